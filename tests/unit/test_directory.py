"""What a chunk costs in memory and, above all, the garbage collector: nothing.

Counted, not timed: a pause cannot be tested without a clock, but a collection takes as
long as there are objects for it to walk.
"""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable, Iterator

import pytest
from hierarchy_kit import CHUNK, FIRST, DictTier, Stack, key
from hypothesis import given
from hypothesis import strategies as st
from kvtiers.policies import POLICIES, Policy, Run, TierInfo
from kvtiers.policies.arc import ArcPolicy
from kvtiers.policies.columns import Objects, Table
from kvtiers.policies.lru import LruPolicy
from kvtiers.tiers import ChunkKey, Entry, Namespace
from kvtiers.tiers.cpu import CpuTier
from kvtiers.tiers.directory import Directory
from kvtiers.tiers.findings import Findings
from kvtiers.tiers.foreign import Foreign
from kvtiers.tiers.lower import LowerTier
from kvtiers.tiers.workers import OpKind

OTHERS = Namespace("e" * 32)


def hashes(count: int) -> Iterator[bytes]:
    """Made one by one, so that no list of them is there to be walked."""
    return (key(str(number)) + bytes(20) for number in range(count))


def walked(fill: Callable[[], object]) -> int:
    """How many more objects a collection walks, what they refer to included."""
    gc.collect()
    before = _weight()
    kept = fill()
    gc.collect()
    after = _weight()
    del kept
    return after - before


def _weight() -> int:
    return sum(1 + len(gc.get_referents(each)) for each in gc.get_objects())


class Found(DictTier):
    """Holds so many chunks of ours and of others, and keeps none of their bytes."""

    def __init__(self, ours: int, theirs: int) -> None:
        super().__init__()
        self.counts = {FIRST: ours, OTHERS: theirs}

    def scan(self) -> Iterator[Entry]:
        for namespace, count in self.counts.items():
            for chunk_hash in hashes(count):
                yield Entry(ChunkKey(namespace, chunk_hash, -1, "tenant"), CHUNK, 0.0)


def stack_of(policy: type[Policy], ours: int, theirs: int = 0) -> Stack:
    stack = Stack(4, {"disk": Found(ours, theirs)}, policy=policy)
    stack.settle()
    return stack


def known(stack: Stack) -> tuple[int, int]:
    tier: LowerTier = stack.h._lower[0]
    return len(stack.h._residency.directory), len(tier.foreign)


@pytest.mark.parametrize("policy", [LruPolicy, ArcPolicy])
def test_chunks_that_a_scan_found_are_nothing_to_the_garbage_collector(
    policy: type[Policy],
) -> None:
    few = walked(lambda: stack_of(policy, 1_000, 1_000))
    many = walked(lambda: stack_of(policy, 11_000, 11_000))
    assert many - few < 20_000 // 20


@pytest.mark.parametrize(
    "policy",
    [
        POLICIES.get(n)
        for n in ["lru", "arc", "fifo", "lfu", "lru-2", "s3fifo", "sieve", "w-tinylfu"]
    ],
)
def test_chunks_that_were_stored_are_nothing_to_the_garbage_collector(
    policy: type[Policy],
) -> None:
    def stored(count: int) -> Policy:
        made = policy([TierInfo("disk")])
        ids = hashes(count)
        while chunks := tuple(chunk for _, chunk in zip(range(50), ids, strict=False)):
            made.on_insert(Run(chunks, 0, CHUNK), "disk")
        return made

    assert walked(lambda: stored(11_000)) - walked(lambda: stored(1_000)) < 10_000 // 20


def test_what_a_scan_has_found_is_nothing_to_the_garbage_collector_while_it_waits() -> None:
    def found(count: int) -> Findings:
        findings = Findings()
        for chunk_hash in hashes(count):
            findings.add(Entry(ChunkKey(FIRST, chunk_hash), CHUNK, 0.0))
        findings.sort()
        return findings

    assert walked(lambda: found(11_000)) - walked(lambda: found(1_000)) < 10_000 // 20


def test_a_chunk_takes_three_hundred_bytes_its_key_and_the_policy_included() -> None:
    # The dicts of so many are as full as those of a million.
    chunks = 125_000
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        stack = stack_of(LruPolicy, chunks)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert known(stack) == (chunks, 0)
    assert (after - before) / chunks <= 300


def test_a_reset_leaves_nothing_of_what_was_known_but_what_is_found_again() -> None:
    stack = stack_of(LruPolicy, 2_000, 500)
    stack.h.reset(Namespace("f" * 32))
    assert known(stack)[0] == 0, "at once"
    assert stack.h.behind()
    stack.settle()
    assert known(stack) == (0, 2_500)
    assert len(set(stack.h.policy.victims("disk", 1 << 40))) == 2_500


