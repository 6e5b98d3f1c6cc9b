"""Whatever lies in ``.keeping``: the keeper goes on, and touches nothing that is not its root's.

Who can write in a root can plant there what no engine wrote, with checksums that are right.
It may spoil the order of eviction, or the bound. It may not make an engine delete, write or
move anything elsewhere, wait, take memory without end, or stop keeping the bound.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvtiers.policies import Policy, TierInfo
from kvtiers.policies.arc import ArcPolicy
from kvtiers.policies.lru import LruPolicy
from kvtiers.policies.quota import with_quotas
from kvtiers.tiers.access_log import NO_TENANT, Encoder, Header, Kind, Record, framed
from kvtiers.tiers.base import ALIGNMENT, ReadOutcome, WriteOutcome
from kvtiers.tiers.keeper_logs import SILENT_SECONDS
from kvtiers.tiers.lease import PATIENCE
from kvtiers.tiers.root_index import Facts
from root_kit import NAMESPACE, Clock, Engine, key, settled

ELSEWHERE = "../../elsewhere"
HASH = bytes.fromhex("abcd")
PLANTED = "w-0123456789abcdef"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


def keeping(root: Path) -> Path:
    folder = root / "v1" / ".keeping"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def plant_log(root: Path, data: bytes, writer: str = PLANTED) -> None:
    folder = keeping(root) / writer
    folder.mkdir(exist_ok=True)
    (folder / "log.000001").write_bytes(data)


def plant_lease(root: Path, name: str, data: bytes, generation: int = 1) -> None:
    folder = keeping(root) / "lease" / f"{generation:012d}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data)


POLICIES = {
    "lru": LruPolicy,
    "arc": ArcPolicy,
    "quotas": lambda infos, clock: with_quotas(LruPolicy(infos, clock=clock)),
}


def under(engine: Engine, policy: str) -> Engine:
    """The engine, to keep the bound in the order of that policy."""
    terms = engine.keeping._terms
    info = replace(terms.tier, tenant_quota=terms.tier.capacity // 3)

    def make(infos: Sequence[TierInfo], clock: Callable[[], float]) -> Policy:
        return POLICIES[policy](infos, clock=clock)

    engine.keeping._terms = replace(terms, tier=info, make_policy=make)
    return engine


def goes_on(root: Path, capacity: int = 64, prompt: int = 77, policy: str = "lru") -> Engine:
    """A new engine comes to keep the bound, stores, and reads."""
    clock = Clock()
    engine = under(Engine(root, capacity, clock), policy)
    for _ in range(4):
        clock.now += PATIENCE + 1
        engine.keeping._step()
    clock.now += SILENT_SECONDS + 1
    engine.keeping._step()
    assert engine.keeps
    engine.tier.usage()
    keys = [key(n, prompt=prompt) for n in range(3)]
    assert engine.write(*keys) == [WriteOutcome.STORED] * 3
    assert engine.read(*keys) == [ReadOutcome.HIT] * 3
    engine.keeping._step()
    return engine


def record(kind: Kind, namespace: str, *hashes: bytes) -> bytes:
    encoder = Encoder()
    head = encoder.header(Header(0, ALIGNMENT, {"pid": 1}))
    return head + encoder.records([Record(kind, namespace, hashes or (HASH,), 0, None, ALIGNMENT)])


@pytest.fixture
def stranger(tmp_path: Path) -> Path:
    """A file outside of the root that looks like a chunk's."""
    file = tmp_path / "elsewhere" / "ab" / "abcd.kv"
    file.parent.mkdir(parents=True)
    file.write_bytes(bytes(ALIGNMENT))
    return file


@pytest.mark.parametrize("name", [ELSEWHERE, "{}", "a/../../../elsewhere", ".", "..", "x\0y", ""])
@pytest.mark.parametrize("kind", [Kind.COMING, Kind.USED, Kind.GONE, Kind.THERE])
def test_a_log_names_nothing_outside_of_the_root(root, stranger, name, kind):
    plant_log(root, record(kind, name.format(stranger.parent.parent)))
    engine = goes_on(root, capacity=4)
    engine.write(*(key(n, prompt=5) for n in range(4)))
    settled([engine])
    assert stranger.exists()


def test_a_snapshot_names_nothing_outside_of_the_root(root, stranger):
    head = {"namespaces": [ELSEWHERE], "writers": {}}
    chunk, facts = b"\0\0" + HASH, Facts(1 << 40, 0.0).packed()
    body = b"C" + struct.pack("<BB", len(chunk), len(facts)) + chunk + facts
    data = b"H" + json.dumps(head).encode()
    data = framed(data) + framed(body) + framed(b"Z" + struct.pack("<Q", 1))
    plant_lease(root, "snapshot", data)
    engine = goes_on(root)
    settled([engine])
    assert stranger.exists()


