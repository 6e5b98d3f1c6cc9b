"""Reading traces: what each format becomes, and what damaged files are told."""

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from kvtiers.simulator.errors import TraceError
from kvtiers.simulator.formats import read_trace
from kvtiers.simulator.optimum import Future, optimum
from kvtiers.simulator.trace import Trace
from small_traces import chat, prompts, prompts_of, trace_of


def write_lines(path: Path, values: Sequence[object]) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def equal(trace: Trace, wanted: Sequence[Sequence[object]]) -> bool:
    """Whether the prompts are the same but for what their chunks are called."""
    names: dict[object, int] = {}
    meanings: dict[int, object] = {}
    got = prompts_of(trace)
    return [len(p) for p in got] == [len(p) for p in wanted] and all(
        names.setdefault(b, a) == a and meanings.setdefault(a, b) == b
        for ours, theirs in zip(got, wanted, strict=True)
        for a, b in zip(ours, theirs, strict=True)
    )


# Numbering -------------------------------------------------------------------------


@given(prompts=prompts(most=30, depth=8))
def test_numbers_are_dense_and_mean_what_the_ids_meant(prompts: list[list[int]]) -> None:
    trace = trace_of(prompts)
    assert equal(trace, prompts)
    used = {chunk for prompt in prompts_of(trace) for chunk in prompt}
    assert used == set(range(trace.footprint))


def test_conversations_in_turns_are_few_stretches() -> None:
    turns = [[k * 100 + i for i in range(3 * turn)] for turn in range(1, 20) for k in range(5)]
    assert max(len(request.stretches) for request in trace_of(turns).requests) == 1


# Mooncake ----------------------------------------------------------------------------


def mooncake(hash_ids: list, length: int, **more: object) -> dict:
    return {
        "timestamp": 1500,
        "input_length": length,
        "output_length": 7,
        "hash_ids": hash_ids,
        **more,
    }


def test_mooncake_lines_are_read_without_the_block_that_is_not_full(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "t.jsonl", [mooncake([0, 1, 2], 1100), mooncake([0, 5], 1024)])
    trace = read_trace(file)
    assert (trace.name, trace.chunk_tokens, trace.footprint) == ("t", 512, 3)
    assert equal(trace, [[0, 1], [0, 5]])
    assert [(r.arrival, r.input_tokens, r.output_tokens) for r in trace.requests] == [
        (1.5, 1100, 7),
        (1.5, 1024, 7),
    ]


def test_larger_chunks_are_named_by_their_last_block(tmp_path: Path) -> None:
    file = write_lines(
        tmp_path / "t.jsonl", [mooncake([0, 1, 2, 3, 4], 2560), mooncake([0, 1, 2, 9], 2048)]
    )
    trace = read_trace(file, chunk_tokens=1024)
    assert equal(trace, [[1, 3], [1, 9]])


def test_bailian_lines_have_small_blocks_seconds_and_sessions(tmp_path: Path) -> None:
    blocks = list(range(33))
    lines = [
        mooncake(blocks, 521, timestamp=61.5, chat_id=9, parent_chat_id=-1, turn=1),
        mooncake(blocks, 521, timestamp=62.5, chat_id=12, parent_chat_id=9, turn=2),
        mooncake(blocks, 521, timestamp=63.5, chat_id=13, parent_chat_id=12, turn=3),
        mooncake(blocks, 521, timestamp=64.5, chat_id=14, parent_chat_id=-1, turn=1),
    ]
    trace = read_trace(write_lines(tmp_path / "t.jsonl", lines))
    assert (trace.chunk_tokens, trace.footprint) == (256, 2)
    assert [(r.session, r.turn) for r in trace.requests] == [
        ("9", 0),
        ("9", 1),
        ("9", 2),
        ("14", 0),
    ]
    assert trace.requests[0].arrival == 61.5


def test_a_whole_trace_survives_the_way_through_a_file(tmp_path: Path) -> None:
    made = chat(random.Random(5), 60)
    lines = [mooncake(ids, 512 * len(ids), timestamp=1000 * i) for i, ids in enumerate(made)]
    trace, wanted = read_trace(write_lines(tmp_path / "t.jsonl", lines)), trace_of(made, 512)
    assert prompts_of(trace) == prompts_of(wanted)
    assert optimum(trace, Future.of(trace), 30).hit_tokens > 0


# LMCache ------------------------------------------------------------------------------