def test_a_reset_in_the_middle_of_another_one_ends_both() -> None:
    stack = stack_of(LruPolicy, 2_000)
    for name in "fab":
        stack.h.reset(Namespace(name * 32))
        stack.h.tick()
    stack.settle()
    stack.clock.now += 1000.0
    stack.settle()
    assert not stack.h._residency.directory._columns.tenants._numbers
    assert known(stack) == (0, 2_000)


def test_who_resets_after_every_few_steps_does_not_fall_behind() -> None:
    """Found by stress: each reset took 256 steps, however little there was to forget."""
    stack = stack_of(LruPolicy, 100)
    for number in range(20):
        stack.h.reset(Namespace(f"{number:032}"))
        steps = 0
        while stack.h.behind():
            stack.h.tick()
            for workers in stack.workers.values():
                workers.run()
            steps += 1
        assert steps <= 20


# The parts ----------------------------------------------------------------------


def test_handles_on_one_chunk_are_equal_and_see_each_others_changes() -> None:
    directory = Directory()
    chunk, same = directory.ensure(b"k", tenant="t"), directory.get(b"k")
    assert same is not None
    chunk.where |= 5
    chunk.learn(3, 1, b"p", "other")
    assert same == chunk
    assert hash(same) == hash(chunk)
    assert (same.where, same.position, same.group, same.parent) == (5, 3, 1, b"p")
    assert same.tenant == "t", "what is known is not learned anew"
    assert directory.ensure(b"l") != chunk


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.sampled_from(["", "a", "b"]))))
def test_rows_and_tenants_of_forgotten_chunks_are_used_again(steps) -> None:
    directory, tenants = Directory(), {}
    for keep, number, tenant in steps:
        name = bytes([number])
        if keep:
            directory.ensure(name, tenant=tenant)
            tenants[name] = tenants.get(name) or tenant
        elif (chunk := directory.get(name)) is not None:
            directory.forget(chunk)
            del tenants[name]
        assert {chunk.key: chunk.tenant for chunk in directory} == tenants
    columns = directory._columns
    assert len(columns.keys) <= 6
    assert set(columns.tenants._numbers) == set(tenants.values()) - {""}


def test_other_peoples_chunks_are_named_by_numbers_that_lead_back_to_their_keys() -> None:
    foreign = Foreign()
    for namespace in (FIRST, OTHERS):
        for chunk_hash in (b"\0\0a", b"\0a", b"a", b"", bytes(64)):
            chunk_id = foreign.id_of(namespace, chunk_hash)
            foreign.add(chunk_id, "t")
            named = foreign.key_of(chunk_id)
            assert (named.namespace, named.hash, named.tenant) == (namespace, chunk_hash, "t")
    assert len(set(foreign)) == len(foreign) == 10
    assert foreign.pop(chunk_id)[0].hash == bytes(64)
    assert foreign.pop(chunk_id) == []
    assert chunk_id not in foreign


def test_a_column_of_objects_gives_them_back_in_pieces() -> None:
    column: Objects[int] = Objects()
    for number in range(10_000):
        column.put(number, number)
    assert [column[i] for i in (0, 4095, 4096, 9_999)] == [0, 4095, 4096, 9_999]
    assert len(list(column.give_back())) == 3
    column.put(0, 7)
    assert (len(column), column[0]) == (1, 7)


def test_no_two_columns_of_a_table_are_extended_at_once() -> None:
    table = Table("iHb")
    for row in range(20_000):
        before = [len(column) for column in table.columns]
        assert table.new(row, row % 7, row % 3) == row
        ahead = [len(c) > n + 1 for c, n in zip(table.columns, before, strict=True)]
        assert sum(ahead) <= 1
    columns = [list(column[:20_000]) for column in table.columns]
    assert columns == [[row % n for row in range(20_000)] for n in (20_000, 7, 3)]
    assert min(map(len, table.columns)) >= 20_000
    assert max(map(len, table.columns)) < 22_000
    table.free(5)
    assert (len(table), table.new(1, 2, 3)) == (19_999, 5)


def test_the_arena_forgets_what_it_held_at_once_and_frees_it_in_pieces() -> None:
    cpu = CpuTier(CpuTier.Config(capacity=3000 * CHUNK), CHUNK)
    keys = [ChunkKey(FIRST, chunk_hash) for chunk_hash in hashes(3000)]
    for chunk_key in keys:
        cpu.publish(chunk_key, cpu.take())
    steps = cpu.withdraw_all()
    assert not any(cpu.contains(keys))
    assert len(list(steps)) == 6


def test_what_is_to_be_evicted_at_once_is_evicted_in_parts() -> None:
    tier = DictTier(2000 * CHUNK, headroom=0.8)
    tier.chunks = {ChunkKey(OTHERS, chunk_hash): b"" for chunk_hash in hashes(2000)}
    stack = Stack(4, {"disk": tier})
    stack.settle()
    assert len(tier.chunks) == 400, "as far as the headroom asks for"
    removes = [op for op in stack.workers["disk"].submitted if op.kind is OpKind.REMOVE]
    assert [len(op.keys) for op in removes] == [512, 512, 512, 64]
