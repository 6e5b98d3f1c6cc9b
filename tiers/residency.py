"""Which chunk is where: the one place that changes it, and tells the policy.

Everything that moves chunks (promotion, stores, eviction, resets) goes through
here, so that directory, slots, the CPU tier's own map and the policy can't come
to disagree. The hierarchy's thread only.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from kvtiers.policies import ChunkId, Policy, Run
from kvtiers.tiers.base import ChunkKey, Namespace
from kvtiers.tiers.cpu import CpuTier
from kvtiers.tiers.directory import Chunk, Directory, State, runs_of
from kvtiers.tiers.findings import Finding, Findings
from kvtiers.tiers.lower import LowerTier
from kvtiers.tiers.slots import SlotTable

CPU = "cpu"
GPU = "gpu"

# What comes when there are no more steps.
_DONE = object()


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
        self.directory = Directory()
        self.slots = SlotTable(cpu, self.directory)
        self.epoch = 0
        self.counts: dict[str, Counter[str]] = {CPU: Counter(), GPU: Counter()}
        self._by_name = {tier.name: tier for tier in lower}
        self._later: deque[Iterator[None]] = deque()

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

    def is_in(self, tier: LowerTier, key: bytes) -> bool:
        """Whether the tier is known to hold the chunk."""
        chunk = self.directory.get(key)
        return chunk is not None and bool(chunk.where & tier.bit)

    def learn(self, run: Run) -> None:
        """Where in their prefix these chunks are, and whose: a scan, or a lookup, did not say."""
        parent = run.parent
        for position, key in enumerate(run.chunks, run.start):
            chunk = self.get(key)
            if chunk is not None:
                assert parent is None or isinstance(parent, bytes)
                chunk.learn(position, run.group, parent, run.tenant)
            parent = key

    def key_of(self, chunk: Chunk) -> ChunkKey:
        """The name under which tiers know the chunk."""
        return ChunkKey(self.namespace, chunk.key, chunk.position, chunk.tenant, chunk.parent)

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
            if chunk.state is State.ABSENT:
                # A policy has named it twice.
                continue
            if chunk.state is State.READY:
                self.cpu.withdraw(self.key_of(chunk))
                were_ready.append(chunk.key)
                self._count_spared(chunk)
            self.slots.drop(chunk)
            chunk.state = State.ABSENT
            self.forget_if_nowhere(chunk)
        if were_ready:
            self.policy.on_remove(were_ready, CPU)

    def _count_spared(self, chunk: Chunk) -> None:
        """What lower tiers go without for good, as the policy chose: the arena loses it now."""
        spared, chunk.declined = chunk.declined & ~chunk.where, 0
        for tier in self.lower if spared else ():
            if spared & tier.bit:
                tier.counts["bytes_not_written"] += self.chunk_bytes

    # Lower tiers ------------------------------------------------------------

    def now_in(self, tier: LowerTier, chunks: Iterable[Chunk]) -> None:
        """The tier holds these, by what it said itself."""
        held = list(chunks)
        if tier.since is not None:
            tier.since.update(chunk.key for chunk in held)
        new = [chunk for chunk in held if not chunk.where & tier.bit]
        tier.hints += len(new)
        for chunk in new:
            chunk.where |= tier.bit
        for run in runs_of(new, self.chunk_bytes):
            self.policy.on_insert(run, tier.name)

    def gone_from(self, tier: LowerTier, ids: Sequence[ChunkId]) -> list[ChunkKey]:
        """The tier does not hold these any more, or is about to drop them."""
        keys: list[ChunkKey] = []
        for chunk_id in ids:
            if isinstance(chunk_id, int):
                keys += tier.foreign.pop(chunk_id)
            elif (chunk := self.get(chunk_id)) is not None and chunk.where & tier.bit:
                chunk.where &= ~tier.bit
                tier.hints -= 1
                keys.append(self.key_of(chunk))
                self.forget_if_nowhere(chunk)
        self.policy.on_remove(ids, tier.name)
        return keys

    def take_in(self, tier: LowerTier, findings: Findings, complete: bool) -> None:
        """What a scan found there, step by step as ``tier.sweep``: it may be millions.

        Args:
            tier: what was scanned.
            findings: nobody else's any more.
            complete: nothing was missed, so that what is not among them is gone.

        """
        tier.found, tier.sweep = findings, self._taking_in(tier, findings, complete)

    def _taking_in(self, tier: LowerTier, findings: Findings, complete: bool) -> Iterator[None]:
        for batch in findings.batches():
            self._adopt(tier, batch)
            yield
        tier.strange = False
        if complete:
            yield from self._sweep(tier, findings)
        tier.since = tier.found = None
        self.later(findings.give_back())

    def _adopt(self, tier: LowerTier, findings: Iterable[Finding]) -> None:
        """Some of what a scan found, last used first."""
        now = time.time()
        for found in findings:
            chunk_id = self._newly_in(tier, found)
            if chunk_id is not None:
                run = Run((chunk_id,), 0, found.nbytes, tenant=found.tenant)
                self.policy.on_found(run, tier.name, max(0.0, now - found.last_used))

    def _newly_in(self, tier: LowerTier, found: Finding) -> ChunkId | None:
        """Note that the tier holds it. Returns its id if that was not known."""
        if found.namespace == self.namespace:
            chunk = self.directory.ensure(found.hash, tenant=found.tenant)
            if chunk.where & tier.bit:
                return None
            chunk.where |= tier.bit
            tier.hints += 1
            return chunk.key
        stranger = tier.foreign.id_of(found.namespace, found.hash)
        if stranger in tier.foreign:
            return None
        tier.foreign.add(stranger, found.tenant)
        return stranger

    def _sweep(self, tier: LowerTier, findings: Findings) -> Iterator[None]:
        """Forget what a scan has not found: others removed it, or the tier did by itself.

        What a scan misses though it is there is found again, by a lookup or the next scan.
        """
        own = self.namespace.id
        for part in self.directory.parts():
            since = tier.since or ()
            held = [chunk.key for chunk in part if chunk.where & tier.bit]
            gone = [key for key in held if not findings.has(own, key) and key not in since]
            self._vanished(tier, gone)
            yield
        for some in tier.foreign.parts():
            keys = ((n, tier.foreign.key_of(n)) for n in some if n in tier.foreign)
            found = findings.has
            self._vanished(tier, [n for n, key in keys if not found(key.namespace.id, key.hash)])
            yield

    def _vanished(self, tier: LowerTier, ids: Sequence[ChunkId]) -> None:
        if ids:
            self.gone_from(tier, ids)

    def forget_if_nowhere(self, chunk: Chunk) -> None:
        """Nothing is kept of a chunk that no tier holds or is getting."""
        if chunk.slot < 0 and not chunk.where:
            self.directory.forget(chunk)

    # Reset ------------------------------------------------------------------

    def start_epoch(self, namespace: Namespace) -> None:
        """From now on nothing that is stored counts; what tiers hold is somebody else's.

        At once for whoever asks: the directory is a new one. The policy is told step by
        step, as a million chunks take longer than the engine can wait; until then it may
        name, as a victim, what is not known here any more.
        """
        left, self.directory = self.directory, Directory()
        self.slots.start_over(self.directory)
        self.later(self._leave(left))
        self.later(self.cpu.withdraw_all())
        self.namespace = namespace
        self.epoch += 1
        for tier in self.lower:
            if tier.found is not None:
                self.later(tier.found.give_back())
            tier.since, tier.found, tier.sweep, tier.hints = None, None, None, 0
            # Where this engine stores no more, it need not keep the bound either.
            if self.may_hold(tier) and not tier.tier.keeps_itself:
                # A scan finds it again, as somebody else's.
                tier.strange = tier.unseen = True

    def later(self, steps: Iterator[None]) -> None:
        """What is to be forgotten or freed, and would stop the engine if done at once."""
        self._later.append(steps)

    def go_on(self) -> bool:
        """Do the next step of that: a millisecond or two. False if there was none."""
        if not self._later:
            return False
        if next(self._later[0], _DONE) is _DONE:
            self._later.popleft()
        return True

    def behind(self) -> bool:
        """Whether there is more of that. The policy may still know chunks of earlier epochs."""
        return bool(self._later)

    def _leave(self, left: Directory) -> Iterator[None]:
        for part in left.parts():
            ready = [chunk.key for chunk in part if chunk.state is State.READY]
            self._left(CPU, [key for key in ready if not self._is_ready(key)])
            for tier in self.lower:
                held = [chunk.key for chunk in part if chunk.where & tier.bit]
                self._left(tier.name, [key for key in held if not self.is_in(tier, key)])
            yield
        yield from left.give_back()

    def _left(self, tier: str, ids: Sequence[ChunkId]) -> None:
        if ids:
            self.policy.on_remove(ids, tier)

    def _is_ready(self, key: bytes) -> bool:
        chunk = self.directory.get(key)
        return chunk is not None and chunk.state is State.READY
