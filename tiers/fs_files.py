"""Small files of a root, made and read so that what somebody put in their place does no harm.

Who can write in a root can put a link, a pipe, a device or terabytes where a file of ours
is expected. Nothing is written or read through a link, nothing waits, and no more is read
than was asked for.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from typing import BinaryIO

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Errors of a file system without room, for anybody or for this user."""

# Of a link, and of a socket.
_NO_FILE = frozenset({errno.ELOOP, errno.ENXIO})
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
_MAKE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@contextlib.contextmanager
def reading(path: str) -> Iterator[BinaryIO]:
    """The file, open.

    Raises FileNotFoundError if there is none, ValueError if what lies there is no file (a link
    is none), and OSError if it can't be read.
    """
    try:
        descriptor = os.open(path, _READ)
    except OSError as error:
        if error.errno in _NO_FILE:
            raise ValueError("it is not a file") from error
        raise
    # Not ``fdopen`` at once: it raises what an unreadable file would, for a folder.
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is not a file")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            yield file
    finally:
        os.close(descriptor)


def made(path: str) -> BinaryIO:
    """A new file for this user only, in place of what a killed process left. Raises OSError."""
    try:
        descriptor = os.open(path, _MAKE, 0o600)
    except FileExistsError:
        os.unlink(path)
        descriptor = os.open(path, _MAKE, 0o600)
    return os.fdopen(descriptor, "wb")
