"""LMCache's interface over real tiers that break: a fault is a miss, in time."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kvtiers.tiers import TIERS, Tier, TierConfig
from kvtiers.tiers.fs import FsTier
from kvtiers.tiers.wrappers import Fault, FaultyTier
from lmcache_client import (
    PIECE,
    WAIT,
    Make,
    contents,
    damage,
    files,
    fs,
    keys,
    restarts,
    wait_for,
)
from redis_server import RedisServer


@pytest.fixture
def make() -> Iterator[Make]:
    """Adapters that are closed at the end; each ends the one before."""
    with restarts() as start:
        yield start


def test_a_flipped_bit_is_a_miss_and_the_object_is_stored_anew(make: Make, tmp_path: Path) -> None:
    data = contents(6)
    sizes = [len(item) for item in data]
    assert make(tiers=[fs(tmp_path)]).set(keys(6), data)
    client = make(tiers=[fs(tmp_path)])
    damage(random.Random(0).choice(files(tmp_path)))
    loaded = client.get(keys(6), sizes)
    assert loaded.count(None) == 1
    assert all(item in (None, right) for item, right in zip(loaded, data, strict=True))
    assert client.set(keys(6), data)
    client = make(tiers=[fs(tmp_path)])
    assert client.get(keys(6), sizes) == data


def test_what_one_tier_lost_comes_from_the_next(
    make: Make, tmp_path: Path, redis_server: RedisServer
) -> None:
    near, far = fs(tmp_path / "near"), {"type": "redis", "url": redis_server.url}
    data = contents(6)
    sizes = [len(item) for item in data]
    assert make(tiers=[near, far]).set(keys(6), data)
    client = make(tiers=[near, far])
    # Known to be there by the scan at the start, or by this.
    assert client.exists(keys(6)) == [True] * 6
    for index, path in enumerate(files(tmp_path / "near")):
        damage(path) if index % 2 else path.unlink()
    assert client.get(keys(6), sizes) == data


def test_a_dead_redis_costs_what_only_it_has(
    make: Make, tmp_path: Path, redis_server: RedisServer
) -> None:
    tiers = [{"type": "redis", "url": redis_server.url, "deadline": 2}, fs(tmp_path / "far")]
    data = contents(6)
    sizes = [len(item) for item in data]
    client = make(tiers=tiers)
    assert client.set(keys(6), data)
    client = make(tiers=tiers)
    assert client.exists(keys(6)) == [True] * 6
    redis_server.kill()
    assert client.get(keys(6), sizes) == data
    assert client.set(keys(6, "b"), data)
    assert client.exists(keys(6, "b")) == [True] * 6


class FaultyFs(FaultyTier):
    """The filesystem tier, breaking on cue."""

    Config = FsTier.Config
    shared = True
    persistent = True
    script: list[Fault | None]
    calls: tuple[str, ...]

    def __init__(self, config: TierConfig, payload_bytes: int) -> None:
        assert isinstance(config, FsTier.Config)
        inner = FsTier(config, payload_bytes)
        super().__init__(inner, self.script, calls=self.calls)
        self.made.append(self)

    made: list[FaultyFs]


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Callable[..., type[FaultyFs]]:
    """Puts a faulty tier in the place of ``fs``."""
    original = TIERS.get

    def replace(script: list[Fault | None], *calls: str) -> type[FaultyFs]:
        namespace = {"script": script, "calls": calls, "made": []}
        cls = type("ScriptedFs", (FaultyFs,), namespace)

        def get(name: str) -> type[Tier]:
            return cls if name == "fs" else original(name)

        monkeypatch.setattr(TIERS, "get", get)
        return cls

    return replace


def test_a_tier_that_fails_reads_is_left_for_the_next(
    make: Make, tmp_path: Path, faulty: Any, redis_server: RedisServer
) -> None:
    faulty([Fault.ERROR] * 1000, "read")
    tiers = [fs(tmp_path), {"type": "redis", "url": redis_server.url}]
    data = contents(6)
    assert make(tiers=tiers).set(keys(6), data)
    client = make(tiers=tiers)
    assert client.exists(keys(6)) == [True] * 6
    assert client.get(keys(6), [len(item) for item in data]) == data


def test_a_hung_read_ends_at_the_deadline_and_never_reaches_the_buffer(
    make: Make, tmp_path: Path, faulty: Any
) -> None:
    data = contents(2)
    assert make(tiers=[fs(tmp_path)]).set(keys(2), data)
    hung = faulty([Fault.STALL] * 1000, "read")
    client = make(tiers=[fs(tmp_path, deadline=0.3)])
    assert client.exists(keys(2)) == [True] * 2
    targets = [bytearray(b"\xee" * len(item)) for item in data]
    number = client.adapter.submit_batch_get(keys(2), [memoryview(item) for item in targets])
    assert hung.made[-1].stalling.wait(WAIT)
    (done,) = client.wait(number)
    assert done[3] == [False] * 2
    hung.made[-1].release()
    wait_for(client.adapter._hierarchy.idle)
    assert all(item == b"\xee" * len(item) for item in targets)


def test_a_hung_write_holds_up_neither_stores_nor_loads(
    make: Make, tmp_path: Path, faulty: Any
) -> None:
    hung = faulty([Fault.STALL] * 1000, "write")
    client = make(tiers=[fs(tmp_path, deadline=1)])
    data = contents(2)
    assert client.set(keys(2), data)
    assert hung.made[-1].stalling.wait(WAIT)
    # Completes, and what is staged is served, while the tier still holds on to it.
    assert client.get(keys(2), [len(item) for item in data]) == data
    hung.made[-1].release()


def test_a_store_that_no_tier_takes_gives_lmcaches_memory_back_in_time(
    make: Make, tmp_path: Path, faulty: Any
) -> None:
    hung = faulty([Fault.STALL] * 1000, "write")
    client = make(tiers=[fs(tmp_path, deadline=0.3)])
    data = contents(60, 4 * PIECE)
    source = [bytearray(item) for item in data]
    number = client.adapter.submit_batch_set(keys(60), [memoryview(item) for item in source])
    (done,) = client.wait(number)
    assert done[1:] == (False, "no tier took it in time", None)
    # LMCache uses its memory for something else before the tier writes.
    for item in source:
        item[:] = bytes(len(item))
    hung.made[-1].release()
    client.adapter.close()
    faulty([], "read")
    loaded = make(tiers=[fs(tmp_path)]).get(keys(60), [4 * PIECE] * 60)
    assert any(item is not None for item in loaded)
    assert all(item in (None, right) for item, right in zip(loaded, data, strict=True))


def test_a_fault_of_ours_ends_every_batch(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = make(tiers=[fs(tmp_path)])

    def broken() -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(client.adapter._hierarchy, "tick", broken)
    done = client.wait(client.adapter.submit_batch_exists(keys(1)))
    assert done[0][3] == [False]
    assert client.wait(client.adapter.submit_batch_exists(keys(1)))[0][3] == [False]
