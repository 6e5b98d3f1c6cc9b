import threading

import pytest
from kvtiers.tiers.base import ChunkKey, Namespace, ReadOutcome, WriteOutcome
from kvtiers.tiers.buffers import aligned_buffer
from kvtiers.tiers.fs import FsTier
from kvtiers.tiers.wrappers import Fault, FaultyTier, LatencyTier, WrapperTier

SIZE = 4096
KEYS = [ChunkKey(Namespace("ab" * 16), bytes([n]) * 8) for n in range(4)]


@pytest.fixture
def inner(tmp_path):
    return FsTier(FsTier.Config(path=tmp_path), SIZE)


def write(tier, keys):
    return tier.write(keys, [aligned_buffer(SIZE) for _ in keys])


def read(tier, keys):
    return tier.read(keys, [aligned_buffer(SIZE) for _ in keys])


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def test_a_wrapper_is_as_shared_and_persistent_as_what_it_wraps(inner):
    tier = WrapperTier(inner)
    assert (tier.shared, tier.persistent, tier.on_disk) == (True, True, True)
    assert (WrapperTier.shared, WrapperTier.persistent, WrapperTier.on_disk) == (False,) * 3


def test_each_call_takes_its_latency_and_each_byte_that_moves_its_time(inner):
    clock = Clock()
    tier = LatencyTier(inner, 0.5, SIZE / 2.0, clock, clock.sleep)
    for call, seconds in [
        (lambda: write(tier, KEYS[:2]), 0.5 + 2 * 2.0),
        (lambda: write(tier, KEYS[:2]), 0.5),
        (lambda: read(tier, KEYS[1:]), 0.5 + 2.0),
        (lambda: tier.contains(KEYS), 0.5),
        (lambda: tier.remove(KEYS), 0.5),
    ]:
        before = clock.now
        call()
        assert clock.now - before == pytest.approx(seconds)


def test_transfers_share_the_link(inner):
    """With time standing still, the second transfer waits for the first as well."""
    slept = []
    tier = LatencyTier(inner, 0.0, float(SIZE), lambda: 0.0, slept.append)
    write(tier, KEYS[:1])
    write(tier, KEYS[1:2])
    assert slept == [1.0, 2.0]


def test_a_script_decides_chunk_by_chunk(inner):
    write(inner, KEYS)
    tier = FaultyTier(inner, [Fault.FAILED, None, Fault.MISS, Fault.CORRUPT])
    assert read(tier, KEYS) == [
        ReadOutcome.FAILED,
        ReadOutcome.HIT,
        ReadOutcome.MISS,
        ReadOutcome.CORRUPT,
    ]
    assert read(tier, KEYS) == [ReadOutcome.HIT] * 3 + [ReadOutcome.MISS]


def test_a_faulty_write_stores_nothing(inner):
    tier = FaultyTier(inner, [Fault.FAILED, Fault.MISS, None])
    assert write(tier, KEYS[:3]) == [
        WriteOutcome.FAILED,
        WriteOutcome.REFUSED,
        WriteOutcome.STORED,
    ]
    assert tier.contains(KEYS[:3]) == [False, False, True]


def test_faults_of_lookups_and_removals(inner):
    write(inner, KEYS)
    tier = FaultyTier(inner, [Fault.MISS, None, None, None, None, Fault.FAILED])
    assert tier.contains(KEYS) == [False, True, True, True]
    assert tier.remove(KEYS[:2]) == 1
    assert inner.contains(KEYS) == [False, True, True, True]


def test_an_error_is_raised_for_the_whole_call(inner):
    tier = FaultyTier(inner, [None, Fault.ERROR], calls=["write"])
    with pytest.raises(OSError, match="Input/output error"):
        write(tier, KEYS[:2])
    assert tier.contains(KEYS[:2]) == [False, False]
    assert write(tier, KEYS[:2]) == [WriteOutcome.STORED] * 2


def test_rates_are_kept_and_repeat(inner):
    write(inner, KEYS)

    def outcomes(rate):
        tier = FaultyTier(inner, rates={Fault.MISS: rate}, seed=3)
        return [outcome for _ in range(50) for outcome in read(tier, KEYS)]

    assert set(outcomes(1.0)) == {ReadOutcome.MISS}
    assert set(outcomes(0.0)) == {ReadOutcome.HIT}
    assert set(outcomes(0.5)) == {ReadOutcome.MISS, ReadOutcome.HIT}
    assert outcomes(0.5) == outcomes(0.5)


@pytest.mark.parametrize("let_go", [FaultyTier.release, FaultyTier.close])
def test_a_stalled_call_waits_until_it_is_released(inner, let_go):
    write(inner, KEYS)
    tier = FaultyTier(inner, [Fault.STALL], calls=["read"])
    answers = []
    thread = threading.Thread(target=lambda: answers.extend(read(tier, KEYS[:1])))
    thread.start()
    assert tier.stalling.wait(30)
    assert answers == []
    assert tier.contains(KEYS[:1]) == [True]
    let_go(tier)
    thread.join(30)
    assert answers == [ReadOutcome.HIT]
