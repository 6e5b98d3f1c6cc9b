"""What an LMCache server may be told, and what our adapter needs and leaves behind."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kvtiers.connector import lmcache
from kvtiers.connector.config_errors import ConfigError
from kvtiers.connector.lmcache import TieredL2
from lmcache_client import (
    SMALL,
    Client,
    Make,
    contents,
    fs,
    keys,
    restarts,
    wait_for,
)
from redis_server import RedisServer


@pytest.fixture
def make() -> Iterator[Make]:
    """Adapters that are closed at the end; each ends the one before."""
    with restarts() as start:
        yield start


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({}, "tiers is [] (from adapter_params): it must be a list of tiers, such as [{type: fs"),
        ({"tiers": ["cpu"]}, "LMCache's own memory (L1) is that tier"),
        ({"tiers": [{"type": "fs", "pth": "/x"}]}, "Did you mean 'path'?"),
        ({"tiers": [{"type": "fss"}]}, "Did you mean 'fs'?"),
        ({"tiers": ["fs"], "polcy": "lru"}, "Did you mean 'policy'?"),
        ({"tiers": ["fs"], "piece_size": 5000}, "it must be a multiple of 4096 bytes"),
        ({"tiers": ["fs"], "staging": "1MiB"}, "it must hold at least 16 pieces"),
        ({"tiers": ["fs"], "staging": "100TiB"}, "staging is 100 TiB, but this host"),
        ({"tiers": [{"type": "fs", "capacity": "1KiB"}]}, "below one chunk"),
        ({"tiers": ["fs"], "policy": "lur"}, "Did you mean 'lru'?"),
    ],
)
def test_bad_parameters_are_refused_with_a_paragraph(params: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        TieredL2(**params)
    assert says in str(error.value)


def test_what_no_log_should_show_may_stand_in_a_file(make: Make, tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis", ["--requirepass", "secret"], "secret") as server:
        tier = {"type": "redis", "url": server.url, "password": "secret"}
        file = tmp_path / "tiers.yaml"
        file.write_text(yaml.safe_dump({"tiers": [tier], "weights_version": "1"}))
        data = contents(2)
        assert make(config=str(file)).set(keys(2), data)
        client = make(config=str(file))
        assert client.get(keys(2), [len(item) for item in data]) == data
        # What stands beside it counts more.
        assert make(config=str(file), weights_version="2").exists(keys(2)) == [False] * 2
    file.write_text("tiers: [fs]\nstagin: 1GiB\n")
    with pytest.raises(ConfigError, match=r"stagin \(from file .*:2\).*Did you mean 'staging'"):
        TieredL2(config=str(file))


def test_the_adapter_in_the_docs_is_valid(make: Make, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "lmcache.md").read_text()
    (shown,) = re.findall(r"--l2-adapter '(.*?)'", page, re.DOTALL)
    adapter = json.loads(shown)
    assert (adapter["type"], adapter["module_path"]) == ("native_plugin", lmcache.__name__)
    assert adapter["class_name"] == TieredL2.__name__
    params = adapter["adapter_params"]
    params["tiers"][1]["path"] = str(tmp_path)
    with RedisServer(tmp_path / "redis") as server:
        params["tiers"][0]["url"] = server.url
        assert make(**params).set(keys(1), contents(1))


def test_it_needs_neither_an_engine_nor_lmcache() -> None:
    program = (
        "import sys\nimport kvtiers.connector.lmcache\n"
        "print([m for m in ('vllm', 'torch', 'lmcache', 'redis', 'fsspec') if m in sys.modules])"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    )
    assert answer.stdout.strip() == "[]"


def test_it_leaves_no_thread_and_no_descriptor(tmp_path: Path) -> None:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    before, threads = open_files(), threading.active_count()
    for _ in range(3):
        client = Client(tiers=[fs(tmp_path)], **SMALL)
        client.set(keys(2), contents(2))
        client.adapter.close()
    wait_for(lambda: threading.active_count() <= threads)
    assert open_files() <= before
