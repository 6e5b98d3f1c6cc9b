"""A server that knows nothing but ``LMCACHE_CONFIG_FILE`` serves from the tiers that it means."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine import BLOCK, Engine, chunk_files
from models import prompts

ALONE = {"kv_connector": "TieredKVConnector", "kv_role": "kv_both"}


def test_lmcaches_own_file_is_all_that_a_server_needs(
    llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk, file = tmp_path / "disk", tmp_path / "lmcache.yaml"
    file.write_text(
        f"chunk_size: {2 * BLOCK}\nmax_local_cpu_size: 0.0625\nlocal_disk: file://{disk}\n"
        "max_local_disk_size: 1\nenable_p2p: false\n"
    )
    prompt = prompts(1, 5 * BLOCK)[0]
    with Engine(llama, transfer=ALONE, environment={"LMCACHE_CONFIG_FILE": str(file)}) as engine:
        computed = engine.ask(prompt)
        engine.settle()
        assert len(chunk_files(disk)) == 2
        engine.reset_gpu()
        engine.drop_arena()
        loaded = engine.ask(prompt)
        assert engine.usage("cpu").usage.limit == 1 << 26
    assert (computed.cached, loaded.cached) == (0, 4 * BLOCK)
    assert loaded.tokens == computed.tokens
    assert (
        "kvtiers: Words of LMCache's that set nothing in kvtiers: enable_p2p (engines share KV "
        "through a redis tier, or an fs tier on a shared mount)."
    ) in caplog.messages
