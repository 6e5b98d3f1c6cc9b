"""LMCache's interface over real tiers: what is promised of bytes, ids and bounds."""

from __future__ import annotations

import ctypes
import select
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from encrypted_tiers import write_keys
from kvtiers.connector import lmcache
from lmcache_client import (
    PIECE,
    WAIT,
    Make,
    contents,
    files,
    fs,
    keys,
    restarts,
    scanned,
    wait_for,
)
from redis_server import RedisServer


@pytest.fixture
def make() -> Iterator[Make]:
    """Adapters that are closed at the end; each ends the one before."""
    with restarts() as start:
        yield start


@pytest.fixture(params=["fs", "fsspec", "redis", "encrypted"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """One tier of each kind that outlives the server."""
    if request.param == "fs":
        return fs(tmp_path / "fs")
    if request.param == "encrypted":
        return fs(tmp_path / "fs", encryption=str(write_keys(tmp_path / "kv.keys")))
    if request.param == "fsspec":
        return {"type": "fs", "path": f"memory://{tmp_path}"}
    server: RedisServer = request.getfixturevalue("redis_server")
    return {"type": "redis", "url": server.url}


# Bytes ----------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_objects_come_back_also_after_a_restart(
    make: Make, tier: dict[str, Any], policy: str
) -> None:
    names, data = keys(20), contents(20)
    sizes = [len(item) for item in data]
    client = make(tiers=[tier], policy=policy)
    assert client.exists(names) == [False] * 20
    assert client.get(names, sizes) == [None] * 20
    assert client.set(names, data)
    assert client.exists(names) == [True] * 20
    assert client.get(names, sizes) == data

    client = make(tiers=[tier], policy=policy)
    assert client.exists([*names, "org/model@00000001@0@ff"]) == [True] * 20 + [False]
    # In the order that suits LMCache, all of them or some.
    assert client.get(names[::-2], sizes[::-2]) == data[::-2]
    assert client.get(names, sizes) == data


@pytest.mark.parametrize("nbytes", [1, PIECE - 9, PIECE - 8, PIECE - 7, PIECE, 5 * PIECE])
def test_objects_may_have_any_size(make: Make, tmp_path: Path, nbytes: int) -> None:
    data = contents(3, nbytes)
    assert make(tiers=[fs(tmp_path)]).set(keys(3), data)
    assert make(tiers=[fs(tmp_path)]).get(keys(3), [nbytes] * 3) == data


def test_models_with_objects_of_other_sizes_share_the_tiers(make: Make, tmp_path: Path) -> None:
    small, large = contents(4, 1000), contents(4, 300_000)
    client = make(tiers=[fs(tmp_path)])
    assert client.set(keys(4, "s"), small)
    assert client.set(keys(4, "l"), large)
    client = make(tiers=[fs(tmp_path)])
    mixed = [*keys(4, "s"), *keys(4, "l")]
    assert client.get(mixed, [1000] * 4 + [300_000] * 4) == small + large


def test_an_object_of_another_layout_is_a_miss_and_makes_way(make: Make, tmp_path: Path) -> None:
    old, new = contents(4, 300_000), contents(4, 150_000, seed=1)
    assert make(tiers=[fs(tmp_path)]).set(keys(4), old)
    client = scanned(make(tiers=[fs(tmp_path)]))
    assert client.get(keys(4), [150_000] * 4) == [None] * 4
    assert client.set(keys(4), new)
    assert client.get(keys(4), [150_000] * 4) == new
    client = make(tiers=[fs(tmp_path)])
    assert client.get(keys(4), [150_000] * 4) == new


def test_what_is_left_of_an_object_is_not_mixed_with_one_of_another_layout(
    make: Make, tmp_path: Path
) -> None:
    old, new = contents(1, 300_000), contents(1, 150_000, seed=1)
    client = make(tiers=[fs(tmp_path)])
    assert client.set(keys(1), old)
    client.adapter.close()
    (last,) = [path for path in files(tmp_path) if path.stem.endswith("00000000")]
    last.unlink()
    client = make(tiers=[fs(tmp_path)])
    assert client.set(keys(1), new)
    client = make(tiers=[fs(tmp_path)])
    assert client.get(keys(1), [150_000]) == new


def test_a_batch_may_be_larger_than_the_staging_area(make: Make, tmp_path: Path) -> None:
    data = contents(60, 4 * PIECE)
    assert sum(map(len, data)) > 3 * 4 * 1024 * 1024
    assert make(tiers=[fs(tmp_path)]).set(keys(60), data)
    client = make(tiers=[fs(tmp_path)])
    assert client.exists(keys(60)) == [True] * 60
    assert client.get(keys(60), [4 * PIECE] * 60) == data


def test_an_object_larger_than_half_of_the_staging_area_is_refused_at_once(
    make: Make, tmp_path: Path
) -> None:
    client = make(tiers=[fs(tmp_path, deadline=1000)])
    data = [*contents(1, 40 * PIECE), *contents(1)]
    assert not client.set(keys(2), data)
    assert client.get(keys(2), [len(item) for item in data]) == [None, data[1]]


def test_salts_and_versions_keep_objects_apart(make: Make, tmp_path: Path) -> None:
    data = contents(2)
    assert make(tiers=[fs(tmp_path)], weights_version="1").set(keys(2), data)
    client = make(tiers=[fs(tmp_path)], weights_version="2")
    assert client.exists(keys(2)) == [False] * 2
    client = make(tiers=[fs(tmp_path)], weights_version="1")
    assert client.exists(keys(2, salt="user")) == [False] * 2
    assert client.exists(keys(2)) == [True] * 2


def test_lmcaches_own_buffers_are_taken(make: Make, tmp_path: Path) -> None:
    """Views of ctypes arrays, whose format ``<B`` memoryview can't assign to."""
    source = (ctypes.c_ubyte * 100_000).from_buffer(bytearray(contents(1, 100_000)[0]))
    target = (ctypes.c_ubyte * 100_000)()
    client = make(tiers=[fs(tmp_path)])
    adapter = client.adapter
    client.wait(adapter.submit_batch_set(keys(1), [memoryview(source)]))
    client.wait(adapter.submit_batch_get(keys(1), [memoryview(target)]))
    assert bytes(target) == bytes(source)


def test_deleted_objects_are_gone_with_all_their_pieces(make: Make, tmp_path: Path) -> None:
    data = contents(3)
    client = make(tiers=[fs(tmp_path)])
    assert client.set(keys(3), data)
    client = scanned(make(tiers=[fs(tmp_path)]))
    assert client.delete([*keys(2), "never@0@0@stored"]) == [True, True, False]
    assert client.exists(keys(3)) == [False, False, True]
    assert client.get(keys(3)[2:], [len(data[2])]) == data[2:]
    assert len(files(tmp_path)) == 4


# Ids ------------------------------------------------------------------------------


def test_what_is_deleted_while_it_is_stored_can_be_stored_again(make: Make, tmp_path: Path) -> None:
    client = scanned(make(tiers=[fs(tmp_path)]))
    names, data = keys(2), contents(2)
    for _ in range(100):
        assert client.set(names, data)
        assert client.get(names, [len(item) for item in data]) == data
        assert client.delete(names) == [True, True]
        assert client.exists(names) == [False, False]


def test_the_descriptor_is_readable_while_something_is_to_be_drained(
    make: Make, tmp_path: Path
) -> None:
    client = make(tiers=[fs(tmp_path)])
    fd = client.adapter.event_fd()
    assert not select.select([fd], [], [], 0)[0]
    number = client.adapter.submit_batch_exists(keys(1))
    assert select.select([fd], [], [], WAIT)[0]
    assert client.adapter.drain_completions() == [(number, True, "", [False])]
    assert not select.select([fd], [], [], 0)[0]
    assert client.adapter.drain_completions() == []


def test_an_answer_is_taken_in_when_it_comes(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not by looking again and again, which would end no batch here."""
    monkeypatch.setattr(lmcache, "_BUSY_SECONDS", 10 * WAIT)
    data = contents(4)
    assert make(tiers=[fs(tmp_path)]).set(keys(4), data)
    assert make(tiers=[fs(tmp_path)]).get(keys(4), [len(item) for item in data]) == data


def test_every_id_is_another_and_completes_once(make: Make, tmp_path: Path) -> None:
    """From several threads, as LMCache's store and prefetch controllers are."""
    client = make(tiers=[fs(tmp_path)])
    data, ids = contents(4), []

    def submit(prompt: str) -> None:
        for _ in range(10):
            ids.append(client.adapter.submit_batch_exists(keys(4, prompt)))
            views = [memoryview(item) for item in data]
            ids.append(client.adapter.submit_batch_set(keys(4, prompt), views))
            views = [memoryview(bytearray(len(item))) for item in data]
            ids.append(client.adapter.submit_batch_get(keys(4, prompt), views))

    threads = [threading.Thread(target=submit, args=(prompt,)) for prompt in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    client.wait(*ids)
    assert len(set(ids)) == 90
    assert client.completed.keys() == set(ids)


def test_what_is_no_batch_fails_as_a_batch(make: Make, tmp_path: Path) -> None:
    adapter = (client := make(tiers=[fs(tmp_path)])).adapter
    read_only = adapter.submit_batch_get(keys(1), [memoryview(b"x")])
    too_few = adapter.submit_batch_set(keys(2), [memoryview(b"x")])
    empty = adapter.submit_batch_exists([])
    done = client.wait(read_only, too_few, empty)
    assert [(ok, bools) for _, ok, _, bools in done] == [
        (False, [False]),
        (False, None),
        (True, []),
    ]
    assert "read-only" in done[0][2]
    assert "2 keys and 1 buffers" in done[1][2]
    assert client.set(keys(1), [b"x"])


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_parts_that_a_prompt_has_twice_or_in_another_order_are_served(
    make: Make, tmp_path: Path, policy: str
) -> None:
    client = make(tiers=[fs(tmp_path)], policy=policy)
    (a, b, c), data = keys(3), contents(3)
    for order in ([a, a], [a, b, a, c], [c, b, a], [b, c, a]):
        client.exists(order)
        assert client.set([a, b, c], data)
        assert client.get([c, a], [len(data[0])] * 2) == [data[2], data[0]]
        for name, item in zip((a, b, c), data, strict=True):
            assert client.get([name], [len(item)]) == [item]


@pytest.mark.parametrize(
    "name", ["", "@@@@", "m@0@0@h@\ud800", "m@0@-5@h", "a\0b", "m@0@0@h@s@t", " " * 5000]
)
def test_an_object_may_have_any_name(make: Make, tmp_path: Path, name: str) -> None:
    client = make(tiers=[fs(tmp_path)])
    assert client.exists([name, "m@0@0@h"]) == [False, False]
    assert client.set([name], contents(1))
    assert client.get([name], [len(contents(1)[0])]) == contents(1)
    assert client.delete([name]) == [True]


def test_close_ends_what_is_under_way_and_writes_what_is_staged(make: Make, tmp_path: Path) -> None:
    client = make(tiers=[fs(tmp_path)])
    data = contents(10)
    assert client.set(keys(10), data)
    views = [memoryview(bytearray(len(item))) for item in data]
    ids = [client.adapter.submit_batch_get(keys(10), views) for _ in range(5)]
    client.adapter.close()
    late = client.adapter.submit_batch_exists(keys(1))
    client.adapter.close()
    client.take(client.adapter.drain_completions())
    assert client.completed.keys() >= {*ids, late}
    assert client.completed[late][1:] == (False, "closed", [False])
    assert make(tiers=[fs(tmp_path)]).exists(keys(10)) == [True] * 10


# Bounds ---------------------------------------------------------------------------


def test_the_bound_is_kept_also_for_what_an_earlier_server_left(make: Make, tmp_path: Path) -> None:
    bound = 4 * 1024 * 1024
    for prompt in "abcd":
        client = scanned(make(tiers=[fs(tmp_path, capacity=bound)]))
        client.set(keys(12, prompt), contents(12))
        client.adapter.close()
        assert sum(path.stat().st_size for path in files(tmp_path)) <= bound
    client = make(tiers=[fs(tmp_path, capacity=bound)])
    assert client.exists(keys(12, "d"))[0]
    assert not client.exists(keys(12, "a"))[0]


def test_a_prefix_is_evicted_from_its_tail(make: Make, tmp_path: Path) -> None:
    """LMCache's keys do not tell their order; its lookups do."""
    client = make(tiers=[fs(tmp_path, capacity=4 * 1024 * 1024)])
    for prompt in "ab":
        client.exists(keys(10, prompt))
        assert client.set(keys(10, prompt), contents(10))
        # Else the tail may still be on its way when its prefix is evicted.
        wait_for(client.adapter._hierarchy.idle)
    found = make(tiers=[fs(tmp_path)]).exists(keys(10, "a"))
    assert found[0]
    assert not found[-1]
    assert found == sorted(found, reverse=True)
