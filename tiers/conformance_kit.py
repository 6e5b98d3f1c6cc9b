"""What the conformance suite for tiers does with a tier, beside its tests.

Chunks whose bytes follow from a number, calls with buffers as the engine's are, and
the three bad things that happen: threads at once, faults, and a writer that is killed.
"""

from __future__ import annotations

import multiprocessing
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

from kvtiers.tiers.base import (
    ALIGNMENT,
    ChunkKey,
    Entry,
    Namespace,
    ReadOutcome,
    Tier,
    WriteOutcome,
)
from kvtiers.tiers.buffers import aligned_buffer
from kvtiers.tiers.wrappers import Fault, WrapperTier

T = TypeVar("T")

HERE = Namespace("a1" * 16)
ELSEWHERE = Namespace("b2" * 16)

# Room for every test that does not set out to fill the tier.
ROOMY = 64

# Often enough that each kind of fault meets each kind of call within a test.
BAD_DAY = {Fault.ERROR: 0.05, Fault.FAILED: 0.1, Fault.MISS: 0.1, Fault.CORRUPT: 0.05}
BAD_DAY_KEYS = 16

KILLED_KEYS = 16
# Seconds into a write, or into one of those that follow.
KILLED_AFTER = (0.0, 0.0005, 0.001, 0.002, 0.004, 0.008)


def key(number: int, namespace: Namespace = HERE) -> ChunkKey:
    """A key whose hash has the usual length of 36 bytes."""
    return ChunkKey(namespace, number.to_bytes(4, "little") * 9)


def payload(tier: Tier, number: int) -> bytes:
    """A chunk's worth of bytes, different for each number below 64 and at each page."""
    pages = tier.payload_bytes // ALIGNMENT
    return b"".join(bytes([number, page % 256]) * (ALIGNMENT // 2) for page in range(pages))


def new_folder(parent: Path, name: str) -> Path:
    """A place for a tier."""
    folder = parent / name
    folder.mkdir()
    return folder


def put(tier: Tier, keys: Sequence[ChunkKey], contents: Sequence[bytes]) -> list[WriteOutcome]:
    """Write from memory such as the arena's."""
    buffers = []
    for content in contents:
        buffer = aligned_buffer(tier.payload_bytes)
        buffer[:] = content
        buffers.append(buffer)
    return tier.write(keys, buffers)


def get(tier: Tier, keys: Sequence[ChunkKey]) -> list[tuple[ReadOutcome, bytes]]:
    """Read, and what the buffers hold then."""
    buffers = [aligned_buffer(tier.payload_bytes) for _ in keys]
    outcomes = tier.read(keys, buffers)
    return [(outcome, bytes(buffer)) for outcome, buffer in zip(outcomes, buffers, strict=True)]


def outcomes_of(tier: Tier, keys: Sequence[ChunkKey]) -> list[ReadOutcome]:
    """Read, whatever the bytes."""
    return [outcome for outcome, _ in get(tier, keys)]


def is_hit(outcome: ReadOutcome) -> bool:
    """Whether the buffer holds the chunk."""
    return outcome is ReadOutcome.HIT


def entries_of(tier: Tier) -> list[Entry]:
    """The chunks of a scan, without what lies in the tier and is none."""
    return [entry for entry in tier.scan() if entry.key is not None]


def scanned(tier: Tier) -> set[ChunkKey]:
    """The keys of all chunks that a scan shows."""
    return {entry.key for entry in entries_of(tier) if entry.key is not None}


def assert_books_balance(tier: Tier) -> None:
    """What ``usage`` says is what ``scan`` shows."""
    entries, usage = entries_of(tier), tier.usage()
    shown = len(entries), sum(entry.nbytes for entry in entries)
    assert (usage.chunks, usage.nbytes) == shown, (
        f"usage() says {usage.chunks} chunks of {usage.nbytes} bytes, and scan() shows "
        f"{shown[0]} of {shown[1]}"
    )


def inside(tier: Tier) -> Tier:
    """The tier under test, without what it is wrapped in."""
    while isinstance(tier, WrapperTier):
        tier = tier.inner
    return tier


def bad_day(tier: Tier, seed: int) -> None:
    """Sixty calls at random on a tier that may fail. What escapes is a failure too."""
    choose = random.Random(seed)  # noqa: S311 - a test's choices
    for _ in range(60):
        numbers = choose.sample(range(BAD_DAY_KEYS), choose.randint(0, 4))
        keys = [key(number) for number in numbers]
        contents = [payload(tier, number) for number in numbers]
        call = choose.choice([_put_on_a_bad_day, _get_on_a_bad_day, _remove_on_a_bad_day])
        with suppress(OSError):
            call(tier, keys, contents)


def _put_on_a_bad_day(tier: Tier, keys: Sequence[ChunkKey], contents: Sequence[bytes]) -> None:
    put(tier, keys, contents)
    usage = tier.usage()
    assert usage.limit is None or usage.nbytes <= usage.limit


def _get_on_a_bad_day(tier: Tier, keys: Sequence[ChunkKey], contents: Sequence[bytes]) -> None:
    for (outcome, content), right in zip(get(tier, keys), contents, strict=True):
        assert outcome is not ReadOutcome.HIT or content == right


def _remove_on_a_bad_day(tier: Tier, keys: Sequence[ChunkKey], _contents: Sequence[bytes]) -> None:
    assert 0 <= tier.remove(keys) <= len(keys)


def kill_a_writer(open_tier: Callable[[], Tier], pause: float) -> None:
    """Kill a process that removes and stores chunks, ``pause`` seconds after it began to."""
    # Forked, so that a test class needs not be importable, nor what it holds be pickled.
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_write_until_killed, args=(open_tier, theirs), daemon=True)
    child.start()
    theirs.close()
    try:
        assert ours.poll(60), "the other process stores nothing"
        ours.recv()
        time.sleep(pause)
    finally:
        child.kill()
        child.join()
        ours.close()


def _write_until_killed(open_tier: Callable[[], Tier], begun: Connection) -> None:
    tier = open_tier()
    keys = [key(number) for number in range(KILLED_KEYS)]
    tier.remove(keys)
    begun.send("now")
    while True:
        for number, k in enumerate(keys):
            put(tier, [k], [payload(tier, number)])
        tier.remove(keys)


def together(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Run each call on a thread of its own, started at the same moment."""
    barrier = threading.Barrier(len(calls))

    def run(call: Callable[[], T]) -> T:
        barrier.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))
