"""What a LoRA adapter holds: told from its files, and from what a worker loaded."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from kvtiers.connector import adapters, weights
from kvtiers.connector.adapter_loads import LoadedAdapters
from kvtiers.connector.adapters import AdapterBook, AdapterReader, content_of
from kvtiers.connector.weights import Fingerprint, path_fingerprint


@dataclass
class Lora:
    """As much of vLLM's ``LoRARequest`` as is looked at."""

    lora_path: str
    lora_int_id: int = 1
    lora_name: str = "adapter"
    load_inplace: bool = False
    is_3d_lora_weight: bool = False


def write(folder: Path, content: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.bin").write_bytes(content * 100)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "adapter", b"first")


def content(folder: Path) -> bytes | None:
    return content_of(Lora(str(folder)), path_fingerprint(str(folder)))


class Book(AdapterBook):
    """With a clock of its own, and every answer waited for."""

    now = 0.0

    def __init__(self) -> None:
        super().__init__(lambda: self.now)

    def tell(self, lora: Lora, name: str = "request") -> bytes | None:
        self.ask(name, lora)
        self._questions[name].found.exception(10)
        assert not self.waits(name)
        return self.answer(name)


@pytest.fixture
def book() -> Iterator[Book]:
    book = Book()
    yield book
    book.close()


def test_files_are_read_once_and_again_when_they_change(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []

    def counted(path: str) -> Fingerprint:
        reads.append(path)
        return path_fingerprint(path)

    monkeypatch.setattr(adapters, "path_fingerprint", counted)
    reader, lora = AdapterReader(), Lora(str(folder))
    first = reader.read(lora)
    assert reader.read(lora) == first
    assert len(reads) == 1
    write(folder, b"other")
    assert reader.read(lora).value != first.value
    assert len(reads) == 2


def test_new_files_of_the_same_size_and_time_are_noticed(folder: Path, tmp_path: Path) -> None:
    reader, lora = AdapterReader(), Lora(str(folder))
    first = reader.read(lora)
    before = (folder / "adapter_model.bin").stat()
    new = write(tmp_path / "new", b"other") / "adapter_model.bin"
    os.utime(new, ns=(before.st_atime_ns, before.st_mtime_ns))
    new.rename(folder / "adapter_model.bin")
    assert reader.read(lora).value != first.value


def test_files_that_change_while_they_are_read_have_no_fingerprint(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(path: str) -> Fingerprint:
        found = path_fingerprint(path)
        write(folder, b"other")
        return found

    monkeypatch.setattr(adapters, "path_fingerprint", slow)
    reader, lora = AdapterReader(), Lora(str(folder))
    assert reader.read(lora).value is None
    monkeypatch.undo()
    assert reader.read(lora) == path_fingerprint(str(folder))


def test_the_same_files_in_another_layout_of_experts_are_another_content(folder: Path) -> None:
    found = path_fingerprint(str(folder))
    flat = content_of(Lora(str(folder)), found)
    assert flat is not None
    assert len(flat) == 16
    assert content_of(Lora(str(folder), is_3d_lora_weight=True), found) != flat


def test_a_request_is_told_what_its_adapter_holds(book: Book, folder: Path) -> None:
    assert book.tell(Lora(str(folder))) == content(folder)
    assert not book.replaced(Lora(str(folder)))


def test_an_adapter_that_cannot_be_read_is_warned_of_once(
    book: Book, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert book.tell(Lora(str(empty))) is None
    assert book.tell(Lora(str(empty))) is None
    (text,) = caplog.messages
    assert "'adapter' bypass the tiers" in text
    assert "holds no weight files" in text


def test_what_a_worker_loaded_counts_and_not_what_lies_there_now(book: Book, folder: Path) -> None:
    lora, old = Lora(str(folder)), content(folder)
    assert book.tell(lora) == old
    book.loaded({1: old})
    write(folder, b"other")
    assert book.tell(lora) is None
    assert book.replaced(lora), "what vLLM has cached may be of either"
    assert book.tell(Lora(str(folder), load_inplace=True)) == content(folder)
    book.loaded({1: content(folder)})
    assert book.tell(lora) == content(folder)


def test_an_adapter_that_was_unloaded_and_loaded_has_a_new_number(book: Book, folder: Path) -> None:
    assert book.tell(Lora(str(folder))) is not None
    book.loaded({1: content(folder)})
    write(folder, b"other")
    assert book.tell(Lora(str(folder), lora_int_id=2)) == content(folder)


def test_what_ranks_loaded_differently_is_not_told(book: Book, folder: Path) -> None:
    assert book.tell(Lora(str(folder))) is not None
    book.loaded({1: None})
    assert book.tell(Lora(str(folder))) is None


def test_files_that_hang_hold_a_request_up_for_a_while_and_the_thread_for_none(
    book: Book, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hang = threading.Event()
    monkeypatch.setattr(AdapterReader, "read", lambda *_: hang.wait(30))
    book.ask("request", Lora(str(folder)))
    assert book.waits("request")
    book.now += 1000
    assert not book.waits("request")
    assert book.answer("request") is None
    hang.set()


def test_a_request_that_ends_before_the_answer_leaves_nothing(book: Book, folder: Path) -> None:
    book.ask("request", Lora(str(folder)))
    book.forget("request")
    assert not book.asked("request")
    assert not book.waits("request")


def test_a_worker_reports_what_it_loaded_once(folder: Path) -> None:
    loads, lora = LoadedAdapters(), Lora(str(folder))
    assert loads.around(lora, lambda: "model") == "model"
    assert loads.take() == {1: content(folder)}
    loads.around(lora, lambda: "model")
    assert loads.take() == {}
    write(folder, b"other")
    loads.around(lora, lambda: "model")
    assert loads.take() == {1: content(folder)}


def test_files_that_change_under_a_load_are_reported_as_unknown(folder: Path) -> None:
    loads = LoadedAdapters()
    loads.around(Lora(str(folder)), lambda: write(folder, b"other"))
    assert loads.take() == {1: None}


def test_an_adapter_that_comes_from_the_hub_with_its_load_is_known(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached: list[str] = []

    def snapshot(*_: object) -> str | None:
        return cached[0] if cached else None

    monkeypatch.setattr(weights, "_snapshot", snapshot)
    book, loads, lora = Book(), LoadedAdapters(), Lora("someone/adapter")
    assert book.tell(lora) is None, "not fetched yet"
    loads.around(lora, lambda: cached.append(str(folder)))
    assert loads.take() == {1: content(folder)}
    assert book.tell(lora) == content(folder)
    # A later revision is another folder.
    cached[0] = str(write(folder.parent / "later", b"other"))
    assert book.tell(lora) == content(Path(cached[0]))


def test_a_load_that_fails_is_not_one(folder: Path) -> None:
    def fail() -> None:
        raise FileNotFoundError

    loads = LoadedAdapters()
    with pytest.raises(FileNotFoundError):
        loads.around(Lora(str(folder)), fail)
    assert loads.take() == {}
