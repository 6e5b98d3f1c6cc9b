"""A real HTTP server that speaks S3 (moto's), in a process of its own, emptied when it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import EndpointConnectionError, HTTPClientError
from kvtiers.tools.service import Service, free_port

_START_SECONDS = 60.0


class S3Server(Service):
    """Starts moto's server on a free port, with one bucket in it.

    Args:
        folder: for its log.
        trusting: whether it takes any credentials; else it refuses all, once the bucket is made.

    Attributes:
        bucket: name of the bucket.
        endpoint: URL of the server.

    """

    bucket = "kvcache"

    def __init__(self, folder: Path, *, trusting: bool = True) -> None:
        super().__init__()
        folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self._environment = {} if trusting else {"INITIAL_NO_AUTH_ACTION_COUNT": "1"}
        self._log = folder / "moto.log"

    @property
    def storage_options(self) -> dict[str, Any]:
        """What a filesystem tier needs to reach it."""
        return {"endpoint_url": self.endpoint, "key": "access-key", "secret": "secret-key"}

    def url(self, prefix: str) -> str:
        """A place in the bucket."""
        return f"s3://{self.bucket}/{prefix}"

    def start(self) -> None:
        """Start it, wait until it answers, and make the bucket."""
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self._environment},
            )
        deadline = time.monotonic() + _START_SECONDS
        try:
            while not self._answers():
                assert self._process.poll() is None, self._log.read_text(errors="replace")
                assert time.monotonic() < deadline, self._log.read_text(errors="replace")
                time.sleep(0.05)
        except BaseException:
            self.kill()
            raise

    def pause(self) -> None:
        """Let it hang: connections stay open and nothing is answered."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """End a ``pause``."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def client(self) -> Any:
        """A plain client, boto3's, for looking behind a tier's back."""
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id="access-key",
            aws_secret_access_key="secret-key",
            config=Config(retries={"total_max_attempts": 1}, read_timeout=20),
        )

    def names(self, prefix: str = "") -> list[str]:
        """Every object whose name begins so."""
        pages = self.client().get_paginator("list_objects_v2")
        found = pages.paginate(Bucket=self.bucket, Prefix=prefix)
        return [each["Key"] for page in found for each in page.get("Contents", [])]

    def get(self, name: str) -> bytes | None:
        """An object, None if there is none."""
        client = self.client()
        try:
            content: bytes = client.get_object(Bucket=self.bucket, Key=name)["Body"].read()
        except client.exceptions.NoSuchKey:
            return None
        return content

    def put(self, name: str, content: bytes) -> None:
        """Make or replace an object."""
        self.client().put_object(Bucket=self.bucket, Key=name, Body=content)

    def flip_bit(self, name: str, at: int) -> None:
        """Damage one byte of an object."""
        content = bytearray(self.get(name) or b"")
        content[at] ^= 0x10
        self.put(name, bytes(content))

    def _answers(self) -> bool:
        try:
            self.client().create_bucket(Bucket=self.bucket)
        except (EndpointConnectionError, HTTPClientError):
            return False
        return True
