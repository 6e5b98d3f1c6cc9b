"""The systems under test, each behind a real vLLM server with the same settings."""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtiers.tools.model import default_cache
from kvtiers.tools.server import VllmServer
from redis import Redis

from benchmarks.record import OURS, PLAIN, RIVAL, SLOWED, UNVERIFIED

BLOCK = 128
"""Tokens in a block, and in a chunk: vLLM's default on a CPU."""

_ROOT = Path(__file__).parent.parent
_GIB = 1 << 30
_BYTES = {"float32": 4, "bfloat16": 2}
_METADATA_BYTES = 4096  # of kvtiers' files; vLLM's have none


@dataclass(frozen=True)
class Engine:
    """What is the same for every server of a run.

    Attributes:
        model: folder of the model.
        dtype: of weights and KV.
        gpu_tokens: how many tokens of KV vLLM's own cache must hold.

    """

    model: Path
    dtype: str
    gpu_tokens: int

    @property
    def chunk_bytes(self) -> int:
        """KV of one block, from the model's configuration."""
        facts = json.loads((self.model / "config.json").read_text())
        heads = facts.get("num_key_value_heads") or facts["num_attention_heads"]
        size = facts.get("head_dim") or facts["hidden_size"] // facts["num_attention_heads"]
        token = 2 * facts["num_hidden_layers"] * heads * size * _BYTES[self.dtype]
        return int(token) * BLOCK


@contextmanager
def new_folder() -> Iterator[Path]:
    """For a filesystem tier: beside the models, on the disk where one lies by default."""
    with tempfile.TemporaryDirectory(prefix="bench-", dir=default_cache().parent) as name:
        yield Path(name)


@contextmanager
def serve(
    engine: Engine,
    system: str,
    where: Path | str,
    arena_chunks: int,
    log: Path,
    variables: Mapping[str, str] | None = None,
) -> Iterator[VllmServer]:
    """A server of that system, with its lowest tier in a folder or, kvtiers' only, a Redis."""
    arena_bytes = arena_chunks * _page_aligned(engine.chunk_bytes)
    engine_id = f"kvtiers-bench-{os.getpid()}-{time.monotonic_ns()}"
    arguments = [
        *("--dtype", engine.dtype, "--block-size", str(BLOCK), "--enforce-eager"),
        *("--enable-prompt-tokens-details", "--shutdown-timeout", "30"),
    ]
    if system != PLAIN:
        connector = {"kv_role": "kv_both", "engine_id": engine_id}
        connector |= _CONNECTORS[system](where, arena_bytes)
        arguments += ["--kv-transfer-config", json.dumps(connector)]
    environment = {**_environment(engine), **(variables or {})}
    log.parent.mkdir(parents=True, exist_ok=True)
    try:
        with VllmServer(str(engine.model), log, arguments, environment) as server:
            yield server
    finally:
        # vLLM's region outlives a server that did not stop in time.
        for left in Path("/dev/shm").glob(f"*{engine_id}*"):
            left.unlink()


def drain(
    server: VllmServer, where: Path | str, quiet: float = 2.0, timeout: float = 120.0
) -> None:
    """Wait until the tier at ``where`` has stopped growing for ``quiet`` seconds.

    Asks for a token now and then: vLLM's tiering hands stores to its tiers in the
    engine's steps only, and an idle engine makes none.
    """
    deadline = time.monotonic() + timeout
    size, since = -1, time.monotonic()
    while time.monotonic() - since < quiet and time.monotonic() < deadline:
        server.post("/v1/completions", {"model": server.model, "prompt": [1, 2], "max_tokens": 1})
        time.sleep(0.2)
        now = _keys_in(where) if isinstance(where, str) else sum(_sizes(where))
        if now != size:
            size, since = now, time.monotonic()


def chunks_in(where: Path | str, engine: Engine) -> int:
    """How many whole chunks the tier holds; of a Redis, how many keys."""
    if isinstance(where, str):
        return _keys_in(where)
    whole = {engine.chunk_bytes, _page_aligned(engine.chunk_bytes)}
    whole |= {size + _METADATA_BYTES for size in whole}
    return sum(size in whole for size in _sizes(where))


def _keys_in(url: str) -> int:
    with Redis.from_url(url) as client:
        return int(client.dbsize())


def _sizes(folder: Path) -> Iterator[int]:
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                yield os.stat(os.path.join(parent, name)).st_size
            except FileNotFoundError:  # a temporary name
                continue


def _page_aligned(size: int) -> int:
    return -(-size // 4096) * 4096


def _kvtiers(where: Path | str, arena_bytes: int) -> dict[str, Any]:
    below = {"type": "fs", "path": str(where), "capacity": 64 * _GIB}
    if isinstance(where, str):
        below = {"type": "redis", "url": where}
    tiers = [{"type": "cpu", "capacity": arena_bytes}, below]
    return {"kv_connector": "TieredKVConnector", "kv_connector_extra_config": {"tiers": tiers}}


def _unverified(where: Path | str, arena_bytes: int) -> dict[str, Any]:
    """kvtiers, believing what it reads. Only to be measured: see ``benchmarks.unverified``."""
    return {**_kvtiers(where, arena_bytes), "kv_connector_module_path": "benchmarks.unverified"}


def _slowed(where: Path | str, arena_bytes: int) -> dict[str, Any]:
    """kvtiers over a tier that is slow as ``benchmarks.slowed`` is told."""
    return {**_kvtiers(where, arena_bytes), "kv_connector_module_path": "benchmarks.slowed"}


def _vllm_tiering(folder: Path | str, arena_bytes: int) -> dict[str, Any]:
    extra = {
        "spec_name": "TieringOnCpuSpec",
        "spec_module_path": "benchmarks.rival",
        "cpu_bytes_to_use": arena_bytes,
        "secondary_tiers": [{"type": "fs", "root_dir": str(folder)}],
    }
    return {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra}


_CONNECTORS: dict[str, Callable[[Path | str, int], dict[str, Any]]] = {
    OURS: _kvtiers,
    RIVAL: _vllm_tiering,
    UNVERIFIED: _unverified,
    SLOWED: _slowed,
}


def _environment(engine: Engine) -> dict[str, str | None]:
    """No settings of the user, and this folder importable for vLLM's processes."""
    path = os.environ.get("PYTHONPATH")
    kv = engine.gpu_tokens / BLOCK * engine.chunk_bytes
    return {
        **dict.fromkeys(name for name in os.environ if name.startswith("KVTIERS_")),
        "PYTHONPATH": os.pathsep.join([str(_ROOT), *([path] if path else [])]),
        "VLLM_CPU_KVCACHE_SPACE": str(math.ceil(kv / _GIB)),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
