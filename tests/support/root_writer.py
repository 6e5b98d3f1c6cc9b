"""An engine at a shared root, as a process: stores and reads until it is ended.

    python root_writer.py ROOT CAPACITY_IN_CHUNKS NUMBER

Says ``stored N`` after every tenth chunk and fails if a hit holds anything but what was
stored. Reads what all three of its kind store.
"""

from __future__ import annotations

import itertools
import random
import sys
from pathlib import Path

from kvtiers.policies import TierInfo
from kvtiers.policies.lru import LruPolicy
from kvtiers.tiers.base import ReadOutcome, WriteOutcome
from kvtiers.tiers.buffers import aligned_buffer
from kvtiers.tiers.fs import FsTier
from root_kit import FILE, PAYLOAD, filled, key

# Chunks of a prompt, and prompts of each writer, over and over.
_CHUNKS, _PROMPTS = 4, 40


def main(root: Path, capacity: int, number: int) -> None:
    """Store and read for ever."""
    config = FsTier.Config(path=root, capacity=capacity * FILE, direct=False)
    tier = FsTier(config, PAYLOAD)
    info = TierInfo("fs", capacity * FILE, shared=True, persistent=True)
    tier.keep(info, lambda infos, clock: LruPolicy(infos, clock=clock), stores=True)
    choose, stored = random.Random(number), 0
    for prompt in itertools.cycle(range(_PROMPTS)):
        keys = [key(n, prompt=3 * prompt + number) for n in range(_CHUNKS)]
        outcomes = tier.write(keys, [filled(k) for k in keys])
        before, stored = stored, stored + outcomes.count(WriteOutcome.STORED)
        if before // 10 != stored // 10:
            print("stored", stored, flush=True)
        _read(tier, choose)


def _read(tier: FsTier, choose: random.Random) -> None:
    prompt = choose.randrange(3 * _PROMPTS)
    keys = [key(n, prompt=prompt) for n in range(_CHUNKS)]
    buffers = [aligned_buffer(PAYLOAD) for _ in keys]
    outcomes = tier.read(keys, buffers)
    for k, buffer, outcome in zip(keys, buffers, outcomes, strict=True):
        assert outcome in (ReadOutcome.HIT, ReadOutcome.MISS), outcome
        assert outcome is ReadOutcome.MISS or buffer == filled(k), "a hit holds something else"


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
