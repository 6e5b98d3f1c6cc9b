"""A filesystem tier that fails, damages or never answers: the request is answered, and right."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine import BLOCK, cpu, fs
from faulty_bench import CHUNKS, TOKENS, Bench, Question
from kvtiers.tiers import Tier
from kvtiers.tiers.breaker import Breaker
from kvtiers.tiers.wrappers import Fault, FaultyTier

ALL = CHUNKS * BLOCK
DEADLINE = 1.0


class Cued:
    """Faults of the tier's lookups and reads, as they are set at the moment."""

    contains: Fault | None = None
    read: Fault | None = None

    def wrap(self, tier: Tier) -> Tier:
        lookups = (self.contains for _ in itertools.count())
        reads = (self.read for _ in itertools.count())
        self.lookups = FaultyTier(tier, lookups, calls=["contains"])
        self.reads = FaultyTier(self.lookups, reads, calls=["read"])
        return self.reads


class DiskBench(Bench):
    """A bench whose filesystem tier fails on cue."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.cued = Cued()
        tiers = [cpu(), fs(folder / "fs", deadline=DEADLINE)]
        super().__init__(model, folder, tiers, wrap=self.cued.wrap)


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def bench(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DiskBench]:
    model = request.getfixturevalue(request.param)
    with DiskBench(model, tmp_path_factory.mktemp("faults")) as bench:
        yield bench


def on_disk_only(bench: DiskBench) -> Question:
    question = bench.stored()
    bench.engine.drop_arena()
    # What an earlier test did to the tier is not to be carried into the next one.
    tier = bench.engine.hierarchy._lower[0]
    tier.breaker = Breaker(bench.engine.hierarchy._clock)
    return question


def test_a_sound_tier_serves(bench: DiskBench) -> None:
    question = on_disk_only(bench)
    assert bench.ask(question) == ALL


@pytest.mark.parametrize("fault", [Fault.ERROR, Fault.FAILED, Fault.MISS])
def test_lookups_fail(bench: DiskBench, fault: Fault) -> None:
    question = on_disk_only(bench)
    # Or the directory would know from the store where the chunks are.
    forget_whereabouts(bench)
    failures = bench.counted("fs")["failures"]
    bench.cued.contains = fault
    assert bench.ask(question) == 0
    bench.cued.contains = None
    assert (bench.counted("fs")["failures"] > failures) == (fault is Fault.ERROR)
    bench.forget()
    assert bench.ask(question) == ALL


@pytest.mark.parametrize("fault", [Fault.ERROR, Fault.FAILED, Fault.MISS, Fault.CORRUPT])
def test_reads_fail(bench: DiskBench, fault: Fault) -> None:
    question = on_disk_only(bench)
    before = bench.counted("fs")
    bench.cued.read = fault
    assert bench.ask(question) == 0
    bench.cued.read = None
    counted = bench.counted("fs") - before
    assert (counted["failures"] > 0) == (fault in (Fault.ERROR, Fault.FAILED))
    assert (counted["corrupt"] > 0) == (fault is Fault.CORRUPT)
    assert counted["bytes_read"] == 0
    bench.forget()
    assert bench.ask(question) == ALL


def test_lookups_that_never_end_delay_a_request_until_the_deadline_and_no_longer(
    bench: DiskBench,
) -> None:
    question = on_disk_only(bench)
    forget_whereabouts(bench)
    bench.cued.contains = Fault.STALL
    name = bench.engine.submit(question.prompt, TOKENS)
    bench.check(question, bench.answer_to(name))
    assert bench.cued.lookups.stalling.is_set(), "nobody asked the tier"
    assert bench.counted("fs")["timeouts"] > 0
    bench.cued.contains = None
    bench.cued.lookups.release()
    bench.quiet()


def test_reads_that_never_end_delay_a_request_until_the_deadline_and_no_longer(
    bench: DiskBench,
) -> None:
    question = on_disk_only(bench)
    timeouts = bench.counted("fs")["timeouts"]
    bench.cued.read = Fault.STALL
    name = bench.engine.submit(question.prompt, TOKENS)
    bench.check(question, bench.answer_to(name))
    assert bench.cued.reads.stalling.is_set(), "nobody read from the tier"
    assert bench.counted("fs")["timeouts"] > timeouts
    assert bench.engine.hierarchy.pinned() > 0, "slots were given up that the tier still fills"
    bench.cued.read = None
    bench.cued.reads.release()
    bench.quiet()


def test_after_all_of_it_the_tier_serves_again(bench: DiskBench) -> None:
    question = on_disk_only(bench)
    assert bench.ask(question) == ALL


def forget_whereabouts(bench: DiskBench) -> None:
    """As after a restart: only the tier itself knows what it holds."""
    hierarchy = bench.engine.hierarchy
    tier = hierarchy._lower[0]
    for chunk in list(hierarchy._residency.directory):
        hierarchy._residency.gone_from(tier, (chunk.key,))
