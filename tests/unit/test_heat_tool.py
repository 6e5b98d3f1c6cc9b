"""``kvtiers heat`` and its figure, on a model with random weights."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from kvtiers.connector.heat import HeatCost
from kvtiers.connector.heat_log import HeatLog, read
from kvtiers.policies import Run
from kvtiers.tools import cli, heat
from kvtiers.tools.heat_model import HeatModel

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "tests" / "e2e"))

import models  # noqa: E402 - found above

from benchmarks import heat as figure  # noqa: E402 - found above
from benchmarks import heat_cost, heat_policy  # noqa: E402 - found above


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.make_llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="module")
def model(llama: Path) -> HeatModel:
    return HeatModel(llama)


@pytest.fixture
def prompt(tmp_path: Path) -> Path:
    """200 words, which are as many tokens."""
    path = tmp_path / "prompt.txt"
    path.write_text(words(200))
    return path


def words(count: int, seed: int = 1) -> str:
    """A text of as many tokens; the models' tokenizers have a word for each."""
    return " ".join(f"w{token}" for token in models.prompts(1, count, seed=seed)[0])


def test_what_is_observed_is_what_the_model_computes(llama: Path, model: HeatModel) -> None:
    from transformers import AutoModelForCausalLM

    tokens = model.tokens(words(50))
    assert len(tokens) == 50
    plain = AutoModelForCausalLM.from_pretrained(llama, attn_implementation="eager")
    with torch.inference_mode():
        expected = plain(torch.tensor([tokens]), output_attentions=True).attentions
    seen = []

    def observe(layer, query, keys, scale) -> None:
        seen.append(layer)
        logits = torch.einsum("qhd,hdt->hqt", query, keys.repeat_interleave(2, 0)) * scale
        last = torch.softmax(logits[:, -1], dim=-1)
        torch.testing.assert_close(last, expected[layer][0, :, -1], rtol=1e-3, atol=1e-5)

    model.run(tokens, observe)
    assert seen == [0, 1]


def test_the_map_adds_up_to_all_attention(model: HeatModel) -> None:
    found = heat.measure(model, words(200), chunk_tokens=64, window=8)
    assert found.mass.shape == (2, models.SIZES["num_key_value_heads"], 4)
    np.testing.assert_allclose(found.mass.sum(axis=2), 1.0, rtol=1e-4)
    assert found.title == "What the last 8 of 200 tokens attend to"
    assert found.spans == ["0-63", "64-127", "128-191", "192-199"]
    assert found.texts[3].split() == words(200).split()[192:]


