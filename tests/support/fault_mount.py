"""A folder whose file system fails, or stops answering, when the test says so.

``FaultMount`` is a real mount: the tier's system calls go to the kernel, and fail or hang
there. ``FaultCalls`` is for machines where nobody may mount: it stands in at the system
calls of this process. ``open_faulty_folder`` takes the first that works, and says which.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import pytest

HOLD = "hold"
"""A rule: the call does not return before ``clear``."""
EVERYTHING = "everything"
"""Stands for every call."""
_SECONDS = 20.0
_TOLD = "the test run was told so"


class CannotMountError(RuntimeError):
    """This machine or this user cannot mount; the text says what is missing."""


class FaultyFolder(ABC):
    """A folder, and rules for the calls on what is in it.

    Attributes:
        path: the folder.
        means: what makes the faults, for a reader.

    """

    path: Path
    means: str

    @abstractmethod
    def set(self, rules: Mapping[str, int | str], suffix: str = "") -> None:
        """Calls meet these fates from now on, an errno or ``HOLD``, by the name FUSE has for them.

        Args:
            rules: replaces all rules before.
            suffix: only of paths that end so.

        """

    @abstractmethod
    def held(self) -> int:
        """Calls that wait now."""

    @abstractmethod
    def close(self) -> None:
        """Let all calls go, one way or the other, and remove what was made."""

    def clear(self) -> None:
        """No more faults; calls that are held go on, and succeed."""
        self.set({})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class FaultMount(FaultyFolder):
    """A FUSE passthrough to ``folder/backing``, in a process of its own.

    Raises:
        CannotMountError: at construction.

    """

    means = "a FUSE mount"

    def __init__(self, folder: Path) -> None:
        self.backing = folder / "backing"
        self.path = folder / "mount"
        self.backing.mkdir(parents=True)
        self.path.mkdir()
        self._lock = threading.Lock()
        if shutil.which("fusermount3") is None or not Path("/dev/fuse").exists():
            raise CannotMountError("there is no /dev/fuse, or no fusermount3 (Debian: fuse3)")
        self.mount()

    def mount(self) -> None:
        """Start the process, also again after ``kill``."""
        program = Path(__file__).with_name("fault_mount_daemon.py")
        self._process = subprocess.Popen(
            [sys.executable, str(program), str(self.backing), str(self.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        end = time.monotonic() + _SECONDS
        while not self.path.is_mount():
            if self._process.poll() is not None or time.monotonic() > end:
                said = self._end()
                raise CannotMountError(f"the mount did not come up: {said}")
            time.sleep(0.01)

    def set(self, rules: Mapping[str, int | str], suffix: str = "") -> None:
        """See ``FaultyFolder.set``."""
        self._tell({"rules": dict(rules), "suffix": suffix})

    def held(self) -> int:
        """See ``FaultyFolder.held``."""
        return self._tell(None)

    def kill(self) -> None:
        """The process dies: every call fails with ENOTCONN until ``remount``."""
        self._process.kill()
        self._process.wait()

    def remount(self) -> None:
        """After ``kill``: as an administrator, or systemd, would."""
        self._unmount()
        self.mount()

    def close(self) -> None:
        """See ``FaultyFolder.close``. Never waits for what hangs: the kernel fails it."""
        self._end()

    def _tell(self, command: object) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
            return int(json.loads(self._process.stdout.readline()))

    def _end(self) -> str:
        self._process.kill()
        said = self._process.communicate()[1]
        self._unmount()
        return said.strip()

    def _unmount(self) -> None:
        # Lazily: whoever still has a file open there must not keep us.
        subprocess.run(["umount", "-l", str(self.path)], capture_output=True, check=False)
        subprocess.run(["fusermount3", "-uz", str(self.path)], capture_output=True, check=False)


_CALLS = {
    "open": ("open",),
    "read": ("preadv",),
    "write": ("pwritev",),
    "access": ("access",),
    "getattr": ("lstat", "stat"),
    "rename": ("rename",),
    "unlink": ("unlink",),
    "mkdir": ("mkdir",),
    "readdir": ("scandir", "listdir"),
}
"""FUSE's names, and what a tier of ours calls."""


