"""How many engines of a server share a host: real processes with the titles that vLLM gives."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from kvtiers.connector.engines import engines_on_host

ALONE = SimpleNamespace(data_parallel_size_local=1)
# Says that it runs, and starts a child as a worker would be one.
_ENGINE = """
import subprocess, sys
code = "import sys; print(1, flush=True); sys.stdin.read()"
child = subprocess.Popen(
    [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
)
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def engines() -> Iterator[list[tuple[int, int]]]:
    """Three children of this process, one of them no engine, and a child of each."""
    titles = ["VLLM::EngineCore_DP0", "VLLM::EngineCore_DP1", "VLLM::DPCoordinator"]
    started = [
        subprocess.Popen(
            [sys.executable, "-c", _ENGINE, title],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for title in titles
    ]
    try:
        yield [(p.pid, int(p.stdout.readline())) for p in started if p.stdout is not None]
    finally:
        for process in started:
            process.communicate(timeout=30)


def test_engines_beside_each_other_are_counted(engines: list[tuple[int, int]]) -> None:
    for engine, worker in engines[:2]:
        assert engines_on_host(ALONE, engine) == 2
        assert engines_on_host(ALONE, worker) == 2


def test_who_is_no_engine_is_alone(engines: list[tuple[int, int]]) -> None:
    coordinator, child = engines[2]
    assert engines_on_host(ALONE, coordinator) == 1
    assert engines_on_host(ALONE, child) == 1
    assert engines_on_host(ALONE) == 1


def test_what_vllm_says_counts_too() -> None:
    assert engines_on_host(SimpleNamespace(data_parallel_size_local=4)) == 4
    assert engines_on_host(SimpleNamespace(data_parallel_size_local=0)) == 1
    assert engines_on_host(SimpleNamespace()) == 1
