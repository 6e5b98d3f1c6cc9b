"""Heat on the scheduler: what a step is asked to measure, and what the policy is told."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kvtiers.connector import compat
from kvtiers.connector.heat import (
    NO_STEP,
    NOT_MEASURED,
    HeatCost,
    HeatJob,
    HeatReport,
    HeatSettings,
    HeatStep,
)
from kvtiers.connector.heat_book import Heat, HeatBook, HeatPlan
from kvtiers.connector.heat_log import HeatLog
from kvtiers.connector.heat_share import HeatShare
from kvtiers.policies import Run
from kvtiers.tiers.hierarchy import Hierarchy

logger = logging.getLogger(__name__)

# Of others' prompts, in a step: each takes a fraction of a millisecond.
_MOST_AT_ONCE = 4


class HeatWatch:
    """What vLLM's scheduler says of a step, as measurements. Its thread only.

    Args:
        plan: says which prompts are measured.
        book: keeps what came of it.
        log: writes it to a file, if the user wants one.
        shares: whether other engines are told of it, and tell of theirs.
        clock: seconds.

    """

    def __init__(
        self,
        plan: HeatPlan,
        book: HeatBook,
        log: HeatLog | None = None,
        *,
        shares: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._plan, self.book, self._log = plan, book, log
        self._clock = clock
        self._shares = shares
        self._share: HeatShare | None = None
        self._hierarchy: Hierarchy | None = None
        self._elsewhere_s = 0.0
        self._chunk_bytes = 1

    @classmethod
    def of_engine(
        cls, settings: HeatSettings | None, vllm_config: Any, kv_cache_config: Any, groups: Any
    ) -> HeatWatch | None:
        """For an engine's first group with full attention; None if heat is not measured.

        That an engine has no such group is told in the log.

        Args:
            settings: how it is measured, None for not at all.
            vllm_config: of the engine.
            kv_cache_config: of the engine.
            groups: vLLM's ``kv_group_configs``.

        """
        if settings is None:
            return None
        number = compat.full_attention_group(kv_cache_config)
        group = next((group for group in groups if group.group_idx == number), None)
        if group is None:
            logger.warning(NOT_MEASURED, "no KV cache group has plain full attention")
            return None
        plan = HeatPlan(
            settings,
            group.group_idx,
            group.tokens_per_block,
            group.tokens_per_chunk,
            vllm_config.parallel_config.world_size,
        )
        layers = vllm_config.model_config.hf_text_config.num_hidden_layers
        log = HeatLog(settings.log) if settings.log else None
        return cls(plan, HeatBook(layers), log, shares=settings.share)

    def opened(self, hierarchy: Hierarchy) -> None:
        """The tiers are open: exchange heat through the first that is shared, if asked to."""
        self._hierarchy = hierarchy
        if not self._shares:
            return
        tier = hierarchy.shared_tier()
        if tier is None:
            logger.warning("Attention heat stays in this engine: it has no tier that is shared.")
            return
        self._chunk_bytes = hierarchy.chunk_bytes
        self._share = HeatShare(tier, lambda: hierarchy.namespace, writes=hierarchy.stores)
        self._share.start()

    def step(
        self,
        scheduler_output: Any,
        statuses: Mapping[str, Any],
        chunks_of: Callable[[str, int], Run | None],
    ) -> HeatStep:
        """What to measure in the step, and how much of it computes prompts.

        Args:
            scheduler_output: of the step.
            statuses: vLLM's ``RequestOffloadState`` by request, up to date with the step.
            chunks_of: a request's chunks of a group.

        """
        if compat.only_decodes(scheduler_output):
            return NO_STEP
        begin = self._clock()
        told = self._step(scheduler_output, statuses, chunks_of)
        self._plan.delayed(self._clock() - begin)
        return told

    def _step(
        self,
        scheduler_output: Any,
        statuses: Mapping[str, Any],
        chunks_of: Callable[[str, int], Run | None],
    ) -> HeatStep:
        jobs: list[HeatJob] = []
        tokens = of_prompts = 0
        for name, before, computed in compat.step_parts(scheduler_output):
            tokens += computed
            status = statuses.get(name)
            prompt = 0 if status is None else status.req.num_prompt_tokens
            if before >= prompt:
                continue
            of_prompts += min(computed, prompt - before)
            if prompt > before + computed:
                continue
            run = chunks_of(name, self._plan.group)
            blocks = self._blocks(status)
            job = None if run is None else self._plan.job(run, blocks, before, computed)
            if job is not None:
                jobs.append(job)
        return HeatStep(tuple(jobs), of_prompts / max(1, tokens))

    def _blocks(self, status: Any) -> list[int]:
        groups = status.config.kv_group_configs
        for group, state in zip(groups, status.group_states, strict=True):
            if group.group_idx == self._plan.group:
                return state.block_ids  # type: ignore[no-any-return]
        return []

    def told(self, report: HeatReport) -> Iterator[tuple[Run, list[float]]]:
        """What was measured: chunks after the sink, and the heat of each.

        What is done with that counts as the cost of measuring, like the rest of it.
        """
        begin, measured = self._clock(), self._plan.waits_for(report.readings)
        posted = HeatCost(probe_s=report.post_s, probe_cpu_s=report.post_s)
        self._plan.spent(report.cost + posted, measured=measured)
        for run, found in self._plan.answered(report.readings):
            if self._log is not None:
                self._log.note(run, found)
            if self._share is not None:
                self._share.note(run, found)
            yield self._noted(run, found)
        yield from self._told_by_others()
        self._plan.delayed(self._clock() - begin + self._elsewhere(), measured=measured)
        self._plan.settled()

    def _elsewhere(self) -> float:
        """Seconds since the last call of what was done with heat at another time or thread."""
        seconds = 0.0 if self._hierarchy is None else self._hierarchy.heat_seconds
        for thread in (self._log, self._share):
            if thread is not None:
                seconds += thread.seconds
        before, self._elsewhere_s = self._elsewhere_s, seconds
        return seconds - before

    def _noted(self, run: Run, measured: dict[int, Heat]) -> tuple[Run, list[float]]:
        heat = self.book.note(run.tail(1), measured)
        return run.tail(len(run) - len(heat)), heat

    def _told_by_others(self) -> Iterator[tuple[Run, list[float]]]:
        """What other engines have measured, once it is known what heads there are here."""
        if self._share is None or not self.book.heads:
            return
        for prompt in itertools.islice(self._share.take(), _MOST_AT_ONCE):
            run = Run(prompt.chunks, 0, self._chunk_bytes, self._plan.group)
            # Where heads are copied to fill the ranks, there are more of them.
            if len(run) > 1 and prompt.heads == self.book.heads:
                yield self._noted(run, dict(prompt.measured))

    def forget(self) -> None:
        """Other weights, or another namespace: what was measured means nothing now."""
        self._plan.forget()
        self.book.forget()
        if self._share is not None:
            self._share.forget()

    def close(self) -> None:
        """Write what waits to be logged or told. The tiers are still open."""
        if self._share is not None:
            self._share.close()
        if self._log is not None:
            self._log.close()