OWNERS = [b"[]", b"null", b"7", b'{"pid": "x"}', b"[" * 100_000, b"\xff", b'{"boot": []}', b""]


@pytest.mark.parametrize("owner", OWNERS, ids=lambda owner: str(owner[:12]))
def test_who_writes_a_log_may_be_anything(root, owner):
    plant_log(root, framed(struct.pack("<BBQI", Kind.HEADER, 1, 1 << 63, 1) + owner))
    goes_on(root)


BEATS = [
    b"",
    b"[]",
    b"[" * 100_000,
    b'{"owner": []}',
    b'{"owner": null}',
    b'{"limits": []}',
    b'{"limits": {"w-1": "x"}}',
    b'{"limits": {"w-1": null}}',
    b'{"nbytes": "x"}',
    b'{"nbytes": null, "chunks": []}',
    b'{"capacity": "x"}',
    b'{"capacity": 1e999}',
    b'{"resigned": 3}',
    b'{"count": {}}',
    b'{"later": 1}',
    b"\xff" * 100,
]


@pytest.mark.parametrize("beat", BEATS, ids=lambda beat: str(beat[:30]))
def test_a_beat_may_be_anything(root, beat):
    plant_lease(root, "beat", beat)
    onlooker = Engine(root, 8, Clock())
    onlooker.step()
    usage = onlooker.tier.usage()
    assert isinstance(usage.nbytes, int)
    assert isinstance(usage.chunks, int)
    goes_on(root)


@pytest.mark.parametrize("name", ["1" * 200, "٣", "9" * 18 + ".over", "0x1", "-1", "1.over.over"])
def test_a_generation_may_have_any_name(root, name):
    (keeping(root) / "lease" / name).mkdir(parents=True)
    goes_on(root)


