"""LMCache's interface over real tiers: what is promised of ids, bytes, bounds and faults."""

from __future__ import annotations

import ctypes
import json
import os
import random
import re
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from kvtiers.connector import lmcache
from kvtiers.connector.config_errors import ConfigError
from kvtiers.connector.lmcache import Completion, TieredL2
from kvtiers.tiers import TIERS, Tier, TierConfig
from kvtiers.tiers.fs import FsTier
from kvtiers.tiers.wrappers import Fault, FaultyTier
from redis_server import RedisServer

PIECE = 64 * 1024
SMALL = {"piece_size": "64KiB", "staging": "4MiB"}
WAIT = 30.0


def keys(count: int, prompt: str = "a", salt: str = "") -> list[str]:
    """LMCache's names of the objects of one prompt."""
    tail = f"@{salt}" if salt else ""
    return [f"org/model@00000001@0@{prompt.encode().hex()}{i:08x}{tail}" for i in range(count)]


def contents(count: int, nbytes: int = 3 * PIECE + 1000, seed: int = 0) -> list[bytes]:
    source = random.Random(seed)
    return [source.randbytes(nbytes) for _ in range(count)]


class Client:
    """Uses an adapter as LMCache does: its descriptor, and nothing that would wait."""

    def __init__(self, **params: Any) -> None:
        self.adapter = TieredL2(**params)
        self.completed: dict[int, Completion] = {}

    def wait(self, *ids: int) -> list[Completion]:
        """Until these are complete. Fails if one completes twice."""
        deadline = time.monotonic() + WAIT
        while not set(ids) <= self.completed.keys():
            left = deadline - time.monotonic()
            assert left > 0, "a batch does not end"
            if select.select([self.adapter.event_fd()], [], [], left)[0]:
                self.take(self.adapter.drain_completions())
        return [self.completed[number] for number in ids]

    def take(self, drained: Sequence[Completion]) -> None:
        for completion in drained:
            assert completion[0] not in self.completed, "complete twice"
            self.completed[completion[0]] = completion

    def set(self, names: Sequence[str], data: Sequence[bytes]) -> bool:
        sources = [memoryview(item) for item in data]
        return self.wait(self.adapter.submit_batch_set(names, sources))[0][1]

    def get(self, names: Sequence[str], nbytes: Sequence[int]) -> list[bytes | None]:
        """What each object was loaded as, None for a miss."""
        targets = [bytearray(size) for size in nbytes]
        views = [memoryview(target) for target in targets]
        number = self.adapter.submit_batch_get(names, views)
        loaded = self.wait(number)[0][3]
        assert loaded is not None
        return [bytes(t) if yes else None for t, yes in zip(targets, loaded, strict=True)]

    def exists(self, names: Sequence[str]) -> list[bool]:
        found = self.wait(self.adapter.submit_batch_exists(names))[0][3]
        assert found is not None
        return found

    def delete(self, names: Sequence[str]) -> list[bool]:
        deleted = self.wait(self.adapter.submit_batch_delete(names))[0][3]
        assert deleted is not None
        return deleted


Make = Callable[..., Client]


@pytest.fixture
def make() -> Iterator[Make]:
    """Adapters that are closed at the end; ``make`` ends the one before, as a restart does."""
    made: list[Client] = []

    def start(**params: Any) -> Client:
        if made:
            made[-1].adapter.close()
        made.append(Client(**{**SMALL, **params}))
        return made[-1]

    yield start
    for client in made:
        client.adapter.close()


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "redis") as server:
        yield server


def scanned(client: Client) -> Client:
    """The client, once its adapter has taken in what its tiers held at the start.

    What is removed while a tier is looked through may be taken for held afterwards.
    """
    hierarchy = client.adapter._hierarchy
    wait_for(lambda: not (hierarchy.behind() or any(t.scanning for t in hierarchy._lower)))
    return client


def wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def fs(path: Path, **options: Any) -> dict[str, Any]:
    return {"type": "fs", "path": str(path), "capacity": "64MiB", **options}


