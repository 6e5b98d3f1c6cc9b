"""The README's numbers, and the arithmetic behind them."""

import json
import random
import signal
import sys
from pathlib import Path

import pytest
from kvtiers.tools.server import ServerError

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import command, directory, overhead, report, verification  # noqa: E402 - found above
from benchmarks.paired import Interval, Load, PairedRecord, geometric_mean  # noqa: E402
from benchmarks.record import (  # noqa: E402
    OURS,
    PLAIN,
    RIVAL,
    UNVERIFIED,
    Record,
    Sample,
    Setup,
    median,
    p99,
    pressures,
    rows,
)
from benchmarks.scenarios import Plan, _load_prompts  # noqa: E402
from benchmarks.systems import BLOCK, Engine, chunks_in  # noqa: E402

SETUP = Setup("2026-01-02", "a CPU", 2, "0.32.0", "0.1.0", "a-model", "bfloat16", 128, 64)


def _sample(system, turn, ttft_s, scenario="single", step="cpu", cached=1024):
    return Sample(scenario, system, turn, step, 1024, ttft_s, [cached] * len(ttft_s), "host")


def test_the_numbers_in_the_readme_are_those_that_were_measured():
    readme = (ROOT / "README.md").read_text()
    assert readme == report.put(readme, report.section())


def test_what_is_committed_tells_no_paths_and_is_small():
    for file in report.RESULTS.glob("*.json"):
        text = file.read_text()
        assert len(text) < 100_000
        assert "/" not in text, f"{file.name} names a path"


def test_ratios_are_taken_turn_by_turn():
    samples = [
        _sample(OURS, 0, [1.0, 2.0, 9.0]),
        _sample(RIVAL, 0, [4.0, 4.0, 4.0]),
        _sample(OURS, 1, [6.0, 6.0, 6.0]),
        _sample(RIVAL, 1, [2.0, 2.0, 2.0]),
    ]
    (row,) = rows(samples, "single", median)
    assert row.seconds[OURS].middle == 4.0
    assert (row.ratio.low, row.ratio.middle, row.ratio.high) == (0.5, 1.75, 3.0)


def test_a_system_that_did_not_run_has_no_ratio():
    (row,) = rows([_sample(OURS, 0, [1.0])], "single", median)
    assert row.ratio is None
    assert RIVAL not in row.seconds


@pytest.mark.parametrize(("count", "expected"), [(1, 1), (16, 16), (100, 99), (200, 198)])
def test_p99_is_a_time_that_was_measured(count, expected):
    assert p99(list(range(count, 0, -1))) == expected


def test_a_request_counts_as_loaded_only_with_all_of_its_chunks():
    sample = Sample("load", OURS, 0, "fs-whole", 1024, [1.0, 1.0], [1024, 1023])
    assert sample.loaded == 1


def test_a_record_survives_its_file(tmp_path):
    record = Record(SETUP, [_sample(OURS, 0, [0.1234, 0.5])])
    record.save(tmp_path / "made" / "record.json")
    assert Record.load(tmp_path / "made" / "record.json") == record


def test_every_step_stands_in_the_report_with_both_systems(tmp_path):
    samples = []
    for system in (OURS, RIVAL):
        for scenario, step in (("single", "gpu"), ("single", "fs"), ("load", "fs-quarter")):
            samples.append(_sample(system, 0, [0.25, 0.75], scenario, step))
    Record(SETUP, samples).save(tmp_path / "ttft.json")
    step = {"name": "cold", "ttft_s": 2.0, "cached_tokens": 0, "source": "none"}
    warm = {"name": "fs", "ttft_s": 0.1, "cached_tokens": 4096, "source": "disk"}
    demo = {"prompt_tokens": 4160, "answers_match": True, "steps": [step, warm]}
    (tmp_path / "demo.json").write_text(json.dumps(demo))
    text = report.section(tmp_path)
    assert "| 1,024 | GPU | 0.500 | 0.500 | 1.00 |" in text
    assert "| filesystem, the arena holds a quarter | kvtiers | 0.500 | 0.750 | 2 of 2 |" in text
    assert "| filesystem tier, after a restart | 0.100 | 4,096 | 20.0x |" in text


def test_only_what_is_between_the_markers_is_replaced():
    readme = "head\n<!-- numbers:begin -->\nold\n<!-- numbers:end -->\ntail\n"
    assert report.put(readme, "new") == readme.replace("old", "new")
    with pytest.raises(ValueError, match="numbers:begin"):
        report.put("no markers\n", "new")


class _Tokens:
    """Stands in for a server's tokenizer: a token for each character."""

    model = "m"

    def post(self, path, body):
        assert path == "/tokenize"
        return {"tokens": [ord(character) for character in body["prompt"]]}


def test_the_prompts_of_the_load_scenario_have_as_many_chunks_as_the_plan_says():
    plan = Plan([1024], 1, concurrency=16, load_tokens=2048, rest=64, seed=5)
    asked = _load_prompts(_Tokens(), plan, plan.seed)
    assert {len(prompt) for prompt in asked} == {2048 + 64}
    prefixes = {tuple(p[: end + BLOCK]) for p in asked for end in range(0, 2048, BLOCK)}
    assert len(prefixes) == plan.load_chunks


def test_chunks_of_both_systems_are_counted_and_other_files_are_not(tmp_path):
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    engine = Engine(tmp_path, "bfloat16", 0)
    assert engine.chunk_bytes == 2 * 2 * 4 * 16 * 2 * BLOCK
    tier = tmp_path / "tier"
    tier.mkdir()
    for name, size in (("theirs", 0), ("ours", 4096), ("half", -1), ("namespace", -60_000)):
        (tier / name).write_bytes(bytes(engine.chunk_bytes + size))
    assert chunks_in(tier, engine) == 2


