"""Two vLLM servers share prompts through one Redis: the second loads what the first computed.

    python examples/two_replicas/run.py [--model FOLDER]

Starts a redis-server and two servers on this machine, and stops all of it at the end or
on Ctrl-C. Needs `make install`, or `pip install 'kvtiers[cpu,redis,demo]'` and a model.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from kvtiers.tools.measure import Answer, complete, prompts, tier_figure
from kvtiers.tools.model import ModelError, smollm2_path
from kvtiers.tools.redis_server import RedisServer, RedisServerError
from kvtiers.tools.server import ServerError, VllmServer
from rich.console import Console
from rich.table import Table

PROMPT_TOKENS = 2048 + 64
ANSWER_TOKENS = 16
TIERS = ("cpu", "redis")


@dataclass(frozen=True)
class Turn:
    """One prompt asked of one replica.

    Attributes:
        prompt: its number.
        replica: its name.
        answer: what came back.
        source: the tier that served most of the prompt, "computed" if none did.

    """

    prompt: int
    replica: str
    answer: Answer
    source: str


def replica(name: str, model: str, redis: RedisServer, folder: Path) -> VllmServer:
    """A server with a cpu tier of its own above the Redis that all share."""
    tiers = ["cpu", {"type": "redis", "url": redis.unix_url, "required": True}]
    transfer = {
        "kv_connector": "TieredKVConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"tiers": tiers},
    }
    arguments = ["--dtype", "float32", "--enforce-eager", "--enable-prompt-tokens-details"]
    arguments += ["--max-model-len", "4096", "--kv-transfer-config", json.dumps(transfer)]
    # Both on all cores, as they work in turns here; and none of the settings of whoever runs it.
    settings = dict.fromkeys(name for name in os.environ if name.startswith("KVTIERS_"))
    environment = {**settings, "VLLM_CPU_KVCACHE_SPACE": "1"}
    return VllmServer(model, folder / f"{name}.log", arguments, environment)


def ask(server: VllmServer, name: str, number: int, prompt: list[int]) -> Turn:
    """Ask, and find out from the figures of the tiers where the prompt came from."""
    before = hits(server)
    answer = complete(server, prompt, ANSWER_TOKENS)
    grown = [count - old for count, old in zip(hits(server), before, strict=True)]
    source = TIERS[grown.index(max(grown))] if any(grown) else "computed"
    return Turn(number, name, answer, source)


def hits(server: VllmServer) -> list[float]:
    """Chunks that each tier has served so far."""
    metrics = server.get("/metrics")
    return [tier_figure(metrics, "hits_total", tier) or 0 for tier in TIERS]


def wait_until_shared(server: VllmServer, seconds: float = 60) -> None:
    """Until all that the cpu tier took is in Redis too.

    Raises:
        ServerError: it is not, after that long.

    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        metrics = server.get("/metrics")
        stored = [tier_figure(metrics, "bytes_written_total", tier) for tier in TIERS]
        if stored[0] and stored[0] == stored[1]:
            return
        # vLLM's figures stand still while it has nothing to do.
        complete(server, [1, 2, 3], 1)
        time.sleep(0.2)
    raise ServerError(f"The chunks had not all reached Redis after {seconds:.0f} seconds.")


def share(model: str, folder: Path, say: Console) -> list[Turn]:
    """Each of two replicas computes a prompt that the other one loads."""
    turns = []
    with ExitStack() as stack:
        redis = stack.enter_context(RedisServer(folder))
        say.print(f"Redis listens at {redis.url}")
        servers = {}
        for name in ("A", "B"):
            begin = time.monotonic()
            servers[name] = stack.enter_context(replica(name, model, redis, folder))
            say.print(f"replica {name} answers after {time.monotonic() - begin:.0f} s")
        seed = time.time_ns()
        asked = prompts(servers["A"], 2, PROMPT_TOKENS, seed)
        for server in servers.values():
            # The first request of an engine takes longer.
            for prompt in prompts(server, 2, 128, seed + 1):
                complete(server, prompt, 1)
        for number, (first, second) in enumerate((("A", "B"), ("B", "A"))):
            turns.append(ask(servers[first], first, number + 1, asked[number]))
            wait_until_shared(servers[first])
            turns.append(ask(servers[second], second, number + 1, asked[number]))
    return turns


def table(turns: Sequence[Turn]) -> Table:
    """Who computed, and who loaded."""
    grid = Table(title=f"Two prompts of {PROMPT_TOKENS} tokens, each asked of both replicas")
    for heading in ("prompt", "replica", "its KV was"):
        grid.add_column(heading)
    for heading in ("tokens loaded", "time to first token"):
        grid.add_column(heading, justify="right")
    for turn in turns:
        origin = "computed" if turn.source == "computed" else f"loaded from {turn.source}"
        seconds = f"{turn.answer.ttft_s:.3f} s"
        loaded = str(turn.answer.cached_tokens)
        grid.add_row(str(turn.prompt), turn.replica, origin, loaded, seconds)
    return grid


def shortfalls(turns: Sequence[Turn]) -> list[str]:
    """What did not go as it should."""
    faults = []
    for computed, loaded in zip(turns[::2], turns[1::2], strict=True):
        if computed.answer.text != loaded.answer.text:
            faults.append(f"The replicas answer differently to prompt {computed.prompt}.")
        if computed.source != "computed" or loaded.source != "redis":
            faults.append(f"Prompt {loaded.prompt} was not loaded from Redis.")
        elif loaded.answer.cached_tokens < math.floor(0.9 * PROMPT_TOKENS):
            faults.append(f"Only {loaded.answer.cached_tokens} tokens were loaded.")
    return faults


def main() -> int:
    """Run it. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="a model folder (default: SmolLM2-135M)")
    arguments = parser.parse_args()
    say = Console(stderr=True, highlight=False)
    # What stops a container stops the servers too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        model = arguments.model or str(smollm2_path())
        with tempfile.TemporaryDirectory(prefix="kvtiers-") as folder:
            turns = share(model, Path(folder), say)
    except (ModelError, RedisServerError, ServerError) as error:
        say.print(str(error), markup=False)
        return 1
    except KeyboardInterrupt:
        return 130
    Console().print(table(turns))
    faults = shortfalls(turns)
    for fault in faults:
        say.print(fault)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
