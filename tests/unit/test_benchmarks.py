"""The README's numbers, and the arithmetic behind them."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import report  # noqa: E402 - found through the line above
from benchmarks.record import (  # noqa: E402
    OURS,
    RIVAL,
    Record,
    Sample,
    Setup,
    median,
    p99,
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
