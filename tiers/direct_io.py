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
from kvtiers.tiers.fs_files import FULL

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


def transfer_in(descriptor: int, payload: memoryview, tail: memoryview, most: int) -> int:
    """Fill ``payload`` and then ``tail`` from the start of the file; returns bytes read.

    Fewer than the two hold means that the file is shorter. Raises OSError.

    Args:
        descriptor: open for reading.
        payload: a call moves at most ``most`` bytes of it.
        tail: comes with the last call, small as it is.
        most: bytes, above 0.

    """
    return _transfer(os.preadv, descriptor, payload, tail, most)


def transfer_out(descriptor: int, payload: memoryview, tail: memoryview, most: int) -> None:
    """Write ``payload`` and then ``tail`` to the start of the file; see ``transfer_in``."""
    wanted = payload.nbytes + tail.nbytes
    if _transfer(os.pwritev, descriptor, payload, tail, most) != wanted:
        # Nothing written and no error: POSIX allows it, and it would loop for ever.
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def _transfer(
    call: Callable[[int, Sequence[memoryview], int], int],
    descriptor: int,
    payload: memoryview,
    tail: memoryview,
    most: int,
) -> int:
    """Call until all is moved. A signal may cut a call short."""
    done = 0
    while pending := _next_piece(payload, tail, done, most):
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


def _next_piece(
    payload: memoryview, tail: memoryview, done: int, most: int
) -> Sequence[memoryview]:
    """What the next call moves, nothing once ``done`` bytes are all."""
    left = payload.nbytes - done
    if left > most:
        return (payload[done : done + most],)
    if left > 0:
        return (payload[done:], tail)
    rest = tail[-left:]
    return (rest,) if rest else ()


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
            return error.errno in FULL
        finally:
            os.close(descriptor)
