import importlib.util
import shutil
from pathlib import Path

import pytest
from sources import vllm_sources


@pytest.fixture(scope="session")
def v032() -> Path:
    """Sources of the installed release."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parents[1]


@pytest.fixture(scope="session")
def v033() -> Path:
    return vllm_sources("0.33.0")


@pytest.fixture
def broken(tmp_path: Path, v033: Path):
    """A copy of what the contract reads of 0.33.0, with one piece of text replaced."""

    def make(module: str, old: str, new: str, count: int = -1) -> Path:
        shutil.copytree(
            v033 / "vllm",
            tmp_path / "vllm",
            ignore=lambda folder, names: {
                n for n in names if n in {"models", "layers", "entrypoints", "transformers_utils"}
            },
        )
        path = tmp_path.joinpath(*module.split(".")).with_suffix(".py")
        text = path.read_text()
        assert old in text, f"{module} has changed: {old!r} is not in it"
        path.write_text(text.replace(old, new, count))
        return tmp_path

    return make
