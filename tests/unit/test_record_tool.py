"""``kvtiers record``: what it runs, writes, shows and refuses."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtiers.simulator.formats import read_trace
from kvtiers.tiers.recording import Recorder
from kvtiers.tools import cli
from kvtiers.tools.recorded import covered, summarise
from record_kit import CHUNK, ENGINE, end, request, serve

pytest.importorskip("pyarrow")


@pytest.fixture
def folder(tmp_path):
    """What an engine has recorded in."""
    recorder = Recorder(tmp_path / "rec", ENGINE, 1 << 30)
    serve(recorder, "abc")
    asked = request("2", "abx", session="s", tenant="t")
    recorder.admitted(asked, 2 * CHUNK, {0: {"cpu": 1}})
    end(recorder, asked, "abxy")
    recorder.close()
    return tmp_path / "rec"


@pytest.fixture
def server(folder):
    """Commands that stand for a server with kvtiers, and do something afterwards.

    Each leaves what an engine has recorded where the variable says.
    """
    script = f"""
        import json, os, shutil, sys, time
        wanted = json.loads(os.environ["KVTIERS_RECORD"])
        shutil.copytree({str(folder)!r}, wanted["path"])
    """
    return lambda then="": [sys.executable, "-c", textwrap.dedent(script) + then]


@pytest.fixture
def output(tmp_path):
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "a.parquet"


# Running a command -------------------------------------------------------------


def test_what_a_command_records_becomes_one_file_and_its_status_is_ours(server, output, capfd):
    command = server("print('hello'); sys.exit(7)")
    assert cli.main(["record", "-o", str(output), "--", *command]) == 7
    assert [asked.prompt_chunks for asked in read_trace(output).requests] == [3, 3]
    assert output.stat().st_mode & 0o777 == 0o600
    shown = capfd.readouterr()
    # What the command prints may be for others to read.
    assert shown.out == "hello\n"
    assert f"kvtiers: {output}: 2 requests" in shown.err
    assert list(output.parent.iterdir()) == [output]


def test_each_engine_of_a_command_gets_a_file_of_its_own(server, folder, output, capfd):
    second = Recorder(folder, ENGINE, 1 << 30)
    serve(second, "ab")
    second.close()
    assert cli.main(["record", "-o", str(output), "--", *server()]) == 0
    written = sorted(output.parent.iterdir())
    assert [path.name for path in written] == ["a-1.parquet", "a-2.parquet"]
    assert [len(read_trace(path).requests) for path in written] == [2, 1]
    assert cli.main(["record", "-o", str(output), "--", *server("print('ran')")]) == 2
    shown = capfd.readouterr()
    assert "a-1.parquet is there already" in shown.err
    assert shown.out == "", "it is told before hours of traffic, not after"


def test_what_a_killed_engine_left_half_written_goes_with_the_parts(server, folder, output):
    (folder / ".x-000000.parquet.tmp").write_bytes(b"PAR1")
    assert cli.main(["record", "-o", str(output), "--", *server()]) == 0
    assert list(output.parent.iterdir()) == [output]


def test_the_command_keeps_its_own_options_and_dashes(server, output, capfd):
    words = ["-o", "x", "--", "--json"]
    command = server("print(sys.argv, wanted['max_bytes'])")
    ours = ["record", "-o", str(output), "--max-bytes", "3MiB", "--"]
    assert cli.main([*ours, *command, *words]) == 0
    assert capfd.readouterr().out == f"{['-c', *words]} {3 << 20}\n"


def test_a_command_without_an_engine_of_ours_is_told(output, capfd):
    assert cli.main(["record", "-o", str(output), "--", sys.executable, "-c", ""]) == 1
    assert "kvtiers: nothing was recorded." in capfd.readouterr().err
    assert list(output.parent.iterdir()) == []


def test_a_server_is_stopped_through_us_and_its_recording_kept(server, output):
    script = "import sys; from kvtiers.tools.cli import main; sys.exit(main(sys.argv[1:]))"
    command = server("print('up', flush=True); time.sleep(60)")
    ours = [sys.executable, "-c", script, "record", "-o", str(output), "--", *command]
    with subprocess.Popen(ours, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 128 + signal.SIGTERM
    assert len(read_trace(output).requests) == 2


# What it shows -------------------------------------------------------------------


def test_a_recording_is_summed_up(folder, capsys):
    assert cli.main(["record", "--from", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert f"  input tokens    {2 * (3 * CHUNK + 7)}\n" in shown
    assert "  policy          lru\n" in shown
    assert f"token hit ratio {256 / 782:.1%} (gpu {128 / 782:.1%}, cpu {128 / 782:.1%})" in shown
    assert "distinct chunks 4 of 128 tokens" in shown
    assert "gpu 3.9 KiB, cpu without bound" in shown


def test_a_recording_is_summed_up_as_json_and_kept_as_one_file(folder, tmp_path, capsys):
    output = tmp_path / "one.parquet"
    assert cli.main(["record", "--from", str(folder), "-o", str(output), "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert told["file"] == str(output)
    assert told["hit_tokens"] == {"gpu": CHUNK, "cpu": CHUNK}
    assert (told["requests"], told["chunks"], told["sessions"], told["tenants"]) == (2, 4, 1, 1)
    assert summarise([output]).token_hit_ratio == told["token_hit_ratio"] == 256 / 782
    assert list(folder.iterdir()), "the folder is the engine's"
    one, parts = read_trace(output), read_trace(folder)
    assert one.requests == parts.requests


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 8)), max_size=12))
def test_chunks_in_several_runs_are_counted_once(runs):
    numbers = {number for start, length in runs for number in range(start, start + length)}
    assert covered(np.array(runs, np.int64).reshape(-1, 2)) == len(numbers)


# What it refuses -----------------------------------------------------------------


def test_one_of_a_command_and_a_recording_must_be_named(folder, capsys):
    for words in ([], ["--from", str(folder), "--", "true"]):
        with pytest.raises(SystemExit) as status:
            cli.main(["record", *words])
        assert status.value.code == 2
        assert "name a command to run, after '--', or a recording" in capsys.readouterr().err


def test_no_file_is_written_over_and_no_earlier_run_mixed_in(tmp_path, capsys):
    output = tmp_path / "a.parquet"
    command = ["record", "-o", str(output), "--", "false"]
    output.write_text("mine")
    assert cli.main(command) == 2
    assert "is there already" in capsys.readouterr().err
    assert output.read_text() == "mine"
    output.unlink()
    (tmp_path / "a.parquet.parts").mkdir()
    assert cli.main(command) == 2
    assert "an earlier run was not finished" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--from", "nothing"], "there is no such file, folder or recording"),
        (["--from", "text"], "it can't be read as Parquet"),
        (["--from", "other.parquet"], "no recording of kvtiers"),
        (["--from", "newer.parquet"], "a recording of version 99"),
        (["-o", "no/where.parquet", "--", "true"], "there is no folder no to write it in"),
        (["-o", "/proc/a.parquet", "--", "true"], "/proc/a.parquet: it can't be written: No such"),
        (["--", "no-command-of-that-name"], "can't be run: No such file or directory"),
    ],
)
def test_what_cant_be_done_is_told(tmp_path, monkeypatch, capsys, words, says):
    import pyarrow as pa
    from pyarrow import parquet

    monkeypatch.chdir(tmp_path)
    Path("text").write_text("no Parquet")
    parquet.write_table(pa.table({"a": [1]}), "other.parquet")
    newer = pa.table({"a": [1]}, metadata={"kvtiers_trace": "99"})
    parquet.write_table(newer, "newer.parquet")
    assert cli.main(["record", *words]) == 2
    assert says in capsys.readouterr().err


def test_a_size_that_is_none_is_told(capsys):
    with pytest.raises(SystemExit):
        cli.main(["record", "--max-bytes", "many", "--", "true"])
    assert "'many' is no size" in capsys.readouterr().err
