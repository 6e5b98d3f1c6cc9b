"""``kvtiers verify`` and ``kvtiers ls`` on real tiers: a folder, a URL, a Redis."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from encrypted_tiers import write_keys
from fsspec.implementations.memory import MemoryFileSystem
from kvtiers.tiers.base import ChunkKey, Namespace, Tier
from kvtiers.tiers.buffers import aligned_buffer
from kvtiers.tiers.format import METADATA_BYTES
from kvtiers.tiers.fs import FsTier
from kvtiers.tiers.keyring import new_key
from kvtiers.tiers.redis import RedisTier
from kvtiers.tools import cli
from redis_server import RedisServer
from remote_recipes import name_of, open_remote_tier

HERE = Namespace("ab" * 16, {"model": "org/first", "dtype": "bfloat16"})
ELSEWHERE = Namespace("cd" * 16, {"model": "org/second"})
SMALL, LARGE = 8192, 5 << 20
"""Bytes of a payload: one piece of a chunk that is examined, and several."""
CHUNKS = [ChunkKey(HERE, bytes([n]) * 36, n) for n in range(3)]
OTHER = ChunkKey(ELSEWHERE, b"o" * 36, 0)


@dataclass
class Place:
    """A place as the command line names it, and doors to its bytes.

    Attributes:
        words: what to write on the command line.
        tier: payload size, options -> a tier there.
        name: of a chunk, as the commands show it.
        get, put: its bytes.

    """

    words: list[str]
    tier: Callable[..., Tier]
    name: Callable[[ChunkKey], str]
    get: Callable[[ChunkKey], bytes | None]
    put: Callable[[ChunkKey, bytes], None]

    def store(self, *keys: ChunkKey, nbytes: int = SMALL, **options: Any) -> None:
        tier = self.tier(nbytes, **options)
        for key in keys:
            buffer = aligned_buffer(nbytes)
            buffer[:] = key.hash[:1] * nbytes
            tier.write([key], [buffer])
        tier.close()

    def damage(self, key: ChunkKey, offset: int) -> None:
        content = bytearray(self.get(key))
        content[offset] ^= 1
        self.put(key, bytes(content))


def in_folder(folder: Path) -> Place:
    root = folder / "root"

    def name(key: ChunkKey) -> str:
        return f"{root}/{name_of(key)}"

    def tier(nbytes: int, **options: Any) -> Tier:
        return FsTier(FsTier.Config(path=root, **options), nbytes)

    def get(key: ChunkKey) -> bytes | None:
        return Path(name(key)).read_bytes() if os.path.exists(name(key)) else None

    return Place([str(root)], tier, name, get, lambda k, b: Path(name(k)).write_bytes(b) and None)


def in_store(folder: Path) -> Place:
    def name(key: ChunkKey) -> str:
        return f"{folder}/{name_of(key)}"

    def tier(nbytes: int, **options: Any) -> Tier:
        return open_remote_tier(f"memory://{folder}", 999, nbytes, **options)

    def get(key: ChunkKey) -> bytes | None:
        file = MemoryFileSystem.store.get(name(key))
        return None if file is None else file.getvalue()

    def put(key: ChunkKey, content: bytes) -> None:
        MemoryFileSystem().pipe_file(name(key), content)

    return Place([f"memory://{folder}"], tier, name, get, put)


def in_redis(server: RedisServer, folder: Path) -> Place:
    prefix = f"{folder}:"

    def name(key: ChunkKey) -> str:
        return f"{prefix}v1:{key.namespace.id}:{key.hash.hex()}"

    def tier(nbytes: int, **options: Any) -> Tier:
        return RedisTier(RedisTier.Config(url=server.url, key_prefix=prefix, **options), nbytes)

    def get(key: ChunkKey) -> bytes | None:
        with server.client() as client:
            return client.get(name(key))

    def put(key: ChunkKey, content: bytes) -> None:
        with server.client() as client:
            client.set(name(key), content)

    return Place([server.url, "--key-prefix", prefix], tier, name, get, put)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture(params=["fs", "url", "redis"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "redis":
        return in_redis(request.getfixturevalue("server"), tmp_path)
    return {"fs": in_folder, "url": in_store}[request.param](tmp_path)


@pytest.fixture
def keys(tmp_path: Path) -> str:
    return str(write_keys(tmp_path / "kv.keys", new_key("mine")))


def verify(place: Place, *words: str) -> int:
    # The Redis of the tests is older than what can be read without renewing a use.
    renew = ["--renew-use"] if place.words[0].startswith("redis") else []
    return cli.main(["verify", *place.words, *renew, *words])


# verify -----------------------------------------------------------------------------


def test_sound_chunks_of_any_namespace_and_size_are_sound(place: Place, capsys) -> None:
    place.store(*CHUNKS)
    place.store(OTHER, nbytes=LARGE)
    assert verify(place) == 0
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "4 chunks, 5 MiB, 4 sound, 0 damaged." in shown.err


# What is done to a chunk of SMALL bytes, and what is said of it.
DAMAGE = {
    "payload": (lambda content: flipped(content, 5000), "payload damaged"),
    "metadata": (lambda content: flipped(content, SMALL + 30), "metadata damaged"),
    "magic": (lambda content: flipped(content, SMALL), "no chunk: magic missing"),
    "version": (lambda content: flipped(content, SMALL + 8), "another version of the format"),
    "empty": (lambda content: b"", "shorter than a chunk"),
    "cut within the payload": (lambda content: content[:6000], "shorter than a chunk"),
    "cut within the metadata": (lambda content: content[:-1], "shorter than a chunk"),
    "payload cut out": (lambda content: content[4096:], "payload of another size"),
    "zeros": (lambda content: bytes(len(content)), "shorter than a chunk"),
    "grown": (lambda content: content + bytes(4096) + b"x" * 4096, "no chunk: magic missing"),
}


def flipped(content: bytes, offset: int) -> bytes:
    changed = bytearray(content)
    changed[offset] ^= 1
    return bytes(changed)


@pytest.mark.parametrize("kind", DAMAGE)
def test_each_damaged_chunk_is_named_with_what_is_wrong(place: Place, kind: str, capsys) -> None:
    place.store(*CHUNKS)
    spoil, says = DAMAGE[kind]
    place.put(CHUNKS[1], spoil(place.get(CHUNKS[1])))
    assert verify(place) == 1
    shown = capsys.readouterr()
    [line] = shown.out.splitlines()
    assert line.startswith(f"{place.name(CHUNKS[1])}: ")
    assert says in line
    assert "3 chunks" in shown.err
    assert "2 sound, 1 damaged" in shown.err


@pytest.mark.parametrize(
    ("source", "says"),
    [(CHUNKS[0], "another chunk"), (OTHER, "a chunk of another namespace")],
    ids=["hash", "namespace"],
)
def test_a_sound_chunk_under_a_wrong_name_is_named(place: Place, source, says, capsys) -> None:
    place.store(*CHUNKS, OTHER)
    place.put(CHUNKS[1], place.get(source))
    assert verify(place) == 1
    assert capsys.readouterr().out == f"{place.name(CHUNKS[1])}: {says}\n"


def test_damaged_chunks_are_removed_only_when_asked_for(place: Place, capsys) -> None:
    place.store(*CHUNKS)
    place.damage(CHUNKS[0], 77)
    assert verify(place) == 1
    assert place.get(CHUNKS[0]) is not None
    assert verify(place, "--remove") == 1
    assert "1 damaged, 1 removed" in capsys.readouterr().err
    assert place.get(CHUNKS[0]) is None
    assert verify(place) == 0


def test_json_has_it_all(place: Place, capsys) -> None:
    place.store(*CHUNKS)
    place.damage(CHUNKS[2], 0)
    assert verify(place, "--json") == 1
    [report] = json.loads(capsys.readouterr().out)
    assert report["damaged"] == [{"where": place.name(CHUNKS[2]), "why": "payload damaged"}]
    assert (report["chunks"], report["sound"], report["clear"]) == (3, 2, 3)
    assert report["bytes"] == 3 * (SMALL + METADATA_BYTES)


def test_encrypted_chunks_are_judged_with_their_keys(place: Place, keys: str, capsys) -> None:
    place.store(*CHUNKS, encryption=keys)
    place.store(OTHER, nbytes=LARGE, encryption=keys)
    assert verify(place, "--keys", keys) == 0
    place.damage(OTHER, LARGE - 1)
    assert verify(place, "--keys", keys) == 1
    assert capsys.readouterr().out == (
        f"{place.name(OTHER)}: damaged, or not made with the key that it names\n"
    )


def test_without_its_key_a_chunk_is_told_to_be_unjudged(place: Place, keys: str, capsys) -> None:
    place.store(*CHUNKS, encryption=keys)
    place.damage(CHUNKS[0], 77)
    place.damage(CHUNKS[1], SMALL + 1)
    assert verify(place) == 1
    shown = capsys.readouterr()
    assert shown.out == f"{place.name(CHUNKS[1])}: no chunk: magic missing\n"
    assert "2 chunks are encrypted with the key 'mine', which is not here" in shown.err


@pytest.mark.parametrize("made", [in_folder, in_store])
def test_it_renews_no_use(made: Callable[[Path], Place], tmp_path: Path) -> None:
    place = made(tmp_path)
    place.store(*CHUNKS)
    tier = place.tier(SMALL)
    before = {entry.key: entry.last_used for entry in tier.scan()}
    assert verify(place) == 0
    assert cli.main(["ls", *place.words]) == 0
    assert {entry.key: entry.last_used for entry in tier.scan()} == before


def test_a_redis_that_would_renew_uses_is_read_only_when_told_to(
    server: RedisServer, tmp_path: Path, capsys
) -> None:
    place = in_redis(server, tmp_path)
    place.store(*CHUNKS)
    assert cli.main(["verify", *place.words]) == 2
    told = capsys.readouterr()
    assert "older than Redis 7.2" in told.err
    assert told.out == ""
    assert cli.main(["verify", *place.words, "--renew-use"]) == 0


def test_a_value_of_another_type_is_named(server: RedisServer, tmp_path: Path, capsys) -> None:
    place = in_redis(server, tmp_path)
    place.store(*CHUNKS)
    with server.client() as client:
        client.delete(place.name(CHUNKS[0]))
        client.rpush(place.name(CHUNKS[0]), "x")
    assert verify(place) == 1
    shown = capsys.readouterr()
    assert f"{place.name(CHUNKS[0])}: can't be read: WRONGTYPE" in shown.out
    assert "2 sound, 1 damaged" in shown.err


def test_a_link_and_a_socket_are_no_chunks_and_removed_as_what_they_are(
    tmp_path: Path, monkeypatch, capsys
) -> None:
    place = in_folder(tmp_path)
    place.store(*CHUNKS)
    elsewhere = tmp_path / "sound"
    Path(place.name(CHUNKS[0])).rename(elsewhere)
    Path(place.name(CHUNKS[0])).symlink_to(elsewhere)
    named = Path(place.name(CHUNKS[1]))
    named.unlink()
    monkeypatch.chdir(named.parent)  # a socket's path must be short
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(named.name)
    assert verify(place, "--remove") == 1
    shown = capsys.readouterr()
    assert shown.out.count("is not a file") == 2
    assert "1 sound, 2 damaged, 2 removed" in shown.err
    assert elsewhere.exists()
    assert verify(place) == 0


def test_a_configuration_names_places_and_keys(tmp_path: Path, keys: str, capsys) -> None:
    place = in_folder(tmp_path)
    place.store(*CHUNKS, encryption=keys)
    file = tmp_path / "kvtiers.yaml"
    tiers = ["cpu", {"type": "fs", "path": place.words[0], "encryption": {"key_file": keys}}]
    file.write_text(yaml.safe_dump({"tiers": tiers}))
    assert cli.main(["verify", "--config", str(file)]) == 0
    assert "3 sound" in capsys.readouterr().err


def test_what_can_not_be_read_is_named_and_the_rest_is_read(tmp_path: Path, capsys) -> None:
    place = in_folder(tmp_path)
    place.store(*CHUNKS)
    Path(place.name(CHUNKS[0])).unlink()
    Path(place.name(CHUNKS[0])).mkdir()
    Path(place.name(CHUNKS[1])).unlink()
    os.mkfifo(place.name(CHUNKS[1]))
    assert verify(place) == 1
    shown = capsys.readouterr()
    assert shown.out.count("is not a file") == 2
    assert "1 sound, 2 damaged" in shown.err


def test_files_with_padding_are_sound(tmp_path: Path) -> None:
    place = in_folder(tmp_path)
    place.store(*CHUNKS, nbytes=1 << 16, block_size=1 << 16)
    assert os.stat(place.name(CHUNKS[0])).st_size == 1 << 17
    assert verify(place) == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "Name one or more places, or a file with --config, and not both"),
        (["/nowhere"], "/nowhere is no folder"),
        (["/proc"], "/proc has no folder 'v1'"),
        (["/tmp", "--keys", "/nowhere"], "The key file /nowhere can't be read"),
        (["redis://host:port"], "url is 'redis://host:port' (from the command line): its port"),
        (["s4://bucket"], "fsspec knows no protocol 's4'"),
    ],
)
@pytest.mark.parametrize("command", ["verify", "ls"])
def test_what_names_no_place_is_told(command: str, words: list[str], says: str, capsys) -> None:
    assert cli.main([command, *words]) == 2
    assert says in capsys.readouterr().err


# ls ---------------------------------------------------------------------------------


def test_a_listing_says_whose_chunks_lie_there(place: Place, keys: str, capsys) -> None:
    place.store(*CHUNKS)
    place.store(OTHER, nbytes=LARGE, encryption=keys)
    assert cli.main(["ls", *place.words, "--json"]) == 0
    [shown] = json.loads(capsys.readouterr().out)
    second, first = shown["namespaces"]
    assert (second["namespace"], first["namespace"]) == (ELSEWHERE.id, HERE.id)
    assert first["facts"] == HERE.facts
    assert (first["chunks"], first["bytes"]) == (3, 3 * (SMALL + METADATA_BYTES))
    assert (second["chunks"], second["bytes"]) == (1, LARGE + METADATA_BYTES)
    assert time.time() - 60 < first["oldest_use"] <= first["newest_use"] <= time.time() + 1
    if not place.words[0].startswith("redis"):
        assert (first["encryption"], second["encryption"]) == (["in clear"], ["key mine"])
    assert cli.main(["ls", *place.words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [
        [ELSEWHERE.id, "org/second"],
        [HERE.id, "org/first"],
    ]


def test_a_terminal_gets_a_table_with_titles(tmp_path: Path, monkeypatch, capsys) -> None:
    place = in_folder(tmp_path)
    place.store(*CHUNKS)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main(["ls", *place.words]) == 0
    shown = capsys.readouterr()
    assert "namespace" in shown.out
    assert "org/first" in shown.out
    assert "3 chunks, 36 KiB, namespaces: 1." in shown.err


def test_single_chunks_are_listed_with_where_they_lie(place: Place, capsys) -> None:
    place.store(*CHUNKS)
    assert cli.main(["ls", *place.words, "--chunks"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split("  ")[-1] for line in lines} == {place.name(key) for key in CHUNKS}
    assert cli.main(["ls", *place.words, "--chunks", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {row["hash"] for row in rows} == {key.hash.hex() for key in CHUNKS}


def test_a_listing_changes_nothing(tmp_path: Path) -> None:
    place = in_folder(tmp_path)
    place.store(*CHUNKS)
    root = Path(place.words[0])
    before = {path: path.stat() for path in root.rglob("*")}
    assert cli.main(["ls", str(root)]) == cli.main(["verify", str(root)]) == 0
    after = {path: path.stat() for path in root.rglob("*")}
    assert after.keys() == before.keys()
    assert all(after[p].st_mtime_ns == before[p].st_mtime_ns for p in before)


# keygen -----------------------------------------------------------------------------


def test_a_made_key_works_and_its_file_is_private(tmp_path: Path, capsys) -> None:
    file = tmp_path / "kv.keys"
    assert cli.main(["keygen", str(file), "--id", "first"]) == 0
    assert cli.main(["keygen", str(file), "--id", "second"]) == 0
    assert "'first', which stands first, encrypts" in capsys.readouterr().err
    assert file.stat().st_mode & 0o777 == 0o600
    place = in_folder(tmp_path)
    place.store(*CHUNKS, encryption=str(file))
    assert verify(place, "--keys", str(file)) == 0
    assert cli.main(["ls", place.words[0]]) == 0
    assert capsys.readouterr().out.rstrip().endswith("key first")


def test_a_printed_key_is_a_line_of_a_key_file(capsys) -> None:
    assert cli.main(["keygen", "--id", "a"]) == 0
    assert capsys.readouterr().out.startswith("a:")


def test_an_id_that_is_there_is_not_added_again(tmp_path: Path, capsys) -> None:
    file = tmp_path / "kv.keys"
    cli.main(["keygen", str(file), "--id", "a"])
    before = file.read_text()
    assert cli.main(["keygen", str(file), "--id", "a"]) == 1
    assert "names the key id 'a' twice" in capsys.readouterr().err
    assert file.read_text() == before
    assert list(tmp_path.iterdir()) == [file]
