"""``kvtiers simulate``: what people write, and what they get."""

import json
import multiprocessing
import os
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from kvtiers.policies import POLICIES, Policy, Registry
from kvtiers.policies.lru import LruPolicy
from kvtiers.simulator import choices, grid
from kvtiers.simulator.choices import Capacity, policies, score_from
from kvtiers.simulator.errors import SimulatorError
from kvtiers.simulator.formats import read_trace
from kvtiers.simulator.task import Task
from kvtiers.tools import cli, outputs
from record_kit import wait_until

pa = pytest.importorskip("pyarrow", reason="traces are Parquet")
parquet = pytest.importorskip("pyarrow.parquet")

# Chunks of 512 tokens. Two conversations of three turns, in turns, and a tail of 100 tokens.
ROWS = [
    {"run_start": [0], "run_len": [3]},
    {"run_start": [10], "run_len": [3]},
    {"run_start": [0, 20], "run_len": [3, 2]},
    {"run_start": [10, 30], "run_len": [3, 2]},
    {"run_start": [0, 20, 40], "run_len": [3, 2, 1]},
    {"run_start": [10, 30, 50], "run_len": [3, 2, 1]},
]


def write_trace(path: Path, rows: list[dict] = ROWS, first: int = 0) -> Path:
    full = [
        {
            "t_s": float(first + i),
            "input_len": 512 * sum(row["run_len"]) + 100,
            "output_len": 5,
            **row,
        }
        for i, row in enumerate(rows)
    ]
    table = pa.Table.from_pylist(full).replace_schema_metadata({"block_tokens": "512"})
    parquet.write_table(table, path)
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write_trace(tmp_path / "talk.parquet")


def simulate(*words: object) -> int:
    return cli.main(["simulate", *map(str, words), "--jobs", "1"])


def rows_of(tmp_path: Path, *words: object) -> list[dict]:
    out = tmp_path / "out.json"
    assert simulate(*words, "--json", out) == 0
    return json.loads(out.read_text())


# Results ---------------------------------------------------------------------------


def test_each_policy_stands_beside_lru_and_the_optimum(tmp_path: Path, trace: Path) -> None:
    rows = rows_of(tmp_path, trace, "--policies", "lru,arc,min", "--capacity", 6)
    assert [row["policy"] for row in rows] == ["lru", "arc", "min"]
    lru, _, best = rows
    # Six chunks hold three of each conversation, for each of its two further turns.
    assert best["hit_tokens"] == 512 * 12
    assert best["input_tokens"] == 512 * 28 + 600
    assert lru["token_hit_ratio"] == lru["hit_tokens"] / lru["input_tokens"]
    assert (lru["gap_closed"], best["gap_closed"]) == (0, 1)
    assert {"trace", "capacity_chunks", "capacity_share", "seconds"} <= set(lru)
    assert (lru["trace"], lru["capacity_chunks"], lru["capacity_share"]) == ("talk", 6, 0.5)


def test_a_policy_is_compared_with_lru_and_the_optimum_though_neither_is_asked_for(
    tmp_path: Path, trace: Path
) -> None:
    (row,) = rows_of(tmp_path, trace, "--policies", "arc", "--capacity", 6)
    *_, among = rows_of(tmp_path, trace, "--policies", "lru,min,arc", "--capacity", 6)
    assert row["gap_closed"] is not None
    assert row["gap_closed"] == among["gap_closed"]


def test_where_nothing_can_be_won_no_gap_is_closed(tmp_path: Path, trace: Path) -> None:
    (row,) = rows_of(tmp_path, trace, "--policies", "arc", "--capacity", "100%")
    assert row["gap_closed"] is None
    assert row["hit_tokens"] == 512 * 16


