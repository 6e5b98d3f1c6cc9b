"""How much memory this process may still take: the host's, or its cgroup's if less."""

from __future__ import annotations

import os
from pathlib import Path

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")


def available_bytes(proc: Path = _PROC, cgroup_root: Path = _CGROUP) -> int:
    """Bytes that can be allocated without swapping or meeting a cgroup limit.

    Args:
        proc: where procfs is mounted.
        cgroup_root: where the cgroup file system is mounted.

    """
    free = _mem_available(proc)
    for folder in _cgroup_folders(proc, cgroup_root):
        left = _cgroup_headroom(folder)
        if left is not None:
            free = min(free, left)
    return max(free, 0)


def _mem_available(proc: Path) -> int:
    for line in (proc / "meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def _cgroup_folders(proc: Path, root: Path) -> list[Path]:
    """Folders whose limit applies, innermost first: a limit may stand at any level."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return []
    folders: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base = root / "memory" if controllers else root
        folder = base / path.lstrip("/")
        # Inside a container the path may be the host's: then only the mount's
        # root is ours to see.
        while folder != base:
            folders.append(folder)
            folder = folder.parent
        folders.append(base)
    return folders


def _cgroup_headroom(folder: Path) -> int | None:
    """Limit minus use; page cache that can be dropped does not count as used."""
    for limit_name, use_name, cache_key in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            limit = (folder / limit_name).read_text().strip()
            used = int((folder / use_name).read_text())
        except (OSError, ValueError):
            continue
        if limit == "max":
            return None
        return int(limit) - used + _stat_value(folder, cache_key)
    return None


def _stat_value(folder: Path, key: str) -> int:
    try:
        for line in (folder / "memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == key:
                return int(value)
    except (OSError, ValueError):
        pass
    return 0
