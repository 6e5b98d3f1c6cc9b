"""Heat on the scheduler: what a step is asked to measure, and what the policy is told."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kvtiers.connector import compat
from kvtiers.connector.heat import (
    NOT_MEASURED,
    HeatCost,
    HeatJob,
    HeatSettings,
    HeatStep,
    Readings,
)
from kvtiers.connector.heat_book import HeatBook, HeatPlan
from kvtiers.connector.heat_log import HeatLog
from kvtiers.policies import Run

logger = logging.getLogger(__name__)


class HeatWatch:
    """What vLLM's scheduler says of a step, as measurements. Its thread only.

    Args:
        plan: says which prompts are measured.
        book: keeps what came of it.
        log: writes it to a file, if the user wants one.

    """

    def __init__(self, plan: HeatPlan, book: HeatBook, log: HeatLog | None = None) -> None:
        self._plan, self.book, self._log = plan, book, log

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
        return cls(plan, HeatBook(layers), HeatLog(settings.log) if settings.log else None)

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

    def spent(self, cost: HeatCost) -> None:
        """What workers took, for measuring and altogether."""
        self._plan.spent(cost)

    def _blocks(self, status: Any) -> list[int]:
        groups = status.config.kv_group_configs
        for group, state in zip(groups, status.group_states, strict=True):
            if group.group_idx == self._plan.group:
                return state.block_ids  # type: ignore[no-any-return]
        return []

    def told(self, readings: Readings) -> Iterator[tuple[Run, list[float]]]:
        """What workers have measured: chunks after the sink, and the heat of each."""
        for run, measured in self._plan.answered(readings):
            if self._log is not None:
                self._log.note(run, measured)
            heat = self.book.note(run.tail(1), measured)
            yield run.tail(len(run) - len(heat)), heat

    def forget(self) -> None:
        """Other weights, or another namespace: what was measured means nothing now."""
        self._plan.forget()
        self.book.forget()

    def close(self) -> None:
        """Write what waits to be logged."""
        if self._log is not None:
            self._log.close()
