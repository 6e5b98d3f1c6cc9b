"""What the probe takes of a prefill.

    python -m benchmarks.heat_cost --json FILE

One engine in this process computes prompts that nobody has seen before, in pairs of equal
length: one with the probe, one without, first one first and then the other. Of each pair
the ratio counts. Beside it the probe's own time is taken, which needs no pair and is less
noisy, but leaves out what it does to others' caches.

About 5 minutes on two cores for 20 pairs of 2,048 tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from kvtiers.connector.heat import HeatSettings
from kvtiers.tools.model import ModelError, smollm2_path
from rich.console import Console

from benchmarks.paired import Interval, geometric_mean

BOUND = 0.01
"""Of a prefill, what the probe may take at most."""

_TOKENS = range(1000, 30_000)
_BLOCK = 128


@dataclass(frozen=True)
class Pair:
    """Two prompts of one length: seconds of wall time and of the process's CPU time.

    ``probe_s`` is what the probe says itself, of wall time.
    """

    on_s: float
    off_s: float
    on_cpu_s: float
    off_cpu_s: float
    probe_s: float


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print. 1 if the probe took more than ``BOUND``, by its own time."""
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
        share = pair.probe_s / pair.on_s
        progress.print(f"{pair.on_s:.3f} s with, {pair.off_s:.3f} s without, probe {share:.2%}")
    share = fmean(pair.probe_s for pair in pairs) / fmean(pair.on_s for pair in pairs)
    wall = geometric_mean([pair.on_s / pair.off_s for pair in pairs])
    cpu = geometric_mean([pair.on_cpu_s / pair.off_cpu_s for pair in pairs])
    _report(options, pairs, share, wall, cpu)
    return 0 if share <= BOUND else 1


def _report(
    options: argparse.Namespace, pairs: Sequence[Pair], share: float, wall: Interval, cpu: Interval
) -> None:
    console = Console(highlight=False)
    console.print(f"{len(pairs)} pairs of {options.tokens} tokens, {options.dtype}")
    console.print(f"the probe's own time: {share:.2%} of the prefill")
    console.print(f"with the probe over without: wall time {wall}, CPU time {cpu}")
    if options.json:
        found = {"tokens": options.tokens, "dtype": options.dtype, "share": share}
        found["pairs"] = list(map(asdict, pairs))
        options.json.write_text(json.dumps(found, indent=2) + "\n")


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m benchmarks.heat_cost", description=__doc__)
    add = made.add_argument
    add("--pairs", type=int, default=20, help="default: 20")
    add("--tokens", type=int, default=2048, help="of each prompt (default: 2048)")
    add("--layers", type=int, default=HeatSettings().layers, help="measured for each prompt")
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
        (on, on_cpu, probe), (off, off_cpu, _) = found[True], found[False]
        yield Pair(on, off, on_cpu, off_cpu, probe)


class _Engine:
    """An offline engine whose probe can be switched."""

    def __init__(self, model: Path, options: argparse.Namespace) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # else nine tenths of the memory
        from vllm import LLM, SamplingParams

        heat = {"layers": options.layers}
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
        self._time_probe()

    def _time_probe(self) -> None:
        from kvtiers.connector.heat_probe import HeatProbe

        self._probe_s, measure = 0.0, HeatProbe._try_measure

        def timed(*arguments: Any) -> None:
            begin = time.perf_counter()
            measure(*arguments)
            self._probe_s += time.perf_counter() - begin

        HeatProbe._try_measure = timed  # type: ignore[method-assign]

    def prefill(self, prompt: list[int], probed: bool) -> tuple[float, float, float]:
        """Seconds, CPU seconds, and seconds in the probe, of one prompt and one token."""
        self._connector._heat_watch = self._watch if probed else None
        self._probe_s = 0.0
        begin, cpu = time.perf_counter(), time.process_time()
        self._llm.generate({"prompt_token_ids": prompt}, self._sampling, use_tqdm=False)
        return time.perf_counter() - begin, time.process_time() - cpu, self._probe_s


if __name__ == "__main__":
    sys.exit(main())
