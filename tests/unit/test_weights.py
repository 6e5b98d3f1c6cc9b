import json
import os
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvtiers.connector.weights import (
    MAX_TENSORS,
    PAGE,
    engine_fingerprint,
    path_fingerprint,
)

TABLE = (10).to_bytes(8, "little") + b'{"t":   5}'


def safetensors(path: Path, tensors: dict[str, bytes]) -> None:
    header, offset = {}, 0
    for name, data in tensors.items():
        header[name] = {
            "dtype": "U8",
            "shape": [len(data)],
            "data_offsets": [offset, offset + len(data)],
        }
        offset += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(tensors.values()))


def noise(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


def model(folder: Path, seed: int = 0, size: int = 3 * PAGE) -> Path:
    folder.mkdir(parents=True)
    safetensors(folder / "a.safetensors", {f"layer.{i}": noise(seed + i, size) for i in range(4)})
    safetensors(folder / "b.safetensors", {"norm": noise(seed + 9, 40), "empty": b""})
    (folder / "config.json").write_text('{"hidden_size": 64}')
    return folder


def value(path: Path, **options: bool) -> str:
    found = path_fingerprint(str(path), **options)
    assert found.value is not None, found.reason
    return found.value


def config(path: object, load_format: str = "auto", **model_options: object) -> SimpleNamespace:
    return SimpleNamespace(
        model_config=SimpleNamespace(model=str(path), revision=None, **model_options),
        load_config=SimpleNamespace(load_format=load_format, download_dir=None),
    )


def test_a_renamed_folder_is_the_same_model(tmp_path: Path) -> None:
    before = value(model(tmp_path / "one"))
    os.rename(tmp_path / "one", tmp_path / "two")
    assert value(tmp_path / "two") == before
    assert len(before) == 32


def test_order_in_the_folder_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model(tmp_path / "m")
    names = os.listdir(folder)
    found = set()
    for order in (sorted(names), sorted(names, reverse=True)):
        monkeypatch.setattr(os, "listdir", lambda _path, order=order: list(order))
        found.add(value(folder))
    assert len(found) == 1


@pytest.mark.parametrize("tensor", ["layer.0", "layer.3", "norm"])
def test_new_content_of_one_tensor_is_seen(tmp_path: Path, tensor: str) -> None:
    tensors = {f"layer.{i}": noise(i, 5 * PAGE) for i in range(4)} | {"norm": noise(9, 40)}
    one, two = tmp_path / "one.safetensors", tmp_path / "two.safetensors"
    safetensors(one, tensors)
    safetensors(two, tensors | {tensor: noise(77, len(tensors[tensor]))})
    assert one.stat().st_size == two.stat().st_size
    assert value(one) != value(two)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_change_wider_than_the_gaps_between_samples_is_seen(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    size = data.draw(st.integers(1, 4 * PAGE), label="tensor bytes")
    tensors = {f"t{i}": noise(i, size) for i in range(3)}
    folder = tmp_path_factory.mktemp("w")
    safetensors(folder / "m.safetensors", tensors)
    before = value(folder)
    # One sampled page lies in each tensor, so a gap is below two tensors.
    start = data.draw(st.integers(0, size), label="start")
    raw = bytearray((folder / "m.safetensors").read_bytes())
    base = len(raw) - 3 * size
    for index in range(base + start, base + start + 2 * size):
        raw[index] ^= 0xFF
    (folder / "m.safetensors").write_bytes(raw)
    assert value(folder) != before


@pytest.mark.parametrize(
    ("name", "text"),
    [("config.json", '{"hidden_size": 65}'), ("quantize_config.json", '{"bits": 4}')],
)
def test_how_the_weights_are_read_counts(tmp_path: Path, name: str, text: str) -> None:
    folder = model(tmp_path / "m")
    before = value(folder)
    (folder / name).write_text(text)
    assert value(folder) != before


def test_files_that_are_not_weights_do_not_count(tmp_path: Path) -> None:
    folder = model(tmp_path / "m")
    before = value(folder)
    (folder / "README.md").write_text("better in every way")
    (folder / "pytorch_model.bin").write_bytes(noise(1, 100))
    assert value(folder) == before
    assert value(folder, pickled=True) != before


@pytest.mark.parametrize("name", ["model.bin", "model.pt", "model.gguf"])
def test_other_formats_are_told_apart_by_their_pages(tmp_path: Path, name: str) -> None:
    digests = set()
    for seed, size in ((1, 900_000), (2, 900_000), (1, 900_001), (3, 10)):
        path = tmp_path / name
        path.write_bytes(noise(seed, size))
        found = path_fingerprint(str(path))
        assert found.bytes_read <= 64 * PAGE
        digests.add(found.value)
    assert len(digests) == 4


def test_reading_is_bounded_however_many_tensors_there_are(tmp_path: Path) -> None:
    tensors = {f"expert.{i}": bytes([i % 251]) * 5 for i in range(MAX_TENSORS + 500)}
    safetensors(tmp_path / "moe.safetensors", tensors)
    found = path_fingerprint(str(tmp_path))
    header = int.from_bytes((tmp_path / "moe.safetensors").read_bytes()[:8], "little")
    assert found.bytes_read == 8 + header + MAX_TENSORS * 5


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 100, (50).to_bytes(8, "little") + b"{" * 60, b"\0" * 8 + b"x", TABLE]
)
def test_a_broken_file_is_a_reason_and_no_exception(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.safetensors").write_bytes(content)
    found = path_fingerprint(str(tmp_path))
    assert found.value is None
    assert "m.safetensors" in found.reason or str(tmp_path) in found.reason


def test_a_truncated_tensor_is_a_reason(tmp_path: Path) -> None:
    safetensors(tmp_path / "m.safetensors", {"t": noise(0, PAGE)})
    whole = (tmp_path / "m.safetensors").read_bytes()
    (tmp_path / "m.safetensors").write_bytes(whole[:-1])
    assert "ends before byte" in path_fingerprint(str(tmp_path)).reason


@pytest.mark.parametrize("load_format", ["dummy", "runai_streamer", "tensorizer", "sharded_state"])
def test_weights_from_elsewhere_have_no_fingerprint(tmp_path: Path, load_format: str) -> None:
    found = engine_fingerprint(config(model(tmp_path / "m"), load_format))
    assert found.value is None
    assert f"load_format={load_format}" in found.reason


def test_the_user_can_name_streamed_weights_but_not_random_ones(tmp_path: Path) -> None:
    folder = model(tmp_path / "m")
    named = {v: engine_fingerprint(config(folder, "tensorizer"), v).value for v in ("v1", "v2")}
    assert None not in named.values()
    assert named["v1"] != named["v2"]
    assert engine_fingerprint(config(folder, "dummy"), "v1").value is None


def test_a_drafter_with_other_weights_makes_another_engine(tmp_path: Path) -> None:
    target = config(model(tmp_path / "target"))
    alone = engine_fingerprint(target).value
    found = {alone}
    for seed in (100, 200):
        draft = model(tmp_path / f"draft{seed}", seed)
        target.speculative_config = SimpleNamespace(
            draft_model_config=SimpleNamespace(model=str(draft), revision=None)
        )
        found.add(engine_fingerprint(target).value)
    assert len(found) == 3
    assert alone == value(tmp_path / "target")


def test_a_hub_id_is_found_in_the_local_cache(tmp_path: Path) -> None:
    repo = tmp_path / "models--org--tiny"
    model(repo / "snapshots" / "abc123")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc123")
    found = path_fingerprint("org/tiny", download_dir=str(tmp_path))
    assert found.value == value(repo / "snapshots" / "abc123")
    pinned = path_fingerprint("org/tiny", revision="0" * 40, download_dir=str(tmp_path))
    assert pinned.value is None
    assert "not in the local hub cache" in pinned.reason
