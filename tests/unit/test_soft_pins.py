"""Soft pins on vLLM's own block pool: favoured blocks go last, and go if they must."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvtiers.connector.config import load
from kvtiers.connector.config_errors import ConfigError
from kvtiers.connector.favour import ChunkBlocks, GpuFavour, Groups, Prefix
from kvtiers.policies import Policy, Run, TierInfo
from kvtiers.policies.around import answers
from kvtiers.policies.conformance import VirtualClock
from kvtiers.policies.lru import LruPolicy
from kvtiers.policies.quota import with_quotas
from vllm.sampling_params import SamplingParams
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

BLOCK = 16


def sha(value: object) -> bytes:
    return hashlib.sha256(repr(value).encode()).digest()


init_none_hash(sha)


def request_of(name: str, blocks: int) -> Request:
    """A prompt of so many whole blocks. Those of one name share a prefix."""

    seed = int.from_bytes(sha(name)[:4])
    tokens = [seed + i for i in range(blocks * BLOCK)]
    return Request(
        request_id=name,
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        block_hasher=get_request_block_hasher(BLOCK, sha),
    )


class Gpu:
    """A pool of so many usable blocks, and an engine's way of using it."""

    def __init__(self, blocks: int) -> None:
        # Block 0 is never handed out.
        self.pool = BlockPool(blocks + 1, enable_caching=True, hash_block_size=BLOCK)

    def compute(self, name: str, blocks: int) -> Request:
        """A request comes, is computed and goes: its blocks are cached and free, tail first."""
        request = request_of(name, blocks)
        taken = self.pool.get_new_blocks(blocks)
        self.pool.cache_full_blocks(request, taken, 0, blocks, BLOCK, 0)
        self.pool.free_blocks(reversed(taken))
        return request

    def holds(self, request: Request) -> int:
        """Leading blocks of a prompt that are cached."""
        n = 0
        for block_hash in request.block_hashes:
            if self.pool.get_cached_block(block_hash, [0]) is None:
                break
            n += 1
        return n

    def favour(self, share: float, *requests: Request, **options: object) -> GpuFavour:
        prefixes = [Prefix(0, request.block_hashes) for request in requests]
        return GpuFavour(self.pool, share, lambda: prefixes, **options)  # type: ignore[arg-type]


def test_what_is_favoured_outlives_a_flood_that_evicts_the_rest() -> None:
    gpu = Gpu(20)
    kept, lost = gpu.compute("kept", 4), gpu.compute("lost", 4)
    favour = gpu.favour(0.5, kept)
    for number in range(12):
        favour.step(BLOCK * 20)
        gpu.compute(f"flood{number}", 4)
    assert gpu.holds(kept) == 4
    assert gpu.holds(lost) == 0


def test_it_goes_all_the_same_when_a_request_needs_its_room() -> None:
    gpu = Gpu(20)
    kept = gpu.compute("kept", 10)
    gpu.favour(1.0, kept).step(0)
    assert gpu.pool.get_num_free_blocks() == 20, "nothing is held"
    gpu.compute("large", 20)
    assert gpu.holds(kept) == 0


def test_what_is_worth_least_goes_first_and_tails_before_heads() -> None:
    gpu = Gpu(20)
    first, second = gpu.compute("first", 4), gpu.compute("second", 4)
    gpu.favour(1.0, first, second).step(0)
    gpu.compute("other", 14)
    assert (gpu.holds(first), gpu.holds(second)) == (4, 2)


def test_no_more_than_the_share_is_favoured() -> None:
    gpu = Gpu(20)
    long = gpu.compute("long", 12)
    gpu.compute("younger", 8)
    gpu.favour(0.2, long).step(0)
    gpu.compute("other", 16)
    assert gpu.holds(long) == 4


def test_blocks_in_use_and_blocks_behind_a_hole_are_left_alone() -> None:
    gpu = Gpu(20)
    kept, holed = gpu.compute("kept", 4), gpu.compute("holed", 4)
    (used,) = gpu.pool.get_cached_block(kept.block_hashes[0], [0])
    gpu.pool.touch([used])
    (hole,) = gpu.pool.get_cached_block(holed.block_hashes[1], [0])
    gpu.pool.evict_blocks({hole.block_id})
    gpu.favour(1.0, kept, holed).step(0)
    assert used.ref_cnt == 1
    gpu.compute("other", 15)
    assert gpu.holds(kept) == 4
    assert gpu.holds(holed) == 1, "its head; what was behind the hole aged as ever"
    tail = [gpu.pool.get_cached_block(h, [0]) for h in holed.block_hashes[2:]]
    assert tail == [None, None]


def test_of_a_window_what_is_there_is_favoured() -> None:
    gpu = Gpu(20)
    windowed = gpu.compute("windowed", 6)
    head = [gpu.pool.get_cached_block(h, [0])[0].block_id for h in windowed.block_hashes[:4]]
    gpu.pool.evict_blocks(set(head))
    gpu.favour(1.0, windowed, windowed=frozenset({0})).step(0)
    gpu.compute("other", 18)
    assert all(gpu.pool.get_cached_block(h, [0]) for h in windowed.block_hashes[4:])


