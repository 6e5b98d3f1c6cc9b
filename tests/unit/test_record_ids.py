"""Numbers for chunks: the same forest as the keys', whatever is forgotten meanwhile."""

import gc
import hashlib
import random
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtiers.tiers.recording_ids import ChunkNumbers
from kvtiers.tiers.recording_rows import split

LITTLE = 2000
"""Bytes that a few prompts fill."""

prompts = st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=60)


def keys_of(prompt: list[int], suffix: bytes = b"\0\0\0\0") -> list[bytes]:
    """As vLLM makes them: each hash has the one before it in it."""
    state, keys = b"", []
    for chunk in prompt:
        state = hashlib.sha256(state + bytes([chunk])).digest()
        keys.append(state + suffix)
    return keys


def expand(runs: list[tuple[int, int]]) -> list[int]:
    return [number for start, length in runs for number in range(start, start + length)]


@given(prompts)
def test_chunks_have_equal_numbers_just_if_their_prefixes_are_equal(asked):
    numbers, known = ChunkNumbers(), {}
    for prompt in asked:
        got = expand(numbers.runs(keys_of(prompt)))
        for end in range(1, len(prompt) + 1):
            assert known.setdefault(tuple(prompt[:end]), got[end - 1]) == got[end - 1]
    assert sorted(known.values()) == list(range(len(known)))


@pytest.mark.parametrize("seed", range(5))
def test_a_number_never_stands_for_two_prefixes_however_much_is_forgotten(seed):
    choose = random.Random(seed)
    numbers, prefixes = ChunkNumbers(most_bytes=LITTLE), {}
    for _ in range(2000):
        # A few prompts that keep growing out of one another, among many that come once.
        prompt = choose.choices(range(3), k=choose.randrange(4))
        prompt += [choose.randrange(200)] if choose.random() < 0.5 else []
        got = expand(numbers.runs(keys_of(prompt)))
        assert len(got) == len(prompt)
        path = (-1, *got)
        for end, number in enumerate(got, start=1):
            # The number before it must be the same, too.
            found = (tuple(prompt[:end]), path[end - 1])
            assert prefixes.setdefault(number, found) == found


def test_what_is_used_again_is_remembered_and_the_rest_is_forgotten():
    numbers = ChunkNumbers(most_bytes=LITTLE)
    often, once = keys_of([1, 2, 3]), keys_of([7, 8])
    first, second = numbers.runs(often), numbers.runs(once)
    for filler in range(50):
        numbers.runs(keys_of([9, filler, filler]))
        assert numbers.runs(often) == first
    assert numbers.runs(once) != second


def test_memory_is_bounded_while_new_chunks_keep_coming():
    bound = 1 << 20
    numbers = ChunkNumbers(most_bytes=bound)
    source = random.Random(1)
    gc.collect()
    tracemalloc.start()
    try:
        for _ in range(12_000):
            numbers.runs([source.randbytes(36) for _ in range(source.randrange(1, 4))])
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert bound / 4 < used < bound * 1.1


def test_keys_of_other_lengths_are_other_keys():
    numbers = ChunkNumbers()
    plain, adapted = keys_of([1, 2]), keys_of([1, 2], b"\0" * 20)
    assert expand(numbers.runs(plain)) == [0, 1]
    assert expand(numbers.runs(adapted)) == [2, 3]
    assert expand(numbers.runs(plain)) == [0, 1]


def test_after_a_reset_all_chunks_are_new():
    numbers = ChunkNumbers()
    assert numbers.runs(keys_of([1, 2])) == [(0, 2)]
    numbers.forget_all()
    assert numbers.runs(keys_of([1, 2])) == [(2, 2)]


def test_a_prompt_without_full_chunks_has_no_runs():
    assert ChunkNumbers().runs([]) == []


@pytest.mark.parametrize("n", range(6))
def test_runs_are_split_where_the_prompt_ends(n):
    head, tail = split([(10, 3), (20, 2)], n)
    assert expand(head) + expand(tail) == [10, 11, 12, 20, 21]
    assert len(expand(head)) == n
    assert all(length > 0 for _, length in head + tail)
