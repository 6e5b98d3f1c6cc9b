"""Our tiers keep the promises that strangers' tiers are held to; who breaks one is found."""

import inspect
import os
import shutil
import threading
import time
import uuid
from pathlib import Path

import pytest
import xxhash
from kvtiers.tiers.base import Entry, ReadOutcome, Tier, TierConfig, Usage, WriteOutcome
from kvtiers.tiers.conformance import TierConformance
from kvtiers.tiers.conformance_kit import ROOMY
from tier_recipes import CpuRecipe, FsRecipe


class TestCpuTier(CpuRecipe):
    pass


class TestFsTier(FsRecipe):
    pass


class TestFsTierBuffered(FsRecipe):
    direct = False


class TestFsTierWithFsync(FsRecipe):
    payload_bytes = 4096
    fsync = True


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="no tmpfs to write to")
class TestFsTierOnTmpfs(FsRecipe):
    @pytest.fixture
    def tmp_path(self):
        """Named and cleaned like pytest's own, but in memory."""
        folder = Path("/dev/shm", f"kvtiers-test-{uuid.uuid4().hex}")
        folder.mkdir()
        yield folder
        shutil.rmtree(folder)


# What breaks a promise ----------------------------------------------------------


class GoodTier(Tier):
    """A dict of payloads with their checksum and last use: what the tiers below spoil."""

    shared = persistent = True
    kept = {}  # noqa: RUF012 - by place, as a disk would

    def __init__(self, place, payload_bytes, chunks):
        super().__init__(TierConfig(type="good"), payload_bytes)
        self.limit = chunks * payload_bytes
        self.chunks = self.kept.setdefault(place, {})
        self.lock = threading.RLock()

    def contains(self, keys):
        return [key in self.chunks for key in keys]

    def read(self, keys, buffers):
        with self.lock:
            return [self.read_one(key, buffer) for key, buffer in zip(keys, buffers, strict=True)]

    def read_one(self, key, buffer):
        if key not in self.chunks:
            return ReadOutcome.MISS
        data, digest, _ = self.chunks[key]
        buffer[:] = data
        if xxhash.xxh3_128_digest(data) != digest:
            self.chunks.pop(key, None)
            return ReadOutcome.CORRUPT
        self.chunks[key] = data, digest, time.time()
        return ReadOutcome.HIT

    def write(self, keys, buffers):
        with self.lock:
            return [self.write_one(key, buffer) for key, buffer in zip(keys, buffers, strict=True)]

    def write_one(self, key, buffer):
        if key in self.chunks:
            return WriteOutcome.EXISTS
        if (len(self.chunks) + 1) * self.payload_bytes > self.limit:
            return WriteOutcome.REFUSED
        self.chunks[key] = bytes(buffer), xxhash.xxh3_128_digest(buffer), time.time()
        return WriteOutcome.STORED

    def remove(self, keys):
        return sum(self.chunks.pop(key, None) is not None for key in keys)

    def scan(self):
        for key, (_, _, used) in list(self.chunks.items()):
            yield Entry(key, self.payload_bytes, used)

    def usage(self):
        return Usage(len(self.chunks) * self.payload_bytes, len(self.chunks), self.limit)


class GoodRecipe(TierConformance):
    bounded = True
    supports_persistence = True
    made = GoodTier

    def open_tier(self, place, chunks):
        return self.made(place, self.payload_bytes, chunks)

    def peek(self, tier, key):
        return bytes(tier.chunks[key][0]) if key in tier.chunks else None

    def poke_damage(self, tier, key):
        data, *rest = tier.chunks[key]
        tier.chunks[key] = (bytes([data[0] ^ 1]) + data[1:], *rest)


class KeepsBuffers(GoodTier):
    def write_one(self, key, buffer):
        outcome = super().write_one(key, buffer)
        if outcome is WriteOutcome.STORED:
            self.chunks[key] = (buffer, *self.chunks[key][1:])
        return outcome


class WritesAnew(GoodTier):
    def write_one(self, key, buffer):
        self.chunks.pop(key, None)
        return super().write_one(key, buffer)


class OneNamespace(GoodTier):
    def contains(self, keys):
        return [key.hash in {held.hash for held in self.chunks} for key in keys]


class AnswersHitsFirst(GoodTier):
    def read(self, keys, buffers):
        return sorted(super().read(keys, buffers), key=lambda outcome: outcome.value)


class AsksForAtMost(GoodTier):
    def contains(self, keys):
        if len(keys) > 32766:
            raise RuntimeError("too many variables")
        return super().contains(keys)


class EncryptsInPlace(GoodTier):
    def write_one(self, key, buffer):
        outcome = super().write_one(key, buffer)
        buffer[0] ^= 1
        return outcome


class ScansALiveDict(GoodTier):
    def scan(self):
        for key in self.chunks:
            yield Entry(key, self.payload_bytes, time.time())


class ForgetsUses(GoodTier):
    def read_one(self, key, buffer):
        before = self.chunks.get(key)
        outcome = super().read_one(key, buffer)
        if outcome is ReadOutcome.HIT:
            self.chunks[key] = before
        return outcome


class CountsMonotonically(GoodTier):
    def scan(self):
        return (Entry(entry.key, entry.nbytes, time.monotonic()) for entry in super().scan())


