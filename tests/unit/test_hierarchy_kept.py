"""A tier that keeps its bound itself, and what the hierarchy believes to lie in it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hierarchy_kit import CHUNK, DictTier, Stack, prefix
from kvtiers.tiers.base import Usage
from kvtiers.tiers.fs import FsTier
from kvtiers.tiers.requests import Lookup
from kvtiers.tiers.root_keeping import RootKeeping
from kvtiers.tiers.workers import OpKind


class KeptTier(DictTier):
    """Evicts by itself when others want its room, and says how much."""

    keeps_itself = True

    def __init__(self, capacity: int | None) -> None:
        super().__init__(capacity)
        self.kept = []
        self.elsewhere: list[bytes] = []
        self.evicted = 0

    def keep(self, info, make_policy, *, stores):
        self.kept.append((info, make_policy, stores))

    def served_elsewhere(self, keys):
        self.elsewhere += [key.hash for key in keys]

    def usage(self) -> Usage:
        return Usage(len(self.chunks) * CHUNK, len(self.chunks), self.capacity, self.evicted)


def kept_stack(capacity: int | None, slots: int = 32, **options) -> tuple[Stack, KeptTier]:
    tier = KeptTier(capacity)
    return Stack(slots, {"disk": tier}, **options), tier


@pytest.mark.parametrize("stores", [True, False])
def test_it_is_told_what_it_needs_to_keep_itself(stores):
    _, tier = kept_stack(8 * CHUNK, stores=stores)
    [(info, make_policy, told)] = tier.kept
    assert (info.name, info.capacity, told) == ("disk", 8 * CHUNK, stores)
    policy = make_policy([info], lambda: 0.0)
    policy.on_insert(prefix("a", 2), "disk")
    assert list(policy.victims("disk", 1)) == list(reversed(prefix("a", 2).chunks))


def test_it_is_neither_scanned_nor_evicted_from():
    stack, tier = kept_stack(4 * CHUNK)
    for n in range(4):
        stack.store(prefix(f"p{n}", 1))
        stack.settle()
    tier.capacity = None  # so that it refuses nothing, whatever it says
    stack.h._lower[0].refused = 5
    for _ in range(5):
        stack.clock.now += 700
        stack.settle()
    workers = stack.workers["disk"]
    assert workers.count(OpKind.SCAN) == workers.count(OpKind.REMOVE) == 0
    assert len(tier.chunks) == 4


def test_no_more_is_believed_to_lie_there_than_it_can_hold():
    stack, tier = kept_stack(4 * CHUNK, slots=3)
    for n in range(9):
        stack.store(prefix(f"p{n}", 1))
        stack.settle()
        del tier.chunks[next(iter(tier.chunks))]  # it evicts at once, unheard
    assert stack.h._lower[0].hints <= 4
    assert len(stack.h._residency.directory) <= 4 + 3


def test_what_was_forgotten_is_asked_for_again():
    stack, tier = kept_stack(2 * CHUNK, slots=2)
    tier.put(prefix("old", 1))
    stack.begin("r", prefix("old", 1))
    stack.settle()
    assert stack.look("r", prefix("old", 1)) == [Lookup.HIT]


def test_its_own_evictions_are_in_the_figures_once():
    stack, tier = kept_stack(4 * CHUNK)
    tier.put(prefix("a", 3))
    tier.evicted = 7
    [_, disk] = [stats for stats in stack.h.stats() if stats.name in ("cpu", "disk")]
    assert (disk.usage.chunks, disk.usage.limit) == (3, 4 * CHUNK)
    assert disk.counts["evictions"] == 7
    tier.evicted = 9
    assert stack.counts()["disk"]["evictions"] == 2


def test_it_hears_what_a_nearer_tier_or_the_gpu_served_and_not_what_it_did():
    stack, tier = kept_stack(64 * CHUNK)
    run = prefix("a", 4)
    stack.store(run)
    stack.settle()
    for request, gpu, last in (("r", 0, 3), ("s", 2, 1), ("t", 0, None)):
        tier.elsewhere.clear()
        if last is None:
            run = prefix("other", 4)
            tier.put(run)
        stack.begin(request, run)
        stack.settle()
        assert stack.look(request, run) == [Lookup.HIT] * 4
        if not gpu:
            stack.h.load(request, run.chunks)
        stack.h.admitted(request, {0: gpu})
        assert tier.elsewhere == ([] if last is None else [run.chunks[last]])


def test_without_a_bound_a_full_disk_still_gets_room_from_what_is_known():
    stack, tier = kept_stack(None)
    for n in range(4):
        stack.store(prefix(f"p{n}", 1))
        stack.settle()
    tier.capacity = 4 * CHUNK  # the file system is full
    stack.store(prefix("more", 1))
    stack.settle()
    assert len(tier.chunks) == 3
    assert stack.workers["disk"].count(OpKind.SCAN) == 0


@pytest.mark.parametrize("bound", [True, False], ids=["with a bound", "without"])
def test_no_engine_lists_a_root_at_its_start(tmp_path, monkeypatch, bound):
    """Where an engine before it kept the bound; the folders of chunks are not even opened."""
    monkeypatch.setattr(RootKeeping, "start", lambda self: None)
    capacity = 3000 * 2 * CHUNK if bound else None
    tier = FsTier(FsTier.Config(path=tmp_path, capacity=capacity, direct=False), CHUNK)
    first = Stack(32, {"fs": tier})
    if bound:
        tier._keeping.step()
    for n in range(20):
        first.store(prefix(f"p{n}", 16))
        first.settle()
    first.h.close()
    stored = len(list(tmp_path.rglob("*.kv")))
    files = {path.parent for path in tmp_path.rglob("*.kv")}
    assert len(files) > 100
    listed: list[str] = []

    def noting(real):
        def call(path="."):
            listed.append(str(path))
            return real(path)

        return call

    monkeypatch.setattr(os, "scandir", noting(os.scandir))
    monkeypatch.setattr(os, "listdir", noting(os.listdir))
    tier = FsTier(FsTier.Config(path=tmp_path, capacity=capacity, direct=False), CHUNK)
    second = Stack(32, {"fs": tier})
    second.settle()
    if bound:
        for _ in range(3):
            tier._keeping.step()
        assert tier.usage().chunks == stored
    second.begin("r", prefix("p7", 16))
    second.settle()
    assert second.look("r", prefix("p7", 16)) == [Lookup.HIT] * 16
    assert not files & set(map(Path, listed))
    assert len(listed) < 40