@pytest.fixture(params=["fs", "fsspec", "redis"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """One tier of each kind that outlives the server."""
    if request.param == "fs":
        return fs(tmp_path / "fs")
    if request.param == "fsspec":
        return {"type": "fs", "path": f"memory://{tmp_path}"}
    server: RedisServer = request.getfixturevalue("redis_server")
    return {"type": "redis", "url": server.url}


def files(root: Path) -> list[Path]:
    return sorted(root.glob("v1/*/??/*.kv"))


def damage(path: Path, offset: int = 1000) -> None:
    """One bit."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


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
    monkeypatch.setattr(lmcache, "_IDLE_SECONDS", 10 * WAIT)
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


# Faults ---------------------------------------------------------------------------


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


# Configuration --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({}, "tiers is [] (from adapter_params): it must be a list of tiers"),
        ({"tiers": ["cpu"]}, "LMCache's own memory (L1) is that tier"),
        ({"tiers": [{"type": "fs", "pth": "/x"}]}, "Did you mean 'path'?"),
        ({"tiers": [{"type": "fss"}]}, "Did you mean 'fs'?"),
        ({"tiers": ["fs"], "polcy": "lru"}, "Did you mean 'policy'?"),
        ({"tiers": ["fs"], "piece_size": 5000}, "it must be a multiple of 4096 bytes"),
        ({"tiers": ["fs"], "staging": "1MiB"}, "it must hold at least 16 pieces"),
        ({"tiers": [{"type": "fs", "capacity": "1KiB"}]}, "below one chunk"),
        ({"tiers": ["fs"], "policy": "lur"}, "Did you mean 'lru'?"),
    ],
)
def test_bad_parameters_are_refused_with_a_paragraph(params: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        TieredL2(**params)
    assert says in str(error.value)


def test_what_no_log_should_show_may_stand_in_a_file(make: Make, tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis", ["--requirepass", "secret"], "secret") as server:
        tier = {"type": "redis", "url": server.url, "password": "secret"}
        file = tmp_path / "tiers.yaml"
        file.write_text(yaml.safe_dump({"tiers": [tier], "weights_version": "1"}))
        data = contents(2)
        assert make(config=str(file)).set(keys(2), data)
        client = make(config=str(file))
        assert client.get(keys(2), [len(item) for item in data]) == data
        # What stands beside it counts more.
        assert make(config=str(file), weights_version="2").exists(keys(2)) == [False] * 2
    file.write_text("tiers: [fs]\nstagin: 1GiB\n")
    with pytest.raises(ConfigError, match=r"stagin \(from file .*:2\).*Did you mean 'staging'"):
        TieredL2(config=str(file))


def test_the_adapter_in_the_docs_is_valid(make: Make, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "lmcache.md").read_text()
    (shown,) = re.findall(r"--l2-adapter '(.*?)'", page, re.DOTALL)
    adapter = json.loads(shown)
    assert (adapter["type"], adapter["module_path"]) == ("native_plugin", lmcache.__name__)
    assert adapter["class_name"] == TieredL2.__name__
    params = adapter["adapter_params"]
    params["tiers"][1]["path"] = str(tmp_path)
    with RedisServer(tmp_path / "redis") as server:
        params["tiers"][0]["url"] = server.url
        assert make(**params).set(keys(1), contents(1))


def test_it_needs_neither_an_engine_nor_lmcache() -> None:
    program = (
        "import sys\nimport kvtiers.connector.lmcache\n"
        "print([m for m in ('vllm', 'torch', 'lmcache', 'redis', 'fsspec') if m in sys.modules])"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert answer.stdout.strip() == "[]"


def test_it_leaves_no_thread_and_no_descriptor(tmp_path: Path) -> None:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    before, threads = open_files(), threading.active_count()
    for _ in range(3):
        client = Client(tiers=[fs(tmp_path)], **SMALL)
        client.set(keys(2), contents(2))
        client.adapter.close()
    wait_for(lambda: threading.active_count() <= threads)
    assert open_files() <= before