def lookup(hashes: list[str], length: int, seconds: float, **more: object) -> dict:
    return {
        "timestamp": seconds,
        "request_id": "r",
        "model_name": "m",
        "chunk_size": 256,
        "seq_len": length,
        "dtypes": ["bfloat16"],
        "shapes": [[2, 256, 128]],
        "chunk_hashes": hashes,
        **more,
    }


def test_a_lookup_log_gives_chunks_their_size_and_times_from_its_begin(tmp_path: Path) -> None:
    lines = [lookup(["0xa", "0xb"], 600, 1e9), lookup(["0xa"], 300, 1e9 + 2.5)]
    trace = read_trace(write_lines(tmp_path / "l.jsonl", lines))
    assert (trace.chunk_tokens, trace.chunk_bytes) == (256, 2 * 256 * 128 * 2)
    assert equal(trace, [["a", "b"], ["a"]])
    assert [request.arrival for request in trace.requests] == [0.0, 2.5]


def test_a_folder_of_logs_is_one_trace(tmp_path: Path) -> None:
    write_lines(tmp_path / "lookup_hashes_1.jsonl", [lookup(["0xa"], 256, 1e9)])
    write_lines(tmp_path / "lookup_hashes_2.jsonl", [lookup(["0xa", "0xb"], 512, 1e9 + 60)])
    trace = read_trace(tmp_path)
    assert equal(trace, [["a"], ["a", "b"]])
    assert [request.arrival for request in trace.requests] == [0.0, 60.0]


def test_equal_hashes_of_two_models_are_two_chunks(tmp_path: Path) -> None:
    lines = [lookup(["0xa"], 256, 1.0), lookup(["0xa"], 256, 2.0, model_name="other")]
    assert read_trace(write_lines(tmp_path / "l.jsonl", lines)).footprint == 2


# vLLM's KV events ------------------------------------------------------------------------


def stored(blocks: list[str], parent: str | None, **more: object) -> dict:
    return {
        "type": "BlockStored",
        "block_hashes": blocks,
        "parent_block_hash": parent,
        "token_ids": [],
        "block_size": 16,
        "lora_id": None,
        "medium": "GPU",
        **more,
    }


BATCHES = [
    (100.0, [stored(["a", "b"], None)]),
    (100.5, [stored(["c", "d"], "b"), stored(["x"], "b", medium="CPU")]),
    (101.0, [stored(["e"], "d"), {"type": "BlockRemoved", "block_hashes": ["e"], "medium": "GPU"}]),
    (140.0, [stored(["f", "g"], "e")]),
    (141.0, [stored(["h"], "b")]),
]


def test_events_become_requests_for_the_prefixes_that_were_stored(tmp_path: Path) -> None:
    lines = [{"ts": ts, "events": events} for ts, events in BATCHES]
    trace = read_trace(write_lines(tmp_path / "e.jsonl", lines))
    assert trace.chunk_tokens == 16
    assert equal(trace, ["abcd", "abcdefg", "abh"])
    first = trace.requests[0]
    assert [len(stretch) for stretch in first.output_stretches] == [1]
    assert (first.input_tokens, first.output_tokens) == (64, 16)
    assert [request.arrival for request in trace.requests] == [0.0, 40.0, 41.0]


def test_events_off_the_wire_are_the_same(tmp_path: Path) -> None:
    msgspec = pytest.importorskip("msgspec")
    pytest.importorskip("msgpack")
    file = tmp_path / "e.msgpack"
    file.write_bytes(b"".join(msgspec.msgpack.encode([ts, events, 0]) for ts, events in BATCHES))
    assert equal(read_trace(file), ["abcd", "abcdefg", "abh"])


def test_events_as_vllm_encodes_them_are_read(tmp_path: Path) -> None:
    events = pytest.importorskip("vllm.distributed.kv_events")
    msgspec, _ = pytest.importorskip("msgspec"), pytest.importorskip("msgpack")
    one = events.BlockStored(
        block_hashes=[b"\x01", b"\x02"],
        parent_block_hash=None,
        token_ids=[1] * 32,
        block_size=16,
        lora_id=None,
        medium="GPU",
        lora_name=None,
    )
    batch = events.KVEventBatch(ts=5.0, events=[one, events.AllBlocksCleared()])
    file = tmp_path / "e.msgpack"
    file.write_bytes(msgspec.msgpack.encode(batch))
    assert prompts_of(read_trace(file)) == [[0, 1]]


