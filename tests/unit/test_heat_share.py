"""Heat that one engine measured reaches another, through a tier that both use."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hierarchy_kit import DictTier, Stack, ToldOfHeat, prefix
from hypothesis import given, settings
from hypothesis import strategies as st
from kvtiers.connector import heat_share, heat_watch
from kvtiers.connector.heat import NO_REPORT, HeatCost, HeatReport, HeatSettings
from kvtiers.connector.heat_book import HeatBook, HeatPlan
from kvtiers.connector.heat_records import Prompt, decode, encode
from kvtiers.connector.heat_share import HeatShare
from kvtiers.connector.heat_watch import HeatWatch
from kvtiers.policies import Run
from kvtiers.tiers import Namespace
from kvtiers.tiers.base import ALIGNMENT, Tier, WriteOutcome
from kvtiers.tiers.fs import FsTier

PAYLOAD = 4 * ALIGNMENT
OURS = Namespace("a" * 16)
HOUR = 3600


def measured(chunks: int, *layers: int, heads: int = 2) -> dict[int, np.ndarray]:
    """Figures that half floats keep."""
    at = np.arange(heads * chunks, dtype=np.float32).reshape(heads, chunks)
    return {layer: (at + layer) / 1024 for layer in layers}


def prompt(name: str, chunks: int = 3, layers: Sequence[int] = (0, 4)) -> Prompt:
    names = tuple(f"{name}{i}".encode().ljust(36, b".") for i in range(chunks))
    return Prompt(names, measured(chunks, *layers))


def same(found: Sequence[Prompt], wanted: Sequence[Prompt]) -> bool:
    def plain(one: Prompt) -> Any:
        return one.chunks, {layer: mass.tolist() for layer, mass in one.measured.items()}

    return [plain(one) for one in found] == [plain(one) for one in wanted]


# As bytes -----------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.lists(
        st.tuples(st.integers(1, 5), st.lists(st.integers(0, 99), min_size=1, unique=True)),
        max_size=5,
    )
)
def test_prompts_come_back_whatever_follows_them(sizes) -> None:
    prompts = [prompt(str(i), chunks, layers) for i, (chunks, layers) in enumerate(sizes)]
    data = encode(prompts, 1 << 20)
    assert same(decode(data + b"the rest of a chunk"), prompts)


def test_what_has_no_room_is_the_oldest() -> None:
    prompts = [prompt(name) for name in "abc"]
    room = len(encode(prompts[1:], 1 << 20))
    assert same(decode(encode(prompts, room)), prompts[1:])
    assert same(decode(encode(prompts, room - 1)), prompts[2:])


def test_chunks_beyond_those_that_have_names_are_left_out() -> None:
    whole = Prompt((b"a", b"b"), measured(3, 1))
    (found,) = decode(encode([whole], 1 << 20))
    np.testing.assert_array_equal(found.measured[1], whole.measured[1][:, :2])


@settings(max_examples=50, deadline=None)
@given(at=st.integers(0, 200), flip=st.integers(1, 255))
def test_other_bytes_are_told_from_prompts(at, flip) -> None:
    data = bytearray(encode([prompt("a")], 1 << 20))
    data[at % len(data)] ^= flip
    with pytest.raises(ValueError, match="it "):
        decode(bytes(data))


@pytest.mark.parametrize("value", [-1.0, 2.0, float("nan")])
def test_figures_that_are_no_attention_are_refused(value) -> None:
    wrong = Prompt((b"a",), {0: np.full((1, 1), value, np.float32)})
    with pytest.raises(ValueError, match="no attention"):
        decode(encode([wrong], 1 << 20))


# Through a tier -------------------------------------------------------------------


class Engines:
    """Shares of several engines over tiers of their own in one folder, at one time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now = 100.5 * HOUR
        self.namespaces = [OURS, OURS, OURS]
        self.tiers = [self.open() for _ in self.namespaces]
        self.shares = [self.share(i) for i in range(len(self.tiers))]

    def open(self) -> Tier:
        return FsTier(FsTier.Config(type="fs", path=self.folder, capacity=1 << 20), PAYLOAD)

    def share(self, index: int, **options: Any) -> HeatShare:
        tier, clock = self.tiers[index], lambda: self.now
        return HeatShare(tier, lambda: self.namespaces[index], clock=clock, **options)

    def tell(self, index: int, *prompts: Prompt) -> None:
        for one in prompts:
            self.shares[index].note(Run(one.chunks), one.measured)
        self.shares[index].exchange(tell=True)

    def hear(self, index: int) -> list[Prompt]:
        self.shares[index].exchange(tell=False)
        return list(self.shares[index].take())


@pytest.fixture
def engines(tmp_path: Path) -> Any:
    made = Engines(tmp_path)
    yield made
    for tier in made.tiers:
        tier.close()


def test_what_one_tells_all_others_hear_once(engines: Engines) -> None:
    told = [prompt("a"), prompt("b", 5)]
    engines.tell(0, *told)
    for index in (1, 2):
        assert same(engines.hear(index), told)
        assert engines.hear(index) == []
    assert engines.hear(0) == [], "nobody hears itself"