class CountsAttempts(GoodTier):
    attempts = 0

    def write_one(self, key, buffer):
        self.attempts += 1
        return super().write_one(key, buffer)

    def usage(self):
        return Usage(self.attempts * self.payload_bytes, self.attempts, self.limit)


class CountsChunksOnly(GoodTier):
    def usage(self):
        return Usage(0, len(self.chunks), self.limit)


class ServesDamage(GoodTier):
    def read_one(self, key, buffer):
        outcome = super().read_one(key, buffer)
        return ReadOutcome.HIT if outcome is ReadOutcome.CORRUPT else outcome


class KeepsDamage(GoodTier):
    def read_one(self, key, buffer):
        before = self.chunks.get(key)
        outcome = super().read_one(key, buffer)
        if outcome is ReadOutcome.CORRUPT:
            self.chunks[key] = before
        return outcome


class KnowsNoBound(GoodTier):
    def __init__(self, place, payload_bytes, chunks):
        super().__init__(place, payload_bytes, 2 * chunks)


class ForgetsAtClose(GoodTier):
    def close(self):
        self.chunks.clear()


class HidesThatItKeeps(GoodTier):
    persistent = False


class SeesOnlyItsOwn(GoodTier):
    def __init__(self, place, payload_bytes, chunks):
        super().__init__(place, payload_bytes, chunks)
        self.chunks = {}


class WritesInHalves(GoodTier):
    """Waits after the first half for a reader, so that one sees it however threads are run."""

    def __init__(self, place, payload_bytes, chunks):
        super().__init__(place, payload_bytes, chunks)
        self.was_read = threading.Event()

    def read(self, keys, buffers):
        try:
            return [self.read_one(key, buffer) for key, buffer in zip(keys, buffers, strict=True)]
        finally:
            self.was_read.set()

    def write_one(self, key, buffer):
        half = self.payload_bytes // 2
        old = self.chunks.get(key, (bytes(self.payload_bytes),))[0]
        for data in (bytes(buffer[:half]) + old[half:], bytes(buffer)):
            self.chunks[key] = data, xxhash.xxh3_128_digest(data), time.time()
            self.was_read.clear()
            self.was_read.wait(1)
        return WriteOutcome.STORED


class AnswersOutOfItsBuffer(GoodTier):
    def read_one(self, key, buffer):
        if self.chunks and key not in self.chunks:
            key = next(iter(self.chunks))
        return super().read_one(key, buffer)


@pytest.mark.parametrize(
    ("broken", "test"),
    [
        (KeepsBuffers, "buffers_are_not_kept"),
        (WritesAnew, "a_second_write_says_exists_and_changes_nothing"),
        (OneNamespace, "equal_hashes_in_two_namespaces_are_two_chunks"),
        (AnswersHitsFirst, "a_batch_is_answered_in_its_order"),
        (AsksForAtMost, "a_lookup_of_the_longest_prompt_is_one_call"),
        (EncryptsInPlace, "a_write_leaves_the_callers_memory_as_it_is"),
        (ScansALiveDict, "a_scan_beside_other_calls_shows_what_was_there_all_along"),
        (ForgetsUses, "a_scan_says_when_a_chunk_was_last_used"),
        (CountsMonotonically, "a_scan_says_when_a_chunk_was_last_used"),
        (CountsChunksOnly, "scan_and_usage_agree_on_the_space_taken"),
        (CountsAttempts, "any_sequence_of_calls_matches_a_dict"),
        (ServesDamage, "a_damaged_chunk_is_corrupt_once_and_then_a_miss"),
        (ServesDamage, "on_a_bad_day_damage_is_never_served"),
        (KeepsDamage, "a_damaged_chunk_is_corrupt_once_and_then_a_miss"),
        (KeepsDamage, "a_damaged_chunk_can_be_stored_anew"),
        (KnowsNoBound, "a_full_tier_refuses_and_keeps_what_it_has"),
        (KnowsNoBound, "the_bound_holds_among_threads"),
        (ForgetsAtClose, "chunks_survive_closing_and_opening"),
        (HidesThatItKeeps, "persistence_is_declared_by_the_class"),
        (SeesOnlyItsOwn, "engines_that_share_it_see_each_others_chunks"),
        (WritesInHalves, "readers_beside_writers_see_whole_chunks_or_none"),
        (AnswersOutOfItsBuffer, "on_a_bad_day_hits_are_right_and_the_books_balance"),
        (CountsAttempts, "on_a_bad_day_hits_are_right_and_the_books_balance"),
    ],
)
def test_a_tier_that_breaks_a_promise_is_caught(broken, test, tmp_path) -> None:
    run(GoodTier, test, tmp_path / "good")
    with pytest.raises((AssertionError, RuntimeError, BufferError)):
        run(broken, test, tmp_path / "broken")


def run(made, test, folder) -> None:
    folder.mkdir()
    suite = type("Suite", (GoodRecipe,), {"made": made})()
    call = getattr(suite, f"test_{test}")
    if "tier" in inspect.signature(call).parameters:
        (folder / "tier").mkdir()
        call(suite.opened(folder / "tier", ROOMY))
    else:
        call(folder)
