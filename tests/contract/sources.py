"""Fetches the ``.py`` files of a vLLM release: its wheel, without installing it."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

CACHE = Path(__file__).parents[2] / ".cache"
# The sources are the same in the wheels of all platforms, and pip must be told
# one to find any on a machine that vLLM has no wheel for.
WHEEL_PLATFORM = "manylinux_2_28_x86_64"


def vllm_sources(version: str, cache: Path = CACHE) -> Path:
    """A folder that holds ``vllm/``, downloaded once (about 340 MB, kept: 57 MB)."""
    given = os.environ.get("KVTIERS_VLLM_SOURCES")
    if given:
        return Path(given)
    target = cache / f"vllm-{version}"
    if not target.is_dir():
        wheel = _download(version, cache)
        _extract(wheel, target)
        wheel.unlink()
    return target


def _download(version: str, cache: Path) -> Path:
    cache.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"]
    command += ["--only-binary=:all:", "--platform", WHEEL_PLATFORM, "--dest", str(cache)]
    subprocess.run([*command, f"vllm=={version}"], check=True)
    (wheel,) = cache.glob(f"vllm-{version}-*.whl")
    return wheel


def _extract(wheel: Path, target: Path) -> None:
    """All or nothing, so that a cancelled run leaves no half tree behind."""
    partial = target.with_suffix(".part")
    with zipfile.ZipFile(wheel) as archive:
        names = [n for n in archive.namelist() if n.startswith("vllm/") and n.endswith(".py")]
        archive.extractall(partial, names)
    partial.rename(target)
