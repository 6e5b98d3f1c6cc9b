"""Adapts vLLM's ``OffloadingManager`` to the hierarchy.

Runs on the scheduler's thread. vLLM asks chunk by chunk and by key; the
hierarchy thinks in requests and runs. The translation is all there is here.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvtiers.connector import metrics
from kvtiers.connector.adapters import Contents
from kvtiers.connector.prefill import PrefillClock, Span
from kvtiers.connector.roles import loads, stores
from kvtiers.connector.stack import build_hierarchy
from kvtiers.connector.store_gate import StoreGate
from kvtiers.connector.transfer import ArenaSpec, WorkerReport
from kvtiers.policies import PolicyRequest, Run
from kvtiers.policies.around import answers
from kvtiers.tiers import Namespace, Usage
from kvtiers.tiers.breaker import BreakerState
from kvtiers.tiers.hierarchy import Hierarchy
from kvtiers.tiers.recording import Recorder
from kvtiers.tiers.requests import Lookup
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    get_offload_block_hash,
    get_offload_group_idx,
    make_offload_key,
)
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.metrics.cache_hit_source import CacheHitSource

if TYPE_CHECKING:
    from kvtiers.connector.spec import Context
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )

logger = logging.getLogger(__name__)

# Of what vLLM lets its engine have to stop, the share that stores under way may take, and
# what they may take at least: a fast tier needs no more.
_DRAIN_SHARE = 0.5
_LEAST_DRAIN_SECONDS = 5.0

_RESULTS = {
    Lookup.HIT: LookupResult.HIT,
    Lookup.MISS: LookupResult.MISS,
    Lookup.PENDING: LookupResult.HIT_PENDING,
    Lookup.UNKNOWN: LookupResult.RETRY,
}


@dataclass(frozen=True, slots=True)
class Adapter:
    """The LoRA adapter of a request.

    Attributes:
        number: vLLM's number of it.
        content: digest of what it holds; None if that can't be told.

    """

    number: int
    content: bytes | None


@dataclass
class RequestKeys:
    """A request's keys per group, as vLLM keeps and extends them; put on its ``ReqContext``.

    vLLM's keys say which adapter by its name and path; the hierarchy's say by its
    content too, which stands between the hash and the group.

    Attributes:
        keys: group -> keys of its chunks, head first.
        windowed: groups that need only the last chunks of a prefix.
        adapter: of the request, None for the model as it is.
        loads: whether the request may load.
        stores: whether its chunks may be stored.
        tenant: the request's ``cache_salt``, which vLLM's keys contain.

    """

    keys: Mapping[int, Sequence[OffloadKey]]
    windowed: frozenset[int] = frozenset()
    adapter: Adapter | None = None
    loads: bool = True
    stores: bool = True
    tenant: str = ""

    def __post_init__(self) -> None:
        if self.adapter is not None and self.adapter.content is None:
            self.loads = self.stores = False

    def inner(self, key: OffloadKey) -> OffloadKey:
        """The hierarchy's key for vLLM's."""
        if self.adapter is None or self.adapter.content is None:
            return key
        return make_offload_key(
            get_offload_block_hash(key) + self.adapter.content, get_offload_group_idx(key)
        )

    def outer(self, key: bytes) -> OffloadKey:
        """Back."""
        known = OffloadKey(key)
        if self.adapter is None or self.adapter.content is None:
            return known
        block_hash = get_offload_block_hash(known)[: -len(self.adapter.content)]
        return make_offload_key(block_hash, get_offload_group_idx(known))


class TieredOffloadingManager(OffloadingManager):  # type: ignore[misc]  # vLLM is untyped
    """vLLM's view of the hierarchy.

    It is made before vLLM has heard from the workers, and opened with what
    they report before the first request.

    Args:
        config: vLLM's summary of the engine.
        context: our configuration and vLLM's.

    """

    def __init__(self, config: OffloadingConfig, context: Context) -> None:
        self._config = config
        self._context = context
        self._groups = tuple(group.group_id for group in config.groups)
        self._hierarchy: Hierarchy | None = None
        self._prefill: PrefillClock | None = None
        self._recorder: Recorder | None = None
        self._role: str = context.vllm_config.kv_transfer_config.kv_role
        settings = context.loaded.config
        self._gate = StoreGate(settings.offload_threshold, settings.max_tokens)
        self._facts: dict[str, PolicyRequest] = {}
        # Requests whose next admission has not been counted yet.
        self._looked: set[str] = set()
        # Levels as last sent; None before the first time.
        self._told: list[tuple[Usage, BreakerState, int | None]] | None = None

    def open(
        self,
        report: WorkerReport,
        gpu_usage: Callable[[], Usage],
        gpu_fullness: Callable[[], float],
        under_way: Callable[[], Iterable[Span]],
    ) -> None:
        """Build the tiers, once the workers have made the arena.

        Args:
            report: what the workers made.
            gpu_usage: how much of vLLM's own prefix cache is filled, for the metrics.
            gpu_fullness: the share of its blocks that are not empty.
            under_way: what is left to compute of the prompts of running requests.

        Raises:
            ConfigError, TierConfigError: a tier can't work as configured.

        """
        blocks = self._config.cache.blocks_per_chunk
        tokens = {group.group_id: group.tokens_per_block * blocks for group in self._config.groups}
        self._prefill = PrefillClock(tokens, under_way)
        self._hierarchy = build_hierarchy(
            self._config, self._context, report, gpu_usage, self._prefill
        )
        self._gate.watch(gpu_fullness)

    def record_with(self, recorder: Recorder | None) -> None:
        """Tell the recorder, if there is one, of each request from now on."""
        self._recorder = recorder

    @property
    def hierarchy(self) -> Hierarchy:
        """The tiers. vLLM opens the manager before its first step."""
        if self._hierarchy is None:
            raise RuntimeError("vLLM did not pass the workers' handshake to kvtiers.")
        return self._hierarchy

    # Steps -------------------------------------------------------------------

    def step_scheduled(self, tokens: int, spans: Iterable[Span]) -> None:
        """A step begins that computes so many tokens: these."""
        if self._prefill is not None:
            self._prefill.scheduled(tokens, spans)

    def step_executed(self) -> None:
        """The output of the oldest step under way is here."""
        if self._prefill is not None:
            self._prefill.executed()

    # Requests ---------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:  # noqa: ARG002
        """VLLM calls it before it has keys: ``begin`` does the work."""
        return self._gate.context()

    def begin(
        self, req_context: ReqContext, facts: PolicyRequest, gpu_chunks: Mapping[int, int]
    ) -> None:
        """A request arrived.

        Args:
            req_context: with a ``RequestKeys`` on it.
            facts: all but ``runs``.
            gpu_chunks: per group, how many leading chunks the GPU holds now.

        """
        known = _keys_of(req_context)
        known.loads &= loads(self._role)
        known.stores &= stores(self._role)
        if not (known.loads or known.stores):
            return
        facts.arrival = time.monotonic()
        facts.runs = self._all_runs(known)
        self._facts[facts.request_id] = facts
        # Those who load nothing ask no tier.
        asked = facts.runs if known.loads else ()
        beyond = [run.tail(min(len(run), gpu_chunks.get(run.group, 0))) for run in asked]
        self.hierarchy.begin(facts, beyond, known.windowed)

    def looking(self, request_id: str) -> bool:
        """The scheduler considers the request: its next admission is to be counted.

        Returns False if it has to wait, so that there is no use in looking.
        """
        self._looked.add(request_id)
        return not self.hierarchy.waits(request_id)

    def admitted(self, request_id: str, gpu_chunks: Mapping[int, int], cached: int) -> None:
        """The scheduler starts the request, with or without a load.

        vLLM says so once more when a load has ended; that is not counted.

        Args:
            request_id: the request.
            gpu_chunks: per group, how many leading chunks the GPU held.
            cached: tokens of the prompt that are not computed.

        """
        if request_id in self._looked:
            self._looked.discard(request_id)
            served = self.hierarchy.admitted(request_id, gpu_chunks)
            facts = self._facts.get(request_id)
            if self._recorder is not None and facts is not None:
                self._recorder.admitted(facts, cached, served)

    def finishing(self, req_context: ReqContext, output_tokens: int, reason: str) -> None:
        """The request has ended; ``on_request_finished`` follows after its last stores."""
        facts = self._facts.get(req_context.req_id)
        if facts is not None:
            # Now with the chunks of the output: what the next turn will ask for.
            facts.runs = self._all_runs(_keys_of(req_context))
            facts.output_tokens = output_tokens
            facts.finish_reason = reason
            if self._recorder is not None:
                # Now: an engine that idles takes no step in which it would say so again.
                self._recorder.finished(facts, read=_keys_of(req_context).loads)

    def on_request_finished(self, req_context: ReqContext) -> None:
        """No more loads or stores will be submitted for it; some may be under way."""
        self._facts.pop(req_context.req_id, None)
        self._looked.discard(req_context.req_id)
        self._gate.forget(req_context.req_id)
        self.hierarchy.end(req_context.req_id)

    # The GPU's own cache ----------------------------------------------------

    @property
    def favours(self) -> bool:
        """Whether the policy ever says what the GPU should keep."""
        return self._hierarchy is not None and answers(self._hierarchy.policy, "favour")

    def favoured(self, chunks: int) -> list[Run]:
        """What it should keep, of so many chunks."""
        return self.hierarchy.favoured(chunks * self.hierarchy.chunk_bytes)

    # Loads ------------------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Called for each chunk of each waiting request in each step."""
        known = _keys_of(req_context)
        if not known.loads:
            return LookupResult.MISS
        return _RESULTS[self.hierarchy.lookup(req_context.req_id, known.inner(key))]

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        """Where a chunk was before it was promoted."""
        inner = _keys_of(req_context).inner(key)
        tier = self.hierarchy.source_of(req_context.req_id, inner)
        if tier is None:
            return CacheHitSource.HOST
        return CacheHitSource.DISK if tier.on_disk else CacheHitSource.EXTERNAL_UNSPECIFIED

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> ArenaSpec:
        """Pin and locate chunks that were looked up in this step."""
        keys = list(keys)
        known = _keys_of(req_context)
        slots = self.hierarchy.load(req_context.req_id, [known.inner(key) for key in keys])
        return ArenaSpec(slots, self._group_counts(keys))

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:  # noqa: ARG002
        """A request has one load at a time, so its name is enough."""
        self.hierarchy.loaded(req_context.req_id)

    # Stores -----------------------------------------------------------------

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput:
        """Slots for those of the chunks that the arena lacks, admits and has room for.

        Never None: vLLM would ask, and warn, again every step.
        """
        known = _keys_of(req_context)
        wanted = self._gate.let_through(keys, req_context) if known.stores else ()
        runs = tuple(self._runs(wanted, req_context))
        taken = self.hierarchy.reserve(req_context.req_id, runs)
        accepted = [known.outer(key) for key, _ in taken]
        spec = ArenaSpec([slot for _, slot in taken], self._group_counts(accepted))
        return PrepareStoreOutput(keys_to_store=accepted, store_spec=spec, evicted_keys=[])

    def complete_store(
        self,
        keys: Collection[OffloadKey],
        req_context: ReqContext,
        success: bool = True,
    ) -> None:
        """The chunks are in the arena: readable, unless a worker said otherwise before."""
        known = _keys_of(req_context)
        self.hierarchy.stored([known.inner(key) for key in keys], success)

    def take_offers(self) -> set[str]:
        """Requests whose chunks should be offered anew, from the first on."""
        return self._gate.take_offers()

    def distrust_store(
        self, keys: Iterable[OffloadKey], req_context: ReqContext, slots: Sequence[int]
    ) -> None:
        """A worker could not copy all of a store: ``complete_store`` publishes the rest.

        Args:
            keys: of the job.
            req_context: of the job's request.
            slots: the bad ones, none given for all of the job's.

        """
        if not slots:
            known = _keys_of(req_context)
            slots = self.hierarchy.slots_of_stores(known.inner(key) for key in keys)
        self.hierarchy.spoil(slots)

    def distrust_load(self, request_id: str) -> None:
        """A worker could not copy a load: vLLM recomputes, and must not load it again."""
        self.hierarchy.load_failed(request_id)

    # Attention heat ---------------------------------------------------------

    def chunks_of(self, request_id: str, group: int) -> Run | None:
        """A request's chunks of a group, None if it neither loads nor stores."""
        facts = self._facts.get(request_id)
        runs = facts.runs if facts is not None else ()
        return next((run for run in runs if run.group == group), None)

    def measured(self, run: Run, heat: Sequence[float]) -> None:
        """Workers have measured what the end of a prompt attends to."""
        self.hierarchy.measured(run, heat)

    # LoRA adapters ----------------------------------------------------------

    def contradicts(self, req_context: ReqContext, contents: Contents) -> bool:
        """Whether the request's adapter holds something else than its keys say."""
        adapter = _keys_of(req_context).adapter
        if adapter is None or adapter.number not in contents:
            return False
        return contents[adapter.number] != adapter.content

    def stop_storing(self, req_context: ReqContext) -> None:
        """What the request computes from here on is not what its keys would say."""
        _keys_of(req_context).stores = False

    def leave_alone(self, req_context: ReqContext) -> None:
        """The request shall neither load nor store from here on."""
        known = _keys_of(req_context)
        known.loads = known.stores = False

    # Steps, resets, figures -------------------------------------------------

    def on_schedule_end(self, context: ScheduleEndContext) -> None:  # noqa: ARG002
        """Once per step, before its stores (0.32) or after them (0.33)."""
        self.hierarchy.tick()

    def reset_cache(self) -> None:
        """The weights may have changed under us, so what is stored means nothing now.

        What comes from here on goes into a namespace that nobody else will ever
        read. What others share is left alone.
        """
        old = self.hierarchy.namespace
        epoch = uuid.uuid4().hex
        facts = {**old.facts, "epoch": epoch}
        self.hierarchy.reset(Namespace(epoch, facts, shareable=False))
        if self._recorder is not None:
            self._recorder.reset()

    def flushed(self) -> None:
        """Every copy that was under way at the last reset has ended."""
        self.hierarchy.flushed()

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Figures since the last call; None if there is nothing new to say.

        Every step is asked: the last one before the engine idles must tell all.
        """
        if self._hierarchy is None:
            return None
        stats = self._hierarchy.stats()
        levels = [(tier.usage, tier.breaker, tier.pinned) for tier in stats]
        if levels == self._told and not any(tier.counts for tier in stats):
            return None
        first, self._told = self._told is None, levels
        prefill = self._prefill.tokens_per_second() if self._prefill is not None else None
        return metrics.record(stats, first, prefill)

    def shutdown(self) -> None:
        """Let stores under way end, within a bound, and close the tiers."""
        if self._recorder is not None:
            self._recorder.close()
        if self._hierarchy is not None:
            # The rest is for requests, which vLLM lets end first.
            allowed = self._context.vllm_config.shutdown_timeout
            self._hierarchy.close(max(_LEAST_DRAIN_SECONDS, allowed * _DRAIN_SHARE))
            self._hierarchy = None

    # Keys -------------------------------------------------------------------

    def _all_runs(self, known: RequestKeys) -> tuple[Run, ...]:
        size = self.hierarchy.chunk_bytes
        return tuple(
            Run(tuple(map(known.inner, keys)), 0, size, group, tenant=known.tenant)
            for group, keys in known.keys.items()
            if keys
        )

    def _group_counts(self, keys: Iterable[OffloadKey]) -> list[int]:
        counts = dict.fromkeys(self._groups, 0)
        for key in keys:
            counts[get_offload_group_idx(key)] += 1
        return list(counts.values())

    def _runs(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> Iterable[Run]:
        """Neighbours of one group as runs, in vLLM's order, which is the order of the slots."""
        size = self.hierarchy.chunk_bytes
        known = _keys_of(req_context)
        current: list[bytes] = []
        start = group = -1
        for key in keys:
            its_group = get_offload_group_idx(key)
            position = self._position(key, its_group, req_context)
            if current and (its_group != group or position != start + len(current)):
                yield _run(current, start, size, group, known)
                current = []
            if not current:
                start, group = position, its_group
            current.append(known.inner(key))
        if current:
            yield _run(current, start, size, group, known)

    def _position(self, key: OffloadKey, group: int, req_context: ReqContext) -> int:
        end = req_context.get_offload_key_position(key)
        if end is None:
            return -1
        tokens: int = self._config.groups[self._groups.index(group)].tokens_per_block
        chunk: int = tokens * self._config.cache.blocks_per_chunk
        return -(-int(end) // chunk) - 1


def _keys_of(req_context: ReqContext) -> RequestKeys:
    known = req_context.get_state(RequestKeys)
    return known if known is not None else RequestKeys({})


def _run(
    keys: Sequence[bytes], start: int, chunk_bytes: int, group: int, known: RequestKeys
) -> Run:
    before = known.keys.get(group, ())
    parent = known.inner(before[start - 1]) if 0 < start <= len(before) else None
    return Run(tuple(keys), max(start, 0), chunk_bytes, group, parent, known.tenant)
