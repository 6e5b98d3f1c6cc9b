"""``examples/two_replicas``, as its README says to run it; and stopped in the middle."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import example_packages
import processes

_RUN = example_packages.EXAMPLES / "two_replicas" / "run.py"


@contextmanager
def _running(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """The example with ``folder`` for temporary files."""
    process = subprocess.Popen(
        [sys.executable, str(_RUN), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "TMPDIR": str(folder), "COLUMNS": "100"},
        start_new_session=True,
        # Whoever runs tests in the background has it ignored, and so would the example.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(120)


def _left(session: int, folder: Path) -> list[str]:
    """Command lines of living processes of the session, and of those started with ``folder``.

    redis-server writes its title over its environment; vLLM has sessions of its own.
    """
    left = list(processes.of_session(session).values())
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.fsencode(folder) in path.joinpath("environ").read_bytes():
                left.append(path.joinpath("cmdline").read_bytes().replace(b"\0", b" ").decode())
    return left


def _files(folder: Path) -> list[Path]:
    """What the example has left there. vLLM leaves sockets and lists of devices."""
    return list(folder.glob("kvtiers*"))


def test_each_replica_loads_what_the_other_computed(smollm2: Path, tmp_path: Path) -> None:
    with _running(tmp_path, "--model", str(smollm2)) as process:
        said, _ = process.communicate(timeout=500)
    assert process.returncode == 0, said
    rows = re.findall(r"│ (\d) +│ (\w) +│ (.+?) +│ +(\d+) │ +[\d.]+ s │", said)
    assert rows == [
        ("1", "A", "computed", "0"),
        ("1", "B", "loaded from redis", "2048"),
        ("2", "B", "computed", "0"),
        ("2", "A", "loaded from redis", "2048"),
    ]
    assert _files(tmp_path) == []
    assert _left(process.pid, tmp_path) == []


def test_an_interrupt_leaves_no_server_behind(llama: Path, tmp_path: Path) -> None:
    with _running(tmp_path, "--model", str(llama)) as process:
        deadline = time.monotonic() + 60
        while not any("api_server" in command for command in _left(process.pid, tmp_path)):
            assert time.monotonic() < deadline, "no server was started"
            time.sleep(0.05)
        assert any("redis-server" in command for command in _left(process.pid, tmp_path))
        # As a terminal does: to all of the group. vLLM has a group of its own.
        os.killpg(process.pid, signal.SIGINT)
        said, _ = process.communicate(timeout=120)
    assert process.returncode == 130, said
    assert _left(process.pid, tmp_path) == []
    assert _files(tmp_path) == []
