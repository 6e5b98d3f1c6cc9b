"""The interface every policy implements.

Calls come in **runs**: neighbouring chunks of one prefix, head first. A prompt
of a hundred thousand tokens is one call, not a thousand, and a policy that
keeps runs as intervals pays for runs only.

Methods are called one at a time: by the engine's scheduler thread in a live engine,
and by another one while that idles. None blocks, none raises for a chunk it does not
know, and each should cost about a microsecond a chunk.

**Which call comes when.** Whoever drives a policy (the hierarchy, the simulator,
the conformance suite) keeps to this order:

    start     on_found for what the tiers hold already, last used first, while
              other calls come in between; no ``admit`` is asked.
    arrival   on_request, then prefetch. The request waits until ``on_start``.
    hit       at admission, one on_access for each stretch that one tier served,
              head of the prompt first, then on_start. A preempted request that
              is admitted again goes through both again.
    miss      says nothing by itself: what no on_access names was missed. Once
              it is computed it comes as a store.
    store     admit(run, first tier), room, on_insert; then place(run), and for
              each tier it names the same three steps.
    again     after the on_access of a hit: place_again(run), and for each tier it
              names the same three steps for what the first tier holds of the run
              and that one lacks.
    promote   admit (to take note: what a request waits for is promoted whatever
              the answer), room and on_insert on the nearer tier, before the on_access
              of the request it was done for. That on_access names the tier the
              bytes came from: for every nearer tier it is the use the copy was
              made for, not a second one. The farther tier keeps its copy.
    room      only if the tier lacks space: victims; then for each chosen chunk
              that no farther tier holds, demote; then on_remove for all of
              them, in the order ``victims`` named them.
    demote    admit, room and on_insert on the farther tier; the on_remove of
              the nearer one may come before or after.
    finish    on_finish, once for each request, also if it never started.

Hence between ``admit(run, tier)`` and the ``on_insert`` of that run, ``victims``
of ``tier`` makes room for just that run: a policy whose choice depends on what
comes in (ARC's ghost hit, a tenant's quota) notes it in ``admit``. A run may
still fail to arrive (the write failed): no call reports that.

**Pins.** The driver skips victims that are in use. It pins whole prefixes, so
that a policy which names children before parents stays leaf first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

ChunkId = Hashable
"""Names a chunk. Opaque: a live engine uses bytes, the simulator integers.

Equal ids mean an equal prefix up to and including the chunk, so the ids of all
runs together form a forest: a chunk always follows the same parent.
"""


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring chunks of one prefix, head first.

    Attributes:
        chunks: ids from head to tail. May be a ``range`` in the simulator, so
            index and slice it, but do not expect a list.
        start: position of ``chunks[0]`` in its prefix, counted in chunks.
        chunk_bytes: size of each chunk in bytes.
        group: KV-cache group of the chunks (0 unless the model is a hybrid).
            Chunks of different groups are never in one run.
        parent: the chunk before ``chunks[0]``, None at the start of a prefix or
            if unknown (a tier's scan finds chunks, not what precedes them).
        tenant: who the chunks belong to (the ``cache_salt`` their ids contain),
            "" if unknown.

    """

    chunks: Sequence[ChunkId]
    start: int = 0
    chunk_bytes: int = 1
    group: int = 0
    parent: ChunkId | None = None
    tenant: str = ""

    def __len__(self) -> int:
        return len(self.chunks)

    def head(self, n: int) -> Run:
        """The first ``n`` chunks of this run."""
        return replace(self, chunks=self.chunks[:n])

    def tail(self, n: int) -> Run:
        """What is left of the run without its first ``n`` chunks (``n <= len(run)``)."""
        parent = self.chunks[n - 1] if n else self.parent
        return replace(self, chunks=self.chunks[n:], start=self.start + n, parent=parent)