def test_all_policies_and_the_optimum_run_by_default(tmp_path: Path, trace: Path) -> None:
    rows = rows_of(tmp_path, trace, "--capacity", 6)
    assert [row["policy"] for row in rows] == [*POLICIES.names(), "min"]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a package of somebody else on the path that claims to have policies."""
    info = tmp_path / "theirs-1.dist-info"

    def install(points: str) -> None:
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[{POLICIES.group}]\n{points}\n")
        monkeypatch.syspath_prepend(tmp_path)
        # Read anew, and what is read now is forgotten afterwards.
        monkeypatch.setattr(choices, "POLICIES", Registry(POLICIES.group, POLICIES.kind, Policy))

    return install


def test_a_policy_that_cant_be_loaded_is_left_out_with_a_warning(
    tmp_path: Path, trace: Path, install: Callable[[str], None], capsys
) -> None:
    install("broken = json:NoSuchPolicy")
    rows = rows_of(tmp_path, trace, "--capacity", 6)
    assert [row["policy"] for row in rows] == [*POLICIES.names(), "min"]
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith("kvtiers: The policy 'broken' from json:NoSuchPolicy (theirs) cannot be")
    assert "NoSuchPolicy'. It is left out." in told


def test_a_policy_that_cant_be_loaded_is_refused_if_it_is_named(
    trace: Path, install: Callable[[str], None], capsys
) -> None:
    install("broken = json:NoSuchPolicy")
    assert simulate(trace, "--policies", "lru,broken") == 2
    assert "The policy 'broken' from json:NoSuchPolicy (theirs)" in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["--policies", "lru"]])
def test_a_name_that_two_packages_claim_is_told(
    trace: Path, install: Callable[[str], None], capsys, words: list[str]
) -> None:
    install("lru = json:NoSuchPolicy")
    assert simulate(trace, *words) == 2
    assert "Two packages offer a policy named 'lru'" in capsys.readouterr().err


FAILING = """
import sys
from kvtiers.policies.lru import LruPolicy

class OddError(Exception):
    def __init__(self, reason, more):  # so it is lost on its way from process to process
        super().__init__(reason)

    def __str__(self):
        raise RuntimeError

class Victims(LruPolicy):
    def victims(self, tier, nbytes):
        raise ValueError("nobody\\n  goes\x1b[0m")

class Odd(LruPolicy):
    def on_insert(self, run, tier):
        raise OddError("a", "b")

class Exits(LruPolicy):
    def on_request(self, request):
        sys.exit(3)

class Interrupts(LruPolicy):
    def on_finish(self, request):
        raise KeyboardInterrupt

class Setup(LruPolicy):
    def setup(self):
        raise KeyError("facts")

class Names(LruPolicy):
    def victims(self, tier, nbytes):
        return 7

class Options(LruPolicy):
    class Config(LruPolicy.Config):
        def model_post_init(self, context):
            raise RuntimeError("no licence")
