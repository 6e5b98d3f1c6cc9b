"""What a request asks for beside tokens: a salt of its own, and the logprobs of its prompt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from engine import Engine, chunk_files, cpu, fs
from kvtiers.policies import PolicyRequest, Run
from kvtiers.tiers.base import ChunkKey
from models import prompts
from passage import assert_same_through_every_tier, pass_through
from redis_server import RedisServer

_RED, _BLUE = {"cache_salt": "red"}, {"cache_salt": "blue"}


def test_tenants_find_their_own_through_every_tier_and_nobody_elses(
    llama: Path, redis_server: RedisServer, tmp_path: Path
) -> None:
    red, blue = prompts(2, 300)
    asking = [_RED, _BLUE]
    passage = pass_through(
        llama, [red, blue], tmp_path, redis=redis_server.url, max_tokens=8, asking=asking
    )
    assert_same_through_every_tier(passage)
    with Engine(llama, [cpu(), fs(tmp_path)]) as engine:
        for salt in (_BLUE, {}):
            answer = engine.ask(red, 8, **salt)
            assert (answer.tokens, answer.cached) == (passage.without[0], 0)
        assert engine.counts("fs")["hits"] == 0
        # One text in three salts is three chunks for each of its blocks.
        assert len(engine.arena()) == 2 * 2
        engine.drop_arena()
        assert engine.ask(red, 8, **_RED).cached == 256
        assert engine.counts("fs")["hits"] == 2


def test_a_policy_is_told_the_salt_as_tenant(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests, admitted = [], []
    with Engine(llama, [cpu()]) as engine:
        policy = engine.hierarchy.policy
        on_request, admit = policy.on_request, policy.admit

        def hear(request: PolicyRequest) -> None:
            requests.append((request.tenant, {run.tenant for run in request.runs}))
            on_request(request)

        def let_in(run: Run, tier: str) -> Any:
            admitted.append(run.tenant)
            return admit(run, tier)

        monkeypatch.setattr(policy, "on_request", hear)
        monkeypatch.setattr(policy, "admit", let_in)
        prompt = prompts(1, 150)[0]
        engine.ask(prompt, 1, **_RED)
        engine.ask(prompt, 1)
    assert requests == [("red", {"red"}), ("", {""})]
    assert admitted == ["red", ""]


def test_a_tenant_within_its_quota_keeps_its_hits_whatever_another_one_stores(
    llama: Path, tmp_path: Path
) -> None:
    mine, *theirs = prompts(9, 300)
    with Engine(llama) as engine:
        without = [answer.tokens for answer in engine.ask_each([mine, *theirs], 4)]
    with Engine(llama, [cpu()]) as engine:
        engine.ask(mine, 4)
        (size,) = {memory.nbytes for memory in engine.arena().values()}
    # Room for eight chunks above and twice as many below; a prompt has two.
    tiers = [cpu(f"{8 * size}"), fs(tmp_path, f"{16 * (size + 4096)}")]
    with Engine(llama, tiers, extra={"tenant_quota": "25%"}) as engine:
        answers = [engine.ask(mine, 4, **_BLUE)]
        answers += [engine.ask(prompt, 4, **_RED) for prompt in theirs]
        engine.run_until(lambda: len(chunk_files(tmp_path)) <= 2 + 4)
        engine.reset_gpu()
        assert engine.ask(mine, 4, **_BLUE).cached == 256
        engine.drop_arena()
        answers.append(engine.ask(mine, 4, **_BLUE))
        assert answers[-1].cached == 256
        assert engine.counts("fs")["hits"] == 2
        # Whoever floods finds its own last prompts, and nobody else's.
        engine.drop_arena()
        answers.append(engine.ask(theirs[-1], 4, **_RED))
        assert answers[-1].cached == 256
        assert engine.ask(mine, 4, **_RED).cached == 0
    assert [answer.tokens for answer in answers] == [*without, without[0], without[-1]]


def test_logprobs_of_a_prompt_are_computed_whatever_the_tiers_hold(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, wanted = prompts(1, 300)[0], {"prompt_logprobs": 0}
    with Engine(llama) as engine:
        without = engine.ask(prompt, 8, sampling=wanted)
    assert len(without.logprobs) == 299
    with Engine(llama, [cpu(), fs(tmp_path)]) as engine:
        asked = _watch_questions(engine, monkeypatch)
        assert engine.ask(prompt, 8, sampling=wanted) == without
        engine.drop_arena()
        assert engine.ask(prompt, 8, sampling=wanted) == without
        # vLLM reads no cache for such a request, so no tier is asked in vain.
        assert not asked
        engine.drop_arena()
        # What it stored serves those that want tokens alone.
        plain = engine.ask(prompt, 8)
        assert (plain.tokens, plain.cached) == (without.tokens, 256)
        assert engine.counts("fs")["hits"] == 2


def _watch_questions(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[ChunkKey]:
    """What the filesystem tier is asked for from now on."""
    asked: list[ChunkKey] = []
    tier = engine.hierarchy._residency.lower[0].tier
    contains = tier.contains

    def watched(keys: Sequence[ChunkKey]) -> list[bool]:
        asked.extend(keys)
        return contains(keys)

    monkeypatch.setattr(tier, "contains", watched)
    return asked