@dataclass(slots=True)
class PolicyRequest:
    """What is known of a request. Fields that are not known keep their default.

    Attributes:
        request_id: unique among the requests of one engine.
        runs: the prompt's full chunks, one run per KV-cache group. Before
            ``on_finish`` the chunks of the output are appended: what the next
            turn of the conversation will ask for.
        arrival: seconds on the policy's clock.
        tenant: who the request belongs to (its ``cache_salt``), "" if unknown.
        session: conversation or agent the request belongs to, "" if unknown.
        prompt_tokens: length of the prompt.
        hints: what the client said of the future (``kv_transfer_params``,
            ``kv_hints``): turn, priority, expected return, pin, TTL.
        output_tokens: set before ``on_finish``.
        finish_reason: set before ``on_finish`` ("stop", "length", "abort", …).

    """

    request_id: str
    runs: Sequence[Run] = ()
    arrival: float = 0.0
    tenant: str = ""
    session: str = ""
    prompt_tokens: int = 0
    hints: Mapping[str, Any] = field(default_factory=dict)
    output_tokens: int = 0
    finish_reason: str = ""


@dataclass(frozen=True, slots=True)
class TierInfo:
    """A tier as a policy sees it.

    Attributes:
        name: how the tier is called in the configuration ("cpu", "fs", …).
        capacity: bytes, None if unbounded.
        shared: whether other replicas read and write it too.
        persistent: whether it outlives the engine.
        read_seconds: estimated time to promote that many bytes from it, kept up
            to date by the hierarchy from measurements.
        write_seconds: the same for storing that many bytes in it.
        tenant_quota: bytes that each tenant may hold of it, None for no bound. Kept by
            ``kvtiers.policies.quota``, around whatever policy.

    """

    name: str
    capacity: int | None = None
    shared: bool = False
    persistent: bool = False
    read_seconds: Callable[[int], float] = lambda _nbytes: 0.0
    write_seconds: Callable[[int], float] = lambda _nbytes: 0.0
    tenant_quota: int | None = None


def one_second_a_chunk(run: Run) -> float:
    """Recompute cost where nobody has measured one: every chunk is worth the same."""
    return float(len(run))


