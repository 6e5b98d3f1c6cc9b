"""Made and real sequences of chunks for tests of policies."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest


def zipf_ids(rng: random.Random, n: int, universe: int) -> list[int]:
    """Ids below ``universe``, the lower the more often."""
    weights = [1 / (rank + 1) for rank in range(universe)]
    return rng.choices(range(universe), weights, k=n)


def real_prompts(requests: int) -> list[tuple[int, ...]]:
    """The first prompts of Mooncake's conversation trace, as full chunks of 512 tokens.

    The trace is no part of this repository: ``KVTIERS_TRACES`` names the folder that has
    it, and without it the calling test is skipped.
    """
    folder = Path(os.environ.get("KVTIERS_TRACES", Path(__file__).parents[3] / "shared/traces"))
    file = folder / "mooncake_conversation_dev.parquet"
    if not file.exists():
        pytest.skip(f"no trace at {file}; set KVTIERS_TRACES to the folder that has it")
    parquet = pytest.importorskip("pyarrow.parquet", reason="reading traces needs pyarrow")
    columns = ["run_start", "run_len", "input_len"]
    rows = parquet.read_table(file, columns=columns).slice(0, requests).to_pylist()
    prompts = []
    for row in rows:
        runs = zip(row["run_start"], row["run_len"], strict=True)
        ids = [c for start, n in runs for c in range(start, start + n)]
        prompts.append(tuple(ids[: row["input_len"] // 512]))
    return prompts
