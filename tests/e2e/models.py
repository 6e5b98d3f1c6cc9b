"""Small models with random weights, whose greedy answers depend on the KV they attend to.

Made, not downloaded: nothing here needs a model hub. Each has a tokenizer of one
word per token id, so that an OpenAI server can serve it too.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

VOCABULARY = 1024
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    # Divides by the tensor-parallel size 2, with two heads left for each rank.
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 8192,
}
WINDOW = 256
"""Sliding window of the Gemma 3 model: two of vLLM's blocks of 128 tokens on CPU."""


def make_llama(folder: Path) -> Path:
    """Two layers of full attention."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return _save(LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **_SIZES)), folder)


def make_gemma3(folder: Path) -> Path:
    """Three layers with a sliding window and one of full attention: two KV-cache groups or more."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    layers = ["sliding_attention"] * 3 + ["full_attention"]
    config = Gemma3TextConfig(
        num_hidden_layers=4,
        layer_types=layers,
        sliding_window=WINDOW,
        # Tied embeddings would repeat the last token whatever the KV says, and its norms
        # of queries and keys would make attention flat: see ``_save``.
        tie_word_embeddings=False,
        query_pre_attn_scalar=4,
        **_SIZES,
    )
    return _save(Gemma3ForCausalLM(config), folder)


def make_adapter(folder: Path, seed: int) -> Path:
    """A LoRA adapter for ``make_llama``'s model, in PEFT's format, that changes keys and values.

    Written again with another seed, it has other content in files of the same names and sizes.
    """
    import torch
    from safetensors.torch import save_file

    rank, kv = 8, _SIZES["num_key_value_heads"] * _SIZES["head_dim"]
    source = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(2):
        for module, out in (("q_proj", _SIZES["hidden_size"]), ("k_proj", kv), ("v_proj", kv)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            for part, shape in (("A", (rank, _SIZES["hidden_size"])), ("B", (out, rank))):
                weight = torch.randn(shape, generator=source) * 0.2
                tensors[f"{name}.lora_{part}.weight"] = weight
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none"}
    settings["target_modules"] = ["q_proj", "k_proj", "v_proj"]
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def prompts(count: int, tokens: int, seed: int = 1) -> list[list[int]]:
    """Prompts of token ids that share no block; the lengths differ by a few tokens."""
    choose = random.Random(seed)
    return [[choose.randrange(10, VOCABULARY) for _ in range(tokens + i)] for i in range(count)]


def texts(model: Path, count: int) -> list[list[int]]:
    """Prompts of English text, from 300 tokens on: the longest help texts of Python itself.

    The eighth ends where a block of 128 tokens does.
    """
    from pydoc_data.topics import topics

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(os.fspath(model))
    longest = sorted(topics.values(), key=len)[-count:]
    sizes = [300 + 12 * index for index in range(count)]
    ids = [tokenizer(text)["input_ids"][:size] for text, size in zip(longest, sizes, strict=True)]
    assert [len(prompt) for prompt in ids] == sizes
    return ids


def _save(model: Any, folder: Path) -> Path:
    import torch

    torch.manual_seed(0)
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            # Queries and keys large enough that each token attends to a few others
            # instead of to the mean of all: then a wrong chunk changes the answer.
            sharp = "q_proj" in name or "k_proj" in name
            torch.nn.init.normal_(weight, std=0.14 if sharp else 0.08)
    model.float().save_pretrained(folder)
    _save_tokenizer(folder)
    return folder


def _save_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{index}": index for index in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(
        os.fspath(folder)
    )