def test_engines_that_write_at_once_lose_nothing(engines: Engines) -> None:
    one, other, third = prompt("a"), prompt("b"), prompt("c")
    engines.tell(0, one)
    engines.tell(1, other)  # has not read yet, and takes the same number
    assert same(list(engines.shares[1].take()), [one])
    engines.tell(2, third)
    assert same(engines.hear(0), [other, third])


def test_the_hour_before_is_read_too_and_older_ones_are_not(engines: Engines) -> None:
    engines.tell(0, prompt("old"))
    engines.now += HOUR
    engines.tell(0, prompt("new"))
    assert same(engines.hear(1), [prompt("old"), prompt("new")])
    engines.now += HOUR
    assert same(engines.hear(2), [prompt("new")])


def test_what_is_private_is_told_nobody(engines: Engines) -> None:
    engines.namespaces[0] = Namespace("b" * 16, shareable=False)
    engines.tell(0, prompt("a"))
    assert list(engines.folder.rglob("*.kv")) == []
    engines.namespaces[0] = OURS
    engines.tell(0)
    assert engines.hear(1) == []


def test_nothing_is_told_before_it_is_time(engines: Engines) -> None:
    engines.shares[0].note(Run(prompt("a").chunks), prompt("a").measured)
    assert engines.hear(0) == engines.hear(1) == []
    engines.tell(0)
    assert same(engines.hear(1), [prompt("a")])


def test_what_was_measured_before_a_reset_is_neither_told_nor_heard(engines: Engines) -> None:
    engines.tell(0, prompt("theirs"))
    made = watch()
    made._share = engines.shares[1]
    made._share.exchange(tell=False)
    made._share.note(Run(prompt("ours").chunks), prompt("ours").measured)
    made.forget()
    assert list(made._share.take()) == []
    made._share.exchange(tell=True)
    assert engines.hear(0) == []


def test_a_namespace_that_changes_while_it_is_read_is_heard_no_more(engines: Engines) -> None:
    engines.tell(0, prompt("a"))
    tier, now = engines.tiers[1], iter([OURS])
    share = HeatShare(tier, lambda: next(now, Namespace("b" * 16)), clock=lambda: engines.now)
    share.exchange(tell=False)
    assert list(share.take()) == []


def test_of_an_hour_no_more_entries_are_read_than_its_bound(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heat_share, "_MOST_ENTRIES", 2)
    for name in "abc":
        engines.tell(0, prompt(name))
    assert same(engines.hear(1), [prompt("a"), prompt("b")])