"""
STACK = """
chunk_bytes: 1MiB
prefill: 1000
tiers: [{name: cpu, capacity: 6}, {name: ssd, capacity: 4}]
"""


@pytest.fixture
def failing(
    tmp_path: Path, install: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> Path:
    """The file of a package whose policies raise something, each in its own way."""
    file = tmp_path / "theirs_that_fail.py"
    file.write_text(FAILING)
    # The one of another test, which lies elsewhere.
    monkeypatch.delitem(sys.modules, file.stem, raising=False)
    names = re.findall(r"class (\w+)\(LruPolicy\)", FAILING)
    install("\n".join(f"{name.lower()} = theirs_that_fail:{name}" for name in names))
    return file


@pytest.mark.parametrize("jobs", [1, 4])
@pytest.mark.parametrize("tiers", [False, True])
def test_a_policy_that_raises_ends_nothing_but_its_own_replays(
    tmp_path: Path, trace: Path, failing: Path, jobs: int, tiers: bool, capsys
) -> None:
    (tmp_path / "stack.yaml").write_text(STACK)
    more = ("--tiers", tmp_path / "stack.yaml") if tiers else ()
    words = [trace, "--capacity", "2,3", *more]
    expected = rows_of(tmp_path, *words, "--policies", "lru,arc,min")
    capsys.readouterr()
    out = tmp_path / "some.json"
    words += ["--policies", "victims,lru,arc,min", "--jobs", jobs, "--json", out]
    assert cli.main(["simulate", *map(str, words)]) == 1
    found = json.loads(out.read_text())
    for row in (*found, *expected):
        del row["seconds"]
    assert found == expected
    shown = capsys.readouterr()
    assert shown.out.count(" arc ") == 4 if tiers else 2
    assert "victims" not in shown.out
    line = 1 + FAILING[: FAILING.index("raise ValueError")].count("\n")
    assert shown.err == (
        "kvtiers: policy 'victims' failed on talk with a capacity of 2 and of 3 chunks: "
        f"ValueError: nobody goes\\x1b[0m ({failing}:{line}, in Victims.victims). "
        "It has no results there.\n"
    )


@pytest.mark.parametrize(
    ("policy", "what", "where"),
    [
        ("odd", "theirs_that_fail.OddError: <exception str() failed>", ", in Odd.on_insert"),
        ("exits", "SystemExit: 3", ", in Exits.on_request"),
        ("interrupts", "KeyboardInterrupt", ", in Interrupts.on_finish"),
        ("setup", "KeyError: 'facts'", ", in Setup.setup"),
        # It raises nothing, and the one who asked it does.
        ("names", "TypeError: 'int' object is not iterable", "replay.py:"),
    ],
)
def test_whatever_a_policy_raises_is_told(
    trace: Path, failing: Path, policy: str, what: str, where: str, capsys
) -> None:
    words = ("--policies", f"lru,{policy}", "--capacity", 2, "--json")
    assert simulate(trace, *words) == 1
    shown = capsys.readouterr()
    assert [row["policy"] for row in json.loads(shown.out)] == ["lru"]
    assert f"policy '{policy}' failed on talk with a capacity of 2 chunks: {what} (" in shown.err
    assert where in shown.err
    assert policy == "names" or str(failing) in shown.err


def test_by_default_the_policies_of_others_cost_nobody_else_a_result(
    trace: Path, failing: Path, capsys
) -> None:
    assert simulate(trace, "--capacity", 2, "--json") == 1
    shown = capsys.readouterr()
    assert [row["policy"] for row in json.loads(shown.out)] == [*POLICIES.names(), "min"]
    assert "'options': options can't be had: RuntimeError: no licence. It is left" in shown.err
    assert shown.err.count(" failed on talk ") == 6


def test_where_every_policy_fails_no_figure_is_made_up(
    tmp_path: Path, trace: Path, failing: Path, capsys
) -> None:
    pytest.importorskip("matplotlib")
    table, picture = tmp_path / "out.parquet", tmp_path / "out.png"
    words = ("--policies", "setup", "--json", "--parquet", table, "--plot", picture)
    assert simulate(trace, *words, "--capacity", "2,6") == 1
    shown = capsys.readouterr()
    assert json.loads(shown.out) == []
    assert parquet.read_table(table).num_rows == 0
    assert not picture.exists()
    assert "Traceback" not in shown.err


def test_without_a_replay_of_lru_no_gap_is_known(
    tmp_path: Path, trace: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    def victims(*_: object) -> None:
        raise ValueError("broken for once")

    monkeypatch.setattr(LruPolicy, "victims", victims)
    assert simulate(trace, "--policies", "arc,min", "--capacity", 2, "--json") == 1
    shown = capsys.readouterr()
    rows = json.loads(shown.out)
    assert [(row["policy"], row["gap_closed"]) for row in rows] == [("arc", None), ("min", None)]
    assert rows[1]["hit_tokens"] > 0
    assert "policy 'lru' failed on talk" in shown.err


def install_one_that_waits(tmp_path: Path, install: Callable[[str], None]) -> Path:
    """The policy ``waits``, and the file in which it writes its process when it begins to."""
    begun = tmp_path / "begun"
    module = f"theirs_of_{tmp_path.name}"  # imported once in a process
    (tmp_path / f"{module}.py").write_text(
        "import os, pathlib, time\n"
        "from kvtiers.policies.lru import LruPolicy\n"
        "class Waits(LruPolicy):\n"
        "    def on_request(self, request):\n"
        f"        written = pathlib.Path({str(tmp_path / 'written')!r})\n"
        "        written.write_text(str(os.getpid()))\n"
        f"        written.rename({str(begun)!r})\n"
        "        time.sleep(900)\n"
    )
    install(f"waits = {module}:Waits")
    return begun


def test_an_interrupt_ends_the_processes_too(
    tmp_path: Path, trace: Path, install: Callable[[str], None]
) -> None:
    """Also one that a shell sends to the command alone, and not to its processes."""
    begun = install_one_that_waits(tmp_path, install)

    def interrupt(_share: float) -> None:
        if begun.exists():
            raise KeyboardInterrupt

    before = set(multiprocessing.active_children())
    task = Task(read_trace(trace), [(2, 0.2)], 12)
    with pytest.raises(KeyboardInterrupt):
        grid.run([task], policies("waits,lru"), 2, interrupt)
    for process in set(multiprocessing.active_children()) - before:
        process.join(60)
        assert not process.is_alive()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends them with their parent")
def test_processes_end_with_a_command_that_is_killed(
    tmp_path: Path, trace: Path, install: Callable[[str], None]
) -> None:
    begun = install_one_that_waits(tmp_path, install)
    task = Task(read_trace(trace), [(2, 0.2)], 12)
    command = multiprocessing.get_context("fork").Process(
        target=grid.run, args=([task], policies("waits"), 1)
    )
    command.start()
    try:
        wait_until(begun.exists)
    finally:
        command.kill()
    state = Path("/proc", begun.read_text(), "stat")
    # Z: it has ended, and nobody has asked how yet.
    wait_until(lambda: not state.exists() or ") Z " in state.read_text())


def test_nothing_of_the_processes_is_left_when_a_run_returns(trace: Path) -> None:
    """What is left may fail as Python exits, and say so below the results."""
    threads, processes = set(threading.enumerate()), set(multiprocessing.active_children())
    grid.run([Task(read_trace(trace), [(2, 0.2)], 12)], policies("lru"), 2)
    assert set(threading.enumerate()) <= threads
    assert set(multiprocessing.active_children()) <= processes


def test_what_a_policy_prints_is_not_of_the_results(
    tmp_path: Path, trace: Path, install: Callable[[str], None], capfd
) -> None:
    (tmp_path / "theirs_that_print.py").write_text(
        "from kvtiers.policies.lru import LruPolicy\n"
        "class Prints(LruPolicy):\n"
        "    def on_request(self, request):\n"
        "        print('asked for', len(request.runs[0]), flush=True)\n"
    )
    install("prints = theirs_that_print:Prints")
    assert simulate(trace, "--policies", "prints", "--capacity", 2, "--json") == 0
    shown = capfd.readouterr()
    assert [row["policy"] for row in json.loads(shown.out)] == ["prints"]
    assert shown.err.count("asked for ") == len(ROWS)


def test_capacities_can_be_repeated_listed_and_mixed(tmp_path: Path, trace: Path) -> None:
    words = ("--capacity", "2,50%", "--capacity", "1MiB", "--chunk-bytes", "256KiB")
    rows = rows_of(tmp_path, trace, "--policies", "lru", *words)
    assert [row["capacity_chunks"] for row in rows] == [2, 6, 4]
    assert [row["capacity_bytes"] for row in rows] == [2 << 18, 6 << 18, 4 << 18]
    assert rows[0]["written_bytes"] == rows[0]["written_chunks"] << 18


def test_several_traces_are_replayed_one_by_one(tmp_path: Path, trace: Path) -> None:
    other = write_trace(tmp_path / "other.parquet", ROWS[:2])
    rows = rows_of(tmp_path, trace, other, "--policies", "lru", "--capacity", 9)
    assert [(row["trace"], row["requests"]) for row in rows] == [("talk", 6), ("other", 2)]


def test_traces_of_one_name_in_two_folders_are_told_apart(
    tmp_path: Path, trace: Path, capsys
) -> None:
    (tmp_path / "other").mkdir()
    other = write_trace(tmp_path / "other" / trace.name, ROWS[:2])
    rows = rows_of(tmp_path, trace, other, trace, "--policies", "lru", "--capacity", 9)
    named = [(row["trace"], row["requests"]) for row in rows]
    assert named == [(str(trace), 6), (str(other), 2)]
    assert capsys.readouterr().out.count(" requests, chunks of 512 tokens") == 2


def test_the_folder_at_hand_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [0, 1]}
    (tmp_path / "some.jsonl").write_text(json.dumps(row) + "\n")
    monkeypatch.chdir(tmp_path)
    assert read_trace(".").name == tmp_path.name


def test_parts_of_one_trace_are_one_stream(tmp_path: Path, trace: Path) -> None:
    head = write_trace(tmp_path / "head.parquet", ROWS[:4])
    tail = write_trace(tmp_path / "tail.parquet", ROWS[4:], first=4)
    words = ("--policies", "lru,min", "--capacity", "50%", "--score-from", 4)
    parts = rows_of(tmp_path, head, tail, "--concat", *words)
    whole = rows_of(tmp_path, trace, *words)
    for row in (*parts, *whole):
        del row["trace"], row["seconds"]
    assert parts == whole
    assert parts[0]["requests"] == 2


def test_two_recordings_are_no_stream_and_parts_of_one_are(tmp_path: Path, capsys) -> None:
    def record(name: str, recording: str, first: int) -> Path:
        row = {"req": first, "t_s": float(first), "input_len": 600, "output_len": 1}
        table = pa.Table.from_pylist([row | {"run_start": [0], "run_len": [1]}])
        kind = {"kvtiers_trace": "1", "chunk_tokens": "512", "recording": recording}
        parquet.write_table(table.replace_schema_metadata(kind), tmp_path / name)
        return tmp_path / name

    monday, more = record("monday.parquet", "a", 0), record("more.parquet", "a", 1)
    tuesday = record("tuesday.parquet", "b", 0)
    words = ("--concat", "--policies", "lru", "--capacity", 1)
    assert simulate(monday, more, *words) == 0
    assert simulate(monday, tuesday, *words) == 2
    assert "are not of one recording" in capsys.readouterr().err


def test_shares_can_be_taken_of_the_whole_that_a_trace_is_part_of(
    tmp_path: Path, trace: Path
) -> None:
    (row,) = rows_of(tmp_path, trace, "--policies", "lru", "--capacity", "0.1", "--footprint", 60)
    assert (row["capacity_chunks"], row["capacity_share"]) == (6, 0.1)


def test_the_table_shows_each_capacity_and_policy(trace: Path, capsys) -> None:
    assert simulate(trace, "--policies", "lru,min", "--capacity", "6") == 0
    shown = capsys.readouterr().out
    assert "talk: 6 requests, chunks of 512 tokens" in shown
    assert [word for word in ("6 (50 %)", "lru", "min", "100.0 %") if word not in shown] == []


def test_what_was_saved_is_not_rounded_away_and_fits_a_terminal(
    trace: Path, capsys, monkeypatch
) -> None:
    monkeypatch.setattr("kvtiers.tools.simulate._WIDTH", 80)
    words = ("--policies", "attention-heat,prefix-reuse", "--capacity", "12")
    assert simulate(trace, *words, "--chunk-bytes", "2MiB") == 0
    shown = capsys.readouterr().out
    assert ("…" in shown, shown.count(" 8,192 "), shown.count(" 24.0 MiB ")) == (False, 2, 2)


def test_no_figure_is_cut_off_in_a_narrow_terminal(
    trace: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("FORCE_COLOR", "1")  # that makes it a terminal
    assert simulate(trace, "--policies", "prefix-reuse", "--capacity", "12") == 0
    shown = capsys.readouterr().out
    assert ("…" in shown, "prefix-reuse" in shown, "8,192" in shown) == (False, True, True)


def test_more_room_than_a_trace_can_fill_is_shown_as_a_number(trace: Path, capsys) -> None:
    assert simulate(trace, "--policies", "lru", "--capacity", "1200") == 0
    assert "1,200 (10,000 %)" in capsys.readouterr().out


def test_json_goes_to_the_output_alone(trace: Path, capsys) -> None:
    assert simulate(trace, "--policies", "lru", "--capacity", "6", "--json", "-") == 0
    assert json.loads(capsys.readouterr().out)[0]["policy"] == "lru"


def test_an_output_that_is_closed_gets_no_json(
    trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert simulate(trace, "--policies", "lru", "--capacity", "6", "--json", "-") == 0


def test_results_can_be_read_as_parquet_and_seen_as_curves(tmp_path: Path, trace: Path) -> None:
    pytest.importorskip("matplotlib")
    table, picture = tmp_path / "out.parquet", tmp_path / "out.PNG"
    words = ("--policies", "lru,min", "--capacity", "2,6", "--parquet", table, "--plot", picture)
    rows = rows_of(tmp_path, trace, *words)
    assert parquet.read_table(table).to_pylist() == rows
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("capacities", "told"), [("2", 1), ("2,6", 0)])
def test_a_plot_of_one_capacity_is_told_what_gives_curves(
    tmp_path: Path, trace: Path, capsys, capacities: str, told: int
) -> None:
    pytest.importorskip("matplotlib")
    words = ("--policies", "lru", "--capacity", capacities, "--plot", tmp_path / "out.png")
    assert simulate(trace, *words) == 0
    assert capsys.readouterr().err.count("for curves, give several with --capacity") == told


def test_processes_change_nothing(tmp_path: Path, trace: Path) -> None:
    out = tmp_path / "two.json"
    words = ["simulate", str(trace), "--policies", "lru,arc,min", "--capacity", "2,6"]
    assert cli.main([*words, "--jobs", "2", "--json", str(out)]) == 0
    one, two = rows_of(tmp_path, *words[1:]), json.loads(out.read_text())
    for row in (*one, *two):
        del row["seconds"]
    assert one == two


# What people write ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "chunks"),
    [
        ("5000", 5000),
        ("5_000", 5000),
        ("0.02", 20),
        (".02", 20),
        ("2%", 20),
        ("100%", 1000),
        ("1.0", 1000),
        ("1", 1),
        ("0.0001", 1),
        ("2GiB", 2048),
        ("1 GB", 953),
    ],
)
def test_a_capacity_is_chunks_bytes_or_a_share(text: str, chunks: int) -> None:
    assert Capacity.parse(text).resolve(1000, 1 << 20)[0] == chunks


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "1.5", "0%", "200%", "many", "2 chunks", "9" * 5000]
)
def test_other_capacities_are_refused_with_examples(text: str) -> None:
    with pytest.raises(SimulatorError, match=r"capacity '.*': write chunks \(5000\)"):
        Capacity.parse(text)


@pytest.mark.parametrize(
    ("text", "row"), [("0", 0), ("99", 99), ("0.5", 50), ("66%", 66), ("0.0", 0)]
)
def test_the_score_begins_at_a_row_or_a_share(text: str, row: int) -> None:
    assert score_from(text, 100) == row


@pytest.mark.parametrize("text", ["100", "-1", "1.0", "100%", "half", "9" * 5000])
def test_a_score_that_counts_nothing_is_refused(text: str) -> None:
    with pytest.raises(SimulatorError, match="how many requests warm up, fewer than the 100"):
        score_from(text, 100)


def test_a_policy_is_named_once_and_its_options_are_read() -> None:
    named = policies("lru, attention-heat:hot=0.5 ,lru,belady")
    assert [choice.label for choice in named] == ["lru", "attention-heat:hot=0.5", "min"]


def test_a_policy_may_be_written_as_people_do() -> None:
    named = policies("LRU ,W_TinyLFU, S3-FIFO,Attention_Heat:hot=0.5, lru, MIN ")
    labels = ["lru", "w-tinylfu", "s3fifo", "attention-heat:hot=0.5", "min"]
    assert [choice.label for choice in named] == labels
    assert [choice.name for choice in named] == [label.partition(":")[0] for label in labels]


def test_names_that_differ_in_case_alone_are_told_apart(install: Callable[[str], None]) -> None:
    install("Sieve = kvtiers.policies.lru:LruPolicy")
    assert [choice.name for choice in policies("Sieve,sieve")] == ["Sieve", "sieve"]
    with pytest.raises(SimulatorError, match=r"Unknown policy 'SIEVE'.*Did you mean '[sS]ieve'"):
        policies("SIEVE")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--policies", "lur"], "Did you mean 'lru'?"),
        (["--policies", "LRUU"], "Unknown policy 'LRUU'"),
        (["--policies", "LRUU"], "Did you mean 'lru'?"),
        (["--policies", "mni"], "Did you mean 'min'?"),
        (["--policies", "lru:x=1"], "'x=1' is no option of lru"),
        (["--policies", "attention-heat:hot=[["], "'[[' is no value of an option"),
        (["--policies", "attention-heat:hot=2020-99-99"], "is no value of an option"),
        (["--policies", ","], "no policy is named"),
        (["--policies", "min:x=1"], "min has no options"),
        (["--capacity", "2GiB"], "--chunk-bytes"),
        (["--capacity", ","], "capacity '': write chunks (5000)"),
        (["--capacity", "1KiB", "--chunk-bytes", "1MiB"], "less than one chunk"),
        (["--chunk-bytes", "big"], "write a size, such as 32MiB"),
        (["--chunk-tokens", "100"], "such as 512 or 1024"),
        (["--chunk-tokens", "4096"], "no prompt of talk fills a chunk of 4096 tokens"),
        (["--score-from", "6"], "fewer than the 6 of the trace"),
        (["--footprint", "3"], "has 12 distinct chunks"),
        (["--footprint", "0"], "has 12 distinct chunks"),
        (["--json", "/no/such/folder/x.json"], "there is no folder /no/such/folder"),
        (["--parquet", "/"], "that is a folder"),
        (["--json", ""], "--json has no name of a file"),
        (["--parquet", "/dev/null", "--json", "/dev/null"], "/dev/null: --json is written there"),
        (["--json", "/tmp/x.JSONL"], "/tmp/x.JSONL: JSON would be written there, and the name is"),
        (["--json", "x.parquet"], "or write '--json -' for the output"),
        (["--parquet", "x.json"], "--parquet x.json: name a file that ends in .parquet."),
    ],
)
def test_what_cannot_work_is_told_in_a_paragraph(
    trace: Path, capsys, words: list[str], told: str
) -> None:
    assert simulate(trace, *words) == 2
    assert told in capsys.readouterr().err


def test_a_plot_that_could_not_be_drawn_is_refused_before_the_work(trace: Path, capsys) -> None:
    pytest.importorskip("matplotlib")
    assert simulate(trace, "--policies", "lru", "--plot", "out.xyz") == 2
    shown = capsys.readouterr()
    assert not shown.out
    assert "ends in .png, .svg or .pdf, not 'out.xyz'" in shown.err


def test_zero_jobs_are_refused(trace: Path, capsys) -> None:
    assert cli.main(["simulate", str(trace), "--jobs", "0"]) == 2
    assert "write 1 or more" in capsys.readouterr().err


def test_a_misspelt_option_is_told_the_right_one(trace: Path, capsys) -> None:
    with pytest.raises(SystemExit):
        simulate(trace, "--polices", "lru")
    assert "Did you mean '--policies'?" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["talk.parquet", "", "link"])
@pytest.mark.parametrize(
    ("option", "name"),
    [("--parquet", "talk.parquet"), ("--json", "link"), ("--plot", "hard.png")],
)
def test_a_result_is_not_written_over_a_trace(
    tmp_path: Path, trace: Path, place: str, option: str, name: str, capsys
) -> None:
    """Whether it is a file of its own or one of a folder, and by whatever name."""
    pytest.importorskip("matplotlib")
    (tmp_path / "link").symlink_to(trace)
    (tmp_path / "hard.png").hardlink_to(trace)
    before = trace.read_bytes()
    assert simulate(tmp_path / place, option, tmp_path / name) == 2
    assert f"{option} {tmp_path / name}: that file is to be read" in capsys.readouterr().err
    assert trace.read_bytes() == before


def test_a_result_is_not_written_over_a_part_of_a_recording(tmp_path: Path, capsys) -> None:
    recording = "20260102T030405678Z-0123abcd"
    part = write_trace(tmp_path / f"{recording}-000000.parquet")
    assert simulate(tmp_path / recording, "--parquet", part) == 2
    assert "that file is to be read" in capsys.readouterr().err


def test_a_result_is_not_written_over_the_file_of_tiers(
    tmp_path: Path, trace: Path, capsys
) -> None:
    stack = tmp_path / "stack.yaml"
    stack.write_text("chunk_bytes: 1MiB\nprefill: 1000\ntiers: [{name: cpu, capacity: 6}]\n")
    assert simulate(trace, "--tiers", stack, "--policies", "lru", "--json", stack) == 2
    assert "that file is to be read" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--json", "--parquet", "--plot"])
@pytest.mark.parametrize(
    ("place", "told"),
    [
        # Where not even root makes a file, though by its rights root might.
        ("/proc", "it can't be written: No such file or directory."),
        ("{}/talk.parquet", "there is no folder"),
        ("{}/missing", "there is no folder"),
        ("{}/dangling", "there is no folder"),
        ("{}/" + "long" * 99, "there is no folder"),
    ],
)
def test_a_folder_that_takes_no_file_is_told_before_the_work(
    tmp_path: Path, trace: Path, option: str, place: str, told: str, capsys
) -> None:
    pytest.importorskip("matplotlib")
    # Reading it would be told first, if it were read.
    trace.write_bytes(b"PAR1 and nothing more")
    (tmp_path / "dangling").symlink_to(tmp_path / "missing")
    name = {"--json": "x.json", "--parquet": "x.parquet", "--plot": "x.png"}[option]
    file = f"{place.format(tmp_path)}/{name}"
    assert simulate(trace, option, file) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"kvtiers: {option} {file}: {told}")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_of_somebody_else_is_told_before_the_work(
    tmp_path: Path, trace: Path, capsys
) -> None:
    (tmp_path / "theirs").mkdir(mode=0o500)
    assert simulate(trace, "--json", tmp_path / "theirs" / "x.json") == 2
    assert "it can't be written: Permission denied." in capsys.readouterr().err


def test_looking_at_an_output_changes_nothing(tmp_path: Path) -> None:
    old, new, link = tmp_path / "old", tmp_path / "new", tmp_path / "link"
    old.write_text("mine")
    link.symlink_to(new)
    for path in (old, new, link):
        outputs.check_output("--json", path)
    assert old.read_text() == "mine"
    assert sorted(tmp_path.iterdir()) == [link, old]


def test_a_pipe_is_not_opened_before_there_is_something_to_write(tmp_path: Path) -> None:
    """One with a name would wait for its reader; a shell's ``>(...)`` has none that lies there."""
    os.mkfifo(tmp_path / "pipe")
    outputs.check_output("--json", tmp_path / "pipe")
    reader, writer = os.pipe()
    outputs.check_output("--json", f"/dev/fd/{writer}")
    os.close(writer)
    os.close(reader)


@pytest.mark.parametrize("option", ["--json", "--parquet"])
def test_a_result_that_cant_be_written_leaves_what_is_there(
    tmp_path: Path, trace: Path, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a link, so that the device itself is safe from those who are root."""
    full = tmp_path / "full"
    full.symlink_to("/dev/full")
    words = ["simulate", str(trace), "--policies", "lru", "--capacity", "3", option, str(full)]
    assert cli.main(words) == 1
    assert "No space left on device" in capsys.readouterr().err
    assert full.is_symlink()


def test_results_are_written_where_there_is_no_standard_output(
    tmp_path: Path, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with ``>&-`` in a shell."""
    monkeypatch.setattr("sys.stdout", None)
    found = tmp_path / "found.json"
    words = ["simulate", str(trace), "--policies", "lru", "--capacity", "3", "--json", str(found)]
    assert cli.main(words) == 0
    assert found.exists()