# Pairs ----------------------------------------------------------------------


def _pairs(system, base, ratios):
    loads = []
    for pair, ratio in enumerate(ratios):
        # The machine drifts, and only the ratio within a pair counts.
        seconds = 1.0 + pair
        for name, factor in ((base, 1.0), (system, ratio)):
            took = factor * seconds
            loads.append(Load(name, pair, took, 1000, [took, took / 2], took))
    return loads


def test_of_a_pair_only_the_ratio_counts():
    record = PairedRecord(SETUP, _pairs(overhead.MISSES, PLAIN, [1.1] * 5))
    (found,) = overhead.figures(record)
    assert found.system == overhead.MISSES
    assert (found.throughput.low, found.throughput.high) == pytest.approx((1 / 1.1, 1 / 1.1))
    for interval in (found.ttft, found.cpu):
        assert (interval.low, interval.high) == pytest.approx((1.1, 1.1))


def test_a_load_without_its_pair_counts_for_nothing():
    record = PairedRecord(SETUP, [*_pairs(OURS, UNVERIFIED, [1.02]), Load(OURS, 7, 9, 1, [9])])
    assert verification.figure(record).middle == pytest.approx(1.02)
    with pytest.raises(ValueError, match="no pair"):
        PairedRecord(SETUP).ratio(OURS, PLAIN, lambda load: load.seconds)


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    draw = random.Random(1)
    covered = 0
    for _ in range(40):
        found = geometric_mean([1.01 * draw.lognormvariate(0, 0.05) for _ in range(20)])
        assert found.low < found.middle < found.high
        covered += found.low <= 1.01 <= found.high
    assert 33 <= covered <= 40


def test_a_bound_is_kept_only_if_the_whole_interval_keeps_it():
    narrow, wide, off = Interval(1, 0.99, 1.01), Interval(1, 0.97, 1.03), Interval(2, 1.9, 2.1)
    assert narrow.within(1.02, above=False) == narrow.within(0.98, above=True) == "kept"
    assert wide.within(1.02, above=False) == wide.within(0.98, above=True) == "undecided"
    assert off.within(1.02, above=False) == "missed"


def test_pairs_survive_their_file_and_stand_in_the_report(tmp_path):
    record = PairedRecord(SETUP, _pairs(overhead.AWAY, PLAIN, [1.0, 1.01, 0.99]))
    record.save(tmp_path / "overhead.json")
    loaded = PairedRecord.load(tmp_path / "overhead.json")
    assert loaded.setup == SETUP
    assert loaded.loads[1].seconds == record.loads[1].seconds
    PairedRecord(SETUP, _pairs(OURS, UNVERIFIED, [1.03, 1.03])).save(tmp_path / "verification.json")
    text = report.section(tmp_path)
    assert "| cpu tier and a Redis that is away, its breaker open | 1.000 (0.990 to 1.01" in text
    assert "tokens, over that of the same server with its checks" in text
    assert "1.030 (1.030 to 1.030)" in text


def test_what_was_not_measured_is_left_out(tmp_path):
    assert report.section(tmp_path) == ""
    # A run that was cut off before its first pair was whole.
    loads = [load for load in _pairs(overhead.AWAY, PLAIN, [1.0]) if load.system != PLAIN]
    PairedRecord(SETUP, loads).save(tmp_path / "overhead.json")
    assert report.section(tmp_path) == ""


def test_a_small_arena_is_compared_turn_by_turn_with_one_that_holds_all(tmp_path):
    samples = [
        _sample(OURS, turn, [seconds] * 2, "load", step)
        for turn, step, seconds in [
            (0, "redis-whole", 1.0),
            (0, "redis-quarter", 1.5),
            (1, "redis-whole", 2.0),
            (1, "redis-quarter", 5.0),
            (2, "redis-quarter", 9.0),
        ]
    ]
    (found,) = pressures(samples)
    assert (found.tier, found.system, found.prompts) == ("redis", OURS, 2)
    assert (found.ratio.low, found.ratio.high) == (1.5, 2.5)
    Record(SETUP, samples).save(tmp_path / "pressure.json")
    assert "from Redis 2.00 (1.50 to 2.50) times, 2 of 2 requests" in report.section(tmp_path)


def test_the_directorys_benchmark_sees_each_phase_and_what_a_chunk_takes(tmp_path):
    directory.main(["--chunks", "3200", "--policies", "lru", "--json", str(tmp_path / "d.json")])
    record = json.loads((tmp_path / "d.json").read_text())
    seen = [(phase["policy"], phase["phase"]) for phase in record["phases"]]
    assert seen == [("lru", phase) for phase in ("adopt", "known", "reset", "insert")]
    [used] = record["memory"]
    # So few chunks are lost in what else the process allocates: no more is said of them.
    assert (used["policy"], used["total"] > 0) == ("lru", True)


def test_a_server_that_fails_ends_a_benchmark_with_its_reason(capsys):
    def benchmark(options, progress):
        progress.print(f"{options.model} in {options.dtype}")
        raise ServerError("It did not start [yet].")

    given = command.parser("some", "A text.").parse_args(["--model", "a-model"])
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert command.run(benchmark, given) == 1
    finally:
        signal.signal(signal.SIGTERM, before)
    assert capsys.readouterr().err == "a-model in bfloat16\nIt did not start [yet].\n"
