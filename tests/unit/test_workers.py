"""The threads of a tier. Order is forced by gates, never by sleeping."""

from __future__ import annotations

import queue
import threading
from asyncio import CancelledError
from collections.abc import Callable, Iterator, Sequence

import pytest
from hierarchy_kit import CHUNK, FIRST, Clock, DictTier, key, prefix, truth
from kvtiers.tiers import ChunkKey, Entry, ReadOutcome, WriteOutcome
from kvtiers.tiers.findings import Findings
from kvtiers.tiers.workers import Op, OpKind, ThreadWorkers, call

SOON = 20.0


class GatedTier(DictTier):
    """Writes wait for ``gate``; says which call began."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.began: queue.Queue[str] = queue.Queue()

    def write(self, keys: Sequence[ChunkKey], buffers: Sequence[memoryview]) -> list[WriteOutcome]:
        self.began.put("write")
        assert self.gate.wait(SOON)
        return super().write(keys, buffers)

    def read(self, keys: Sequence[ChunkKey], buffers: Sequence[memoryview]) -> list[ReadOutcome]:
        self.began.put("read")
        return super().read(keys, buffers)


class Rig:
    def __init__(self, tier: DictTier, threads: int, clock: Callable[[], float]) -> None:
        self.ended: queue.Queue[Op] = queue.Queue()
        self.workers = ThreadWorkers(tier, self.ended.put, clock, threads)

    def submit(self, op: Op) -> Op:
        self.workers.submit(op)
        return op

    def next(self) -> Op:
        return self.ended.get(timeout=SOON)


@pytest.fixture
def tier() -> GatedTier:
    return GatedTier()


@pytest.fixture
def make_rig() -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make(tier: DictTier, threads: int = 2, clock: Callable[[], float] | None = None) -> Rig:
        rigs.append(Rig(tier, threads, clock or Clock()))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.workers.close(0.0)


def write(name: str) -> Op:
    return Op(OpKind.WRITE, [ChunkKey(FIRST, key(name))], [memoryview(truth(key(name)))])


def read(name: str, **kwargs: float) -> Op:
    buffer = memoryview(bytearray(CHUNK))
    return Op(OpKind.READ, [ChunkKey(FIRST, key(name))], [buffer], **kwargs)  # type: ignore[arg-type]


def test_each_call_comes_back_with_the_tiers_answer(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(DictTier(), 1)
    rig.submit(write("a"))
    assert rig.next().writes == [WriteOutcome.STORED]
    done = rig.submit(read("a"))
    assert rig.next() is done
    assert done.reads == [ReadOutcome.HIT]
    assert bytes(done.buffers[0]) == truth(key("a"))
    rig.submit(Op(OpKind.CONTAINS, [ChunkKey(FIRST, key(k)) for k in "ab"]))
    assert rig.next().found == [True, False]
    removed = rig.submit(Op(OpKind.REMOVE, [ChunkKey(FIRST, key("a"))]))
    rig.next()
    assert removed.removed == 1
    assert removed.usage is not None
    assert removed.usage.chunks == 0


def test_a_load_overtakes_stores_that_wait(tier: GatedTier, make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(tier, 1)
    first, second = write("a"), write("b")
    rig.submit(first)
    assert tier.began.get(timeout=SOON) == "write"
    rig.submit(second)
    load = rig.submit(read("x"))
    tier.gate.set()
    assert [rig.next(), rig.next(), rig.next()] == [first, load, second]


def test_a_load_does_not_wait_for_any_store_to_end(
    tier: GatedTier, make_rig: Callable[..., Rig]
) -> None:
    rig = make_rig(tier, 2)
    for name in "abc":
        rig.submit(write(name))
    assert tier.began.get(timeout=SOON) == "write"
    load = rig.submit(read("x"))
    assert rig.next() is load, "though the gate of the stores is shut"
    tier.gate.set()


@pytest.mark.parametrize("threads", [2, 3, 4, 7, 8])
def test_half_of_the_threads_are_there_for_loads_however_many_stores_hang(
    threads: int, make_rig: Callable[..., Rig]
) -> None:
    class Meeting(GatedTier):
        """Reads end once ``half`` of them are under way at once."""

        half = threading.Barrier(-(-threads // 2))

        def read(self, keys: object, buffers: object) -> list[ReadOutcome]:
            self.half.wait(SOON)
            return [ReadOutcome.MISS]

    tier = Meeting()
    rig = make_rig(tier, threads)
    for number in range(2 * threads):
        rig.submit(write(str(number)))
    for _ in range(threads // 2):
        assert tier.began.get(timeout=SOON) == "write"
    loads = [rig.submit(read(str(number))) for number in range(-(-threads // 2))]
    assert {rig.next() for _ in loads} == set(loads), "though the gate of the stores is shut"
    assert tier.began.empty(), "no more stores than that began"
    tier.gate.set()


def test_a_queued_op_can_be_taken_back_and_a_started_one_cannot(
    tier: GatedTier, make_rig: Callable[..., Rig]
) -> None:
    rig = make_rig(tier, 1)
    running = rig.submit(write("a"))
    assert tier.began.get(timeout=SOON) == "write"
    waiting = rig.submit(write("b"))
    assert rig.workers.cancel(waiting)
    assert not rig.workers.cancel(running)
    tier.gate.set()
    assert rig.next() is running
    assert list(tier.chunks) == list(running.keys)


def test_an_op_that_begins_after_its_deadline_is_not_made(make_rig: Callable[..., Rig]) -> None:
    tier, clock = DictTier(), Clock()
    rig = make_rig(tier, 1, clock)
    rig.submit(read("a", deadline=clock.now))
    op = rig.next()
    assert op.reads == [ReadOutcome.FAILED]
    assert isinstance(op.error, TimeoutError)
    assert tier.calls == []


class Panic(BaseException):
    """As a library in Rust raises it: no Exception."""


@pytest.mark.parametrize("error", [OSError("gone"), CancelledError(), SystemExit(1), Panic()])
@pytest.mark.parametrize(
    "kind", [OpKind.READ, OpKind.WRITE, OpKind.CONTAINS, OpKind.REMOVE, OpKind.PROBE, OpKind.SCAN]
)
def test_whatever_escapes_from_a_tier_becomes_failed_outcomes_and_ends_no_thread(
    kind: OpKind, error: BaseException, make_rig: Callable[..., Rig]
) -> None:
    class Broken(DictTier):
        def _broken(self, *args: object) -> list[bool]:
            raise error

        contains = read = write = remove = scan = _broken  # type: ignore[assignment]

    rig = make_rig(Broken(), 1)
    for _ in range(2):
        op = Op(kind, [ChunkKey(FIRST, key("a"))], [memoryview(bytearray(CHUNK))])
        assert rig.submit(op) is rig.next()
        assert op.error is error
        assert op.reads == [ReadOutcome.FAILED] * (kind is OpKind.READ)
        assert op.writes == [WriteOutcome.FAILED] * (kind is OpKind.WRITE)
        assert op.found == [False] * (kind is OpKind.CONTAINS)


NONSENSE = [None, [], 7, "ab", [None, None], [[], []], [True, True], {0: 1, 1: 2}]


@pytest.mark.parametrize("answer", NONSENSE, ids=repr)
@pytest.mark.parametrize("kind", [OpKind.READ, OpKind.WRITE])
def test_an_answer_that_is_none_is_not_believed(kind: OpKind, answer: object) -> None:
    class Odd(DictTier):
        def _odd(self, *args: object) -> object:
            return answer

        read = write = _odd  # type: ignore[assignment]

    op = Op(kind, [ChunkKey(FIRST, key(k)) for k in "ab"])
    call(Odd(), op)
    assert f"{kind.value}() answered" in str(op.error) or isinstance(op.error, TypeError)
    assert op.reads == [ReadOutcome.FAILED] * 2 * (kind is OpKind.READ)
    assert op.writes == [WriteOutcome.FAILED] * 2 * (kind is OpKind.WRITE)


@pytest.mark.parametrize("answer", [None, [], 7], ids=repr)
def test_a_lookup_that_does_not_answer_for_each_chunk_has_found_nothing(answer: object) -> None:
    class Odd(DictTier):
        def contains(self, keys: object) -> list[bool]:
            return answer  # type: ignore[return-value]

    op = Op(OpKind.CONTAINS, [ChunkKey(FIRST, key(k)) for k in "ab"])
    call(Odd(), op)
    assert op.error is not None
    assert op.found == [False] * 2


@pytest.mark.parametrize("call_name", ["remove", "usage"])
def test_a_tier_that_does_not_say_how_much_it_removed_or_holds_has_failed(call_name: str) -> None:
    tier = DictTier()
    vars(tier)[call_name] = lambda *args: None
    op = Op(OpKind.REMOVE, [ChunkKey(FIRST, key("a"))])
    call(tier, op)
    assert isinstance(op.error, TypeError)
    assert op.usage is None
    assert op.removed < len(op.keys)


def test_without_a_thread_to_be_had_a_scan_fails(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    rig = make_rig(DictTier(), 1)
    monkeypatch.setattr(threading.Thread, "start", refused)
    op = rig.submit(Op(OpKind.SCAN))
    assert rig.next() is op
    assert isinstance(op.error, RuntimeError)


def test_a_tier_that_answers_for_too_few_chunks_is_not_believed() -> None:
    class Short(DictTier):
        def read(self, keys: object, buffers: object) -> list[ReadOutcome]:
            return [ReadOutcome.HIT]

    op = Op(OpKind.READ, [ChunkKey(FIRST, key(k)) for k in "ab"])
    call(Short(), op)
    assert op.reads == [ReadOutcome.FAILED] * 2
    assert "answered 1 times for 2 chunks" in str(op.error)


def found(op: Op) -> Findings:
    assert op.findings is not None
    return op.findings


def test_a_scan_hands_over_what_is_there_last_used_first(make_rig: Callable[..., Rig]) -> None:
    tier = DictTier()
    tier.put(prefix("p", 1500))
    rig = make_rig(tier, 1)
    rig.submit(Op(OpKind.SCAN))
    op = rig.next()
    batches = list(found(op).batches())
    assert max(map(len, batches)) <= 256
    entries = [entry for batch in batches for entry in batch]
    assert [entry.last_used for entry in entries] == [float(i) for i in reversed(range(1500))]
    assert op.usage == tier.usage()


def test_a_scan_that_breaks_off_hands_over_what_it_found(make_rig: Callable[..., Rig]) -> None:
    class Torn(DictTier):
        def scan(self) -> Iterator[Entry]:
            yield Entry(ChunkKey(FIRST, key("a")), CHUNK, 0.0)
            raise OSError("mount gone")

    rig = make_rig(Torn(), 1)
    rig.submit(Op(OpKind.SCAN))
    op = rig.next()
    assert [len(batch) for batch in found(op).batches()] == [1]
    assert isinstance(op.error, OSError)


def test_a_scan_takes_no_thread_from_the_loads(make_rig: Callable[..., Rig]) -> None:
    class SlowScan(DictTier):
        gate = threading.Event()

        def scan(self) -> Iterator[Entry]:
            assert self.gate.wait(SOON)
            return super().scan()

    rig = make_rig(SlowScan(), 1)
    scan = rig.submit(Op(OpKind.SCAN))
    load = rig.submit(read("a"))
    assert rig.next() is load
    SlowScan.gate.set()
    assert rig.next() is scan


def test_close_drops_what_is_queued_and_lets_running_calls_end(
    tier: GatedTier, make_rig: Callable[..., Rig]
) -> None:
    rig = make_rig(tier, 1)
    running = rig.submit(write("a"))
    assert tier.began.get(timeout=SOON) == "write"
    rig.submit(write("b"))
    closer = threading.Thread(target=rig.workers.close, args=(SOON,))
    closer.start()
    tier.gate.set()
    closer.join(SOON)
    assert not closer.is_alive()
    assert rig.next() is running
    assert rig.ended.empty()
    assert list(tier.chunks) == list(running.keys)


def test_close_does_not_wait_for_a_scan(make_rig: Callable[..., Rig]) -> None:
    class Endless(DictTier):
        gate = threading.Event()

        def scan(self) -> Iterator[Entry]:
            assert self.gate.wait(60 * SOON)
            return super().scan()

    rig = make_rig(Endless(), 1)
    rig.submit(Op(OpKind.SCAN))
    closer = threading.Thread(target=rig.workers.close, args=(30 * SOON,), daemon=True)
    closer.start()
    closer.join(SOON)
    assert not closer.is_alive(), "it would have had ten minutes"
    Endless.gate.set()


def test_close_does_not_wait_for_a_call_that_hangs(
    tier: GatedTier, make_rig: Callable[..., Rig]
) -> None:
    rig = make_rig(tier, 1)
    rig.submit(write("a"))
    assert tier.began.get(timeout=SOON) == "write"
    rig.workers.close(0.0)
    assert rig.ended.empty()
    tier.gate.set()
