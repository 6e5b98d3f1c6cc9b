"""A real OpenAI server with the connector on its defaults, and a home of its own."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvtiers.tools.measure import tier_figure
from kvtiers.tools.server import VllmServer

CONNECTOR = {"kv_connector": "TieredKVConnector", "kv_role": "kv_both"}
"""All that a user has to write."""


def server(
    model: Path,
    home: Path,
    *,
    connector: bool = True,
    extra: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    arguments: Sequence[str] = (),
) -> VllmServer:
    """A server that has not been started. Its filesystem tier lies in ``default_root(home)``.

    Args:
        model: folder of the model.
        home: the user's home.
        connector: whether it has ours.
        extra: the connector's configuration, its defaults if None.
        environment: further variables.
        arguments: further ones of the server.

    """
    options = [
        *("--dtype", "float32", "--enforce-eager", "--max-model-len", "2048"),
        *("--num-gpu-blocks-override", "64", "--enable-prompt-tokens-details"),
        *("--shutdown-timeout", "30"),
        *arguments,
    ]
    if connector:
        transfer = CONNECTOR if extra is None else CONNECTOR | {"kv_connector_extra_config": extra}
        options += ["--kv-transfer-config", json.dumps(transfer)]
    variables = {"HOME": str(home), "XDG_CACHE_HOME": str(home / ".cache")}
    # Tiny models compute in no time: what is tested is that what can be loaded is.
    variables["KVTIERS_LOAD_OR_RECOMPUTE"] = "always_load"
    home.mkdir(exist_ok=True)
    return VllmServer(
        str(model),
        home / "vllm.log",
        options,
        {**variables, "VLLM_CPU_KVCACHE_SPACE": "1", **(environment or {})},
        start_timeout=240,
    )


def default_root(home: Path) -> Path:
    """Where the filesystem tier lies when nothing says otherwise."""
    return home / ".cache" / "kvtiers"


def metric(server: VllmServer, name: str, tier: str) -> float | None:
    """A figure of the connector on vLLM's ``/metrics``, None if it is not there."""
    return tier_figure(server.get("/metrics"), name, tier)


def metric_of(server: VllmServer, name: str, tier: str, engine: int) -> float | None:
    """The same of one of several engines."""
    lines = server.get("/metrics").splitlines()
    own = "\n".join(line for line in lines if f'engine="{engine}"' in line)
    return tier_figure(own, name, tier)


def wait_for_metric(
    server: VllmServer, name: str, tier: str, right: Callable[[float], bool], seconds: float = 60
) -> float:
    """Until the figure is right. vLLM publishes figures as it steps, so it is kept stepping."""
    deadline = time.monotonic() + seconds
    while (value := metric(server, name, tier)) is None or not right(value):
        assert time.monotonic() < deadline, f"{name} of {tier} is {value}"
        # Less than a block, so that it stores and finds nothing.
        complete(server, [1, 2, 3])
        time.sleep(0.2)
    return value


def wait_for(there: Callable[[], bool], server: VllmServer, seconds: float = 60) -> None:
    """Until it is so, with both of two engines kept stepping."""
    deadline = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < deadline, "it did not come about in time"
        for rank in (0, 1):
            complete(server, [1, 2, 3], rank=rank)
        time.sleep(0.2)


def complete(
    server: VllmServer, prompt: list[int], max_tokens: int = 1, rank: int | None = None
) -> str:
    """The text of a greedy answer; ``rank`` chooses among data-parallel engines."""
    body = {"model": server.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
    answer = server.post("/v1/completions", {**body, "ignore_eos": True}, headers=headers)
    return str(answer["choices"][0]["text"])
