"""``kvtiers demo``: one prompt, cold and from each tier, through a real vLLM server."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from kvtiers.connector.config_errors import from_pydantic, shown
from kvtiers.tiers import TierConfigError
from kvtiers.tiers.base import ALIGNMENT
from kvtiers.tiers.redis import RedisTier
from kvtiers.tiers.redis_config import RedisConfig
from kvtiers.tools.measure import COMPUTED, Answer, ask, prompts
from kvtiers.tools.model import ModelError, default_cache, smollm2_path
from kvtiers.tools.outputs import why_unwritable
from kvtiers.tools.redis_server import RedisServer, RedisServerError
from kvtiers.tools.server import ServerError, VllmServer
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

# A whole number of chunks for every usual block size, and a rest that no tier can
# hold, so that each warm step has the same 64 tokens left to compute.
_PROMPT_TOKENS = 4096 + 64
_ANSWER_TOKENS = 16
_KV_GIB_PER_PROMPT = 0.2  # of SmolLM2-135M in float32, and then some
# What vLLM calls these tiers where it says which one cached tokens came from.
_SOURCES = {
    "cold": COMPUTED,
    "gpu": "device",
    "cpu": "host",
    "redis": "external_unspecified",
    "fs": "disk",
}
_TITLES = {
    "cold": "cold",
    "gpu": "GPU tier",
    "cpu": "CPU tier, after a GPU reset",
    "redis": "Redis tier, restarted",
    "fs": "filesystem tier, restarted",
}
_OWN = "a server of its own"
# So that a server of the user's does not keep what the demo stored.
_REDIS_TTL_SECONDS = 900


@dataclass(frozen=True)
class Step:
    """Medians over the prompts of one step.

    Attributes:
        name: cold, gpu, cpu, redis or fs.
        ttft_s: seconds to the first token.
        cached_tokens: prompt tokens that were not computed.
        source: where they came from, in vLLM's words; of most prompts.

    """

    name: str
    ttft_s: float
    cached_tokens: int
    source: str


@dataclass(frozen=True)
class Result:
    """What the demo found.

    Attributes:
        prompt_tokens: length of each prompt.
        answers_match: whether each prompt got the same answer in every step.
        steps: in the order in which they ran.

    """

    prompt_tokens: int
    answers_match: bool
    steps: Sequence[Step]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``kvtiers demo``."""
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the result there")
    parser.add_argument("--model", metavar="PATH", help="a model folder (default: SmolLM2-135M)")
    parser.add_argument("--prompts", metavar="N", type=int, default=5, help="default: 5")
    parser.add_argument("--port", metavar="N", type=int, default=0, help="default: a free one")
    parser.add_argument(
        "--redis",
        metavar="URL",
        nargs="?",
        const=_OWN,
        help=f"add a Redis tier (default URL: {_OWN}, started for the demo)",
    )
    parser.add_argument(
        "--keep", action="store_true", help="keep the server's log and the filesystem tier"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run it. 0 if all answers were the same and every tier was hit, else 1."""
    progress = Console(stderr=True)
    if problem := _obstacle(arguments):
        progress.print(problem, markup=False, highlight=False, soft_wrap=True)
        return 2
    # By default the signal ends Python at once, and leaves the server running.
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(143))
    try:
        with _folder(arguments.keep, progress) as folder:
            result = _measure(arguments, folder, progress)
    except (ModelError, ServerError, RedisServerError) as error:
        progress.print(str(error), markup=False, highlight=False)
        return 1
    Console().print(table(result))
    if arguments.json:
        arguments.json.write_text(json.dumps(asdict(result), indent=2) + "\n")
    faults = list(shortfalls(result))
    for fault in faults:
        progress.print(fault, markup=False)
    return 1 if faults else 0


def _obstacle(arguments: argparse.Namespace) -> str | None:
    """Why it cannot run, known before anything is started; None if nothing is in the way."""
    if importlib.util.find_spec("vllm") is None:
        return (
            f"The demo starts a vLLM server, and vLLM is not installed for {sys.executable}. "
            "Install it there, without a GPU as 'kvtiers[cpu]'."
        )
    if arguments.prompts < 1:
        return f"--prompts is {arguments.prompts}: it must be at least 1."
    if not 0 <= arguments.port < 1 << 16:
        return f"--port is {arguments.port}: it must be a number up to 65535, or 0 for a free one."
    model: str | None = arguments.model
    if model is not None and not Path(model, "config.json").is_file():
        return f"--model is {model!r}: it must be a model's folder, with a config.json in it."
    file: Path | None = arguments.json
    if file is not None and (obstacle := why_unwritable(file)):
        return (
            f"--json is {str(file)!r}: it must be a file that this user can write, in a folder "
            f"({obstacle})."
        )
    return None if arguments.redis in (None, _OWN) else _why_no_redis(arguments.redis)


def _why_no_redis(url: str) -> str | None:
    """Why that server can't be used. vLLM would take a minute to fail, and hide why in its log."""
    try:
        tier = RedisTier(RedisConfig(url=url), ALIGNMENT)
        try:
            away = tier.probe()
        finally:
            tier.close()
    except ValidationError as error:
        return "\n".join(from_pydantic(error, RedisConfig, lambda _path: "--redis"))
    except TierConfigError as error:
        return f"--redis is {shown(url)}: {error}"
    start = "Start it, correct the URL, or leave it out for a server that the demo starts."
    return f"--redis: {away}. {start}" if away else None


def summarise(answers: Mapping[str, Sequence[Answer]]) -> Result:
    """Medians, and whether the prompts' answers agree.

    Args:
        answers: by step, one per prompt, prompts in the same order.

    """
    by_prompt = zip(*([answer.text for answer in row] for row in answers.values()), strict=True)
    return Result(
        prompt_tokens=next(iter(answers.values()))[0].prompt_tokens,
        answers_match=all(len(set(texts)) == 1 for texts in by_prompt),
        steps=[
            Step(
                name,
                statistics.median(answer.ttft_s for answer in row),
                int(statistics.median(answer.cached_tokens for answer in row)),
                statistics.mode(answer.source for answer in row),
            )
            for name, row in answers.items()
        ],
    )


def shortfalls(result: Result) -> Iterator[str]:
    """What did not go as it should."""
    if not result.answers_match:
        yield "The answers to the same prompt differ between the steps."
    for step in result.steps:
        if step.source != _SOURCES[step.name]:
            yield (
                f"The {step.name} step's tokens came from '{step.source}', says vLLM, and not from "
                f"'{_SOURCES[step.name]}'."
            )
        elif step.source != COMPUTED and step.cached_tokens < result.prompt_tokens // 2:
            yield f"The {step.name} step loaded only {step.cached_tokens} tokens."


def table(result: Result) -> Table:
    """The result for people."""
    count = f"{result.prompt_tokens} tokens a prompt"
    same = "same answers in every step" if result.answers_match else "DIFFERENT ANSWERS"
    grid = Table(
        title=f"Time to first token, {count}, {same}",
        caption="source: where the loaded tokens came from, as vLLM counts them",
    )
    grid.add_column("step")
    grid.add_column("source")
    for heading in ("TTFT", "tokens loaded", "speed-up"):
        grid.add_column(heading, justify="right")
    cold = result.steps[0].ttft_s
    for step in result.steps:
        grid.add_row(
            _TITLES[step.name],
            step.source,
            f"{step.ttft_s:.3f} s",
            str(step.cached_tokens),
            f"{cold / step.ttft_s:.1f}x",
        )
    return grid


def _measure(arguments: argparse.Namespace, folder: Path, progress: Console) -> Result:
    answers: dict[str, list[Answer]] = {}
    with _busy(progress, "Preparing the model (converted once)"):
        model = arguments.model or str(smollm2_path())
    with ExitStack() as stack:
        redis = _redis(arguments.redis, folder, stack)
        with _server(arguments, model, folder, progress, _tiers(redis, "fs")) as server:
            asked = prompts(server, arguments.prompts, _PROMPT_TOKENS, seed=time.time_ns())
            answers["cold"] = _step("cold", server, asked, progress)
            answers["gpu"] = _step("gpu", server, asked, progress)
            server.reset_prefix_cache()
            answers["cpu"] = _step("cpu", server, asked, progress)
        if redis:
            with _server(arguments, model, folder, progress, _tiers(redis)) as server:
                answers["redis"] = _step("redis", server, asked, progress)
        with _server(arguments, model, folder, progress) as server:
            answers["fs"] = _step("fs", server, asked, progress)
    return summarise(answers)


def _redis(wanted: str | None, folder: Path, stack: ExitStack) -> str | None:
    """URL of the Redis server to use, which lives until ``stack`` ends; None for no such tier."""
    if wanted != _OWN:
        return wanted
    return stack.enter_context(RedisServer(folder / "redis")).unix_url


def _tiers(redis: str | None, *below: str) -> dict[str, str]:
    """The variable that sets the tiers; none for the defaults."""
    if redis is None:
        return {}
    tier = {"type": "redis", "url": redis, "ttl": _REDIS_TTL_SECONDS, "required": True}
    return {"KVTIERS_TIERS": json.dumps(["cpu", tier, *below])}


def _step(
    name: str, server: VllmServer, asked: Sequence[list[int]], progress: Console
) -> list[Answer]:
    answers = []
    for number, prompt in enumerate(asked, 1):
        with _busy(progress, f"{_TITLES[name]}: prompt {number} of {len(asked)}"):
            answers.append(ask(server, prompt, _ANSWER_TOKENS))
    times = " ".join(f"{answer.ttft_s:.3f}" for answer in answers)
    progress.print(f"{_TITLES[name]}: {times} s", highlight=False)
    return answers


@contextmanager
def _server(
    arguments: argparse.Namespace,
    model: str,
    folder: Path,
    progress: Console,
    settings: Mapping[str, str] | None = None,
) -> Iterator[VllmServer]:
    """A server with the connector on its embedded defaults, warm but for the prompts.

    Args:
        arguments: of the command line.
        model: folder of the model.
        folder: where the run keeps its files.
        progress: told what goes on.
        settings: variables on top of the defaults.

    """
    with _busy(progress, "Starting vLLM") as say:
        server = VllmServer(
            model,
            folder / "vllm.log",
            _arguments(),
            {**_environment(folder, arguments.prompts), **(settings or {})},
            port=arguments.port,
            waiting=lambda seconds: say(f"Starting vLLM: {seconds:.0f} s"),
        )
        begin = time.monotonic()
        server.start()
    try:
        progress.print(f"vLLM answers after {time.monotonic() - begin:.0f} s", highlight=False)
        with _busy(progress, "Warming up"):
            for prompt in prompts(server, 2, tokens=512, seed=time.time_ns()):
                ask(server, prompt, _ANSWER_TOKENS)
        yield server
    finally:
        with _busy(progress, "Stopping vLLM"):
            server.stop()


@contextmanager
def _busy(progress: Console, text: str) -> Iterator[Callable[[str], None]]:
    """Says what is going on: on a terminal all the time, elsewhere once."""
    if progress.is_terminal:
        with progress.status(text) as status:
            yield status.update
    else:
        progress.print(f"{text} …", markup=False, highlight=False)
        yield lambda _text: None


def _arguments() -> list[str]:
    connector = {"kv_connector": "TieredKVConnector", "kv_role": "kv_both"}
    return [
        *("--dtype", "float32", "--enforce-eager", "--enable-prompt-tokens-details"),
        # Without it vLLM kills its engine at once, with stores to the disk under way.
        *("--shutdown-timeout", "30"),
        *("--kv-transfer-config", json.dumps(connector)),
    ]


def _environment(folder: Path, count: int) -> dict[str, str | None]:
    """Defaults, whatever the user has set; and the filesystem tier's default place in ``folder``.

    Only the home of caches is another one, so that the demo can take away what it
    stored; vLLM's own cache stays where it is.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return {
        **dict.fromkeys(name for name in os.environ if name.startswith("KVTIERS_")),
        "XDG_CACHE_HOME": str(folder),
        "VLLM_CACHE_ROOT": os.environ.get("VLLM_CACHE_ROOT", str(home / "vllm")),
        "VLLM_CPU_KVCACHE_SPACE": str(1 + math.ceil(count * _KV_GIB_PER_PROMPT)),
    }


@contextmanager
def _folder(keep: bool, progress: Console) -> Iterator[Path]:
    """A folder for the run, on the disk where the filesystem tier lies by default."""
    parent = default_cache().parent
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="demo-", dir=parent))
    try:
        yield folder
    finally:
        if keep:
            progress.print(f"Kept: {folder}", highlight=False)
        else:
            shutil.rmtree(folder, ignore_errors=True)
