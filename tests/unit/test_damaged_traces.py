"""Whatever a file holds, reading it gives a trace or says what is wrong with which file."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from kvtiers.simulator.errors import SimulatorError, TraceError
from kvtiers.simulator.formats import read_trace

MOONCAKE = {
    "timestamp": 1500,
    "input_length": 1100,
    "output_length": 7,
    "hash_ids": [0, 1, 2],
    "chat_id": 1,
    "parent_chat_id": -1,
    "turn": 1,
}
LMCACHE = {
    "timestamp": 1.5,
    "model_name": "m",
    "chunk_size": 256,
    "seq_len": 600,
    "chunk_hashes": [1, 2],
    "shapes": [[2, 3]],
    "dtypes": ["float16"],
}
EVENT = {
    "type": "BlockStored",
    "block_hashes": [1, 2],
    "parent_block_hash": None,
    "block_size": 16,
    "medium": "GPU",
    "group_idx": 0,
    "session_id": "s",
}
DEEP = "[" * 100_000

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**400, -1, 2**63])
    | st.floats()
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)
thorough = settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def assert_read_or_refused(file: Path) -> None:
    try:
        trace = read_trace(file)
    except SimulatorError as error:
        told = str(error)
    else:
        told = ""
        arrivals = [request.arrival for request in trace.requests]
        assert arrivals == sorted(arrivals)
        assert all(0 <= arrival < float("inf") for arrival in arrivals)
    assert not told or str(file) in told


# Lines of JSON -----------------------------------------------------------------------


def assert_odd_lines_are_read_or_refused(file: Path, plain: object, odd: object) -> None:
    for values in ([odd, plain], [plain, odd]):
        file.write_text("".join(json.dumps(value) + "\n" for value in values))
        assert_read_or_refused(file)


@thorough
@given(key=st.sampled_from(list(MOONCAKE)), value=json_values)
@example(key="chat_id", value=[1])
@example(key="parent_chat_id", value=[1])
@example(key="timestamp", value=10**400)
def test_any_value_in_mooncakes_lines(tmp_path: Path, key: str, value: object) -> None:
    assert_odd_lines_are_read_or_refused(tmp_path / "t.jsonl", MOONCAKE, {**MOONCAKE, key: value})


@thorough
@given(key=st.sampled_from(list(LMCACHE)), value=json_values)
@example(key="model_name", value=["m"])
def test_any_value_in_lmcaches_lines(tmp_path: Path, key: str, value: object) -> None:
    assert_odd_lines_are_read_or_refused(tmp_path / "t.jsonl", LMCACHE, {**LMCACHE, key: value})


@thorough
@given(key=st.sampled_from([*EVENT, "ts"]), value=json_values)
@example(key="block_hashes", value=[[1]])
@example(key="parent_block_hash", value=[])
@example(key="block_size", value=-16)
@example(key="ts", value=float("nan"))
def test_any_value_in_events(tmp_path: Path, key: str, value: object) -> None:
    plain = {"ts": 1.5, "events": [EVENT]}
    odd = {"ts": value, "events": [EVENT]} if key == "ts" else None
    odd = odd or {"ts": 1.5, "events": [{**EVENT, key: value}]}
    assert_odd_lines_are_read_or_refused(tmp_path / "t.jsonl", plain, odd)


@thorough
@given(data=st.data())
def test_damaged_msgpack(tmp_path: Path, data: st.DataObject) -> None:
    msgpack = pytest.importorskip("msgpack")
    packed = msgpack.packb([1.5, [["BlockStored", [b"1", b"2"], None, [], 16, None, "GPU"]]])
    file = tmp_path / "t.msgpack"
    file.write_bytes(damaged(packed * 2, data))
    assert_read_or_refused(file)


@pytest.mark.parametrize("tail", [b"\x81\x90\x01", b"\x91" * 5000, b"\xc7\x05\xff" + b"\xff" * 5])
def test_msgpack_that_python_has_no_value_for(tmp_path: Path, tail: bytes) -> None:
    """A map with a list as a key, too deep a nest, a time that is none."""
    pytest.importorskip("msgpack")
    file = tmp_path / "t.msgpack"
    file.write_bytes(b"\x92\xcb" + bytes(8) + tail)
    with pytest.raises(TraceError, match=r"message 1: it is no msgpack: \w"):
        read_trace(file)


@pytest.mark.parametrize("lines", [f'{{"hash_ids": {DEEP}\n', json.dumps(MOONCAKE) + "\n" + DEEP])
def test_json_that_is_nested_too_deep(tmp_path: Path, lines: str) -> None:
    file = tmp_path / "t.jsonl"
    file.write_text(lines)
    with pytest.raises(TraceError, match="it is no JSON"):
        read_trace(file)


# Parquet -----------------------------------------------------------------------------


def parquet_file(file: Path, metadata: Mapping[Any, Any] | None = None, **columns: object) -> Path:
    """A trace of two requests with these columns besides, or in place of others."""
    import pyarrow as pa
    from pyarrow import parquet

    usual: dict[str, Any] = {
        "t_s": [0.0, 1.0],
        "input_len": [600, 600],
        "output_len": [1, 1],
        "run_start": [[0], [0]],
        "run_len": [[2], [2]],
    }
    table = pa.table({**usual, **columns})
    table = table.replace_schema_metadata(metadata or {"block_tokens": "256"})
    parquet.write_table(table, file)
    return file


@thorough
@given(data=st.data())
def test_damaged_parquet(tmp_path: Path, data: st.DataObject) -> None:
    pytest.importorskip("pyarrow")
    file = parquet_file(tmp_path / "t.parquet", session=["a", "b"])
    file.write_bytes(damaged(file.read_bytes(), data))
    assert_read_or_refused(file)


@pytest.mark.parametrize("text", [b"words", b"session"])
def test_text_that_is_none_in_a_value_or_the_name_of_a_column(tmp_path: Path, text: bytes) -> None:
    pytest.importorskip("pyarrow")
    file = parquet_file(tmp_path / "t.parquet", session=["words", "words"])
    file.write_bytes(file.read_bytes().replace(text, b"\xff" * len(text)))
    with pytest.raises(TraceError, match="it is damaged"):
        read_trace(file)


def damaged(content: bytes, data: st.DataObject) -> bytes:
    """With some bytes changed, and perhaps the end cut off."""
    positions = st.integers(0, len(content) - 1)
    changed = bytearray(content)
    for at, byte in data.draw(st.dictionaries(positions, st.integers(0, 255), max_size=4)).items():
        changed[at] = byte
    return bytes(changed[: data.draw(positions | st.just(len(content)))])


@pytest.mark.parametrize("name", ["t_s", "input_len", "output_len", "run_start", "run_len", "turn"])
@pytest.mark.parametrize("values", [["a", "b"], [True, False], [[True], [False]], [[["a"]], [[]]]])
def test_columns_of_another_type_are_told(tmp_path: Path, name: str, values: list) -> None:
    pytest.importorskip("pyarrow")
    file = parquet_file(tmp_path / "t.parquet", **{name: values})
    with pytest.raises(TraceError, match=f"{name} must hold"):
        read_trace(file)


def test_a_column_that_is_there_twice_is_told(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    file = parquet_file(tmp_path / "t.parquet")
    table = parquet.read_table(file)
    parquet.write_table(table.append_column("t_s", pa.array([5.0, 6.0])), file)
    with pytest.raises(TraceError, match=r"it is damaged: .*duplicate"):
        read_trace(file)


def test_of_nulls_in_lists_the_row_is_told(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    starts = pa.array([[], [None]], pa.list_(pa.int64()))
    file = parquet_file(tmp_path / "t.parquet", run_start=starts)
    with pytest.raises(TraceError, match=r"row 1 \(counted from 0\): run_start has a null"):
        read_trace(file)


def test_lists_that_lie_otherwise_in_memory_are_told(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    fixed = pa.array([[0], [0]], pa.list_(pa.int64(), 1))
    file = parquet_file(tmp_path / "t.parquet", run_start=fixed)
    with pytest.raises(TraceError, match="run_start must hold lists of whole numbers"):
        read_trace(file)


def test_numbers_beyond_64_bits_with_a_sign_are_no_ids(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    most = pa.array([[2**64 - 1], [0]], pa.list_(pa.uint64()))
    lengths = pa.array([[2], [2]], pa.list_(pa.uint64()))
    file = parquet_file(tmp_path / "t.parquet", run_start=most, run_len=lengths)
    with pytest.raises(TraceError, match=r"row 0 \(counted from 0\): runs must start at 0"):
        read_trace(file)


def test_more_blocks_than_memory_holds_are_refused_before_they_are_made(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    file = parquet_file(
        tmp_path / "t.parquet", run_start=[[0] * 50, [0]], run_len=[[1 << 27] * 50, [2]]
    )
    with pytest.raises(TraceError, match=r"row 0 \(counted from 0\): its runs have more than"):
        read_trace(file)


def test_a_turn_that_is_missing_is_none_as_pandas_has_it_too(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    for turns in ([None, 3], [float("nan"), 3.0]):
        file = parquet_file(tmp_path / "t.parquet", turn=turns)
        assert [request.turn for request in read_trace(file).requests] == [None, 3]
    file = parquet_file(tmp_path / "t.parquet", turn=[None, None])
    assert [request.turn for request in read_trace(file).requests] == [None, None]
    with pytest.raises(TraceError, match=r"row 0 \(counted from 0\): turn must be a whole number"):
        read_trace(parquet_file(tmp_path / "t.parquet", turn=[float("inf"), 3.0]))


@pytest.mark.parametrize("number", ["²", "٣", "-1", "0", "9" * 5000, ""])
def test_metadata_with_no_number_in_plain_digits(tmp_path: Path, number: str) -> None:
    pytest.importorskip("pyarrow")
    for key in ("block_tokens", "chunk_tokens"):
        metadata = {key: number} | ({"kvtiers_trace": "1"} if key == "chunk_tokens" else {})
        file = parquet_file(tmp_path / "t.parquet", metadata, req=[0, 1])
        with pytest.raises(TraceError, match=f"must say '{key}'"):
            read_trace(file)
    recorded = {"kvtiers_trace": "1", "chunk_tokens": "256", "chunk_bytes": number}
    assert read_trace(parquet_file(file, recorded, req=[0, 1])).chunk_bytes == 0


def test_a_recording_that_stores_no_output_need_not_have_columns_for_it(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    recorded = {"kvtiers_trace": "1", "chunk_tokens": "256", "stores_output": "false"}
    file = parquet_file(tmp_path / "t.parquet", recorded, req=[1, 0])
    assert [request.prompt_chunks for request in read_trace(file).requests] == [2, 2]


def test_dates_that_python_has_none_for_are_told_by_their_column(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    file = parquet_file(tmp_path / "t.parquet", when=pa.array([2**60, 0], pa.timestamp("ms")))
    with pytest.raises(TraceError, match="column when can't be read"):
        read_trace(file)


# Names -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b", "/dev/null", "\ud800"])
def test_names_that_no_trace_can_have(name: str) -> None:
    with pytest.raises(TraceError):
        read_trace(name)