def in_place_of(path: Path, kind: str, target: Path) -> None:
    """What should not be there, instead of a file or folder of ours."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        (path / "in it").mkdir(parents=True)
    elif kind == "endless":
        path.symlink_to("/dev/zero")
    elif kind == "link":
        path.symlink_to(target)
    elif kind == "file":
        path.write_bytes(b"x")
    else:
        with path.open("wb") as file:
            file.truncate(1 << 44)


FILES = [
    f"{PLANTED}/log.000001",
    "lease/000000000001/beat",
    "lease/000000000001/snapshot",
    "lease/000000000001.over/beat",
    "lease/000000000001.over/snapshot",
    "lease/000000000002/beat.new",
    "lease/000000000002/snapshot.new",
    "salt",
]
KINDS = ["pipe", "folder", "endless", "link", "sparse"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", KINDS)
def test_no_file_is_waited_for_or_written_through_a_link(root, tmp_path, name, kind):
    target = tmp_path / "precious"
    target.write_bytes(b"precious")
    try:
        in_place_of(keeping(root) / name, kind, target)
    except OSError as error:
        if error.errno != errno.EFBIG:
            raise
        in_place_of(keeping(root) / name, "file", target)
    engine = goes_on(root)
    settled([engine])
    engine.close()
    assert target.read_bytes() == b"precious"


@pytest.mark.parametrize("name", [PLANTED, f"{PLANTED}.over", "w-", "w-.over"])
@pytest.mark.parametrize("kind", ["pipe", "file", "link"])
def test_what_is_no_writers_folder_is_passed_over(root, tmp_path, name, kind):
    outside = tmp_path / "outside"
    outside.mkdir()
    for number in range(1, 4):
        (outside / f"log.{number:06d}").write_bytes(b"theirs")
    in_place_of(keeping(root) / name, kind, outside)
    engine = goes_on(root)
    settled([engine])
    engine.close()
    assert len(list(outside.iterdir())) == 3


def test_a_lease_behind_a_link_is_nobodys(root, tmp_path):
    outside = tmp_path / "outside"
    (outside / "000000000001.over").mkdir(parents=True)
    (outside / "000000000001.over" / "snapshot").write_bytes(b"theirs")
    (outside / "000000000003").mkdir()
    (keeping(root) / "lease").symlink_to(outside)
    engine = Engine(root, 8, Clock())
    settled([engine])
    assert not engine.keeps
    assert engine.write(key(0)) == [WriteOutcome.REFUSED]
    names = sorted(str(path.relative_to(outside)) for path in outside.rglob("*"))
    assert names == ["000000000001.over", "000000000001.over/snapshot", "000000000003"]


@pytest.mark.parametrize("name", ["000000000001", "000000000001.over"])
def test_a_generation_behind_a_link_is_none(root, tmp_path, name):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "snapshot").write_bytes(b"theirs")
    (keeping(root) / "lease").mkdir()
    (keeping(root) / "lease" / name).symlink_to(outside)
    goes_on(root).close()
    assert [file.name for file in outside.iterdir()] == ["snapshot"]


def test_more_namespaces_than_there_can_be_are_not_counted(root):
    encoder = Encoder()
    parts = [encoder.header(Header(0, ALIGNMENT, {}))]
    for number in range((1 << 16) + 5):
        parts.append(encoder.records([Record(Kind.THERE, f"{number:032x}", (HASH,))]))
        if number % 60_000 == 59_999:
            # A segment's numbers are two bytes, so that one more segment is needed.
            plant_log(root, b"".join(parts))
            encoder = Encoder()
            parts = [encoder.header(Header(0, ALIGNMENT, {}))]
    (keeping(root) / PLANTED / "log.000002").write_bytes(b"".join(parts))
    goes_on(root)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_files_that_were_cut_to_nothing_are_counted(root, policy):
    for name in ("ab", "cd"):
        folder = root / "v1" / ("ef" * 16) / name
        folder.mkdir(parents=True)
        (folder / f"{name}{name}.kv").touch()
    goes_on(root, policy=policy)


# Few names, so that they meet: neighbours, cycles, another's chunks.
_DIGESTS = st.sampled_from([bytes([n]) * 4 for n in range(6)])


@st.composite
def records(draw: st.DrawFn) -> Record:
    return Record(
        draw(st.sampled_from([Kind.COMING, Kind.THERE, Kind.USED, Kind.GONE, Kind.SHORT])),
        draw(st.sampled_from(["ab" * 16, "cd" * 16])),
        tuple(draw(st.lists(_DIGESTS, min_size=1, max_size=8))),
        draw(st.integers(-1, 5) | st.just(2**31 - 1)),
        draw(st.none() | _DIGESTS),
        draw(st.sampled_from([0, ALIGNMENT, 2 * ALIGNMENT, (2**32 - 1) * ALIGNMENT])),
        draw(st.sampled_from([NO_TENANT, b"tenant11"])),
    )


def written(items: list[Record | bytes]) -> bytes:
    encoder = Encoder()
    parts = [encoder.header(Header(0, ALIGNMENT, {}))]
    parts += [
        framed(item) if isinstance(item, bytes) else encoder.records([item]) for item in items
    ]
    return b"".join(parts)


def temporary_root() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp())
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


@FUZZ
@given(
    st.lists(records() | st.binary(min_size=1, max_size=60), max_size=12),
    st.sampled_from(sorted(POLICIES)),
)
def test_records_of_any_kind_and_order_are_survived(items, policy):
    for root in temporary_root():
        plant_log(root, written(items))
        engine = goes_on(root, policy=policy)
        engine.write(*(key(n, prompt=5) for n in range(8)))
        settled([engine])
        engine.close()
        # What was written down of it is understood by the next one.
        goes_on(root, prompt=78, policy=policy).close()


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
_POSITIONS = st.lists(st.integers(-2, 1 << 70) | _JSON, min_size=3, max_size=5)


@FUZZ
@given(
    st.lists(st.sampled_from(["ab" * 16, "cd" * 16, "..", "x/y"]) | _JSON, max_size=3) | _JSON,
    st.dictionaries(st.sampled_from([PLANTED, "../w-1", "x"]), _POSITIONS, max_size=2) | _JSON,
    st.lists(st.tuples(st.binary(max_size=80), st.binary(max_size=90)), max_size=3),
)
def test_a_snapshot_may_be_anything(namespaces, writers, chunks):
    for root in temporary_root():
        head = json.dumps({"namespaces": namespaces, "writers": writers}).encode()
        rows = [struct.pack("<BB", len(c), len(f)) + c + f for c, f in chunks]
        data = framed(b"H" + head) + framed(b"C" + b"".join(rows))
        plant_lease(root, "snapshot", data + framed(b"Z" + struct.pack("<Q", len(chunks))))
        goes_on(root).close()


@pytest.mark.parametrize(
    "value", ["x\n" * 100_000, {"\x1b[2J\n": "x" * 100_000}, [[[["x"] * 9999]]]]
)
def test_facts_that_do_not_fit_are_told_in_short_lines(root, caplog, value):
    folder = root / "v1" / NAMESPACE.id
    folder.mkdir(parents=True)
    (folder / "namespace.json").write_text(json.dumps({"model": value, "\x1b]0;\x07": 1}))
    engine = Engine(root, 8, Clock())
    assert engine.write(key(0)) == [WriteOutcome.REFUSED]
    assert "model: stored" in caplog.text
    assert "\x1b" not in caplog.text
    assert len(caplog.text) < 2000