# Damage --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ([mooncake([0], 512), "text"], r"line 2: it must be a JSON object"),
        ([mooncake([0], 512), mooncake([0], -1)], r"line 2: 'input_length' must be a number"),
        ([mooncake([0], 512), mooncake([0.5], 512)], r"line 2: 'hash_ids' must be a list of ids"),
        ([mooncake([0], 512), {"hash_ids": [0]}], r"line 2: 'input_length' .* it is missing"),
        ([mooncake([0], 512)] * 201 + [mooncake([0], 1024)], r"line 202: 1 blocks .* are fewer"),
        ([mooncake([0, 1, 2], 512)], r"fits input_length for no size of blocks"),
        ([mooncake([0, 1], 1024), mooncake([1], 512)], r"line 2: chunk 1 begins a prompt"),
        ([mooncake([0, 1], 1024), mooncake([2, 1], 1024)], r"line 2: .* follows chunk 2"),
        ([mooncake([0, 0], 1024)], r"line 1: chunk 0 follows chunk 0"),
        ([mooncake([0], 512), mooncake([0], 512, timestamp=9)], r"line 2: it arrives at 0.009 s"),
        ([lookup(["0xa"], 256, 1.0), lookup([], 256, 1.0)], r"line 2: 0 hashes are fewer"),
        ([lookup([], 9, 1.0), lookup([], 9, 1.0, chunk_size=16)], r"line 2: chunks of 16 tokens"),
        ([lookup([], 9, 1.0, chunk_size=0)], r"line 1: 'chunk_size' must be the tokens"),
        ([{"ts": 1.0, "events": []}], "tells of a block stored"),
        ([{"ts": 1.0, "events": [7]}], "line 1: an event must be an object or an array"),
        ([{"ts": "x", "events": []}], "line 1: the time of a batch"),
        ([{"events": {}}], "line 1: a batch must have a time"),
        (
            [{"ts": 1.0, "events": [stored(["a"], "b"), stored(["b"], "a"), stored(["c"], "a")]}],
            "line 1: block 'a' follows itself",
        ),
        ([{"ts": 1.0, "events": [stored(["a"], None), stored(["a"], "b")]}], "follows another one"),
        ([{"ts": 1.0, "events": [stored([], None)]}], "must have block_hashes"),
        ([{"some": "thing"}], "not a trace in a known format"),
    ],
)
def test_damage_is_told_with_the_file_and_the_line(tmp_path: Path, lines: list, told: str) -> None:
    file = write_lines(tmp_path / "t.jsonl", lines)
    with pytest.raises(TraceError, match=told) as caught:
        read_trace(file)
    assert str(file) in str(caught.value)


def test_a_line_that_is_cut_off_is_told(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "t.jsonl", [mooncake([0], 512)])
    with open(file, "a") as more:
        more.write('{"timestamp": 1, "inp')
    with pytest.raises(TraceError, match="line 2: it is no JSON"):
        read_trace(file)


def test_a_line_that_is_no_json_is_told_by_line_and_column_alone(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "t.jsonl", [mooncake([0], 512)])
    with open(file, "a") as more:
        more.write('{"timestamp": 1, "hash_ids": [0]\n' + json.dumps(mooncake([0], 512)) + "\n")
    with pytest.raises(TraceError) as caught:
        read_trace(file)
    told = "line 2: it is no JSON: Expecting ',' delimiter (column 33)."
    assert str(caught.value) == f"{file}, {told}"


@pytest.mark.parametrize("broken", ["{", "[]", json.dumps(mooncake([0], 512, timestamp=9))])
def test_lines_are_counted_as_an_editor_counts_them(tmp_path: Path, broken: str) -> None:
    """From 1, and those of nothing, too."""
    file = tmp_path / "t.jsonl"
    file.write_text(f"\n{json.dumps(mooncake([0], 512))}\n\n \n{broken}\n")
    with pytest.raises(TraceError, match=r"t\.jsonl, line 5: it "):
        read_trace(file)


def test_msgpack_that_is_cut_off_is_told(tmp_path: Path) -> None:
    msgspec, _ = pytest.importorskip("msgspec"), pytest.importorskip("msgpack")
    file = tmp_path / "e.msgpack"
    whole = b"".join(msgspec.msgpack.encode([ts, events]) for ts, events in BATCHES)
    file.write_bytes(whole[:-3])
    with pytest.raises(TraceError, match="message 5: it ends within it"):
        read_trace(file)