def test_the_cache_can_be_reset_whenever_nothing_else_uses_it() -> None:
    gpu = Gpu(20)
    kept = gpu.compute("kept", 4)
    favour = gpu.favour(1.0, kept)
    favour.step(0)
    assert gpu.pool.reset_prefix_cache()
    favour.step(10**6)
    assert gpu.holds(kept) == 0
    assert gpu.pool.reset_prefix_cache()


def test_it_is_asked_once_a_second_and_renewed_as_blocks_are_handed_out() -> None:
    clock = VirtualClock()
    asked: list[float] = []
    gpu = Gpu(32)
    kept = gpu.compute("kept", 4)

    def ask() -> Iterable[Prefix]:
        asked.append(clock.now)
        return [Prefix(0, kept.block_hashes)]

    favour = GpuFavour(gpu.pool, 0.5, ask, block_tokens=BLOCK, clock=clock)
    for _ in range(20):
        favour.step(2 * BLOCK)
        gpu.compute(f"flood{clock.now}", 2)
        clock.now += 0.25
    assert [now - asked[0] for now in asked] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert gpu.holds(kept) == 4
    before = gpu.pool.free_block_queue.get_all_free_blocks()
    favour.step(0)
    clock.now += 0.1
    moved = gpu.pool.free_block_queue.get_all_free_blocks()
    favour.step(BLOCK)
    assert gpu.pool.free_block_queue.get_all_free_blocks() == moved, "nothing had changed"
    assert sorted(map(id, before)) == sorted(map(id, moved))


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6), st.booleans()), max_size=15),
    st.floats(0.0, 1.0),
)
def test_no_block_is_lost_held_or_listed_twice(
    steps: list[tuple[int, int, bool]], share: float
) -> None:
    gpu = Gpu(12)
    used: list[object] = []
    for prompt, blocks, in_use in steps:
        request = request_of(f"p{prompt}", blocks)
        if gpu.pool.get_num_free_blocks() >= blocks and not gpu.holds(request):
            gpu.compute(f"p{prompt}", blocks)
        found = gpu.pool.get_cached_block(request.block_hashes[0], [0])
        if in_use and found:
            gpu.pool.touch(found)
            used += found
        counts = [block.ref_cnt for block in gpu.pool.blocks]
        gpu.favour(share, request, request_of("p0", 6), request).step(0)
        assert [block.ref_cnt for block in gpu.pool.blocks] == counts
        free = gpu.pool.free_block_queue.get_all_free_blocks()
        assert len(set(map(id, free))) == len(free) == gpu.pool.get_num_free_blocks()
        assert all(block.ref_cnt == 0 for block in free)
    gpu.pool.free_blocks(used)
    assert gpu.pool.reset_prefix_cache()


# From chunks and requests to blocks --------------------------------------------


def test_a_chunk_is_all_of_its_blocks() -> None:
    request = request_of("p", 7)
    known = ChunkBlocks(100)
    known.learn([b"a", b"b", b"c"], request.block_hashes, 2)
    assert known.prefix(Run((b"a", b"b"), group=3)) == (3, list(request.block_hashes[:4]))
    assert known.prefix(Run((b"b", b"x", b"c"))).hashes == list(request.block_hashes[2:4])
    assert known.prefix(Run((b"x", b"a"))).hashes == []


def test_what_was_not_asked_for_in_long_is_forgotten() -> None:
    known = ChunkBlocks(4)
    for number in range(40):
        known.learn([b"%d" % number], [b"h%d" % number], 1)
        known.learn([b"hot"], [b"h"], 1)
    assert len(known._young) + len(known._old) <= 8
    assert known.prefix(Run((b"hot", b"39"))).hashes == [b"h", b"h39"]
    assert known.prefix(Run((b"3",))).hashes == []


def test_a_queue_is_favoured_in_its_order_and_group_by_group() -> None:
    requests = [request_of("first", 4), request_of("second", 4)]
    groups = Groups({0: 1, 1: 2}, frozenset(), 1)
    named = list(groups.prefixes(requests))
    assert [prefix.group for prefix in named] == [0, 1, 0, 1]
    assert list(named[2].hashes) == list(requests[1].block_hashes)
    assert list(named[1].hashes) == list(requests[0].block_hashes[1::2])
    endless = (requests[0] for _ in iter(int, 1))
    assert len(list(groups.prefixes(endless))) == 128


# Who says what is favoured ------------------------------------------------------


class Favouring(LruPolicy):
    """Has something to say."""

    def favour(self, n_bytes: int) -> Sequence[Run]:
        return [Run((b"a",))]


@pytest.mark.parametrize("quota", [None, 10])
def test_a_policy_without_an_opinion_is_not_asked(quota: int | None) -> None:
    def made(policy: type[Policy]) -> Policy:
        return with_quotas(policy([TierInfo("cpu", 100, tenant_quota=quota)]))

    assert answers(made(Favouring), "favour")
    assert not answers(made(LruPolicy), "favour")
    assert answers(made(LruPolicy), "expired") is (quota is not None)


def test_the_share_is_bounded() -> None:
    assert load({"gpu_favour": "25%"}, {}).config.gpu_favour == 0.25
    with pytest.raises(ConfigError, match=r"gpu_favour is 0.8 .*it must be at most 0.5"):
        load({"gpu_favour": 0.8}, {})
