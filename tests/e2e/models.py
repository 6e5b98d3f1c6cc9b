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
SIZES = {
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

    return save(LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **SIZES)), folder)


def make_gemma3(folder: Path) -> Path:
    """Three layers with a sliding window and one of full attention: two KV-cache groups or more."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    layers = ["sliding_attention"] * 3 + ["full_attention"]
    config = Gemma3TextConfig(
        num_hidden_layers=4,
        layer_types=layers,
        sliding_window=WINDOW,
        # Tied embeddings would repeat the last token whatever the KV says, and its norms
        # of queries and keys would make attention flat: see ``save``.
        tie_word_embeddings=False,
        query_pre_attn_scalar=4,
        **SIZES,
    )
    return save(Gemma3ForCausalLM(config), folder)


def make_adapter(folder: Path, seed: int) -> Path:
    """A LoRA adapter for ``make_llama``'s model, in PEFT's format, that changes keys and values.

    Written again with another seed, it has other content in files of the same names and sizes.
    """
    import torch
    from safetensors.torch import save_file

    rank, kv = 8, SIZES["num_key_value_heads"] * SIZES["head_dim"]
    source = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(2):
        for module, out in (("q_proj", SIZES["hidden_size"]), ("k_proj", kv), ("v_proj", kv)):
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            for part, shape in (("A", (rank, SIZES["hidden_size"])), ("B", (out, rank))):
                weight = torch.randn(shape, generator=source) * 0.2
                tensors[f"{name}.lora_{part}.weight"] = weight
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none"}
    settings["target_modules"] = ["q_proj", "k_proj", "v_proj"]
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def make_mamba_hybrid(folder: Path) -> Path:
    """Granite 4's kind: a layer of attention between two of Mamba 2. Three KV-cache groups.

    vLLM gives both kinds blocks of 256 tokens, so that their pages are equally large.
    """
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    config = GraniteMoeHybridConfig(
        num_hidden_layers=3,
        layer_types=["mamba", "attention", "mamba"],
        shared_intermediate_size=512,
        num_local_experts=0,
        num_experts_per_tok=0,
        mamba_n_heads=8,
        mamba_d_head=64,
        mamba_n_groups=1,
        mamba_d_state=64,
        mamba_chunk_size=128,
        tie_word_embeddings=False,
        **{name: size for name, size in SIZES.items() if name != "head_dim"},
    )
    return save(GraniteMoeHybridForCausalLM(config), folder)


def make_convolution_hybrid(folder: Path) -> Path:
    """LFM2's kind: a layer of attention between two short convolutions, with states as Mamba's."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    config = Lfm2Config(
        num_hidden_layers=3,
        layer_types=["conv", "full_attention", "conv"],
        block_auto_adjust_ff_dim=False,
        tie_word_embeddings=False,
        **{name: size for name, size in SIZES.items() if name != "head_dim"},
    )
    # Of published models' configurations; vLLM reads them, transformers derives them.
    sizes = {"conv_dim": 256, "block_dim": 256, "block_ff_dim": 512}
    config.update({**sizes, "block_multiple_of": 1, "block_ffn_dim_multiplier": 1.0})
    return save(Lfm2ForCausalLM(config), folder)


def make_mla(folder: Path) -> Path:
    """DeepSeek V2's kind: two layers that keep one latent vector a token, for all heads."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    config = DeepseekV2Config(
        num_hidden_layers=2,
        # No experts.
        first_k_dense_replace=2,
        q_lora_rank=None,
        # The only sizes that vLLM's CPU kernel knows.
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=64,
        v_head_dim=64,
        tie_word_embeddings=False,
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=8192,
    )
    return save(DeepseekV2ForCausalLM(config), folder)


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


def save(model: Any, folder: Path) -> Path:
    """Give the model random weights and a tokenizer, and write both."""
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