class Policy(ABC):
    """Decides; holds no bytes.

    A subclass must say which chunks go first (``victims``) and keep what it
    needs for that in the ``on_*`` hooks. Everything else has a default: admit
    all, write each new chunk through to every tier, demote nothing that a lower
    tier has, prefetch what the hierarchy finds on its own.

    Args:
        tiers: from nearest to the GPU to farthest.
        config: an instance of the class's ``Config``.
        clock: seconds, monotonic. Virtual in the simulator: use no other clock.
        recompute_seconds: estimated time to prefill the chunks of a run if its
            prefix is there. With ``TierInfo.read_seconds`` it gives what a copy in
            a tier is worth. The vLLM connector measures it, and says a second a chunk
            before it has; drivers that can't measure it, such as LMCache's, always do.

    """

    class Config(BaseModel):
        """Options of the policy, as they stand in the configuration."""

        model_config = ConfigDict(frozen=True, extra="forbid")

    name: ClassVar[str] = ""
    wants_heat: ClassVar[bool] = False
    """Whether a driver that can measure attention should, unless its user says otherwise."""

    def __init__(
        self,
        tiers: Sequence[TierInfo],
        config: BaseModel | None = None,
        clock: Callable[[], float] = lambda: 0.0,
        recompute_seconds: Callable[[Run], float] = one_second_a_chunk,
    ) -> None:
        self.tiers = tuple(tiers)
        self.config = config if config is not None else self.Config()
        self.clock = clock
        self.recompute_seconds = recompute_seconds
        self.setup()

    def setup(self) -> None:  # noqa: B027
        """Make what the hooks keep. Last step of construction: ``tiers`` and the rest are set."""

    # What happens -----------------------------------------------------------

    def on_request(self, request: PolicyRequest) -> None:  # noqa: B027
        """A request arrived. Its keys may be in any tier or in none."""

    def on_access(self, run: Run, request: PolicyRequest, tier: str) -> None:  # noqa: B027
        """``tier`` served ``run`` to ``request``.

        Called once per admission of a request, with the tier that held the bytes
        before they were promoted; "gpu" for what vLLM's own prefix cache held.
        Other tiers may hold a copy of ``run``, all of it or parts.
        """

    def on_start(self, request: PolicyRequest) -> None:  # noqa: B027
        """The request left the queue: no longer waiting, whatever it hit."""

    def on_finish(self, request: PolicyRequest) -> None:  # noqa: B027
        """The request ended; ``output_tokens`` and ``finish_reason`` are set.

        Its last chunks may be stored only afterwards.
        """

    def on_heat(self, run: Run, heat: Sequence[float]) -> None:  # noqa: B027
        """Measured attention mass per chunk of ``run``, where a driver has a probe for it."""

    @abstractmethod
    def on_insert(self, run: Run, tier: str) -> None:
        """``tier`` now holds ``run``: stored, promoted, or found there at start.

        Chunks that ``tier`` held already may be among them.
        """

    def on_found(self, run: Run, tier: str, age: float) -> None:  # noqa: ARG002
        """A look through ``tier`` found ``run`` there, last used ``age`` seconds ago.

        Such calls come last used first, so what one names was used before all
        that was named by others. Neither position nor parent may be known.
        """
        self.on_insert(run, tier)

    @abstractmethod
    def on_remove(self, chunks: Sequence[ChunkId], tier: str) -> None:
        """``tier`` no longer holds ``chunks``: evicted, lost or corrupt.

        Chunks that ``tier`` never held may be among them.
        """

    # What to do -------------------------------------------------------------

    @abstractmethod
    def victims(self, tier: str, n_bytes: int) -> Iterator[ChunkId]:
        """Chunks of ``tier`` to evict, best first, to free ``n_bytes``.

        An iterator: the caller skips what is pinned and stops when it has
        enough, so go on past ``n_bytes`` worth until every chunk of the tier has
        been named once. Must change nothing a later answer depends on; whatever
        is evicted comes back through ``on_remove``, after the caller has let go
        of the iterator. Amortised O(1) a chunk.
        """

    def expired(self, tier: str) -> Iterable[ChunkId]:  # noqa: ARG002
        """Chunks of ``tier`` to drop now although it has room (a TTL passed).

        Asked about once a second while there are chunks. Like ``victims``: must
        change nothing, pinned ones stay, the rest come back by ``on_remove``.
        """
        return ()

    def admit(self, run: Run, tier: str) -> int:  # noqa: ARG002
        """How many chunks of ``run``, from its head, ``tier`` should take.

        Asked once before ``run`` is written to ``tier``, by a store, a promotion
        or a demotion, and before room is made for it.
        """
        return len(run)

    def place(self, run: Run) -> Sequence[str]:  # noqa: ARG002
        """Tiers below the first that a new run is written to at once, in order."""
        return [tier.name for tier in self.tiers[1:]]

    def place_again(self, run: Run) -> Sequence[str]:  # noqa: ARG002
        """Tiers below the first that a run which was used again is written to now, in order.

        For what ``place`` had left out until it proves its worth.
        """
        return []

    def demote(self, chunk: ChunkId, from_tier: str) -> str | None:  # noqa: ARG002
        """Tier to move ``chunk`` to before ``from_tier`` drops it, None to drop it.

        Asked only for chunks that no tier below ``from_tier`` holds.
        """
        return None

    def reuse(self, run: Run, within: float) -> Sequence[float] | None:  # noqa: ARG002
        """Probability that each chunk of ``run`` is used within so many seconds from now.

        None from a policy that has no notion of it: who asks (``kvtiers.policies.placement``)
        then goes by how often such chunks were used again.
        """
        return None

    def prefetch(self, request: PolicyRequest) -> Iterable[Run]:  # noqa: ARG002
        """Runs worth promoting before they are asked for, most useful first.

        Called after ``on_request``. What ``request`` itself hits is promoted
        without being named here. A driver may take the head of a run only, or not
        ask at all, where its user bounds prefetching; so for ``anticipate``.
        """
        return ()

    def anticipate(self) -> Iterable[Run]:
        """Runs worth promoting now although no request asks, most useful first.

        Asked about once a second while there are chunks, and done if no request
        waits for room: a session is about to return, a prefix turned hot.
        """
        return ()

    def favour(self, n_bytes: int) -> Iterable[Run]:  # noqa: ARG002
        """Runs the GPU should rather keep, most valuable first, up to ``n_bytes``.

        A soft pin: the engine owns the GPU's blocks and may evict them all the
        same. The vLLM connector asks about once a second while it computes, where its
        user leaves room for soft pins.
        """
        return ()
