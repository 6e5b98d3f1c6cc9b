"""What cannot work is refused before the server answers, in words that reach the operator.

Each text is looked for in the output of a real server where it comes up in another
process than the one that read the configuration; the rest are checked where they
are made. Texts on the configuration alone are in tests/unit/test_config.py.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine import BLOCK, connector_config, cpu
from kvtiers.connector.config import load
from kvtiers.connector.config_errors import ConfigError
from kvtiers.connector.spec import Context
from kvtiers.connector.stack import _build_tier
from kvtiers.tiers import Tier, TierConfigError
from kvtiers.tools.server import ServerError, VllmServer

CHUNK = 64 * 1024
LLAMA_CHUNK = 2 * BLOCK * 4 * 2 * 32 * 4
"""Bytes: layers, tokens, KV heads, keys and values, head size, float32."""
COMMON = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "1024")


def output_of(model: Path, home: Path, config: dict[str, Any], *arguments: str) -> str:
    """Starts a server, sees that it never answers ``/health``, returns what it printed."""
    log = home / "log"
    server = VllmServer(
        str(model),
        log,
        [*COMMON, "--kv-transfer-config", json.dumps(config), *arguments],
        {"HOME": str(home), "XDG_CACHE_HOME": str(home), "VLLM_CPU_KVCACHE_SPACE": "1"},
        start_timeout=240,
    )
    with pytest.raises(ServerError), server:
        pytest.fail("the server started")
    return log.read_text()


def test_every_mistake_of_the_configuration_is_told_at_once(llama: Path, tmp_path: Path) -> None:
    tiers = [cpu(), {"type": "fss"}, {"type": "fs", "capcity": "1GiB"}, {"type": "fs"}, "fs"]
    said = output_of(llama, tmp_path, connector_config(tiers, polcy="lru"))
    assert (
        "tiers[1].type is 'fss' (from kv_connector_extra_config): Unknown tier 'fss'. Known: cpu, "
        "fs, redis. Did you mean 'fs'?"
    ) in said
    assert (
        "tiers[2].capcity (from kv_connector_extra_config) is not a key that kvtiers knows. Did "
        "you mean 'capacity'? Known here: block_size, buffer, capacity, deadline, direct, "
        "encryption, fsync, headroom, name, path, tenant_quota, threads, type. Correct it "
        "or leave it out."
    ) in said
    assert (
        "tiers[4] is 'fs' (from kv_connector_extra_config): tiers[3] is called that already. "
        "Remove one of the two, or give one of them another 'name'."
    ) in said
    assert (
        "polcy (from kv_connector_extra_config) is not a key that kvtiers knows. Did you mean "
        "'policy'?"
    ) in said


def test_prefix_caching_switched_off(llama: Path, tmp_path: Path) -> None:
    said = output_of(llama, tmp_path, connector_config([cpu()]), "--no-enable-prefix-caching")
    assert (
        "Prefix caching is switched off, so vLLM computes no hashes by which kvtiers could find a "
        "chunk again. Remove --no-enable-prefix-caching or, where vLLM switched it off by itself "
        "for this model on this device, remove TieredKVConnector from --kv-transfer-config."
    ) in said


def test_a_chunk_size_that_is_no_multiple_of_the_block(llama: Path, tmp_path: Path) -> None:
    said = output_of(llama, tmp_path, connector_config([cpu()], chunk_size=300))
    assert (
        "chunk_size is 300 tokens, which is no multiple of vLLM's block of 128 tokens. Set it to "
        "256 or 384, or set blocks_per_chunk instead."
    ) in said


def test_a_cpu_tier_below_one_chunk(llama: Path, tmp_path: Path) -> None:
    said = output_of(llama, tmp_path, connector_config([cpu("100KiB")]))
    assert (
        "tiers[0].capacity is 100 KiB, which is below one chunk of 256 KiB. Set it to a good "
        f"multiple of {LLAMA_CHUNK} bytes"
    ) in said


def test_a_path_below_a_file(llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    tiers = [cpu(), {"type": "fs", "path": str(file / "kv")}]
    said = output_of(llama, tmp_path, connector_config(tiers))
    assert (
        f"The filesystem tier's 'path' {str(file / 'kv')!r} is not a folder, or lies below "
        "something that is none"
    ) in said
    assert "Name a folder, or a path where one can be made." in said


def test_weights_that_nobody_can_name_and_a_tier_that_outlives_them(
    llama: Path, tmp_path: Path
) -> None:
    tiers = [cpu(), {"type": "fs", "path": str(tmp_path / "kv")}]
    said = output_of(llama, tmp_path, connector_config(tiers), "--load-format", "dummy")
    assert (
        "tiers[1] (fs) outlives this engine or is shared with others, but the KV of this engine "
        "must not be: load_format=dummy makes random weights. Change that, or leave the tier out."
    ) in said
    assert not (tmp_path / "kv").exists()


# Where a server would say no more than the function that refuses -------------


def build(*tiers: dict[str, Any], private: str | None = None) -> Tier | None:
    """The second of the tiers, as an engine builds it."""
    loaded = load({"tiers": ["cpu", *tiers]} if tiers else {}, {})
    context = Context(loaded, None, None)
    return _build_tier(context, 1, loaded.config.tiers[1], CHUNK, private, away={})


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    made = subprocess.run(mount, capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"this user may not mount a file system: {made.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_full_at_start(small_disk: Path) -> None:
    (small_disk / "other").write_bytes(bytes((1 << 20) - CHUNK // 2))
    root = small_disk / "kv"
    with pytest.raises(TierConfigError) as raised:
        build({"type": "fs", "path": str(root)})
    said = str(raised.value)
    assert said.startswith(f"The file system of the filesystem tier's 'path' {str(root)!r} has ")
    assert f"bytes free, and one chunk takes {CHUNK + 4096}." in said
    assert said.endswith("or name a folder on another disk.")


def test_a_disk_without_room_for_a_folder(small_disk: Path) -> None:
    (small_disk / "other").write_bytes(bytes(1 << 20))
    with pytest.raises(TierConfigError, match=r"Free some space|cannot write in its 'path'"):
        build({"type": "fs", "path": str(small_disk / "kv")})


def test_a_folder_that_cannot_be_written(small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    root = small_disk / "kv"
    with pytest.raises(TierConfigError) as raised:
        build({"type": "fs", "path": str(root)})
    said = str(raised.value)
    assert said.startswith(f"The filesystem tier cannot write in its 'path' {str(root)!r} (")
    assert said.endswith("Give this user the right to write there, or name another folder.")


def test_a_filesystem_tier_below_one_chunk(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        build({"type": "fs", "path": str(tmp_path), "capacity": "32KiB"})
    assert str(raised.value).startswith(
        "tiers[1].capacity is 32 KiB, which is below one chunk of 64 KiB. Set it to a good "
        f"multiple of {CHUNK} bytes"
    )


def test_a_default_tier_that_cannot_work_is_left_out_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    assert build() is None
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "kvtiers runs without its default fs tier: The filesystem tier's 'path' "
    )