def test_a_long_first_line_is_recognised(tmp_path: Path) -> None:
    ids = list(range(20_000))
    file = write_lines(tmp_path / "t.jsonl", [mooncake(ids, 512 * len(ids))])
    assert read_trace(file).footprint == 20_000


# Parquet -------------------------------------------------------------------------------


def write_runs(path: Path, rows: list[dict], tokens: object = 512, **more: object) -> Path:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    said = more if tokens is None else {"block_tokens": tokens, **more}
    metadata = {key: str(value) for key, value in said.items()}
    parquet.write_table(pa.Table.from_pylist(rows).replace_schema_metadata(metadata), path)
    return path


def runs(starts: list, lengths: list, length: object, **more: object) -> dict:
    return {
        "t_s": 1.0,
        "input_len": length,
        "output_len": 3,
        "run_start": starts,
        "run_len": lengths,
        **more,
    }


def test_runs_are_expanded_and_columns_become_what_a_policy_is_told(tmp_path: Path) -> None:
    row = runs([0, 9], [2, 2], 1600, session="s", turn=4, stop="end_turn", model="m")
    trace = read_trace(write_runs(tmp_path / "t.parquet", [row, runs([0, 9], [2, 1], 1536)]))
    assert equal(trace, [[0, 1, 9], [0, 1, 9]])
    first = trace.requests[0]
    assert (first.session, first.turn, first.finish_reason) == ("s", 4, "end_turn")
    assert first.hints == {"model": "m"}
    assert (first.input_tokens, first.arrival) == (1600, 1.0)


def test_small_blocks_make_chunks_of_256_tokens_unless_told_otherwise(tmp_path: Path) -> None:
    file = write_runs(tmp_path / "t.parquet", [runs([0], [10], 640)], tokens=64)
    assert read_trace(file).chunk_tokens == 256
    assert read_trace(file).references == 2
    assert read_trace(file, chunk_tokens=64).references == 10
    with pytest.raises(TraceError, match="chunks of 96 tokens can't be made"):
        read_trace(file, chunk_tokens=96)


@pytest.mark.parametrize(
    ("rows", "tokens", "told"),
    [
        ([runs([0], [1], 512), runs([0], [1], 1024)], 512, "row 1 (counted from 0): 1 blocks"),
        (
            [runs([0], [1], 512), runs([0, 1], [1], 512)],
            512,
            "row 1 (counted from 0): run_start has 2",
        ),
        (
            [runs([0], [1], 512), runs([0], [0], 0)],
            512,
            "row 1 (counted from 0): runs must start at 0",
        ),
        ([runs([-1], [1], 512)], 512, "row 0 (counted from 0): runs must start at 0"),
        (
            [runs([0], [1], 512), runs([None], [1], 512)],
            512,
            "row 1 (counted from 0): run_start has a",
        ),
        (
            [runs([0], [1], 512), runs(None, [1], 512)],
            512,
            "row 1 (counted from 0): run_start has a",
        ),
        (
            [runs([0], [1], 512), runs([0], [1], None)],
            512,
            "row 1 (counted from 0): input_len must",
        ),
        ([runs([0.5], [1], 512)], 512, "must hold lists of whole numbers"),
        ([runs([0], [1], 512)], None, "must say 'block_tokens'"),
        ([runs([0], [1], 512)], "many", "it says 'many'"),
        ([{"t_s": 1.0, "input_len": 5, "output_len": 1}], 512, "lacks the columns run_start"),
    ],
)
def test_damaged_runs_are_told_with_the_file_and_the_row(
    tmp_path: Path, rows: list[dict], tokens: object, told: str
) -> None:
    file = write_runs(tmp_path / "t.parquet", rows, tokens)
    with pytest.raises(TraceError) as caught:
        read_trace(file)
    assert str(caught.value).startswith(str(file))
    assert told in str(caught.value)


def test_a_row_of_a_recording_is_told_as_it_lies_in_the_file(tmp_path: Path) -> None:
    """Though requests are replayed by their numbers."""
    rows = [runs([0], [1], 512, req=1), runs([0], [0], 512, req=2), runs([0], [1], 512, req=0)]
    file = write_runs(tmp_path / "t.parquet", rows, kvtiers_trace=1, chunk_tokens=512)
    with pytest.raises(TraceError, match=r"row 1 \(counted from 0\): runs must start"):
        read_trace(file)
    rows[1] = runs([7, 0], [1, 1], 1024, req=2)
    write_runs(file, rows, kvtiers_trace=1, chunk_tokens=512)
    with pytest.raises(TraceError, match=r"row 1 \(counted from 0\): chunk 0 follows chunk 7"):
        read_trace(file)


