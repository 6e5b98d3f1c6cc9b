"""Writes the README's numbers from what was measured, so that nobody types them.

    python -m benchmarks.report

Reads from ``results/`` what ``--json`` of ``benchmarks.ttft``, ``benchmarks.overhead``,
``benchmarks.verification`` and ``kvtiers demo`` wrote: ``ttft.json``, ``pressure.json`` (``ttft``
of kvtiers alone, with its scenarios under load), ``overhead.json``, ``verification.json`` and
``demo.json``. What was not measured is left out.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import overhead, verification
from benchmarks.paired import PairedRecord
from benchmarks.record import (
    OURS,
    PLAIN,
    RIVAL,
    Record,
    Setup,
    Spread,
    median,
    p99,
    pressures,
    rows,
)

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
_STORES = {"fs": "the filesystem", "redis": "Redis"}
_BEGIN, _END = "<!-- numbers:begin -->", "<!-- numbers:end -->"
_STEPS = {
    "cold": "cold",
    "gpu": "GPU",
    "cpu": "CPU tier, after a GPU reset",
    "redis": "Redis tier (unix socket), after a restart",
    "fs": "filesystem tier, after a restart",
    "fs-whole": "filesystem, the arena holds all",
    "fs-quarter": "filesystem, the arena holds a quarter",
    "redis-whole": "Redis (unix socket), the arena holds all",
    "redis-quarter": "Redis (unix socket), the arena holds a quarter",
}
_SYSTEMS = {
    OURS: "kvtiers",
    RIVAL: "vLLM's tiering",
    overhead.MISSES: "cpu and filesystem tier, no hit, all stored",
    overhead.AWAY: "cpu tier and a Redis that is away, its breaker open",
}


def section(results: Path = RESULTS) -> str:
    """The text between the markers, from the files in ``results``."""
    parts: list[str] = []
    for name, told in _TOLD.items():
        file = results / name
        if file.exists():
            parts += told(file)
    return "\n\n".join(parts)


def put(readme: str, text: str) -> str:
    """The README with ``text`` between its markers.

    Raises:
        ValueError: the markers are not there.

    """
    head, begin, rest = readme.partition(_BEGIN + "\n")
    _, end, tail = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"The README lacks the lines {_BEGIN} and {_END}.")
    return head + begin + (text + "\n" if text else "") + end + tail


def _comparison(record: Record) -> Iterator[str]:
    yield _preamble(record.setup)
    if alone := list(_alone(record)):
        yield (
            "**One request at a time.** Time to the first token in seconds; prompts of whole "
            f"chunks and {record.setup.rest} tokens more, which are always computed; "
            f"{_counts(record, 'single')}. A GPU hit is vLLM's own in both systems, so how far its "
            "ratio is from 1 is the noise of the run."
        )
        yield _table(("prompt", "source", "kvtiers", "vLLM's tiering", "ratio"), alone)
    if together := list(_together(record)):
        yield (
            f"**All at once.** Requests in flight: {_prompts(record, 'load')}, half of them on two "
            f"shared heads; {_counts(record, 'load')}. P99 is the slowest request. *Loaded*: "
            "requests that computed none of their chunks."
        )
        heads = ("source", "system", "median", "P99", "loaded")
        yield _table(heads, together)


def _pressure(record: Record) -> Iterator[str]:
    found = list(pressures(record.samples))
    if not found:
        return
    told = [
        f"from {_STORES[one.tier]} {_ratio(one.ratio)} times, "
        f"{_spread(one.loaded, '{:.0f}')} of {one.prompts} requests loaded whole"
        for one in found
    ]
    yield (
        f"**A small arena.** Requests in flight: {_prompts(record, 'load')}, half of them on two "
        "shared heads, all chunks in a lower tier. P99 time to the first token with an arena for "
        f"a quarter of the chunks, over that with one for all: {'; '.join(told)}. "
        f"{_made(record.setup)}"
    )


def _preamble(setup: Setup) -> str:
    return (
        f"Measured on {setup.date} with `make bench`: {setup.cores} cores ({setup.cpu}), no GPU, "
        f"vLLM {setup.vllm}, {setup.model} in {setup.dtype}, blocks of {setup.block_size} tokens. "
        "The rival is vLLM's own `TieringOffloadingSpec` with the same copy worker as kvtiers, "
        "since it has none for CPUs. Both ran in turns, on fresh servers; the spread over the "
        "turns is in brackets, and a ratio below 1 says that kvtiers was faster."
    )


def _alone(record: Record) -> Iterator[Sequence[str]]:
    for row in rows(record.samples, "single", median):
        times = [_seconds(row.seconds.get(system)) for system in (OURS, RIVAL)]
        yield (f"{row.tokens:,}", _STEPS[row.step], *times, _ratio(row.ratio))


def _together(record: Record) -> Iterator[Sequence[str]]:
    middles = rows(record.samples, "load", median)
    worst = rows(record.samples, "load", p99)
    for middle, slowest in zip(middles, worst, strict=True):
        for system in (OURS, RIVAL):
            if system in middle.seconds:
                yield (
                    _STEPS[middle.step],
                    _SYSTEMS[system],
                    _seconds(middle.seconds[system]),
                    _seconds(slowest.seconds[system]),
                    f"{_spread(middle.loaded[system], '{:.0f}')} of {middle.prompts}",
                )


def _overhead(record: PairedRecord) -> Iterator[str]:
    found = list(overhead.figures(record))
    if not found:
        return
    loads = record.of(PLAIN)
    requests = len(next(iter(loads.values())).ttft_s)
    yield (
        "**Where kvtiers can't help.** With it over without it, the same server and the same "
        f"loads of {requests} requests in flight, in turns: geometric means of {len(loads)} pairs, "
        "with 95 % confidence intervals (bootstrap). P99 is the slowest request of a load. At most "
        f"{overhead.BOUND:.0%} may be lost. {_made(record.setup)}"
    )
    lines = [
        (
            _SYSTEMS[one.system],
            str(one.throughput),
            one.throughput.within(1 - overhead.BOUND, above=True),
            str(one.ttft),
            one.ttft.within(1 + overhead.BOUND, above=False),
            str(one.cpu),
        )
        for one in found
    ]
    heads = ("with", "throughput", "bound", "P99 time to first token", "bound", "CPU time")
    yield _table(heads, lines)


def _verification(record: PairedRecord) -> Iterator[str]:
    tokens = next(iter(record.of(OURS).values())).tokens - record.setup.rest
    yield (
        f"**Verification.** The time to the first token of a filesystem hit of {tokens:,} tokens, "
        "over that of the same server with its checks of namespace, key, length and checksum taken "
        f"out: {verification.figure(record)}, geometric mean of {len(record.of(OURS))} pairs with "
        f"its 95 % confidence interval (bootstrap). {_made(record.setup)}"
    )


def _made(setup: Setup) -> str:
    return f"Measured on {setup.date}, vLLM {setup.vllm}, {setup.cores} cores, {setup.dtype}."


def _demo(result: dict[str, Any]) -> Iterator[str]:
    same = "the same" if result["answers_match"] else "NOT the same"
    yield (
        f"**`make demo`**, float32, {result['prompt_tokens']:,} tokens a prompt; the answers of "
        f"all steps were {same}."
    )
    cold = result["steps"][0]["ttft_s"]
    lines = [
        (
            _STEPS[step["name"]],
            f"{step['ttft_s']:.3f}",
            f"{step['cached_tokens']:,}",
            f"{cold / step['ttft_s']:.1f}x",
        )
        for step in result["steps"]
    ]
    yield _table(("source", "seconds to first token", "tokens loaded", "speed-up"), lines)


def _counts(record: Record, scenario: str) -> str:
    turns = {sample.turn for sample in record.samples if sample.scenario == scenario}
    count = f"{len(turns)} turn" + ("s" if len(turns) > 1 else "")
    if scenario == "single":
        return f"medians of {_prompts(record, scenario)} prompts, then of {count}"
    return f"{_tokens(record, scenario)} tokens each; medians of {count}"


def _prompts(record: Record, scenario: str) -> int:
    return next(len(s.ttft_s) for s in record.samples if s.scenario == scenario)


def _tokens(record: Record, scenario: str) -> str:
    lengths = {sample.tokens for sample in record.samples if sample.scenario == scenario}
    return " and ".join(f"{tokens:,}" for tokens in sorted(lengths))


def _seconds(spread: Spread | None) -> str:
    return "" if spread is None else _spread(spread, "{:.3f}")


def _ratio(spread: Spread | None) -> str:
    return "" if spread is None else _spread(spread, "{:.2f}")


def _spread(spread: Spread, form: str) -> str:
    middle, low, high = (form.format(value) for value in (spread.middle, spread.low, spread.high))
    return middle if low == high else f"{middle} ({low} to {high})"


def _table(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    aligned = ["---:" if re.match(r"[\d.]", cell) else "---" for cell in next(iter(lines))]
    rendered = [heads, aligned, *lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in rendered)


_TOLD: dict[str, Callable[[Path], Iterator[str]]] = {
    "ttft.json": lambda file: _comparison(Record.load(file)),
    "pressure.json": lambda file: _pressure(Record.load(file)),
    "overhead.json": lambda file: _overhead(PairedRecord.load(file)),
    "verification.json": lambda file: _verification(PairedRecord.load(file)),
    "demo.json": lambda file: _demo(json.loads(file.read_text())),
}


def main() -> int:
    """Update the README."""
    readme = ROOT / "README.md"
    readme.write_text(put(readme.read_text(), section()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
