"""Who a process is, so that others on its host can tell that it has ended.

A process id says nothing on another host, in another container, or after it was given to
another process. So boot, namespace of process ids, and start time are compared too; where
any of the first two differs nothing is known, and silence is all there is to go by.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Owner:
    """A process.

    Attributes:
        host: its host's name, for humans.
        pid: its process id, as it sees it itself.
        boot: id of the host's boot, "" if unknown.
        pids: namespace of its process ids, "" if unknown.
        started: when it started, in the kernel's ticks since the boot.

    """

    host: str
    pid: int
    boot: str
    pids: str
    started: int

    def facts(self) -> dict[str, Any]:
        """As it is written down."""
        return asdict(self)


def this_process() -> Owner:
    """The caller's process."""
    pid = os.getpid()
    boot, pids = _here()
    return Owner(socket.gethostname(), pid, boot, pids, _started(pid) or 0)


def has_ended(facts: Mapping[str, Any]) -> bool:
    """Whether it is certain that the process of which these are the facts is no more."""
    return _runs(facts) is False


def is_alive(facts: Mapping[str, Any]) -> bool:
    """Whether it is certain that the process of which these are the facts still runs."""
    return _runs(facts) is True


def _runs(facts: Mapping[str, Any]) -> bool | None:
    """None if it can't be told from here."""
    boot, pids = _here()
    if not boot or not pids or (facts.get("boot"), facts.get("pids")) != (boot, pids):
        return None
    pid = facts.get("pid")
    return _started(pid) == facts.get("started") if isinstance(pid, int) else None


@cache
def _here() -> tuple[str, str]:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return boot, os.readlink("/proc/self/ns/pid")
    except OSError:
        return "", ""


def _started(pid: int) -> int | None:
    """The process's start time, None if there is none of that id, or only its remains."""
    try:
        status = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The name in parentheses may hold anything, so count from its end.
    fields = status[status.rindex(b")") + 2 :].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])
