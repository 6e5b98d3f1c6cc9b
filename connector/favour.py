"""Soft pins: which cached blocks of the GPU vLLM shall evict last.

vLLM's own prefix cache is the GPU tier, and evicts the least recently used block. To
``touch`` blocks that nobody uses and to free them again makes them the most recently used
ones. That is all that is done here: no reference is held from one step to the next, since
held blocks would keep the cache from being reset and the engine from sleeping. So what is
favoured goes last, and still goes if requests need its room.

Who waits in the queue comes first, as its prefix is certain to be used; then what the
policy favours. Both within a bounded share of the cache, beyond which blocks age as ever.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from kvtiers.policies import Run

# How often it is asked anew what to favour.
_ASK_SECONDS = 1.0
# In between, the blocks are moved again when so much of the cache may have been handed out.
_RENEW_SHARE = 0.125
# Requests of a queue that are looked at: the bounded share has no room for more.
_MOST_WAITING = 64


class Prefix(NamedTuple):
    """A prefix as vLLM's cache knows it.

    Attributes:
        group: KV-cache group.
        hashes: of its blocks, head first.

    """

    group: int
    hashes: Sequence[bytes]


class ChunkBlocks:
    """The blocks of chunks: a policy names chunks, vLLM's cache knows blocks.

    A chunk is named after its last block, so those before it have to be remembered. Two
    generations of chunks are, each as many as the GPU's blocks: a run that is worth
    favouring was used since. Any other is not found, and not favoured.

    Args:
        room: chunks of a generation.

    """

    def __init__(self, room: int) -> None:
        self._room = max(1, room)
        self._young: dict[bytes, tuple[bytes, ...]] = {}
        self._old: dict[bytes, tuple[bytes, ...]] = {}

    def learn(self, keys: Sequence[bytes], hashes: Sequence[bytes], blocks: int) -> None:
        """Take in a prompt.

        Args:
            keys: of its chunks, as the policy knows them.
            hashes: of its blocks, at least as many as the chunks have.
            blocks: of a chunk.

        """
        for i, key in enumerate(keys):
            self._young[key] = tuple(hashes[i * blocks : (i + 1) * blocks])
        if len(self._young) >= self._room:
            self._old, self._young = self._young, {}

    def prefix(self, run: Run) -> Prefix:
        """The blocks of a run's chunks, up to the first that is not known."""
        hashes: list[bytes] = []
        for key in run.chunks:
            known = self._young.get(key) or self._old.get(key)  # type: ignore[call-overload]
            if known is None:
                break
            hashes += known
        return Prefix(run.group, hashes)


class GpuFavour:
    """Moves favoured blocks to the most recently used end. The scheduler's thread only.

    Args:
        pool: vLLM's ``BlockPool``.
        share: of its blocks that may be favoured, 0 to 1.
        ask: names what to favour, most valuable first.
        windowed: groups of which only some blocks of a prefix are kept.
        block_tokens: tokens of a block: how many may be handed out in a step.
        clock: seconds, monotonic.

    """

    def __init__(
        self,
        pool: Any,
        share: float,
        ask: Callable[[], Iterable[Prefix]],
        windowed: frozenset[int] = frozenset(),
        block_tokens: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self.blocks = int(share * pool.num_gpu_blocks)
        self._ask = ask
        self._windowed = windowed
        self._renew_tokens = _RENEW_SHARE * pool.num_gpu_blocks * block_tokens
        self._clock = clock
        self._due = float("-inf")
        self._tokens = 0
        self._favoured: list[Prefix] = []

    def step(self, tokens: int) -> None:
        """A step was scheduled that computes so many tokens."""
        self._tokens += tokens
        now = self._clock()
        if now >= self._due:
            self._due = now + _ASK_SECONDS
            self._favoured = list(self._ask())
        elif self._tokens < self._renew_tokens:
            return
        self._tokens = 0
        self._renew()

    def _renew(self) -> None:
        blocks = list(self._cached())
        self._pool.touch(blocks)
        # What is freed first is evicted first: tails, and what is worth least.
        self._pool.free_blocks(reversed(blocks))

    def _cached(self) -> Iterator[Any]:
        """Blocks to favour that nobody uses now, most valuable first, within the share."""
        left, seen = self.blocks, set[int]()
        for group, hashes in self._favoured:
            for block_hash in hashes:
                if not left:
                    return
                found = self._pool.get_cached_block(block_hash, [group])
                if found is None and group not in self._windowed:
                    # Without this one those behind it serve nobody.
                    break
                for block in found or ():
                    if block.ref_cnt == 0 and block.block_id not in seen:
                        left -= 1
                        seen.add(block.block_id)
                        yield block


class Groups(NamedTuple):
    """KV-cache groups of an engine, as far as their blocks matter.

    Attributes:
        hashes: group -> how many of a request's hashes make a block.
        windowed: those of which only some blocks of a prefix are kept.
        blocks_per_chunk: vLLM's blocks of a chunk.

    """

    hashes: Mapping[int, int]
    windowed: frozenset[int]
    blocks_per_chunk: int

    @classmethod
    def of(cls, config: Any) -> Groups:
        """From the configuration of vLLM's offloading scheduler."""
        blocks = config.blocks_per_chunk
        groups = config.kv_group_configs
        return cls(
            {group.group_idx: group.hashes_per_chunk // blocks for group in groups},
            frozenset(g.group_idx for g in groups if g.sliding_window_size_in_chunks is not None),
            blocks,
        )

    def prefixes(self, requests: Iterable[Any]) -> Iterator[Prefix]:
        """The prompts of vLLM's requests, some of the first ones."""
        for request in islice(requests, _MOST_WAITING):
            for group in self.hashes:
                yield Prefix(group, self.of_request(request, group))

    def of_request(self, request: Any, group: int) -> Sequence[bytes]:
        """Hashes of a request's blocks."""
        step, hashes = self.hashes[group], request.block_hashes
        blocks: Sequence[bytes] = hashes if step == 1 else hashes[step - 1 :: step]
        return blocks
