"""Which chunk is where: the one place that changes it, and tells the policy.

Everything that moves chunks (promotion, stores, eviction, resets) goes through
here, so that directory, slots, the CPU tier's own map and the policy can't come
to disagree. The hierarchy's thread only.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence

from kvtiers.policies import ChunkId, Policy, Run
from kvtiers.tiers.base import ChunkKey, Entry, Namespace
from kvtiers.tiers.cpu import CpuTier
from kvtiers.tiers.directory import Chunk, Directory, State, runs_of
from kvtiers.tiers.lower import LowerTier
from kvtiers.tiers.slots import SlotTable

CPU = "cpu"
GPU = "gpu"

# Foreign chunks that are compared with a scan in one step of the engine.
_SWEPT_AT_ONCE = 4096


class Residency:
    """Chunks and the tiers that hold them.

    Args:
        cpu: the arena's tier.
        lower: the tiers below it, nearest first.
        policy: told of everything that comes and goes.
        namespace: of this engine's chunks.
        clock: seconds, monotonic.

    """

    def __init__(
        self,
        cpu: CpuTier,
        lower: Sequence[LowerTier],
        policy: Policy,
        namespace: Namespace,
        clock: Callable[[], float],
    ) -> None:
        self.cpu = cpu
        self.lower = lower
        self.policy = policy
        self.namespace = namespace
        self.clock = clock
        self.chunk_bytes = cpu.payload_bytes
        self.slots = SlotTable(cpu)
        self.directory = Directory()
        self.epoch = 0
        self.counts: dict[str, Counter[str]] = {CPU: Counter(), GPU: Counter()}
        self._by_name = {tier.name: tier for tier in lower}

    # Looking ----------------------------------------------------------------

    def get(self, key: ChunkId) -> Chunk | None:
        """What is known of a chunk of this engine."""
        return self.directory.get(key) if isinstance(key, bytes) else None

    def named(self, name: str) -> LowerTier | None:
        """The lower tier of that name."""
        return self._by_name.get(name)

    def source(self, chunk: Chunk) -> LowerTier | None:
        """The nearest lower tier that holds the chunk and may be asked."""
        if chunk.where:
            for tier in self.lower:
                if chunk.where & tier.bit and tier.breaker.closed():
                    return tier
        return None

    def may_hold(self, tier: LowerTier) -> bool:
        """Whether chunks of this engine may go there: not all may outlive or leave it."""
        return self.namespace.shareable or not (tier.tier.shared or tier.tier.persistent)

    def is_nowhere(self, chunk: Chunk) -> bool:
        """Whether neither the arena has it, or is getting it, nor a tier that may be asked."""
        return chunk.state is State.ABSENT and self.source(chunk) is None

    def learn(self, run: Run) -> None:
        """Where in their prefix these chunks are, and whose: a scan, or a lookup, did not say."""
        parent = run.parent
        for position, key in enumerate(run.chunks, run.start):
            chunk = self.get(key)
            if chunk is not None and chunk.position < 0:
                assert parent is None or isinstance(parent, bytes)
                chunk.position, chunk.group, chunk.parent = position, run.group, parent
            if chunk is not None and not chunk.tenant:
                chunk.tenant = run.tenant
            parent = key

    def key_of(self, chunk: Chunk) -> ChunkKey:
        """The name under which tiers know the chunk."""
        return ChunkKey(self.namespace, chunk.key, chunk.position, chunk.tenant)

    # The arena --------------------------------------------------------------

    def take_slot(self, chunk: Chunk, state: State) -> int:
        """Give the chunk a free slot, pinned by whoever fills it now."""
        slot = self.slots.take(chunk)
        chunk.state = state
        return slot

    def ready(self, chunks: Sequence[Chunk]) -> list[Run]:
        """All bytes of these are in their slots. Returns them as runs."""
        for chunk in chunks:
            chunk.state = State.READY
            self.cpu.publish(self.key_of(chunk), chunk.slot)
        runs = runs_of(chunks, self.chunk_bytes)
        for run in runs:
            self.policy.on_insert(run, CPU)
        return runs

    def drop(self, chunks: Iterable[Chunk]) -> None:
        """The arena loses its copies, whole or not."""
        were_ready: list[ChunkId] = []
        for chunk in chunks:
            if chunk.state is State.READY:
                self.cpu.withdraw(self.key_of(chunk))
                were_ready.append(chunk.key)
            self.slots.drop(chunk)
            chunk.state = State.ABSENT
            self.forget_if_nowhere(chunk)
        if were_ready:
            self.policy.on_remove(were_ready, CPU)

    # Lower tiers ------------------------------------------------------------

    def now_in(self, tier: LowerTier, chunks: Iterable[Chunk]) -> None:
        """The tier holds these, by what it said itself."""
        held = list(chunks)
        if tier.since is not None:
            tier.since.update(chunk.key for chunk in held)
        new = [chunk for chunk in held if not chunk.where & tier.bit]
        for chunk in new:
            chunk.where |= tier.bit
        for run in runs_of(new, self.chunk_bytes):
            self.policy.on_insert(run, tier.name)

    def gone_from(self, tier: LowerTier, ids: Sequence[ChunkId]) -> list[ChunkKey]:
        """The tier does not hold these any more, or is about to drop them."""
        keys: list[ChunkKey] = []
        for chunk_id in ids:
            if isinstance(chunk_id, ChunkKey):
                tier.foreign.discard(chunk_id)
                keys.append(chunk_id)
            elif (chunk := self.get(chunk_id)) is not None and chunk.where & tier.bit:
                chunk.where &= ~tier.bit
                keys.append(self.key_of(chunk))
                self.forget_if_nowhere(chunk)
        self.policy.on_remove(ids, tier.name)
        return keys

    def adopt(self, tier: LowerTier, entries: Iterable[Entry]) -> None:
        """What a scan found there, last used first."""
        for entry in entries:
            key = entry.key
            if key is None:
                continue
            if key.namespace == self.namespace:
                chunk = self.directory.ensure(key.hash, tenant=key.tenant)
                if not chunk.where & tier.bit:
                    chunk.where |= tier.bit
                    self._found(tier, chunk.key, entry, key.tenant)
            elif key not in tier.foreign:
                tier.foreign.add(key)
                self._found(tier, key, entry, key.tenant)

    def sweep(self, tier: LowerTier, seen: Mapping[str, Container[bytes]]) -> Iterator[None]:
        """Forget what a scan has not found: others removed it, or the tier did by itself.

        Step by step, since a million chunks take longer than the engine can wait. What a
        scan misses though it is there is found again, by a lookup or the next scan.
        """
        own = seen.get(self.namespace.id, ())
        for part in self.directory.parts():
            since = tier.since or ()
            held = [chunk.key for chunk in part if chunk.where & tier.bit]
            self._vanished(tier, [key for key in held if key not in own and key not in since])
            yield
        foreign = list(tier.foreign)
        for start in range(0, len(foreign), _SWEPT_AT_ONCE):
            some = [key for key in foreign[start : start + _SWEPT_AT_ONCE] if key in tier.foreign]
            gone = [key for key in some if key.hash not in seen.get(key.namespace.id, ())]
            self._vanished(tier, gone)
            yield
        tier.since = None

    def _vanished(self, tier: LowerTier, ids: Sequence[ChunkId]) -> None:
        if ids:
            self.gone_from(tier, ids)

    def _found(self, tier: LowerTier, chunk_id: ChunkId, entry: Entry, tenant: str) -> None:
        age = max(0.0, time.time() - entry.last_used)
        self.policy.on_found(Run((chunk_id,), 0, entry.nbytes, tenant=tenant), tier.name, age)

    def forget_if_nowhere(self, chunk: Chunk) -> None:
        """Nothing is kept of a chunk that no tier holds or is getting."""
        if chunk.slot < 0 and not chunk.where:
            self.directory.forget(chunk)

    # Reset ------------------------------------------------------------------

    def start_epoch(self, namespace: Namespace) -> None:
        """From now on nothing that is stored counts; what tiers hold is somebody else's."""
        held = {tier.name: self._own_chunks_of(tier) for tier in self.lower}
        estranged = {name: [self.key_of(chunk) for chunk in own] for name, own in held.items()}
        for name, own in held.items():
            self.policy.on_remove([chunk.key for chunk in own], name)
        self.drop([chunk for chunk in self.directory if chunk.slot >= 0])
        self.directory.clear()
        self.namespace = namespace
        self.epoch += 1
        for tier in self.lower:
            tier.since, tier.sweep = None, None
            # Where this engine stores no more, it need not keep the bound either.
            if self.may_hold(tier):
                self._estrange(tier, estranged[tier.name])

    def _own_chunks_of(self, tier: LowerTier) -> list[Chunk]:
        """What the tier holds of this namespace, first victim first."""
        chunks = (self.get(victim) for victim in self.policy.victims(tier.name, 1 << 62))
        return [chunk for chunk in chunks if chunk is not None]

    def _estrange(self, tier: LowerTier, keys: Sequence[ChunkKey]) -> None:
        """Keep the order of what the tier holds, so that its bound can still be kept."""
        for key in keys:
            tier.foreign.add(key)
            self.policy.on_insert(Run((key,), 0, self.chunk_bytes, tenant=key.tenant), tier.name)
