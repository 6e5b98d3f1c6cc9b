import contextlib
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvtiers.tiers import Usage
from kvtiers.tiers.named_ledger import Ledger

names = st.integers(0, 5).map(lambda n: b"%d" % n)


def soon() -> float:
    return time.monotonic() + 30


def test_news_of_one_name_count_once():
    ledger = Ledger(100)
    for nbytes in (10, 10, 30):
        ledger.present(b"a", nbytes)
    assert ledger.usage() == Usage(30, 1, 100)
    assert ledger.knows(b"a")
    for _ in range(2):
        ledger.absent(b"a")
    assert ledger.usage() == Usage(0, 0, 100)
    assert not ledger.knows(b"a")


def test_a_chunk_that_was_reserved_never_counts_twice():
    ledger = Ledger(20)
    assert ledger.reserve(10)
    ledger.present(b"a", 10, reserved=10)
    assert ledger.reserve(10)
    assert ledger.usage() == Usage(10, 1, 20)


def test_reservations_count_against_the_limit_until_they_end():
    ledger = Ledger(25)
    assert ledger.reserve(10)
    assert ledger.reserve(10)
    assert not ledger.reserve(10)
    assert ledger.usage().nbytes == 0, "nothing is there yet"
    ledger.present(b"a", 10)
    ledger.release(10)
    ledger.release(10)
    assert ledger.reserve(15)
    assert not ledger.reserve(1)


@given(
    st.dictionaries(names, st.integers(1, 9)),
    st.lists(st.tuples(names, st.integers(1, 9) | st.none())),
    st.dictionaries(names, st.integers(1, 9)),
)
def test_what_changes_during_a_scan_overrides_what_the_scan_saw(before, changes, seen):
    """``seen`` may be from before or after any of the changes: the server does not say."""
    ledger = Ledger(None)
    for name, nbytes in before.items():
        ledger.present(name, nbytes)
    with ledger.scanning() as found:
        for name, nbytes in changes:
            if nbytes is None:
                ledger.absent(name)
            else:
                ledger.present(name, nbytes)
        found.update(seen)
    expected = {n: size for n, size in (seen | dict(changes)).items() if size is not None}
    assert ledger.usage() == Usage(sum(expected.values()), len(expected), None)
    assert all(ledger.knows(name) == (name in expected) for name in {*before, *seen})


def test_a_scan_that_fails_leaves_all_as_it_was():
    ledger = Ledger(None)
    ledger.present(b"a", 10)
    with contextlib.suppress(ConnectionError), ledger.scanning() as found:
        found[b"b"] = 20
        ledger.present(b"c", 30)
        raise ConnectionError
    assert ledger.usage() == Usage(40, 2, None)


def test_one_thread_at_a_time_changes_a_name_and_others_go_on():
    ledger = Ledger(None)
    order = []
    entered, leave = threading.Event(), threading.Event()

    def first():
        with ledger.changing([b"a", b"b"], soon()):
            entered.set()
            assert leave.wait(30)
            order.append("first")

    def second():
        with ledger.changing([b"b", b"c"], soon()):
            order.append("second")

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    threads[0].start()
    assert entered.wait(30)
    threads[1].start()
    with ledger.changing([b"c", b"d"], soon()):
        order.append("beside")
    leave.set()
    for thread in threads:
        thread.join(30)
    assert order == ["beside", "first", "second"]


def test_waiting_for_a_name_ends_at_the_deadline_and_takes_nothing():
    ledger = Ledger(None)
    with ledger.changing([b"a"], soon()):
        with (
            pytest.raises(TimeoutError, match="another call"),
            ledger.changing([b"a", b"b"], time.monotonic()),
        ):
            pytest.fail("both have it")
        with ledger.changing([b"b"], soon()):
            pass