class FaultCalls(FaultyFolder):
    """The same at this process's own system calls, for machines that cannot mount."""

    means = "a stand-in at the tier's system calls"

    def __init__(self, folder: Path) -> None:
        self.path = folder / "folder"
        self.path.mkdir(parents=True)
        self._rules: dict[str, int | str] = {}
        self._suffix = ""
        self._changed = threading.Condition()
        self._held = 0
        self._patch = pytest.MonkeyPatch()
        for name, calls in _CALLS.items():
            for call in calls:
                self._patch.setattr(os, call, self._ruled(name, getattr(os, call)))

    def set(self, rules: Mapping[str, int | str], suffix: str = "") -> None:
        """See ``FaultyFolder.set``."""
        with self._changed:
            self._rules, self._suffix = dict(rules), suffix
            self._changed.notify_all()

    def held(self) -> int:
        """See ``FaultyFolder.held``."""
        return self._held

    def close(self) -> None:
        """See ``FaultyFolder.close``."""
        self.clear()
        self._patch.undo()

    def _ruled(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def ruled(file: Any, *arguments: Any, **options: Any) -> Any:
            if self._rules and self._is_below(file):
                creates = name == "open" and arguments and arguments[0] & os.O_CREAT
                try:
                    self._pass_through("create" if creates else name, file)
                except OSError:
                    if call.__name__ == "access":
                        return False
                    raise
            return call(file, *arguments, **options)

        return ruled

    def _is_below(self, file: Any) -> bool:
        path = _path_of(file)
        return path.startswith(f"{self.path}/") and path.endswith(self._suffix)

    def _pass_through(self, name: str, file: Any) -> None:
        with self._changed:
            while (rule := self._rules.get(name, self._rules.get(EVERYTHING))) == HOLD:
                self._held += 1
                self._changed.wait()
                self._held -= 1
        if isinstance(rule, int):
            raise OSError(rule, os.strerror(rule), _path_of(file))


def _path_of(file: Any) -> str:
    if isinstance(file, int):
        with contextlib.suppress(OSError):
            return os.readlink(f"/proc/self/fd/{file}")
        return ""
    return os.fspath(file) if isinstance(file, str | os.PathLike) else ""


@contextlib.contextmanager
def open_faulty_folder(folder: Path, *, mount: bool = True) -> Iterator[FaultyFolder]:
    """A ``FaultMount`` below ``folder`` where one can be had, ``FaultCalls`` where not."""
    made: FaultyFolder
    try:
        if not mount:
            raise CannotMountError(_TOLD)
        made = FaultMount(folder)
    except CannotMountError as reason:
        _say(reason)
        made = FaultCalls(folder)
    with made:
        yield made


class SmallDisk:
    """A file system of its own in memory, that can be filled and made read-only.

    Args:
        path: where to mount it; made.
        nbytes: its size.

    Raises:
        CannotMountError: at construction.

    """

    means = "a tmpfs"

    def __init__(self, path: Path, nbytes: int) -> None:
        self.path = path
        path.mkdir(parents=True)
        _mount("-t", "tmpfs", "-o", f"size={nbytes}", "none", str(path))

    @contextlib.contextmanager
    def full(self) -> Iterator[None]:
        """Others have taken what was free."""
        others = self.path / "others"
        with open(others, "wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(4096)):
                pass
        yield
        others.unlink()

    @contextlib.contextmanager
    def read_only(self) -> Iterator[None]:
        """Mounted anew, so that nothing can be written."""
        _mount("-o", "remount,ro", str(self.path))
        try:
            yield
        finally:
            _mount("-o", "remount,rw", str(self.path))

    def close(self) -> None:
        """Remove it, whoever still uses it."""
        subprocess.run(["umount", "-l", str(self.path)], capture_output=True, check=False)


class PretendedDisk:
    """The same at this process's own system calls."""

    means = FaultCalls.means

    def __init__(self, folder: Path) -> None:
        self._calls = FaultCalls(folder)
        self.path = self._calls.path

    @contextlib.contextmanager
    def full(self) -> Iterator[None]:
        """See ``SmallDisk.full``."""
        with self._fail("write", how=errno.ENOSPC):
            yield

    @contextlib.contextmanager
    def read_only(self) -> Iterator[None]:
        """See ``SmallDisk.read_only``."""
        with self._fail("create", "rename", "unlink", "mkdir", how=errno.EROFS):
            yield

    def close(self) -> None:
        """No more faults."""
        self._calls.close()

    @contextlib.contextmanager
    def _fail(self, *calls: str, how: int) -> Iterator[None]:
        self._calls.set(dict.fromkeys(calls, how))
        yield
        self._calls.clear()


@contextlib.contextmanager
def open_disk(
    folder: Path, nbytes: int, *, mount: bool = True
) -> Iterator[SmallDisk | PretendedDisk]:
    """A ``SmallDisk`` where one can be had, a ``PretendedDisk`` where not."""
    disk: SmallDisk | PretendedDisk
    try:
        if not mount:
            raise CannotMountError(_TOLD)
        disk = SmallDisk(folder / "disk", nbytes)
    except CannotMountError as reason:
        _say(reason)
        disk = PretendedDisk(folder)
    try:
        yield disk
    finally:
        disk.close()


def _say(reason: CannotMountError) -> None:
    print(f"Nothing can be mounted: {reason}. Faults are put in at the tier's system calls.")


def _mount(*arguments: str) -> None:
    made = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if made.returncode:
        raise CannotMountError(made.stderr.strip())
