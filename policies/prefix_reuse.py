"""Evicts what is least likely to be used again soon, as learned from what was.

Every use of a prefix is an observation of how long it takes until the next one
(``reuse_watch``), told apart by what is known of the request and its session
(``reuse_classes``, ``reuse_sessions``). From these observations hazards by age are learned
while the engine runs, and an index made of them (``reuse_hazard``): expected hits for each
second that a chunk takes up space. The leaf of the lowest index goes first, and what comes
in is admitted only where it is worth more than what would have to go.
See docs/policies/prefix-reuse.md.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import ClassVar

from kvtiers.policies.base import ChunkId, Policy, PolicyRequest, Run
from kvtiers.policies.reuse_classes import ANY, Turn, UseClass, left, own, shared
from kvtiers.policies.reuse_hazard import HazardLearner
from kvtiers.policies.reuse_marks import UNKNOWN, Marks
from kvtiers.policies.reuse_nodes import NO_NODE, NOTHING, Nodes
from kvtiers.policies.reuse_ranks import Ranks
from kvtiers.policies.reuse_sessions import Session, Sessions
from kvtiers.policies.reuse_watch import Watches

# Watches and sessions: at least, at most, and one a chunk in between.
_FEWEST, _MOST = 8, 65_536
# Requests that ended last, of which chunks may come in still.
_LATE = 16
# Nodes that follow one, from which on what they follow counts as shared.
_BRANCHES = 3
# Of their age, that chunks which a scan finds may differ by and share a mark.
_FOUND_SHARE = 1 / 16
# Characters of the names of a session, beyond which only their hash is kept.
_LONG_NAMES = 96
# What the front end says where the model gave the turn back to the user, if it tells.
_ENDED = frozenset({"end_turn"})


@dataclass(slots=True, eq=False)
class _Active:
    """A request under way."""

    request: PolicyRequest
    session: Session
    turn: Turn
    repeated: bool
    mark: int


class PrefixReusePolicy(Policy):
    """Keeps the chunks that promise most hits for the space and time they take.

    Admits from a run's head what is worth more than the chunks that would make room for it,
    writes through to every tier, demotes nothing. Learns from all tiers' uses at once.
    """

    name: ClassVar[str] = "prefix-reuse"

    def setup(self) -> None:
        """An order per tier, and one learner for all of them."""
        self._learner = HazardLearner()
        self._marks = Marks(self._learner)
        self._watches = Watches(self._learner, _FEWEST)
        self._sessions = Sessions(_FEWEST)
        self._nodes = {tier.name: Nodes(self._marks.hold) for tier in self.tiers}
        self._ranks = {name: Ranks(nodes, self._marks) for name, nodes in self._nodes.items()}
        self._capacity = {tier.name: tier.capacity for tier in self.tiers}
        self._active: dict[str, _Active] = {}
        # Of a short answer the last chunks may come in after it.
        self._ended: deque[_Active] = deque()
        # What a scan found last in each tier has this mark.
        self._found = {tier.name: UNKNOWN for tier in self.tiers}
        # Calls that changed a node or a mark.
        self._news = 0

    # What happens -----------------------------------------------------------

    def on_request(self, request: PolicyRequest) -> None:
        """Learn from what the prompt shares with earlier ones, and know its session."""
        self._news += 1
        prompt = next((run for run in request.runs if len(run)), None)
        if prompt is None or request.request_id in self._active:
            return
        now, chunks = self.clock(), prompt.chunks
        again = self._watches.used(chunks, now)
        known = max(
            nodes.leading(chunks, NOTHING if request.prompt_tokens else None)
            for nodes in self._nodes.values()
        )
        if again:
            known = max(known, chunks.index(again[-1]) + 1)
        session = self._session_of(request, prompt, again, known)
        if session.turn is not None and session.tails[0] not in chunks:
            self._leave(session, chunks, now)
        tails = tuple(run.chunks[-1] for run in request.runs if len(run))
        new = len(chunks) - known
        turn = self._sessions.take_turn(
            session, now, tails, new, len(chunks), request.prompt_tokens
        )
        mark = self._marks.new(own(turn, not new), now)
        # One holder for the request, one for the session.
        self._marks.hold(mark, 1)
        self._marks.hold(session.mark, -1)
        session.mark = mark
        self._active[request.request_id] = _Active(request, session, turn, not new, mark)

    def on_access(self, run: Run, request: PolicyRequest, tier: str) -> None:  # noqa: ARG002
        """Mark the run as used, in every tier that has some of it."""
        self._news += 1
        now, active = self.clock(), self._active.get(request.request_id)
        before = self._before(run)
        for nodes in self._nodes.values():
            for node in nodes.cover(run.chunks, before):
                nodes.count_use(node)
                self._use(nodes, node, active, now)

    def on_finish(self, request: PolicyRequest) -> None:
        """From here on the next use is waited for, of a class that the output is part of."""
        self._news += 1
        active = self._active.pop(request.request_id, None)
        if active is None:
            return
        now, session = self.clock(), active.session
        output, ended = request.output_tokens, request.finish_reason in _ENDED
        turn = replace(active.turn, output_tokens=output, ended=ended)
        use = own(turn, active.repeated)
        self._marks.change(active.mark, use, now)
        if session.mark == active.mark and session.tails:
            self._sessions.end_turn(session, now, turn)
            self._watches.begin(session.tails[0], use, now)
        self._ended.append(active)
        if len(self._ended) > _LATE:
            self._marks.hold(self._ended.popleft().mark, -1)
        self._forget_sessions()

    def on_insert(self, run: Run, tier: str) -> None:
        """Take in what is missing, as used by the request it was stored for."""
        self._news += 1
        nodes, chunks = self._nodes[tier], run.chunks
        self._learn_limits(run)
        before = self._before(run)
        for begin, end in nodes.absent(chunks, before):
            parent = chunks[begin - 1] if begin else before
            mark, owner = self._mark_for(run, begin, parent)
            nodes.add(chunks[begin:end], parent, mark, owner)
            self._marks.hold(mark, -1)
        nodes.learn_parents(chunks, before)
        self._ranks[tier].changes += 1

    def on_found(self, run: Run, tier: str, age: float) -> None:
        """Take the run in as of that age, of a class that nothing is known of."""
        self._news += 1
        self._learn_limits(run)
        nodes, mark = self._nodes[tier], self._mark_found(tier, age)
        for i, chunk in enumerate(run.chunks):
            if nodes.node_of(chunk) == NO_NODE:
                parent = run.chunks[i - 1] if i else run.parent
                nodes.add((chunk,), parent, mark, 0)
        self._ranks[tier].changes += 1

    def on_remove(self, chunks: Sequence[ChunkId], tier: str) -> None:
        """Forget where the chunks were; what is watched of them stays watched."""
        self._news += 1
        self._nodes[tier].discard(chunks)
        self._ranks[tier].changes += 1

    # What to do -------------------------------------------------------------

    def victims(self, tier: str, n_bytes: int) -> Iterator[ChunkId]:  # noqa: ARG002
        """All chunks of ``tier``, what is worth least first, children before parents."""
        tail_first = self._nodes[tier].tail_first
        ranked = self._ranks[tier].ascending(self.clock(), self._news)
        return chain.from_iterable(tail_first(node) for _, node in ranked)

    def admit(self, run: Run, tier: str) -> int:
        """What there is room for, and what is worth more than that which would make room."""
        capacity, nodes = self._capacity[tier], self._nodes[tier]
        if capacity is None or not len(run):
            return len(run)
        before = self._before(run)
        missing = sum(end - begin for begin, end in nodes.absent(run.chunks, before))
        wanted = missing - max(0, capacity // run.chunk_bytes - nodes.held)
        now = self.clock()
        if wanted <= 0:
            self._ranks[tier].keep_up(now)
            return len(run)
        mark, _ = self._mark_for(run, 0, before)
        # What is worth less than any of its kind goes without knowing what this one is worth.
        worth, exact, gained = self._marks.least(mark, now), False, 0
        for score, node in self._ranks[tier].ascending(now, self._news):
            if score >= worth and not exact:
                worth, exact = self._marks.worth_of_one(mark, now), True
            if score >= worth:
                break
            gained += nodes.size_of(node)
            if gained >= wanted:
                break
        self._marks.hold(mark, -1)
        return len(run) - max(0, wanted - gained)

    def reuse(self, run: Run, within: float) -> Sequence[float]:
        """By the hazard of what each chunk was last used for, or is asked for now."""
        held: list[int | None] = [None] * len(run)
        for nodes in self._nodes.values():
            for begin, end, mark in nodes.marks_of(run.chunks, self._before(run)):
                held[begin:end] = [mark] * (end - begin)
        marks = [self._asked(run, i) if mark is None else mark for i, mark in enumerate(held)]
        distinct = sorted(set(marks))
        chances = self._marks.chances(distinct, self.clock(), within)
        known = dict(zip(distinct, chances, strict=True))
        return [known[mark] for mark in marks]

    # Parts ------------------------------------------------------------------

    def _before(self, run: Run) -> ChunkId | None:
        """What a run follows: a chunk, ``NOTHING``, or None if it is unknown.

        Drivers say that a run begins at 0 if they do not know where, so it begins a prompt
        only where a request says so of which the prompt is known, or did.
        """
        if run.parent is not None or run.start or not len(run):
            return run.parent
        if any(nodes.begins_prompt(run.chunks[0]) for nodes in self._nodes.values()):
            return NOTHING
        for active in reversed(self._active.values()):
            if active.request.prompt_tokens and _has(active.request, run, 0):
                return NOTHING
        return None

    def _session_of(
        self, request: PolicyRequest, prompt: Run, again: Sequence[ChunkId], known: int
    ) -> Session:
        sessions = self._sessions
        if request.session:
            # An agent's prompts are not those of the session that it works for.
            agent = str(request.hints.get("agent") or "")
            key = _named(request.tenant, request.session, agent)
            named = sessions.named(key) or sessions.new(key)
            named.agent = bool(agent)
            return named
        for chunk in reversed(again):
            if session := sessions.ending_with(chunk):
                return session
        if known:
            session = self._owner_of(prompt.chunks[known - 1])
            if session and session.turn and 2 * known > session.turn.chunks:
                return session
        return sessions.new(None)

    def _owner_of(self, chunk: ChunkId) -> Session | None:
        """The session that a chunk was made for, unless many others use it too."""
        for nodes in self._nodes.values():
            node = nodes.node_of(chunk)
            if node != NO_NODE and nodes.children_of(node) < _BRANCHES:
                return self._sessions.numbered(nodes.owner_of(node))
        return None

    def _leave(self, session: Session, chunks: Sequence[ChunkId], now: float) -> None:
        """The session goes on without the end of its last prompt."""
        assert session.turn is not None
        stay = set(chunks)
        ends = [
            (nodes, node)
            for nodes in self._nodes.values()
            for tail in session.tails
            for node in self._only_of(session, nodes, tail, stay)
        ]
        kept = 0
        if ends:
            nodes, top = ends[-1]
            above = nodes.parent_of(top)
            last = None if above == NO_NODE else nodes.last_chunk(above)
            kept = chunks.index(last) + 1 if last in stay and last is not None else 0
        use = left(session.turn, kept, len(chunks))
        mark = self._marks.new(use, now)
        for nodes, node in ends:
            nodes.set_mark(node, mark)
        self._marks.hold(mark, -1)
        self._watches.begin(session.tails[0], use, now)

    def _only_of(
        self, session: Session, nodes: Nodes, tail: ChunkId, stay: set[ChunkId]
    ) -> Iterator[int]:
        node = nodes.node_of(tail)
        while (
            node != NO_NODE
            and nodes.mark_of(node) == session.mark
            and nodes.last_chunk(node) not in stay
        ):
            yield node
            node = nodes.parent_of(node)

    def _use(self, nodes: Nodes, node: int, active: _Active | None, now: float) -> None:
        if active is None:
            mark = self._marks.new(UseClass(ANY), now)
        elif nodes.owner_of(node) == active.session.number and nodes.children_of(node) < _BRANCHES:
            nodes.set_mark(node, active.mark)
            return
        else:
            gap = now - self._marks.since(nodes.mark_of(node))
            use = shared(nodes.uses_of(node), gap)
            mark = self._marks.new(use, now)
            if (chunk := nodes.last_chunk(node)) not in self._watches:
                self._watches.begin(chunk, use, now)
        nodes.set_mark(node, mark)
        self._marks.hold(mark, -1)

    def _mark_for(self, run: Run, i: int, parent: ChunkId | None) -> tuple[int, int]:
        """The mark, held once more, and the session of chunk ``i`` of a run that comes in."""
        chunk = run.chunks[i]
        for nodes in self._nodes.values():
            node = nodes.node_behind(chunk, parent)
            if node != NO_NODE:
                return self._held(nodes.mark_of(node)), nodes.owner_of(node)
        for active in self._latest():
            if _has(active.request, run, i):
                return self._held(active.mark), active.session.number
        for nodes in self._nodes.values() if parent not in (None, NOTHING) else ():
            node = nodes.node_of(parent)
            if node != NO_NODE:
                return self._held(nodes.mark_of(node)), nodes.owner_of(node)
        return self._marks.new(UseClass(ANY), self.clock()), 0

    def _asked(self, run: Run, i: int) -> int:
        """The mark of the request that asks for chunk ``i`` of a run."""
        asking = (a.mark for a in self._latest() if _has(a.request, run, i))
        return next(asking, UNKNOWN)

    def _latest(self) -> Iterator[_Active]:
        """Requests under way, and those that have just ended, the last ones first."""
        return chain(reversed(self._active.values()), reversed(self._ended))

    def _mark_found(self, tier: str, age: float) -> int:
        """That of the last chunk found, if both were last used at about the same time."""
        mark, since = self._found[tier], self.clock() - age
        if mark == UNKNOWN or abs(self._marks.since(mark) - since) > _FOUND_SHARE * age:
            self._marks.hold(mark, -1)
            mark = self._found[tier] = self._marks.new(UseClass(ANY), since)
        return mark

    def _held(self, mark: int) -> int:
        self._marks.hold(mark, 1)
        return mark

    def _learn_limits(self, run: Run) -> None:
        """One watch a chunk of the largest tier, within bounds."""
        if self._watches.limit == _FEWEST:
            sizes = [capacity for capacity in self._capacity.values() if capacity is not None]
            chunks = max(sizes) // run.chunk_bytes if len(sizes) == len(self.tiers) else _MOST
            limit = min(_MOST, max(_FEWEST, chunks))
            self._watches.limit = self._sessions.limit = limit

    def _forget_sessions(self) -> None:
        while session := self._sessions.oldest():
            self._sessions.forget(session)
            self._marks.hold(session.mark, -1)


def _named(*names: str) -> Hashable:
    """A key of these names that takes little room, however long clients make them."""
    if sum(map(len, names)) <= _LONG_NAMES:
        return names
    return hashlib.blake2b(repr(names).encode(), digest_size=16).digest()


def _has(request: PolicyRequest, run: Run, i: int) -> bool:
    """Whether a request asks for chunk ``i`` of a run."""
    at, chunk = run.start + i, run.chunks[i]
    return any(
        mine.start <= at < mine.start + len(mine) and mine.chunks[at - mine.start] == chunk
        for mine in request.runs
        if mine.group == run.group
    )
