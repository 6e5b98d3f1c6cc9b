"""The process behind ``fault_mount.FaultMount``: a FUSE passthrough that fails on cue.

    python fault_mount_daemon.py BACKING MOUNTPOINT

Commands come on standard input and answers go to standard output, one JSON value a
line. When standard input ends, because the test ended or was killed, so does the
process, and the kernel fails whatever still waits for it.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import mfusepy

HOLD = "hold"
EVERYTHING = "everything"


class Rules:
    """What becomes of calls, by name: an errno, or ``HOLD``. Any thread may call."""

    def __init__(self) -> None:
        self._rules: dict[str, int | str] = {}
        self._suffix = ""
        self._changed = threading.Condition()
        self._held = 0

    def set(self, rules: dict[str, int | str], suffix: str) -> None:
        """Replace all rules; those calls that are held and whose rule is gone go on."""
        with self._changed:
            self._rules, self._suffix = rules, suffix
            self._changed.notify_all()

    @property
    def held(self) -> int:
        """Calls that wait now."""
        return self._held

    def pass_through(self, call: str, path: str) -> None:
        """Return when the call may be made; raises OSError where it shall fail."""
        with self._changed:
            while (rule := self._rule(call, path)) == HOLD:
                self._held += 1
                self._changed.wait()
                self._held -= 1
        if isinstance(rule, int):
            raise mfusepy.FuseOSError(rule)

    def _rule(self, call: str, path: str) -> int | str | None:
        if not path.endswith(self._suffix):
            return None
        return self._rules.get(call, self._rules.get(EVERYTHING))


def ruled(method: Callable[..., Any]) -> Callable[..., Any]:
    """A call of the kernel that its rule may hold or fail."""

    def call(self: Passthrough, path: str, *arguments: Any) -> Any:
        self.rules.pass_through(method.__name__, path)
        return method(self, path, *arguments)

    call.__name__ = method.__name__
    return call


class Passthrough(mfusepy.Operations):
    """Every call is made on the same path below ``backing``."""

    use_ns = True

    def __init__(self, backing: str, rules: Rules) -> None:
        self._backing = backing
        self.rules = rules

    def _at(self, path: str) -> str:
        return self._backing + path

    @ruled
    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        found = os.lstat(self._at(path))
        names = [name for name in dir(found) if name.startswith("st_")]
        return {name: getattr(found, name) for name in names} | {
            "st_atime": found.st_atime_ns,
            "st_mtime": found.st_mtime_ns,
            "st_ctime": found.st_ctime_ns,
        }

    @ruled
    def access(self, path: str, amode: int) -> int:
        if not os.access(self._at(path), amode):
            raise mfusepy.FuseOSError(
                errno.EACCES if os.path.lexists(self._at(path)) else errno.ENOENT
            )
        return 0

    @ruled
    def open(self, path: str, flags: int) -> int:
        # Buffers of this process have no alignment.
        return os.open(self._at(path), flags & ~os.O_DIRECT)

    @ruled
    def create(self, path: str, mode: int, fi: Any = None) -> int:
        return os.open(self._at(path), os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)

    @ruled
    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return os.pread(fh, size, offset)

    @ruled
    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        return os.pwrite(fh, data, offset)

    @ruled
    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        os.truncate(self._at(path), length)
        return 0

    @ruled
    def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
        os.utime(self._at(path), ns=times)
        return 0

    @ruled
    def unlink(self, path: str) -> int:
        os.unlink(self._at(path))
        return 0

    @ruled
    def rename(self, old: str, new: str) -> int:
        os.rename(self._at(old), self._at(new))
        return 0

    @ruled
    def link(self, target: str, source: str) -> int:
        os.link(self._at(source), self._at(target))
        return 0

    @ruled
    def mkdir(self, path: str, mode: int) -> int:
        os.mkdir(self._at(path), mode)
        return 0

    @ruled
    def rmdir(self, path: str) -> int:
        os.rmdir(self._at(path))
        return 0

    @ruled
    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *os.listdir(self._at(path))]

    @ruled
    def statfs(self, path: str) -> dict[str, int]:
        found = os.statvfs(self._at(path))
        return {name: getattr(found, name) for name in dir(found) if name.startswith("f_")}

    @ruled
    def fsync(self, path: str, datasync: int, fh: int) -> int:
        os.fsync(fh)
        return 0

    def release(self, path: str, fh: int) -> int:
        os.close(fh)
        return 0


def obey(rules: Rules, mountpoint: str) -> None:
    """Carry out commands until there will be none any more: then leave no mount behind."""
    for line in sys.stdin:
        command = json.loads(line)
        if command is not None:
            rules.set(command["rules"], command["suffix"])
        print(json.dumps(rules.held), flush=True)
    subprocess.run(["umount", "-l", mountpoint], check=False)
    os._exit(0)


def main() -> None:
    """Mount, serve until unmounted or told to end."""
    backing, mountpoint = sys.argv[1:]
    rules = Rules()
    threading.Thread(target=obey, args=(rules, mountpoint), daemon=True).start()
    # Nothing is cached in the kernel: each call of a tier is a call here.
    never = dict.fromkeys(("attr_timeout", "entry_timeout", "negative_timeout"), 0)
    mfusepy.FUSE(Passthrough(backing, rules), mountpoint, foreground=True, direct_io=True, **never)


if __name__ == "__main__":
    main()
