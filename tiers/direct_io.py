"""Scatter reads and writes of files, past the page cache where it can be done.

O_DIRECT keeps KV out of the page cache: it would lie there a second time, push
out what others need, and be copied once more. But file systems differ in where
they refuse it (at open, at the first transfer, for one buffer), so everything
here falls back to buffered I/O by itself.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from kvtiers.tiers.base import ALIGNMENT
from kvtiers.tiers.buffers import aligned_buffer

# Absent on macOS.
_O_DIRECT = getattr(os, "O_DIRECT", 0)


@contextlib.contextmanager
def opened(path: str, flags: int, *, direct: bool, mode: int = 0o600) -> Iterator[int]:
    """A descriptor of ``path`` for ``transfer_in`` and ``transfer_out``.

    Never waits and never follows a link: ``O_NONBLOCK`` does nothing to a file,
    but a FIFO in a chunk's place would otherwise hold the thread for ever.
    """
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(path, flags | (_O_DIRECT if direct else 0), mode)
    except OSError as error:
        if not direct or error.errno != errno.EINVAL:
            raise
        # A file may exist by now: some file systems create it, then refuse.
        descriptor = os.open(path, flags & ~os.O_EXCL, mode)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def transfer_in(descriptor: int, buffers: Sequence[memoryview]) -> int:
    """Fill ``buffers`` from the start of the file; returns bytes read.

    Fewer than the buffers hold means that the file is shorter. Raises OSError.
    """
    return _transfer(os.preadv, descriptor, buffers)


def transfer_out(descriptor: int, buffers: Sequence[memoryview]) -> None:
    """Write ``buffers`` to the start of the file, all of them. Raises OSError."""
    wanted = sum(buffer.nbytes for buffer in buffers)
    if _transfer(os.pwritev, descriptor, buffers) != wanted:
        # Nothing written and no error: POSIX allows it, and it would loop for ever.
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def _transfer(
    call: Callable[[int, Sequence[memoryview], int], int],
    descriptor: int,
    buffers: Sequence[memoryview],
) -> int:
    """Call until all is moved. One call does it, but for a signal, or beyond 2 GiB."""
    done = 0
    while pending := _without_first(buffers, done):
        try:
            moved = call(descriptor, pending, done)
        except OSError as error:
            if error.errno != errno.EINVAL or not _leave_direct(descriptor):
                raise
            continue
        if moved == 0:
            break
        done += moved
    return done


def _without_first(buffers: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    pending = []
    for buffer in buffers:
        if nbytes < buffer.nbytes:
            pending.append(buffer[nbytes:])
        nbytes = max(0, nbytes - buffer.nbytes)
    return pending


def _leave_direct(descriptor: int) -> bool:
    """Switch to buffered I/O; False if it was that already."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    if not flags & _O_DIRECT:
        return False
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~_O_DIRECT)
    return True


def direct_works(folder: Path) -> bool:
    """Whether a file in ``folder`` can be written and read with O_DIRECT.

    Tried, not guessed from the file system's name: some accept the flag at open
    and refuse the transfer. Raises OSError if no file can be made there at all.
    """
    if not _O_DIRECT:
        return False
    page = aligned_buffer(ALIGNMENT)
    with tempfile.NamedTemporaryFile(dir=folder, prefix="probe-") as file:
        try:
            descriptor = os.open(file.name, os.O_RDWR | _O_DIRECT)
        except OSError:
            return False
        try:
            return (
                os.pwrite(descriptor, page, 0) == ALIGNMENT
                and os.preadv(descriptor, [page], 0) == ALIGNMENT
            )
        except OSError as error:
            # The file system took the transfer, and found no room for it.
            return error.errno in (errno.ENOSPC, errno.EDQUOT)
        finally:
            os.close(descriptor)
