"""Memory that O_DIRECT can read into and write from."""

from __future__ import annotations

import mmap


def aligned_buffer(nbytes: int) -> memoryview:
    """A zeroed, writable, page-aligned buffer of ``nbytes`` bytes.

    Pages are taken from the system when first touched, and given back when the
    last reference to the view goes.
    """
    # Private, not Python's default of shared: a forked child must get its own
    # copy of a scratch buffer, not scribble over its parent's.
    return memoryview(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
