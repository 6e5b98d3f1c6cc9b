"""A real LMCache server of a test's own, in a process group of its own, killed at the end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvtiers.tools.service import Service, free_port

_START_SECONDS = 120.0
_STOP_SECONDS = 30.0


class LmcacheServer(Service):
    """Starts ``lmcache server`` on free ports, with one L2 adapter.

    Args:
        adapter: the JSON of ``--l2-adapter``.
        log: file that its output is appended to.

    """

    def __init__(self, adapter: Mapping[str, Any], log: Path) -> None:
        super().__init__()
        self.port = free_port()
        self.log = log
        self._adapter = adapter

    @property
    def transfer(self) -> dict[str, Any]:
        """The ``kv_transfer_config`` of a vLLM that uses it."""
        return {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://localhost",
                "lmcache.mp.port": self.port,
                "lmcache.mp.mp_transfer_mode": "engine_driven",
            },
        }

    def start(self) -> None:
        """Start it and wait until it listens."""
        command = [sys.executable, "-m", "lmcache.cli.main", "server", "--port", str(self.port)]
        command += ["--chunk-size", "256", "--l1-size-gb", "1", "--l1-init-size-gb", "1"]
        command += ["--eviction-policy", "LRU", "--supported-transfer-mode", "auto"]
        command += ["--http-port", str(free_port()), "--prometheus-port", str(free_port())]
        command += ["--l2-adapter", json.dumps(self._adapter)]
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + _START_SECONDS
        while not _listens(self.port):
            assert self._process.poll() is None, self.text()
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.1)

    def stop(self) -> None:
        """Ask it to stop, as an operator would; kill what is left of its group."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def text(self) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-8000:] if self.log.exists() else ""


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0
