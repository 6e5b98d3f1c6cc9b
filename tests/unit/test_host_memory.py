"""What may still be allocated, read from files laid out as Linux lays them out."""

from __future__ import annotations

from pathlib import Path

import pytest
from kvtiers.tiers.host_memory import available_bytes

GIB = 1 << 30


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    text = f"MemTotal: {64 << 20} kB\nMemFree: 1 kB\nMemAvailable: {32 << 20} kB\n"
    (proc / "meminfo").write_text(text)
    return proc


@pytest.fixture
def cgroup(tmp_path: Path) -> Path:
    root = tmp_path / "cgroup"
    root.mkdir()
    return root


def limit_v2(folder: Path, limit: int | str, used: int, cache: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cache}\n")


def limit_v1(folder: Path, limit: int, used: int, cache: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"cache 1\ntotal_inactive_file {cache}\n")


def test_without_cgroups_it_is_what_the_host_has(proc: Path, cgroup: Path) -> None:
    assert available_bytes(proc, cgroup) == 32 * GIB


def test_a_v2_limit_counts_and_droppable_cache_does_not(proc: Path, cgroup: Path) -> None:
    (proc / "self/cgroup").write_text("0::/pod/container\n")
    limit_v2(cgroup / "pod/container", 8 * GIB, 5 * GIB, cache=2 * GIB)
    assert available_bytes(proc, cgroup) == 5 * GIB


def test_a_limit_of_an_outer_group_counts_too(proc: Path, cgroup: Path) -> None:
    (proc / "self/cgroup").write_text("0::/pod/container\n")
    limit_v2(cgroup / "pod/container", "max", 1 * GIB)
    limit_v2(cgroup / "pod", 4 * GIB, 1 * GIB)
    assert available_bytes(proc, cgroup) == 3 * GIB


def test_a_v1_memory_controller_counts_and_others_do_not(proc: Path, cgroup: Path) -> None:
    (proc / "self/cgroup").write_text("5:cpu,cpuacct:/job\n4:memory:/job\n")
    limit_v1(cgroup / "memory/job", 6 * GIB, 2 * GIB, cache=1 * GIB)
    limit_v2(cgroup / "job", 1, 0)
    assert available_bytes(proc, cgroup) == 5 * GIB


def test_inside_a_container_the_mounts_root_counts(proc: Path, cgroup: Path) -> None:
    (proc / "self/cgroup").write_text("0::/kubepods/not/visible/here\n")
    limit_v2(cgroup, 2 * GIB, 1 * GIB)
    assert available_bytes(proc, cgroup) == 1 * GIB


def test_a_group_above_its_limit_has_nothing_left(proc: Path, cgroup: Path) -> None:
    (proc / "self/cgroup").write_text("0::/\n")
    limit_v2(cgroup, 1 * GIB, 2 * GIB)
    assert available_bytes(proc, cgroup) == 0


def test_a_limit_above_the_host_does_not_help(proc: Path, cgroup: Path) -> None:
    (proc / "self/cgroup").write_text("0::/\n")
    limit_v2(cgroup, 100 * GIB, 0)
    assert available_bytes(proc, cgroup) == 32 * GIB


def test_files_that_make_no_sense_are_passed_over(proc: Path, cgroup: Path) -> None:
    (proc / "self/cgroup").write_text("0::/\n")
    limit_v2(cgroup, 1 * GIB, 0)
    (cgroup / "memory.current").write_text("plenty\n")
    assert available_bytes(proc, cgroup) == 32 * GIB


def test_this_machine_has_some() -> None:
    assert available_bytes() > 0
