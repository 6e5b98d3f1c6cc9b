"""Redis servers of other kinds: with TLS, its certificates made by openssl, and in a cluster."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

from redis_server import RedisServer


class Certificates:
    """An authority of one's own, and what it signed.

    Args:
        folder: for the files; made if it is not there.
        host: what the server's certificate is for.

    Attributes:
        ca, server, client: certificates; the keys lie beside them, see ``key_of``.

    """

    def __init__(self, folder: Path, host: str = "IP:127.0.0.1") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.ca = self._make("ca", None, "basicConstraints=critical,CA:TRUE")
        self.server = self._make("server", self.ca, f"subjectAltName={host}")
        self.client = self._make("client", self.ca, "basicConstraints=CA:FALSE")

    @staticmethod
    def key_of(certificate: Path) -> Path:
        return certificate.with_suffix(".key")

    def _make(self, name: str, authority: Path | None, extension: str) -> Path:
        file = self._folder / f"{name}.pem"
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt"]
        command += ["ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
        command += ["-subj", f"/CN={name}", "-addext", extension, "-out", str(file)]
        command += ["-keyout", str(self.key_of(file))]
        if authority is not None:
            command += ["-CA", str(authority), "-CAkey", str(self.key_of(authority))]
        subprocess.run(command, check=True, capture_output=True)
        return file


class TlsRedisServer(RedisServer):
    """Also listens for TLS, at ``tls_url``.

    Args:
        folder: see ``RedisServer``.
        certificates: its own, and the authority that it trusts.
        ask_clients: whether a client needs a certificate, too.
        password: what it demands of clients.

    """

    def __init__(
        self,
        folder: Path,
        certificates: Certificates,
        *,
        ask_clients: bool = False,
        password: str = "",
        arguments: Sequence[str] = (),
    ) -> None:
        port = free_port()
        self.tls_url = f"rediss://127.0.0.1:{port}/0"
        self.certificates = certificates
        tls = ["--tls-port", str(port), "--tls-cert-file", str(certificates.server)]
        tls += ["--tls-key-file", str(certificates.key_of(certificates.server))]
        tls += ["--tls-ca-cert-file", str(certificates.ca)]
        tls += ["--tls-auth-clients", "yes" if ask_clients else "no"]
        if password:
            tls += ["--requirepass", password]
        super().__init__(folder, [*tls, *arguments], password)


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def clustered() -> list[str]:
    """Arguments of a server that runs as a Redis Cluster of its own, without slots."""
    # By default its second port is 10,000 above the first, which may be none.
    return ["--cluster-enabled", "yes", "--cluster-port", str(free_port())]
