"""The recorder: what it is told is what lies in its files, and nothing else does."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import record_kit
from kvtiers.policies import Run
from kvtiers.simulator.formats import read_trace
from kvtiers.tiers import recording
from kvtiers.tiers.recording import Recorder
from kvtiers.tiers.recording_files import PartFiles
from kvtiers.tiers.recording_format import (
    About,
    RecordingError,
    about,
    parts_of,
    recordings_in,
)
from record_kit import CHUNK, ENGINE, end, keys_of, request, rows_in, serve, wait_until

parquet = pytest.importorskip("pyarrow.parquet")

SECRETS = ("conversation-with-alice", "salt-of-acme", "what alice asked")


@pytest.fixture
def recorder(tmp_path):
    made = Recorder(tmp_path / "rec", ENGINE, 1 << 30)
    yield made
    made.close()


# What is written ---------------------------------------------------------------


def test_a_row_says_what_a_request_was_made_of_and_which_tier_served_how_much(recorder, tmp_path):
    first = request("1", "abc", session="s", tenant="t", hints={"turn": 3})
    recorder.admitted(first, 0, {})
    end(recorder, first, "abcd", "length")
    second = request("2", "abx", session="s")
    recorder.admitted(second, 2 * CHUNK, {0: {"cpu": 1}})
    end(recorder, second)
    recorder.close()
    one, two = rows_in(tmp_path / "rec")
    assert (one["req"], one["input_len"], one["output_len"]) == (0, 3 * CHUNK + 7, 100)
    assert (one["run_start"], one["run_len"]) == ([0], [3])
    assert (one["output_run_start"], one["output_run_len"]) == ([3], [1])
    assert (one["turn"], one["finish"]) == (3, "length")
    assert (one["hit_gpu"], one["hit_cpu"]) == (0, 0)
    assert (two["run_start"], two["run_len"]) == ([0, 4], [2, 1])
    assert two["output_run_start"] == []
    assert (two["hit_gpu"], two["hit_cpu"]) == (CHUNK, CHUNK)
    assert (two["turn"], two["tenant"]) == (None, "")
    assert one["session"] == two["session"]
    assert one["session"] not in ("", one["tenant"])
    assert 0 <= one["t_s"] <= two["t_s"]
    assert min(one["busy_s"], one["queued_s"]) >= 0


def test_requests_are_counted_as_they_are_admitted_though_they_end_in_another_order(
    recorder, tmp_path
):
    long, short = request("1", "a"), request("2", "cd")
    recorder.admitted(long, 0, {})
    recorder.admitted(short, 0, {})
    end(recorder, short)
    end(recorder, long)
    recorder.close()
    # Numbers go to chunks as requests end.
    assert [row["run_start"] for row in rows_in(tmp_path / "rec")] == [[2], [0]]
    trace = read_trace(tmp_path / "rec")
    assert [asked.prompt_chunks for asked in trace.requests] == [1, 2]
    assert trace.requests[0].arrival <= trace.requests[1].arrival


def test_the_simulator_reads_a_recording_with_its_output_and_its_sizes(recorder, tmp_path):
    hints = {"turn": 3, "agent": "searches-for-alice"}
    asked = request("1", "abc", session="s", tenant="t", hints=hints)
    recorder.admitted(asked, 0, {})
    end(recorder, asked, "abcd")
    recorder.close()
    trace = read_trace(tmp_path / "rec")
    (read,) = trace.requests
    assert (trace.chunk_tokens, trace.chunk_bytes, trace.footprint) == (CHUNK, 1000, 4)
    assert (read.stretches, read.output_stretches) == ((range(3),), (range(3, 4),))
    assert (read.turn, read.finish_reason) == (3, "stop")
    # Policies tell agents of a session apart by it; its name is nobody's business.
    assert read.hints["agent"] not in ("", "searches-for-alice")


def test_the_simulator_leaves_out_what_the_engines_tiers_were_not_given(tmp_path):
    engine = About(**{**vars_of(ENGINE), "stores_output": False})
    recorder = Recorder(tmp_path / "rec", engine, 1 << 30)
    asked = request("1", "abc")
    recorder.admitted(asked, 0, {})
    end(recorder, asked, "abcd")
    recorder.close()
    assert read_trace(tmp_path / "rec").requests[0].output_stretches == ()


def test_the_simulator_asks_for_no_chunk_that_ends_where_the_prompt_does(recorder, tmp_path):
    for name in ("1", "2"):
        asked = request(name, "abc")
        asked.prompt_tokens = 3 * CHUNK
        recorder.admitted(asked, 0, {})
        end(recorder, asked, "abcd")
    recorder.close()
    first, second = read_trace(tmp_path / "rec").requests
    # It computes the last token, and with it the chunk, though that is stored.
    assert first.stretches == second.stretches == (range(2),)
    assert first.output_stretches == second.output_stretches == (range(2, 4),)


def vars_of(engine: About) -> dict:
    return {name: getattr(engine, name) for name in About.__dataclass_fields__}


def test_the_metadata_describes_the_engine_and_the_recording(recorder, tmp_path):
    serve(recorder, "ab")
    recorder.close()
    found = parquet.read_schema(parts_of(tmp_path / "rec")[0]).metadata
    metadata = {key.decode(): value.decode() for key, value in found.items()}
    assert about(metadata) == ENGINE
    assert metadata["recording"] == recorder.recording
    assert metadata["kvtiers_trace"] == "1"


def test_no_key_and_no_text_of_a_client_lies_in_a_file(recorder, tmp_path):
    session, tenant, words = SECRETS
    asked = request(
        "1",
        "abc",
        session=session,
        tenant=tenant,
        hints={"prompt": words, "turn": words, "agent": words},
    )
    recorder.admitted(asked, 0, {})
    end(recorder, asked)
    recorder.close()
    (part,) = parts_of(tmp_path / "rec")
    # As values, and as bytes: columns are compressed, metadata and statistics are not.
    content = str(parquet.read_table(part).to_pylist()).encode() + part.read_bytes()
    for word in (*SECRETS, str(tmp_path), os.uname().nodename):
        assert word.encode() not in content
    for key in keys_of("abc"):
        assert key[:8] not in content


def test_two_recordings_of_the_same_requests_name_sessions_differently(tmp_path):
    for name in ("a", "b"):
        recorder = Recorder(tmp_path / name, ENGINE, 1 << 30)
        asked = request("1", "abc", session="s")
        recorder.admitted(asked, 0, {})
        end(recorder, asked)
        recorder.close()
    (one,), (two,) = rows_in(tmp_path / "a"), rows_in(tmp_path / "b")
    assert one["session"] != two["session"]


def test_what_a_client_may_send_is_no_reason_to_stop(recorder, tmp_path):
    for number, turn in enumerate((True, -1, 1 << 40, "3", None, [1])):
        asked = request(str(number), "ab", session="\ud800", hints={"turn": turn})
        recorder.admitted(asked, 0, {})
        end(recorder, asked)
    recorder.close()
    assert [row["turn"] for row in rows_in(tmp_path / "rec")] == [None] * 6


# Which requests are -------------------------------------------------------------


def test_a_preempted_request_is_one_row_with_what_it_hit_at_first(recorder, tmp_path):
    asked = request("1", "abc")
    recorder.admitted(asked, CHUNK, {})
    recorder.admitted(asked, 3 * CHUNK, {})
    end(recorder, asked)
    recorder.close()
    assert [row["hit_gpu"] for row in rows_in(tmp_path / "rec")] == [CHUNK]


def test_requests_that_say_nothing_of_the_cache_are_left_out(recorder, tmp_path):
    unread = request("1", "abc")
    recorder.admitted(unread, 0, {})
    recorder.finished(unread, read=False)
    unnamed = request("2", "abc")
    unnamed.runs = ()
    recorder.admitted(unnamed, 0, {})
    end(recorder, unnamed)
    recorder.finished(request("never admitted", "abc"))
    serve(recorder, "x")
    recorder.close()
    assert [row["input_len"] for row in rows_in(tmp_path / "rec")] == [CHUNK + 7]


def test_of_a_hybrid_model_the_group_with_full_attention_is_recorded(tmp_path):
    recorder = Recorder(tmp_path / "rec", ENGINE, 1 << 30, group=1)
    asked = request("1", "abc", group=1)
    asked.runs = (Run(keys_of("zz"), group=0), *asked.runs)
    recorder.admitted(asked, 2 * CHUNK, {0: {"cpu": 2}, 1: {"cpu": 1}})
    recorder.finished(asked)
    recorder.close()
    (row,) = rows_in(tmp_path / "rec")
    assert (row["run_len"], row["hit_cpu"], row["hit_gpu"]) == ([3], CHUNK, CHUNK)


def test_after_a_reset_the_same_prompt_is_made_of_other_chunks(recorder, tmp_path):
    serve(recorder, "ab")
    recorder.reset()
    serve(recorder, "ab")
    recorder.close()
    assert [row["run_start"] for row in rows_in(tmp_path / "rec")] == [[0], [2]]


# Files --------------------------------------------------------------------------


def test_parts_are_of_bounded_size_and_share_their_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(recording, "_MOST_ROWS", 3)
    recorder = Recorder(tmp_path / "rec", ENGINE, 1 << 30)
    serve(recorder, *["ab"] * 7)
    recorder.close()
    parts = parts_of(tmp_path / "rec")
    assert [parquet.read_metadata(part).num_rows for part in parts] == [3, 3, 1]
    assert {tuple(row["run_start"]) for row in rows_in(tmp_path / "rec")} == {(0,)}


def test_the_oldest_parts_go_where_all_are_larger_than_the_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(recording, "_MOST_ROWS", 2)
    folder = tmp_path / "rec"
    earlier = Recorder(folder, ENGINE, 1 << 30)
    serve(earlier, "ab", "ab")
    earlier.close()
    (old,) = parts_of(folder)
    # What is not ours does not count, and stays.
    other = folder / "other.parquet"
    other.write_bytes(bytes(1 << 20))
    bound = 3 * old.stat().st_size
    later = Recorder(folder, ENGINE, bound)
    serve(later, *["ab"] * 20)
    later.close()
    assert other.exists()
    found = recordings_in(folder)
    assert list(found) == [later.recording]
    numbers = [row["req"] for row in rows_in(folder)]
    assert numbers == list(range(20 - len(numbers), 20))
    assert sum(part.stat().st_size for part in found[later.recording]) <= bound


def test_a_part_is_kept_though_it_alone_is_larger_than_the_bound(tmp_path):
    recorder = Recorder(tmp_path / "rec", ENGINE, 1)
    serve(recorder, "ab")
    recorder.close()
    assert len(rows_in(tmp_path / "rec")) == 1


def test_files_are_for_this_user_only(recorder, tmp_path):
    serve(recorder, "ab")
    recorder.close()
    assert (tmp_path / "rec").stat().st_mode & 0o777 == 0o700
    assert [part.stat().st_mode & 0o777 for part in parts_of(tmp_path / "rec")] == [0o600]


def test_an_engine_that_is_killed_leaves_what_had_been_written_and_it_can_be_read(tmp_path):
    script = """
        import os, signal, sys, time
        sys.path.insert(0, {here!r})
        import record_kit as kit
        from kvtiers.tiers import recording
        from kvtiers.tiers.recording_format import recordings_in
        recording._GATHER_SECONDS = 0.05
        recorder = recording.Recorder(kit.Path({folder!r}), kit.ENGINE, 1 << 30)
        kit.serve(recorder, "ab", "abc")
        kit.wait_until(lambda: recordings_in({folder!r}))
        asked = kit.request("under way", "abc")
        recorder.admitted(asked, 0, {{}})
        os.kill(os.getpid(), signal.SIGKILL)
    """
    folder = str(tmp_path / "rec")
    here = str(Path(record_kit.__file__).parent)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script.format(here=here, folder=folder))],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert done.returncode == -9, done.stderr
    assert [row["req"] for row in rows_in(tmp_path / "rec")] == [0, 1]


def test_what_a_killed_engine_left_half_written_is_removed_by_a_later_one(tmp_path):
    folder = tmp_path / "rec"
    folder.mkdir()
    old, young = (folder / f".{name}-000000.parquet.tmp" for name in ("old", "young"))
    for path in (old, young):
        path.write_bytes(b"PAR1")
    os.utime(old, (1, 1))
    Recorder(folder, ENGINE, 1 << 30).close()
    assert not old.exists()
    assert young.exists()


def test_a_recording_is_named_where_a_folder_has_several(tmp_path):
    folder = tmp_path / "rec"
    names = []
    for text in ("ab", "xyz"):
        recorder = Recorder(folder, ENGINE, 1 << 30)
        serve(recorder, text)
        recorder.close()
        names.append(recorder.recording)
    with pytest.raises(RecordingError, match="2 recordings lie in this folder") as told:
        parts_of(folder)
    assert all(str(folder / name) in str(told.value) for name in names)
    assert read_trace(folder / names[1]).requests[0].prompt_chunks == 3


def test_a_folder_without_a_recording_is_told(tmp_path):
    with pytest.raises(RecordingError, match="no recording lies in this folder"):
        parts_of(tmp_path)
    with pytest.raises(RecordingError, match="there is no such file, folder or recording"):
        parts_of(tmp_path / "nothing")


# Faults -------------------------------------------------------------------------


def test_a_failing_disk_ends_the_recording_with_one_line_and_nothing_else(
    recorder, tmp_path, caplog
):
    shutil.rmtree(tmp_path / "rec")
    with caplog.at_level(logging.WARNING):
        serve(recorder, "ab")
        recorder.close()
        serve(recorder, "cd")
        recorder.reset()
    assert recorder.stopped
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("kvtiers stops recording: ")
    assert "No such file or directory" in caplog.messages[0]


def test_a_disk_that_hangs_costs_bounded_memory_and_ends_the_recording(
    tmp_path, caplog, monkeypatch
):
    hanging, free = threading.Event(), threading.Event()

    def hang(*_: object, **__: object) -> None:
        hanging.set()
        free.wait(30)

    monkeypatch.setattr(PartFiles, "write", hang)
    monkeypatch.setattr(recording, "_GATHER_SECONDS", 0.01)
    monkeypatch.setattr(recording, "_MOST_WAITING", 10)
    recorder = Recorder(tmp_path / "rec", ENGINE, 1 << 30)
    serve(recorder, "ab")
    assert hanging.wait(30)
    serve(recorder, *["ab"] * 20)
    assert recorder.stopped
    assert not recorder._ended
    assert not recorder._admitted
    assert len(caplog.messages) == 1
    recorder.close(timeout=0.01)
    free.set()


def test_a_folder_that_cant_be_used_is_told_at_once(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="exists"):
        Recorder(tmp_path / "file", ENGINE, 1 << 30)


def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.delitem(sys.modules, "pyarrow.parquet")
    with pytest.raises(ImportError, match=r"pip install 'kvtiers\[simulate\]'"):
        Recorder(tmp_path / "rec", ENGINE, 1 << 30)
    assert not (tmp_path / "rec").exists()


# The thread ---------------------------------------------------------------------


def test_what_was_told_is_written_soon_after_though_nothing_follows(tmp_path, monkeypatch):
    monkeypatch.setattr(recording, "_GATHER_SECONDS", 0.05)
    monkeypatch.setattr(recording, "_REST", 0)
    recorder = Recorder(tmp_path / "rec", ENGINE, 1 << 30)
    serve(recorder, "ab")
    wait_until(lambda: recordings_in(tmp_path / "rec"))
    assert len(rows_in(tmp_path / "rec")) == 1
    # The same part again, with more in it.
    serve(recorder, "cd")
    wait_until(lambda: len(rows_in(tmp_path / "rec")) == 2)
    recorder.close()
    assert len(parts_of(tmp_path / "rec")) == 1


def test_what_cant_be_deleted_is_no_reason_to_stop(tmp_path, monkeypatch):
    """As where users share a folder, and none may delete another's files."""
    monkeypatch.setattr(recording, "_MOST_ROWS", 2)
    folder = tmp_path / "rec"
    # Not even root can unlink a folder.
    stuck = folder / f"{'1' * 8}T{'1' * 9}Z-{'a' * 8}-000000.parquet"
    unfinished = folder / ".left.parquet.tmp"
    for each in (stuck, unfinished):
        each.mkdir(parents=True)
        os.utime(each, (0, 0))
    recorder = Recorder(folder, ENGINE, 1)
    serve(recorder, *["ab"] * 6)
    recorder.close()
    assert not recorder.stopped
    parts = recordings_in(folder)[recorder.recording]
    assert len(parts) == 1
    assert sorted(folder.iterdir()) == sorted([stuck, unfinished, *parts])
