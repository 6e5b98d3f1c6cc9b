"""A real vLLM server in a process group of its own, for the demo, tests and benchmarks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvtiers.tools.service import Service, free_port

_POLL = 0.5
_LOG_TAIL = 4000
_KILL_TIMEOUT = 10.0


class ServerError(RuntimeError):
    """The server did not start or does not answer; the text has the end of its log."""


class VllmServer(Service):
    """Starts ``python -m vllm.entrypoints.openai.api_server`` and stops it again.

    A context manager: inside it the server answers. Only what it started is ever
    killed, and nothing of it is left afterwards.

    Args:
        model: path of the model.
        log: file that the server's output is appended to.
        arguments: further command line arguments of the server.
        environment: variables on top of this process's; None takes one away.
        port: 0 for a free one.
        start_timeout: seconds until it must answer ``/health``.
        stop_timeout: seconds it has to stop after SIGTERM.
        waiting: called about twice a second while it starts, with the seconds so far.

    """

    def __init__(
        self,
        model: str,
        log: Path,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str | None] | None = None,
        port: int = 0,
        start_timeout: float = 600,
        stop_timeout: float = 60,
        waiting: Callable[[float], None] = lambda _seconds: None,
    ) -> None:
        super().__init__()
        self.model = model
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = log
        self._arguments = arguments
        # The development mode has /reset_prefix_cache.
        variables = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", **(environment or {})}
        self._environment = {k: v for k, v in variables.items() if v is not None}
        self._start_timeout = start_timeout
        self._stop_timeout = stop_timeout
        self._waiting = waiting

    def start(self) -> None:
        """Start it and wait until it answers.

        Raises:
            ServerError: it ended, or did not answer in time. It is stopped then.

        """
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", self.model, "--host", "127.0.0.1", "--port", str(self.port)]
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter
                [*command, *self._arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self._environment,
                start_new_session=True,
            )
        try:
            self._wait_until_healthy()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Ask it to stop, then kill what is left of its process group."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        # The engine's processes are in the group too. They may outlive their parent,
        # and write to slow tiers while they stop.
        if not _group_ends(process, self._stop_timeout):
            os.killpg(process.pid, signal.SIGKILL)
            _group_ends(process, _KILL_TIMEOUT)

    def reset_prefix_cache(self, external: bool = False, timeout: float = 60) -> None:
        """Empty the GPU's prefix cache, and the connector's tiers too if ``external``.

        Raises:
            ServerError: blocks are still in use after ``timeout`` seconds.

        """
        path = f"/reset_prefix_cache?reset_external={str(external).lower()}"
        deadline = time.monotonic() + timeout
        # It fails while the last request's blocks are still being offloaded.
        while not self.post(path)["success"]:
            if time.monotonic() > deadline:
                raise ServerError(f"The prefix cache was still in use after {timeout:.0f} seconds.")
            time.sleep(_POLL)

    def _wait_until_healthy(self) -> None:
        assert self._process is not None
        begin = time.monotonic()
        while (elapsed := time.monotonic() - begin) < self._start_timeout:
            if self._process.poll() is not None:
                raise self._failed(f"ended with status {self._process.returncode}")
            with contextlib.suppress(OSError), self._open("/health", timeout=5):
                return
            self._waiting(elapsed)
            time.sleep(_POLL)
        raise self._failed(f"did not answer within {self._start_timeout:.0f} seconds")

    def _failed(self, what: str) -> ServerError:
        text = self._log.read_text(errors="replace") if self._log.exists() else ""
        return ServerError(f"The vLLM server {what}. The end of {self._log}:\n{text[-_LOG_TAIL:]}")

    def get(self, path: str, timeout: float = 60) -> str:
        """The body of a GET."""
        with self._open(path, timeout=timeout) as answer:
            return str(answer.read().decode())

    def post(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        timeout: float = 600,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """The JSON that a POST answers, None if it answers nothing.

        Raises:
            ServerError: the status is not a success.

        """
        with self._open(path, body or {}, timeout, headers) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def stream(
        self, path: str, body: Mapping[str, Any], timeout: float = 600
    ) -> Iterator[dict[str, Any]]:
        """The events of a streamed answer, as they arrive.

        Raises:
            ServerError: the status is not a success.

        """
        with self._open(path, {**body, "stream": True}, timeout) as answer:
            for line in answer:
                data = line.decode().strip().removeprefix("data: ")
                if data and data != "[DONE]":
                    yield json.loads(data)

    def _open(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        timeout: float = 600,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        data = None if body is None else json.dumps(body).encode()
        sent = {"Content-Type": "application/json", **(headers or {})}
        request = urllib.request.Request(self.url + path, data, sent)  # noqa: S310 - our own URL
        try:
            # Without the environment's proxies, which know nothing of this machine.
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            return opener.open(request, timeout=timeout)
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            raise ServerError(f"{path} answered {error.code}: {text[:1000]}") from error


def _group_ends(leader: subprocess.Popen[bytes], timeout: float) -> bool:
    """Whether no process of the group is left within that many seconds."""
    deadline = time.monotonic() + timeout
    while leader.poll() is None or _lives(leader.pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _lives(group: int) -> bool:
    """Whether the group has a process that is no zombie: in a container nobody may reap those."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, process_group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(process_group) == group and state not in "ZX":
                return True
    return False
