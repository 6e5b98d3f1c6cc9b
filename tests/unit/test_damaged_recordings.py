"""What ``kvtiers record`` says of a recording whose bytes, columns or metadata are not its own."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvtiers.tiers.recording import Recorder
from kvtiers.tiers.recording_format import RecordingError, parts_of
from kvtiers.tools.recorded import merge, summarise
from record_kit import ENGINE, serve

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The one part of a recording of four requests."""
    folder = tmp_path_factory.mktemp("rec")
    recorder = Recorder(folder, ENGINE, 1 << 30)
    serve(recorder, *["ab"] * 4)
    recorder.close()
    (part,) = parts_of(folder)
    return part


def assert_told_or_shown(part: Path) -> None:
    told = [str(part)]
    for read in (lambda: summarise([part]), lambda: merge([part], part.with_name("merged"))):
        try:
            read()
        except RecordingError as error:
            told.append(str(error))
    assert all(str(part) in text for text in told)


@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_bytes(whole: Path, tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(whole.read_bytes())
    positions = st.integers(0, len(content) - 1)
    for at, byte in data.draw(st.dictionaries(positions, st.integers(0, 255), max_size=4)).items():
        content[at] = byte
    part = tmp_path / "part.parquet"
    part.write_bytes(bytes(content[: data.draw(positions | st.just(len(content)))]))
    assert_told_or_shown(part)


@pytest.mark.parametrize("text", [b"words", b"session"])
def test_text_that_is_none(whole: Path, tmp_path: Path, text: bytes) -> None:
    """In a value or the name of a column."""
    part = tmp_path / "part.parquet"
    table = parquet.read_table(whole)
    words = pa.array(["words"] * 4)
    table = table.set_column(table.column_names.index("session"), "session", words)
    parquet.write_table(table, part)
    part.write_bytes(part.read_bytes().replace(text, b"\xff" * len(text)))
    with pytest.raises(RecordingError, match="can't be read as Parquet"):
        summarise([part])


@pytest.mark.parametrize(
    "name", ["t_s", "input_len", "output_len", "run_start", "run_len", "session", "tenant"]
)
@pytest.mark.parametrize("values", [[None] * 4, [True] * 4, [[["x"]]] * 4, [[None]] * 4, None])
def test_any_column(whole: Path, tmp_path: Path, name: str, values: Any) -> None:
    """Of another type, with nulls, or not there."""
    table = parquet.read_table(whole)
    if values is None:
        table = table.drop_columns([name])
    else:
        table = table.set_column(table.column_names.index(name), name, pa.array(values))
    part = tmp_path / "part.parquet"
    parquet.write_table(table, part)
    with pytest.raises(RecordingError, match=f"no recording: it.* {name}"):
        summarise([part])


@pytest.mark.parametrize("lengths", [[[2]] * 3 + [[]], [[2]] * 3 + [[None]]])
def test_runs_without_a_length(whole: Path, tmp_path: Path, lengths: list[list[Any]]) -> None:
    table = parquet.read_table(whole)
    column = table.column_names.index("run_len")
    part = tmp_path / "part.parquet"
    parquet.write_table(table.set_column(column, "run_len", pa.array(lengths)), part)
    with pytest.raises(RecordingError, match="run_start and run_len don't fit together"):
        summarise([part])


@pytest.mark.parametrize("key", ["tiers", "chunk_tokens", "chunk_bytes", "stores_output"])
@pytest.mark.parametrize("value", [b"[" * 100_000, b"\xff", b"", b'[{"name": [], "capacity": 1}]'])
def test_any_metadata(whole: Path, tmp_path: Path, key: str, value: bytes) -> None:
    table = parquet.read_table(whole)
    metadata = {**table.schema.metadata, key.encode(): value}
    part = tmp_path / "part.parquet"
    parquet.write_table(table.replace_schema_metadata(metadata), part)
    if key == "stores_output" and value.startswith(b"[{"):
        assert_told_or_shown(part)
        return
    with pytest.raises(RecordingError, match="its metadata describes no engine"):
        summarise([part])


def test_parts_of_different_columns_are_not_merged(whole: Path, tmp_path: Path) -> None:
    other, target = tmp_path / "other.parquet", tmp_path / "merged.parquet"
    parquet.write_table(parquet.read_table(whole).drop_columns(["turn"]), other)
    with pytest.raises(RecordingError, match=r"other\.parquet: its columns are not those"):
        merge([whole, other], target)
    assert list(tmp_path.iterdir()) == [other]
