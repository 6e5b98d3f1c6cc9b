"""The small Llama with quantised weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_SCHEME = {
    "targets": ["Linear"],
    "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "dynamic": False},
    "input_activations": {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True},
}


def make_int8(folder: Path, plain: Path) -> Path:
    """``plain`` in compressed-tensors' w8a8: weights and activations in eight bits."""
    import torch
    from safetensors.torch import load_file

    tensors = {}
    for name, weight in load_file(plain / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            scale = weight.abs().amax(1, keepdim=True) / 127
            tensors[name] = (weight / scale).round().to(torch.int8)
            tensors[f"{name}_scale"] = scale
        else:
            tensors[name] = weight
    settings = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": _SCHEME},
    }
    return _save(folder, plain, tensors, settings)


def _save(
    folder: Path, plain: Path, tensors: Mapping[str, Any], settings: Mapping[str, Any]
) -> Path:
    from safetensors.torch import save_file

    shutil.copytree(plain, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file(dict(tensors), folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    return folder
