"""Heat that goes from engine to engine through Redis."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from encrypted_tiers import write_keys
from kvtiers.connector.heat_share import HeatShare
from kvtiers.policies import Run
from kvtiers.tiers import Namespace
from kvtiers.tiers.base import ALIGNMENT
from redis_server import RedisServer

pytest.register_assert_rewrite("kvtiers.tiers.conformance")

from redis_tiers import open_redis_tier  # noqa: E402 - its suite is rewritten before its import

NAMESPACE = Namespace("a" * 16)
CHUNKS = tuple(bytes([i]) * 36 for i in range(3))
MASS = np.float32([[0.5, 0.25, 0.125], [0.0, 0.5, 0.25]])


@pytest.mark.parametrize("encrypted", [False, True])
def test_engines_tell_each_other_through_redis(
    redis_server: RedisServer, tmp_path: Path, encrypted: bool
) -> None:
    keys = {"key_file": str(write_keys(tmp_path / "kv.keys"))}
    options = {"encryption": keys} if encrypted else {}
    tiers = [
        open_redis_tier(redis_server, tmp_path / "place", 8, 4 * ALIGNMENT, **options)
        for _ in range(2)
    ]
    ours, theirs = (HeatShare(tier, lambda: NAMESPACE, clock=lambda: 1e6) for tier in tiers)
    try:
        for layer in (3, 5):
            ours.note(Run(CHUNKS), {layer: MASS})
            ours.exchange(tell=True)
        theirs.exchange(tell=False)
        heard = list(theirs.take())
        assert [prompt.chunks for prompt in heard] == [CHUNKS] * 2
        assert [list(prompt.measured) for prompt in heard] == [[3], [5]]
        np.testing.assert_array_equal(heard[0].measured[3], MASS)
        ours.exchange(tell=False)
        assert list(ours.take()) == [], "nobody hears itself"
    finally:
        for tier in tiers:
            tier.close()
