"""Who keeps a root's bound, by folders and a contender's own clock."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from kvtiers.tiers.lease import PATIENCE, SNAPSHOT, Beat, Lease, LeaseLostError
from kvtiers.tiers.owner import has_ended, is_alive, this_process
from root_kit import Clock, before_call

ELSEWHERE = {"host": "elsewhere", "pid": 1, "boot": "b", "pids": "p", "started": 1}


@pytest.fixture
def clock():
    return Clock()


def contender(tmp_path, clock, owner=ELSEWHERE) -> Lease:
    return Lease(str(tmp_path / "lease"), owner, clock)


def test_a_lease_that_nobody_ever_held_is_free(tmp_path, clock):
    one, other = contender(tmp_path, clock), contender(tmp_path, clock)
    one.look()
    other.look()
    assert one.is_free()
    assert other.is_free()
    assert one.take() is not None
    one.publish(Beat(capacity=7))
    assert other.look().beat.capacity == 7
    assert not other.is_free()


def test_of_many_who_try_at_once_one_holds_it(tmp_path, clock):
    barrier = threading.Barrier(8)

    def contend(_: int) -> Lease | None:
        lease = contender(tmp_path, clock)
        lease.look()
        barrier.wait()
        return lease if lease.is_free() and lease.take() is not None else None

    with ThreadPoolExecutor(8) as threads:
        taken = [lease for lease in threads.map(contend, range(8)) if lease is not None]
    still = 0
    for lease in taken:
        try:
            lease.publish(Beat())
            still += 1
        except LeaseLostError:
            pass
    assert still == 1


def test_who_takes_it_while_another_does_has_it_or_has_not(tmp_path, clock):
    """The other one comes before any call of the first, and has it in any case."""
    for count in range(1, 100):
        root = tmp_path / str(count)
        holder, first, other = (contender(root, clock) for _ in range(3))
        root.mkdir()
        holder.take()
        holder.publish(Beat(resigned=True))
        Path(holder.folder, SNAPSHOT).write_text("index")
        first.look()
        taken = []

        def meanwhile(other=other, taken=taken):
            other.look()
            taken.append(other.take())
            other.publish(Beat())
            other.forget_earlier()

        with before_call(count, meanwhile):
            first.take()
        if not taken:
            assert count > 5
            break
        (held,) = [lease for lease in (first, other) if lease._held and os.path.isdir(lease.folder)]
        assert os.listdir(held.folder).count(SNAPSHOT) == 1


def test_a_silent_holder_is_given_up_and_can_publish_nothing_any_more(tmp_path, clock):
    holder, other = contender(tmp_path, clock), contender(tmp_path, clock)
    holder.take()
    holder.publish(Beat(limits={"w-1": 10}))
    other.look()
    clock.now += PATIENCE - 1
    assert not other.is_free()
    holder.publish(Beat(limits={"w-1": 20, "w-2": 5}))
    other.look()
    clock.now += PATIENCE - 1
    other.look()
    assert not other.is_free()
    clock.now += 2
    assert other.is_free()
    assert other.take().limits == {"w-1": 20, "w-2": 5}
    with pytest.raises(LeaseLostError):
        holder.publish(Beat(limits={"w-1": 10**9}))
    with pytest.raises(LeaseLostError):
        holder.check()
    other.check()


def test_no_clock_of_a_host_is_compared(tmp_path, clock):
    """The holder's is days ahead, or behind; the files' times are what they are."""
    holder, other = contender(tmp_path, Clock()), contender(tmp_path, clock)
    holder.take()
    holder.publish(Beat())
    for name in (tmp_path / "lease").rglob("*"):
        os.utime(name, (1, 1))
    other.look()
    assert not other.is_free()


def test_a_holder_that_resigned_is_followed_at_once(tmp_path, clock):
    holder, other = contender(tmp_path, clock), contender(tmp_path, clock)
    holder.take()
    holder.publish(Beat(resigned=True, limits={"w-1": 3}))
    other.look()
    assert other.is_free()
    assert other.take().limits == {"w-1": 3}


def test_a_process_of_this_host_that_ended_is_followed_at_once(tmp_path, clock):
    code = (
        "import sys, time; from kvtiers.tiers.lease import *; "
        "from kvtiers.tiers.owner import this_process; "
        "lease = Lease(sys.argv[1], this_process().facts(), time.monotonic); "
        "lease.take(); lease.publish(Beat()); print('held', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "lease")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        other = contender(tmp_path, clock)
        owner = other.look().beat.owner
        assert (is_alive(owner), has_ended(owner), other.is_free()) == (True, False, False)
        process.kill()
    assert (is_alive(owner), has_ended(owner), other.is_free()) == (False, True, True)


def test_of_a_process_elsewhere_nothing_is_known():
    assert not has_ended(ELSEWHERE)
    assert not is_alive(ELSEWHERE)
    reused = {**this_process().facts(), "started": 1}
    assert has_ended(reused)


def test_what_a_holder_that_died_at_once_had_inherited_is_not_lost(tmp_path, clock):
    """The second died before it could publish: the third finds what the first granted."""
    first, second, third = (contender(tmp_path, clock) for _ in range(3))
    first.take()
    first.publish(Beat(limits={"w-1": 9}))
    (tmp_path / "lease" / "000000000001" / SNAPSHOT).write_text("index")
    second.look()
    assert second.take().snapshot
    third.look()
    clock.now += PATIENCE + 1
    third.look()
    assert third.is_free()
    inherited = third.take()
    assert (inherited.limits, inherited.snapshot) == ({"w-1": 9}, True)
    assert Path(third.folder, SNAPSHOT).read_text() == "index"
    third.publish(Beat(limits=inherited.limits))
    third.forget_earlier()
    assert os.listdir(tmp_path / "lease") == ["000000000003"]


def test_one_that_comes_very_late_does_not_hold_a_generation_long_over(
    tmp_path, clock, monkeypatch
):
    late = contender(tmp_path, clock)
    real, once = os.mkdir, [1]

    def mkdir(path, mode=0o777):
        if "0000" in str(path) and once:
            once.pop()
            for _ in range(2):
                other = contender(tmp_path, clock)
                other.look()
                other.take()
                other.publish(Beat(resigned=True))
                other.forget_earlier()
        real(path, mode)

    monkeypatch.setattr(os, "mkdir", mkdir)
    late.look()
    assert late.take() is None
    assert late.look().generation == 2


def test_a_beat_that_cannot_be_read_is_no_sign_of_life(tmp_path, clock):
    holder, other = contender(tmp_path, clock), contender(tmp_path, clock)
    holder.take()
    (tmp_path / "lease" / "000000000001" / "beat").write_text('{"owner": ')
    other.look()
    clock.now += PATIENCE + 1
    other.look()
    assert other.is_free()