def test_the_command_prints_a_row_for_each_chunk(llama, prompt, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert cli.main(["heat", str(prompt), "--model", str(llama)]) == 0
    text = capsys.readouterr().out
    for tokens in ("0-63", "64-127", "128-191", "192-199"):
        assert tokens in text
    assert "layer" in text


def test_in_80_columns_no_column_is_lost(llama, prompt, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(["heat", str(prompt), "--model", str(llama)]) == 0
    text = capsys.readouterr().out
    _, titles, _, first, *_ = text.splitlines()
    assert titles.split() == ["chunk", "tokens", "attention", "most", "in", "begins", "with"]
    assert first.split()[:2] == ["0", "0-63"]
    assert len(titles) <= 80


def test_a_prompt_that_is_no_text_is_refused(llama, tmp_path, capsys) -> None:
    (tmp_path / "prompt").write_bytes(b"w1 w2 \xe2")
    assert cli.main(["heat", str(tmp_path / "prompt"), "--model", str(llama)]) == 2
    assert "is no text in UTF-8" in capsys.readouterr().err


def test_the_command_prints_json_of_standard_input(llama, prompt, capsys, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(prompt.read_text()))
    assert cli.main(["heat", "-", "--model", str(llama), "--json", "--window", "4"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["title"] == "What the last 4 of 200 tokens attend to"
    assert np.array(found["attention"]).shape == (2, 4, 4)


def test_the_plot_is_a_png(llama, prompt, tmp_path, capsys) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "heat.png"
    assert cli.main(["heat", str(prompt), "--model", str(llama), "--png", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert str(path) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "text", "problem"),
    [
        (["--window", "0"], "w1 w2", "--window is 0: it must be 1 or more."),
        (["--chunk-tokens", "-1"], "w1 w2", "--chunk-tokens is -1: it must be 1 or more."),
        ([], "w1 w2", "The prompt has 2 tokens, which is one chunk of 64"),
        (["--model", "nowhere"], "w1 w2", "nowhere holds no model that can be loaded: there is no"),
        (["--model", str(ROOT)], "w1 w2", f"{ROOT} holds no model that can be loaded"),
    ],
)
def test_what_cannot_be_shown_says_why(options, text, problem, llama, tmp_path, capsys) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text(text)
    given = options if "--model" in options else [*options, "--model", str(llama)]
    assert cli.main(["heat", str(prompt), *given]) == 2
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize(
    ("png", "problem"),
    [
        ("nope/x.png", "--png nope/x.png: there is no folder nope."),
        ("x.gif", "--png x.gif: name a file that ends in .png."),
        ("/proc/x.png", "--png /proc/x.png: it can't be written: No such file or directory."),
        ("folder.PNG", "--png folder.PNG: that is a folder; name a file."),
        ("linked.png", "--png linked.png: that file is to be read, and would be written over."),
    ],
)
def test_a_plot_that_cannot_be_written_is_refused_before_the_work(
    png, problem, prompt, tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.PNG").mkdir()
    (tmp_path / "linked.png").symlink_to(prompt)
    before = prompt.read_text()
    # Without a model: what needs one is not reached.
    words = ["heat", str(prompt), "--model", "nowhere", "--png", png]
    assert cli.main(words) == 2
    told = capsys.readouterr().err
    assert problem in told
    assert "nowhere" not in told
    assert prompt.read_text() == before


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (["nope.txt"], "nope.txt can't be read: No such file or directory. Give a text file with"),
        (["."], ". can't be read: Is a directory. Give a text file with a prompt, or - for"),
        (["--log", "nope"], "nope can't be read: No such file or directory. Name the file that"),
    ],
)
def test_what_cannot_be_read_is_named_with_what_to_give(given, problem, capsys) -> None:
    assert cli.main(["heat", *given]) == 2
    assert capsys.readouterr().err.startswith(f"kvtiers: {problem}")


def test_without_matplotlib_the_plot_names_the_extra(prompt, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    # Without a model: what needs one is not reached.
    assert cli.main(["heat", str(prompt), "--png", "x.png", "--model", "nowhere"]) == 2
    assert "pip install 'kvtiers[simulate]'" in capsys.readouterr().err


# What a live engine measured ----------------------------------------------------


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Two prompts that share two chunks, of a model with three layers."""
    path = tmp_path / "heat.jsonl"
    writer = HeatLog(path)
    for name, layer, value in (("a", 0, 0.2), ("b", 2, 0.4)):
        run = Run((b"sink", b"head", name.encode()))
        # With the chunk that is not whole.
        writer.note(run, {layer: np.full((2, 4), value, np.float32)})
    writer.close(timeout=10)
    return path


def test_a_log_gives_back_what_was_measured_and_no_keys(log: Path) -> None:
    (first, _), (second, layers) = read(log)
    assert first.chunks[:2] == second.chunks[:2]
    assert first.chunks[2] != second.chunks[2]
    assert b"head".hex() not in log.read_text()
    np.testing.assert_allclose(layers[2], np.full((2, 3), 0.4))
    assert log.stat().st_mode & 0o777 == 0o600


def test_names_of_chunks_differ_from_engine_to_engine(log: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    writer = HeatLog(other)
    writer.note(Run((b"sink", b"head")), {0: np.ones((1, 2), np.float32)})
    writer.close(timeout=10)
    ((run, _),) = read(other)
    assert run.chunks[0] not in log.read_text()


def test_the_command_shows_the_last_prompt_with_averages_of_all(log: Path, capsys) -> None:
    assert cli.main(["heat", "--log", str(log), "--json"]) == 0
    found = np.array(json.loads(capsys.readouterr().out)["attention"])
    assert found.shape == (3, 2, 3)
    np.testing.assert_allclose(found[:, 0, 1], [0.2, 0.0, 0.4], atol=1e-6)
    np.testing.assert_allclose(found[:, 0, 2], [0.0, 0.0, 0.4], atol=1e-6)
    assert cli.main(["heat", "--log", str(log), "--last", "2"]) == 0
    assert "prompt 1" in capsys.readouterr().out


def test_a_line_that_is_being_written_is_left_out(log: Path) -> None:
    whole = len(list(read(log)))
    log.write_text(log.read_text() + '{"chunks": ["x"')
    assert len(list(read(log))) == whole


def test_a_log_has_a_bound(log: Path, monkeypatch) -> None:
    monkeypatch.setattr("kvtiers.connector.heat_log._MOST_BYTES", 10)
    writer = HeatLog(log)
    writer.note(Run((b"c",)), {0: np.ones((1, 1), np.float32)})
    writer.close(timeout=10)
    assert len(list(read(log))) == 1
    assert len(list(read(log.with_name("heat.jsonl.1")))) == 2


def test_a_log_that_cannot_be_written_is_told_once_and_delays_nobody(tmp_path, caplog) -> None:
    writer = HeatLog(tmp_path / "missing" / "heat.jsonl")
    for _ in range(2):
        writer.note(Run((b"c",)), {0: np.ones((1, 1), np.float32)})
    writer.close(timeout=10)
    assert len([record for record in caplog.records if "heat is not logged" in record.message]) == 1


LINE = b'{"chunks": ["a"], "layers": {"0": [[0.5]]}}'
"""A whole one, but for its end."""


@pytest.mark.parametrize(
    ("options", "content", "problem"),
    [
        ([], b"no log\n", ", line 1 is no line of a heat log"),
        ([], LINE + b"\n[]\n", ", line 2 is no line of a heat log"),
        ([], LINE.replace(b"]]", b", 2]]") + b"\n", "its tables do not fit its chunks"),
        ([], LINE.replace(b"[[0.5]]", b"[]") + b"\n", "its tables do not fit its chunks"),
        ([], LINE.replace(b"[[0.5]]", b'[[0.5]], "1": [[1], [1]]') + b"\n", "do not fit its"),
        ([], LINE.replace(b"0.5", b"9" * 400) + b"\n", ", line 1 is no line of a heat log"),
        ([], LINE.replace(b"0.5", b"NaN") + b"\n", "its figures are no attention"),
        ([], b'{"chunks": [], "layers": {"0": [[]]}}\n', "its figures are no attention"),
        ([], b'{"chunks": ["a"], "layers": {}}\n', "it has no layers of a model"),
        ([], LINE.replace(b'"0"', b'"9999999"') + b"\n", "it has no layers of a model"),
        ([], LINE.replace(b'"0"', b'"-1"') + b"\n", "it has no layers of a model"),
        ([], b"[" * 100_000 + b"\n", ", line 1 is no line of a heat log"),
        ([], b"\x89PNG\r\n\x1a\n", ", line 1 is no line of a heat log"),
        ([], b"\xff\xd8\xff\xe0", ", line 1 is no line of a heat log"),
        ([], bytes(100), ", line 1 is no line of a heat log"),
        ([], b"", "none was measured yet"),
        ([], LINE, "none was measured yet"),
        (["--last", "3"], LINE + b"\n", "has 1 prompts, and --last is 3"),
    ],
)
def test_what_is_no_log_says_so(options, content, problem, tmp_path, capsys) -> None:
    path = tmp_path / "heat.jsonl"
    path.write_bytes(content)
    assert cli.main(["heat", "--log", str(path), *options]) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"kvtiers: {path}")
    assert problem in told


# The figure ---------------------------------------------------------------------


def test_a_fifth_of_the_chunks_is_chosen_by_score_and_weighed_by_mass() -> None:
    future = np.zeros((1, 2, 10))
    future[0, 0, :4] = 3.0, 1.0, 1.0, 1.0
    future[0, 1, 5:7] = 2.0, 2.0
    perfect = figure.held(future, future)
    assert perfect == pytest.approx((3 + 1 + 2 + 2) / 10)
    assert figure.held(future, np.arange(10.0)[None, None]) == 0.0
    shared = future.sum(axis=1, keepdims=True)
    assert figure.held(future, shared) == pytest.approx((3 + 2) / 10)


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    rows = [
        {
            "source": f"made {seed}",
            "prefix": words(150, seed),
            "continuation": " " + words(30, seed + 9),
            "prefix_tokens": 150,
        }
        for seed in (1, 2)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_the_figure_is_computed_from_pairs_of_prompts(model: HeatModel, pairs: Path) -> None:
    options = SimpleNamespace(window=8, chunk_tokens=16, all_queries=True)
    measured = [figure.measure(model, pair, options) for pair in figure.read_pairs(pairs)]
    assert np.stack(measured[0].future).shape == (2, 4, 150 // 16 - 1)
    found = figure.shares(measured)
    best = found.pop(figure.PERFECT)
    for values in found.values():
        assert len(values) == 2
        assert all(0 < value <= most <= 1 for value, most in zip(values, best, strict=True))


def test_the_table_has_each_prompt_and_their_mean(llama, pairs, tmp_path, capsys) -> None:
    written = tmp_path / "figure.json"
    options = ["--prompts", str(pairs), "--model", str(llama), "--json", str(written)]
    assert figure.main([*options, "--window", "8", "--chunk-tokens", "16"]) in (0, 1)
    found = json.loads(written.read_text())
    assert found["prompts"] == ["made 1", "made 2"]
    for name, values in found["shares"].items():
        assert found["means"][name] == pytest.approx(sum(values) / 2)
    assert "#2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("cpu", "wall", "measured", "code"),
    [
        ([0.02, 0.0], 0.0, True, 0),
        ([0.03, 0.0], 0.0, True, 1),
        ([0.0, 0.0], 0.06, True, 1),
        ([0.0, 0.0], 0.0, False, 1),
    ],
)
def test_the_cost_is_what_of_all_time_was_inside_the_probe(
    cpu, wall, measured, code, monkeypatch, tmp_path, capsys
) -> None:
    account = HeatCost(0.1, 5.0, 0.015, 1.0)
    pairs = [
        heat_cost.Pair(5.0, 5.0, 1.0, 1.0, wall, seconds, account, measured=measured)
        for seconds in cpu
    ]
    monkeypatch.setattr(heat_cost, "_measure", lambda *_: iter(pairs))
    assert heat_cost.main(["--model", str(tmp_path)]) == code
    told = capsys.readouterr().out
    assert f"{sum(cpu) / 2:.2%} of the prefill's CPU time, {wall / 5:.2%} of wall time" in told
    assert "in the budget's account: 1.50% of CPU time, 2.00% of wall time" in told


def test_a_damaged_pair_is_named_by_its_line(pairs: Path) -> None:
    file = pairs / "pairs.jsonl"
    file.write_text(file.read_text() + '{"source": "x"}\n')
    with pytest.raises(ValueError, match=r"pairs.jsonl, line 3 is no pair of prompts"):
        list(figure.read_pairs(pairs))


def test_the_policies_are_compared_over_the_same_sessions(monkeypatch) -> None:
    for name, value in {"SESSIONS": 12, "SEEDS": 2, "SHARED_CHUNKS": 2}.items():
        monkeypatch.setattr(heat_policy, name, value)
    turns = [[0.1] * (6 * n) for n in range(1, 5)]
    rows = heat_policy.compare([turns])
    lru = [row for row in rows if row.policy == heat_policy.LRU]
    assert [row.capacity_share for row in lru] == list(heat_policy.CAPACITIES)
    assert lru[0].hit_ratio < lru[-1].hit_ratio < 1
    assert all(row.over_lru == 0 for row in rows), "all heat is the same, so all are LRU"


def test_the_policies_compared_hear_the_heat_of_each_turn_and_one_hears_it_shuffled(
    monkeypatch,
) -> None:
    for name, value in {"SESSIONS": 20, "SEEDS": 2, "CAPACITIES": (0.2,)}.items():
        monkeypatch.setattr(heat_policy, name, value)
    turns = [[0.9 if i % 5 == n % 5 else 0.1 for i in range(6 * n)] for n in range(1, 9)]
    gains = [row.over_lru for row in heat_policy.compare([turns])]
    assert len(set(gains)) == 3, "lru, with heat, and with the same heat elsewhere"
