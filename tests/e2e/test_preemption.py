"""A GPU cache too small for the load, and requests that end while their KV is on its way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from engine import Answer, Engine, cpu, fs
from models import prompts

_PROMPTS = prompts(6, 380)
_OUTPUT = 160
# Three prompts of three blocks fit, but not when they have grown to five blocks
# each: vLLM preempts.
_BLOCKS = 12
# What an abort may meet between two steps, and how to see that it is there. A load on
# CPU ends within its step; a test of its own holds one back.
_POINTS: dict[str, Callable[[Engine], bool]] = {
    "before the first step": lambda engine: bool(engine.hierarchy._requests),
    "promoting": lambda engine: engine.hierarchy.pinned() > 0,
    "computing": lambda engine: bool(engine.scheduler.running),
    "storing": lambda engine: any(job.is_store for job in _jobs(engine)),
}


@pytest.fixture(scope="module")
def alone(llama: Path) -> list[tuple[int, ...]]:
    """Each answer of an engine with room for all, without the connector."""
    with Engine(llama) as engine:
        answers = engine.ask_each(_PROMPTS, _OUTPUT)
        assert engine.preemptions == 0
    assert len({answer.tokens for answer in answers}) == len(_PROMPTS)
    return [answer.tokens for answer in answers]


@pytest.mark.parametrize("prompts_only", [True, False])
@pytest.mark.parametrize("arena", ["1MiB", "64MiB"])
def test_answers_are_the_same_when_requests_are_preempted(
    llama: Path, tmp_path: Path, alone: list[tuple[int, ...]], prompts_only: bool, arena: str
) -> None:
    """With an arena of four chunks, a third of what the prompts have, and with one for all."""
    extra = {"offload_prompt_only": prompts_only}
    with Engine(llama, [cpu(arena), fs(tmp_path)], blocks=_BLOCKS, extra=extra) as engine:
        first = engine.ask_all(_PROMPTS, _OUTPUT)
        preempted = engine.preemptions
        again = engine.ask_all(_PROMPTS, _OUTPUT)
        assert engine.preemptions > preempted > 0
        _assert_at_rest(engine)
        loaded = engine.counts("cpu")["hits"] + engine.counts("fs")["hits"]
    assert [answer.tokens for answer in first] == alone
    assert [answer.tokens for answer in again] == alone
    assert loaded > 0


@pytest.fixture
def engine(llama: Path, tmp_path: Path) -> Iterator[Engine]:
    """An engine that has the first prompt in each of its tiers, and not on the GPU."""
    with Engine(llama, [cpu(), fs(tmp_path)]) as made:
        made.ask(_PROMPTS[0])
        made.reset_gpu()
        yield made


def test_an_abort_during_a_load_leaves_nothing_pinned(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, alone: list[tuple[int, ...]]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(_copies(engine), "get_finished", list)
        name = engine.submit(_PROMPTS[0])
        engine.run_until(lambda: engine.hierarchy.pinned() > 0)
        # A step more: the copy is under way as far as anybody can tell.
        engine.step()
        engine.abort(name)
        engine.step()
        assert engine.hierarchy.pinned() > 0, "the copy may still read those slots"
    engine.settle()
    _assert_at_rest(engine)
    _assert_served(engine.ask(_PROMPTS[0]), alone[0])


def test_an_abort_during_a_promotion_leaves_nothing_pinned(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, alone: list[tuple[int, ...]]
) -> None:
    engine.drop_arena()
    gate = threading.Event()
    tier = engine.hierarchy._lower[0].tier
    read = tier.read

    def held_back(*arguments: Any) -> Any:
        assert gate.wait(60)
        return read(*arguments)

    monkeypatch.setattr(tier, "read", held_back)
    name = engine.submit(_PROMPTS[0])
    engine.run_until(lambda: engine.hierarchy.pinned() > 0)
    engine.abort(name)
    engine.step()
    assert engine.hierarchy.pinned() > 0, "the read still writes to those slots"
    gate.set()
    engine.settle()
    _assert_at_rest(engine)
    _assert_served(engine.ask(_PROMPTS[0]), alone[0])


@pytest.mark.parametrize("point", _POINTS)
def test_an_abort_at_any_point_leaves_nothing_pinned(
    engine: Engine, alone: list[tuple[int, ...]], point: str
) -> None:
    engine.drop_arena()
    # Two that share what the tiers have, and one that has everything to store.
    names = [engine.submit(_PROMPTS[index]) for index in (0, 0, 1)]
    engine.run_until(partial(_POINTS[point], engine))
    for name in names:
        engine.abort(name)
    engine.settle()
    _assert_at_rest(engine)
    _assert_served(engine.ask(_PROMPTS[0]), alone[0])


def _jobs(engine: Engine) -> Collection[Any]:
    """vLLM's copy jobs under way."""
    return engine.connector.scheduler._jobs.values()  # type: ignore[no-any-return]


def _copies(engine: Engine) -> Any:
    """The copy worker, which is in this process as there is only one."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()._spec.worker


def _assert_at_rest(engine: Engine) -> None:
    assert engine.hierarchy.pinned() == 0
    assert engine.hierarchy.idle()
    assert not engine.hierarchy._requests


def _assert_served(answer: Answer, alone: tuple[int, ...]) -> None:
    assert answer.tokens == alone[: len(answer.tokens)]
    assert answer.cached == 256
