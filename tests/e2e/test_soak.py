"""A soak too short to say much of leaks, so that the long one is known to work."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

_SOAK = Path(__file__).parents[1] / "soak" / "soak.py"


def test_two_minutes_of_random_load_and_faults(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, str(_SOAK), "--minutes", "2", "--json", str(report)]
    # It ends by itself before that, and takes its servers with it.
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(report.read_text())
    assert found["requests"]["right"] > 100
    assert sum(found["faults"].values()) > 20
    assert found["cached_tokens"] > 0
    hits = {tier: found["tiers"][tier].get("hits", 0) for tier in ("gpu", "cpu", "redis", "fs")}
    assert hits["gpu"] > 0
    assert hits["cpu"] > 0
    assert hits["redis"] + hits["fs"] > 0