def test_a_broken_parquet_is_told(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    file = tmp_path / "t.parquet"
    file.write_bytes(b"PAR1 and nothing more")
    with pytest.raises(TraceError, match="it is damaged"):
        read_trace(file)


# Several files, and where they lie ---------------------------------------------------------


def test_a_part_whose_times_begin_anew_follows_the_one_before(tmp_path: Path) -> None:
    one = write_lines(
        tmp_path / "a.jsonl", [mooncake([0], 512), mooncake([0, 1], 1024, timestamp=9000)]
    )
    two = write_lines(
        tmp_path / "b.jsonl", [mooncake([0, 1], 1024, timestamp=0), mooncake([0], 512)]
    )
    trace = read_trace(one, two)
    assert trace.name == "a+b"
    assert [request.arrival for request in trace.requests] == [1.5, 9.0, 9.0, 10.5]
    assert trace.footprint == 2


def test_parts_of_different_traces_are_refused(tmp_path: Path) -> None:
    one = write_lines(tmp_path / "a.jsonl", [mooncake([0, 1], 1024)])
    two = write_lines(tmp_path / "b.jsonl", [mooncake([7, 1], 1024)])
    with pytest.raises(TraceError, match=r"b\.jsonl, line 1: .* parts of one trace"):
        read_trace(one, two)
    other = write_lines(tmp_path / "c.jsonl", [mooncake([0], 16)])
    write_lines(other, [mooncake([5, 6], 20)])
    with pytest.raises(TraceError, match="can't be one stream"):
        read_trace(one, other)


def test_traces_are_found_by_name_in_the_folder_for_them(tmp_path: Path, monkeypatch) -> None:
    write_lines(tmp_path / "talk.jsonl", [mooncake([0], 512)])
    monkeypatch.setenv("KVTIERS_TRACES", str(tmp_path))
    assert read_trace("talk").name == "talk"
    assert read_trace("talk.jsonl").name == "talk"
    with pytest.raises(TraceError, match=r"Did you mean 'talk'\?.* There: talk\."):
        read_trace("takl")
    with pytest.raises(TraceError, match="no trace at"):
        read_trace(tmp_path / "nowhere.jsonl")


def test_a_misspelt_path_is_told_the_file_beside_it(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("KVTIERS_TRACES", str(tmp_path / "other"))
    write_lines(tmp_path / "monday.jsonl", [mooncake([0], 512)])
    with pytest.raises(TraceError, match=r"Did you mean 'monday\.jsonl'\?"):
        read_trace(tmp_path / "munday.jsonl")


def test_a_folder_of_traces_is_none_and_its_files_are_named(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    file = write_runs(tmp_path / "t.parquet", [runs([0], [1], 512)])
    with pytest.raises(TraceError, match=f"without a recording. Name a trace in it: {file}"):
        read_trace(tmp_path)


def test_nothing_names_no_trace(tmp_path: Path, monkeypatch) -> None:
    """As where a shell's variable is not set: what lies in the folder at hand was not meant."""
    write_lines(tmp_path / "t.jsonl", [mooncake([0], 512)])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TraceError, match="no trace at ''"):
        read_trace("")


def test_an_empty_file_is_told_as_such(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "t.jsonl", [])
    with pytest.raises(TraceError, match=r"t\.jsonl is empty"):
        read_trace(file)


def test_metadata_that_is_no_text_is_no_trace(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    from pyarrow import parquet

    file = write_runs(tmp_path / "t.parquet", [runs([0], [1], 512)])
    table = parquet.read_table(file).replace_schema_metadata({b"block_tokens": b"51\x9b"})
    parquet.write_table(table, file)
    with pytest.raises(TraceError, match="must say 'block_tokens'"):
        read_trace(file)


def test_a_trace_without_requests_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    from pyarrow import parquet

    file = write_runs(tmp_path / "t.parquet", [runs([0], [1], 512)])
    parquet.write_table(parquet.read_table(file).slice(0, 0), file)
    with pytest.raises(TraceError, match="has no requests"):
        read_trace(file)
