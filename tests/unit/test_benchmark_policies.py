"""The benchmarks of policies: what their prompts are like, and that their figures are of them."""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from kvtiers.simulator.trace import Trace
from small_traces import chat, trace_of

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from benchmarks import policy_cost, reuse_table

# What a policy closes of the gap from LRU to the optimum ------------------------------------


def sessions_of(trace: Trace) -> dict[str, list[float]]:
    """When each session's requests come."""
    found: dict[str, list[float]] = {}
    for request in trace.requests:
        found.setdefault(request.session, []).append(request.arrival)
    return found


def test_a_half_has_every_other_session_at_its_own_pace_and_as_many_at_a_time() -> None:
    rng = random.Random(1)
    made = trace_of(chat(rng, 60))
    requests = [replace(r, session=f"s{rng.randrange(12)}") for r in made.requests]
    whole = replace(made, requests=requests)
    halves = [reuse_table.half_of(whole, half) for half in (0, 1)]
    before, one, other = (sessions_of(trace) for trace in (whole, *halves))
    assert one.keys() | other.keys() == before.keys()
    assert len(one) == len(other) == 6
    for name, arrivals in {**one, **other}.items():
        begun = before[name][0]
        assert arrivals == [arrival - begun / 2 for arrival in before[name]]
    for half in halves:
        arrivals = [request.arrival for request in half.requests]
        assert arrivals == sorted(arrivals)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> int:
    """How many prompts are drawn: a few, of fewer kinds."""
    for name, value in {"_PROMPTS": 400, "_KINDS": 100, "_CHUNKS": 2}.items():
        monkeypatch.setattr(reuse_table, name, value)
    return 400


def test_drawn_prompts_are_the_same_again_or_have_nothing_in_common(few: int) -> None:
    often = {}
    for kind in ("uniform", "zipf", "loop"):
        trace = reuse_table.drawn(kind)
        prompts = [tuple(request.chunks()) for request in trace.requests]
        assert len(prompts) == few
        distinct = set(prompts)
        assert len({chunk for prompt in distinct for chunk in prompt}) == 2 * len(distinct)
        assert max(map(max, distinct)) < trace.footprint == 200
        assert all(one.arrival < two.arrival for one, two in pairwise(trace.requests))
        often[kind] = Counter(prompts).most_common(1)[0][1]
        if kind == "loop":
            assert prompts[75:] == prompts[:-75]
    assert often["zipf"] > 2 * often["uniform"]


def test_the_gap_is_measured_from_lru_on(few: int) -> None:
    trace = reuse_table.drawn("zipf")
    assert reuse_table.measure("lru", trace, 200, 10) == reuse_table.Cell(
        "zipf", 10, [0.0] * 3, [0.0] * 3
    )
    cell = reuse_table.measure("lfu", trace, 200, 10)
    assert all(0 < closed < 100 for closed in cell.gap_closed)
    assert all(points > 0 for points in cell.points)


def test_of_a_policy_every_cell_is_shown_and_kept(
    few: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn = reuse_table.drawn("uniform")
    monkeypatch.setattr(reuse_table, "traces", lambda: iter([(drawn, 200, (2, 10))]))
    file = tmp_path / "cells.json"
    monkeypatch.setattr(sys, "argv", ["reuse_table", "--jobs", "1", "--json", str(file)])
    reuse_table.main()
    cells = json.loads(file.read_text())
    assert [(cell["trace"], cell["share"]) for cell in cells] == [("uniform", 2), ("uniform", 10)]
    shown = capsys.readouterr().out
    for cell in cells:
        assert f"{cell['gap_closed'][0]:.0f} ({cell['points'][0]:+.2f})" in shown


# What a policy costs ------------------------------------------------------------------------


def test_half_of_the_prompts_that_cost_is_measured_with_go_on_from_an_earlier_one() -> None:
    seen, continued = set[object](), 0
    prompts = list(policy_cost.prompts_of(2000, 20))
    for run, hit in prompts:
        assert len(run) - hit == 20
        assert seen.issuperset(run.chunks[:hit])
        assert seen.isdisjoint(run.chunks[hit:])
        seen.update(run.chunks)
        continued += hit > 0
    assert len(prompts) == 100
    assert 35 < continued < 65


def test_a_tier_under_measurement_is_filled_and_never_more_than_that() -> None:
    tier = policy_cost.Tier("lru", 200)
    for prompt in policy_cost.prompts_of(2000, 20):
        tier.serve([prompt])
        held = list(tier.policy.victims("cpu", 200))
        assert len(held) == len(set(held)) == 200 - tier.free
    assert tier.free == 0
    assert tier.stored == 2000


def test_the_cost_of_a_policy_is_told_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cost = policy_cost.measure("prefix-reuse", 1000, 20)
    assert len(cost.full) == policy_cost.WINDOWS
    assert min(cost.filling, *cost.full, cost.stored, cost.longest, cost.kept) > 0
    arguments = ["policy_cost", "lru", "fifo", "--chunks", "1000", "--run", "20"]
    monkeypatch.setattr(sys, "argv", arguments)
    policy_cost.main()
    _, *lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["lru", "fifo"]
    assert all(line.endswith("B kept a chunk") for line in lines)