def test_who_comes_behind_several_others_writes_after_them_all(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries that came one by one between its read and its write."""
    write, others = engines.tiers[1].write, [prompt("a"), prompt("b")]

    def overtaken(*what: Any) -> list[WriteOutcome]:
        if others:
            engines.tell(0, others.pop(0))
        return write(*what)

    monkeypatch.setattr(engines.tiers[1], "write", overtaken)
    engines.tell(1, prompt("c"))
    assert same(engines.hear(2), [prompt(name) for name in "abc"])


def test_an_entry_that_is_there_and_cannot_be_read_ends_the_writing(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def exists(keys: Sequence[Any], _: Any) -> list[WriteOutcome]:
        tried.extend(keys)
        return [WriteOutcome.EXISTS] * len(keys)

    monkeypatch.setattr(engines.tiers[0], "write", exists)
    engines.tell(0, prompt("a"))
    assert len(tried) == 1


def test_other_namespaces_are_not_heard(engines: Engines) -> None:
    engines.namespaces[0] = Namespace("b" * 16)
    engines.tell(0, prompt("a"))
    assert engines.hear(1) == []


def test_an_engine_that_only_reads_writes_nothing(engines: Engines) -> None:
    engines.shares[0] = engines.share(0, writes=False)
    engines.tell(0, prompt("a"))
    assert engines.hear(1) == []


def test_a_damaged_entry_is_stepped_over(engines: Engines) -> None:
    engines.tell(0, prompt("a"))
    engines.tell(0, prompt("b"))
    (first, _) = sorted(engines.folder.rglob("*.kv"), key=lambda file: file.stat().st_mtime_ns)
    with first.open("r+b") as file:
        file.seek(10)
        file.write(b"x")
    assert same(engines.hear(1), [prompt("b")])


def test_a_tier_without_room_loses_what_it_was_told(engines: Engines, monkeypatch) -> None:
    refuse = lambda keys, _buffers: [WriteOutcome.REFUSED] * len(keys)  # noqa: E731
    monkeypatch.setattr(engines.tiers[0], "write", refuse)
    engines.tell(0, prompt("a"))
    monkeypatch.undo()
    engines.tell(0, prompt("b"))
    assert same(engines.hear(1), [prompt("b")])


def test_the_rest_is_told_at_the_end(engines: Engines) -> None:
    engines.shares[0].start()
    engines.shares[0].note(Run(prompt("a").chunks), prompt("a").measured)
    engines.shares[0].close(timeout=60)
    assert same(engines.hear(1), [prompt("a")])


def test_a_tier_that_raises_is_told_once_and_ends_nothing(engines: Engines, monkeypatch, caplog):
    def broken(*_: Any) -> None:
        raise OSError("no such server")

    monkeypatch.setattr(engines.tiers[0], "read", broken)
    engines.shares[0].start()
    engines.shares[0].close(timeout=60)
    (record,) = caplog.records
    assert "Attention heat is not shared, its tier failed: no such server" in record.getMessage()


# What the scheduler makes of it -----------------------------------------------------


def watch(*, shares: bool = True) -> HeatWatch:
    plan = HeatPlan(HeatSettings(), 0, 4, 8, 1)
    return HeatWatch(plan, HeatBook(layers=8), shares=shares)


def test_others_heat_is_in_the_averages_once_the_own_heads_are_known(engines: Engines) -> None:
    made = watch()
    made._share = engines.shares[1]
    strange = Prompt(prompt("c").chunks, measured(3, 0, heads=5))
    engines.tell(0, prompt("a"), strange)
    made._share.exchange(tell=False)
    assert list(made.told(NO_REPORT)) == []
    made._plan.spent(HeatCost(prefill_s=60.0, prefill_cpu_s=60.0))
    made._plan.job(Run(prompt("b").chunks), [1, 2, 3, 4, 5, 6], 0, 24)
    own, others = made.told(HeatReport({(1, 0, 0): measured(3, 0)[0]}))
    assert own[0].chunks == prompt("b").chunks[1:]
    assert others[0].chunks == prompt("a").chunks[1:]
    expected = np.mean([mass[:, 1:] for mass in prompt("a").measured.values()], axis=(0, 1))
    assert others[1] == pytest.approx(expected.tolist())
    made._share.exchange(tell=True)
    assert same(engines.hear(0), [Prompt(prompt("b").chunks, measured(3, 0))])
    assert list(made.told(NO_REPORT)) == []


def test_a_step_takes_in_a_few_of_many(engines: Engines, monkeypatch) -> None:
    monkeypatch.setattr(heat_watch, "_MOST_AT_ONCE", 2)
    made = watch()
    made._share = engines.shares[1]
    made.book.note(Run((b"x",)), {0: np.ones((2, 1), np.float32)})
    engines.tell(0, *map(prompt, "abc"))
    made._share.exchange(tell=False)
    assert [len(list(made.told(NO_REPORT))) for _ in range(3)] == [2, 1, 0]


def test_what_the_exchange_takes_is_in_the_cost(engines: Engines, monkeypatch) -> None:
    made = watch()
    made._share = engines.share(0, spent=lambda: 0.25)
    made._share.start()
    made._share.close()
    told = []
    monkeypatch.setattr(made._plan, "delayed", lambda seconds, **_: told.append(seconds))
    made._clock = lambda: 0.0
    for _ in range(2):
        list(made.told(NO_REPORT))
    assert told == [0.25, 0.0]


def test_who_watches_tells_the_rest_at_the_end(engines: Engines) -> None:
    made = watch()
    made._share = engines.shares[1]
    made._share.note(Run(prompt("a").chunks), prompt("a").measured)
    made._share.start()
    made.close()
    assert same(engines.hear(0), [prompt("a")])


class SharedTier(DictTier):
    """One that leaves it to who opened it whether it may be written to."""

    shared = True


@pytest.mark.parametrize("stores", [True, False])
def test_an_engine_shares_through_its_tier_and_writes_if_it_stores(stores: bool) -> None:
    near, tier = DictTier(), SharedTier()
    stack = Stack(8, {"near": near, "shared": tier}, stores=stores)
    made = watch()
    made.opened(stack.h)
    assert made._share is not None
    made._share.note(Run(prompt("a").chunks), prompt("a").measured)
    made.close()
    assert "read" in tier.calls
    assert len(tier.chunks) == stores
    assert not near.calls


def test_without_a_shared_tier_it_says_so(caplog) -> None:
    made = watch()
    made.opened(Stack(8).h)
    assert "it has no tier that is shared" in caplog.text
    assert made._share is None
    caplog.clear()
    watch(shares=False).opened(Stack(8).h)
    assert caplog.records == []


def test_a_policy_hears_of_loaded_chunks_when_they_are_used() -> None:
    tier, run = DictTier(), prefix("a", 3)
    tier.put(run)
    stack = Stack(8, {"far": tier}, policy=ToldOfHeat)
    stack.h.measured(run.tail(1), [0.1, 0.2])
    stack.begin("r", run)
    stack.settle()
    assert stack.h.policy.heard == []
    stack.look("r", run)
    stack.settle()
    stack.load("r", run)
    assert stack.h.policy.heard == [(run.tail(1), [0.1, 0.2])]
    stack.h.admitted("r", {})
    assert len(stack.h.policy.heard) == 1
