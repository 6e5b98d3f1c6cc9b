"""Times one request through the OpenAI API and says which tier its prefix came from."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvtiers.tools.server import ServerError, VllmServer

# "device", "host", "disk", …: vLLM's own words for where cached tokens came from.
_BY_SOURCE = re.compile(
    r'^vllm:prompt_tokens_cached_by_source_total\{[^}]*source="(\w+)"[^}]*\} (\S+)$', re.MULTILINE
)
COMPUTED = "none"
"""The source of a prompt of which nothing was cached."""


@dataclass(frozen=True)
class Answer:
    """What came back for one prompt.

    Attributes:
        text: generated text.
        ttft_s: seconds from sending the request to the first generated token.
        prompt_tokens: length of the prompt, as the server counts it.
        cached_tokens: how many of them were not computed, as the server says.
        source: where most of those came from, in the words of vLLM's metric
            ``prompt_tokens_cached_by_source``; ``COMPUTED`` if from nowhere, empty
            if nobody looked.

    """

    text: str
    ttft_s: float
    prompt_tokens: int
    cached_tokens: int
    source: str = ""


def ask(server: VllmServer, prompt: list[int], max_tokens: int) -> Answer:
    """``complete``, and where its prefix came from. Nothing else may run meanwhile.

    Raises:
        ServerError: the server refuses, or ends the answer without usage.

    """
    before = cached_by_source(server.get("/metrics"))
    answer = complete(server, prompt, max_tokens)
    after = cached_by_source(server.get("/metrics"))
    return replace(answer, source=main_source(before, after))


def complete(server: VllmServer, prompt: list[int], max_tokens: int) -> Answer:
    """Send a prompt of token ids, greedy, and time it. Any number may run at once.

    Raises:
        ServerError: the server refuses, or ends the answer without usage.

    """
    body = {
        "model": server.model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    text, ttft, usage = "", None, None
    begin = time.perf_counter()
    for event in server.stream("/v1/completions", body):
        if event.get("choices"):
            ttft = time.perf_counter() - begin if ttft is None else ttft
            text += event["choices"][0]["text"]
        usage = event.get("usage") or usage
    if ttft is None or usage is None:
        raise ServerError("The server ended its answer without a token or without usage.")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Answer(text, ttft, usage["prompt_tokens"], cached)


def cached_by_source(metrics: str) -> dict[str, float]:
    """Cached prompt tokens so far by source, from the text of ``/metrics``."""
    counts: dict[str, float] = {}
    for source, value in _BY_SOURCE.findall(metrics):
        counts[source] = counts.get(source, 0) + float(value)
    return counts


def main_source(before: Mapping[str, float], after: Mapping[str, float]) -> str:
    """The source that grew most between two readings."""
    grown = {source: count - before.get(source, 0) for source, count in after.items()}
    source = max(grown, key=lambda name: grown[name], default=COMPUTED)
    return source if grown.get(source, 0) > 0 else COMPUTED


def tier_figure(metrics: str, name: str, tier: str) -> float | None:
    """A figure of a tier, over all engines, from the text of ``/metrics``; None if it is not there.

    Args:
        metrics: the text.
        name: without what all have in common, such as ``hits_total``.
        tier: as configured, or ``cpu`` or ``gpu``.

    """
    pattern = rf'^vllm:kvtiers_tier_{name}\{{[^}}]*\btier="{re.escape(tier)}"[^}}]*\}} (\S+)$'
    found = re.findall(pattern, metrics, re.MULTILINE)
    return sum(map(float, found)) if found else None


def prompts(server: VllmServer, count: int, tokens: int, seed: int) -> list[list[int]]:
    """Different prompts of exactly that many tokens; another seed shares no block with them.

    Raises:
        ServerError: the server's tokenizer makes fewer tokens of the text than wanted.

    """
    made = []
    for index in range(count):
        text = _ledger(random.Random(f"{seed}/{index}"), lines=tokens // 8)  # noqa: S311
        ids = server.post("/tokenize", {"model": server.model, "prompt": text})["tokens"]
        if len(ids) < tokens:
            raise ServerError(f"The tokenizer made {len(ids)} tokens of a prompt, not {tokens}.")
        made.append(ids[:tokens])
    return made


def _ledger(choose: random.Random, lines: int) -> str:
    """Lines of which no two are the same, with a random number first."""
    goods = ("barley", "copper", "indigo", "lamp oil", "paper", "salt", "timber", "wool")
    towns = ("Arles", "Bergen", "Cadiz", "Delft", "Genoa", "Lubeck", "Riga", "Tunis")
    entries = (
        f"{choose.randrange(10**6)}: {choose.randrange(2, 99)} bales of {choose.choice(goods)} "
        f"from {choose.choice(towns)} to {choose.choice(towns)}, "
        f"for {choose.randrange(100, 9999)} florins."
        for _ in range(lines)
    )
    return "\n".join(entries)
