"""A small model, and an EAGLE drafter that guesses about half of what it will say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import models

_NOISE = 0.02
"""Of the drafter's weights, relative. Without it nearly every draft is accepted."""


def make_drafted_llama(folder: Path) -> tuple[Path, Path]:
    """The model's folder and its drafter's.

    The drafter takes the next token's embedding, ignores the hidden state that EAGLE
    passes along, and is the model itself but for the first norm, which a drafter lacks
    and these embeddings, all of one length, do not need.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(num_hidden_layers=2, tie_word_embeddings=False, **models.SIZES)
    model = LlamaForCausalLM(config)
    models.save(model, folder / "model")
    with torch.no_grad():
        embeddings = model.model.embed_tokens.weight
        embeddings.div_(embeddings.square().mean(-1, keepdim=True).sqrt())
    model.save_pretrained(folder / "model")
    return folder / "model", _save_drafter(model, folder / "drafter")


def _save_drafter(model: Any, folder: Path) -> Path:
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(1)
    layers = model.model.layers.state_dict(prefix="layers.")
    del layers["layers.0.input_layernorm.weight"]
    tensors = {
        name: weight * (1 + _NOISE * torch.randn_like(weight)) if weight.dim() > 1 else weight
        for name, weight in layers.items()
    }
    size = model.config.hidden_size
    tensors["fc.weight"] = torch.cat([torch.eye(size), torch.zeros(size, size)], dim=1)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(model.config.to_dict(), default=str))
    return folder
