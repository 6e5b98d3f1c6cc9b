"""What a real engine writes to a lower tier where only what is reused is admitted."""

from __future__ import annotations

from pathlib import Path

import models
from engine import BLOCK, Engine, chunk_files, cpu, fs


def test_a_prompt_is_written_when_it_comes_again_and_served_after_a_restart(
    llama: Path, tmp_path: Path
) -> None:
    once, twice = models.prompts(2, 4 * BLOCK + 8)
    tiers, extra = [cpu(), fs(tmp_path)], {"admission": "reused"}
    with Engine(llama, tiers, extra=extra) as engine:
        engine.ask(once)
        first = engine.ask(twice)
        assert chunk_files(tmp_path) == {}
        # From the GPU: the arena's copies are written.
        assert engine.ask(twice).cached == 4 * BLOCK
        assert len(chunk_files(tmp_path)) == 4
    with Engine(llama, tiers, extra=extra) as engine:
        again = engine.ask(twice)
        assert (again.tokens, again.cached) == (first.tokens, 4 * BLOCK)
        assert engine.ask(once).cached == 0
