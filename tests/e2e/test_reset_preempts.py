"""A prefix-cache reset that preempts what runs: it may be admitted again with a load at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine import Answer, Engine, cpu
from models import prompts

(PROMPT,) = prompts(1, 700)
OUTPUT = 24


@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_a_running_request_outlives_the_reset(model: str, request: pytest.FixtureRequest) -> None:
    """VLLM 0.32 ends the engine here if the request's prefix is in a tier."""
    folder: Path = request.getfixturevalue(model)
    with Engine(folder, [cpu()]) as engine:
        expected = engine.ask(PROMPT, OUTPUT).tokens
        engine.settle()
        name = engine.submit(PROMPT, OUTPUT)
        answers: dict[str, Answer] = {}
        while not engine.scheduler.running or engine.scheduler.running[0].num_output_tokens < 3:
            answers.update(engine.step())
        assert engine.llm.reset_prefix_cache(reset_running_requests=True)
        hits = engine.counts("cpu")["hits"]
        while name not in answers:
            answers.update(engine.step())
        assert answers[name].tokens == expected
        assert engine.counts("cpu")["hits"] > hits, "it loaded after the reset"
        engine.settle()
        assert engine.hierarchy.pinned() == 0
