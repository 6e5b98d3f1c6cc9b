"""The keys of a paged KV cache, for the backends whose arrangement is known.

vLLM hands every backend a view ``[blocks, kv_heads, block_tokens, content]``, whatever
the order in memory. What lies in the last two, each backend decides for itself:

    CPU_ATTN     a head's page holds all keys, then all values. The keys are column
                 major for the kernels with plain vector instructions, and in tiles
                 of 16 tokens and pairs of elements for those with AMX.
    FLASH_ATTN   key, then value, token by token.
    TRITON_ATTN  the same.

Others are not looked into: FlashInfer hands its layers no block table, MLA has no keys,
and a quantised cache would need its scales.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Keys = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
"""``(cache, blocks, head_size)`` to the keys of these blocks, one after the other:
``[blocks, kv_heads, block_tokens, content]`` to ``[kv_heads, head_size, tokens]``."""

_TILE = 16


def keys_of(backend: str, kernel: str = "") -> Keys | None:
    """How to get at the keys, None if that is not known.

    Args:
        backend: vLLM's name of the attention backend.
        kernel: which of its kernels runs (``isa`` of a layer on CPU), "" if it has one.

    """
    known: dict[tuple[str, str], Keys] = {
        ("CPU_ATTN", "vec"): column_major,
        ("CPU_ATTN", "vec16"): column_major,
        ("CPU_ATTN", "amx"): amx_tiles,
        ("FLASH_ATTN", ""): token_by_token,
        ("TRITON_ATTN", ""): token_by_token,
    }
    return known.get((backend, kernel))


def column_major(cache: torch.Tensor, blocks: torch.Tensor, head_size: int) -> torch.Tensor:
    """Of vLLM's CPU kernels ``vec`` and ``vec16``: see ``Keys``."""
    count, heads, tokens, _ = cache.shape
    keys = cache.view(count, heads, 2, head_size, tokens)[:, :, 0].index_select(0, blocks)
    return keys.permute(1, 2, 0, 3).reshape(heads, head_size, -1)


def amx_tiles(cache: torch.Tensor, blocks: torch.Tensor, head_size: int) -> torch.Tensor:
    """Of vLLM's CPU kernel ``amx``: see ``Keys``."""
    count, heads, tokens, _ = cache.shape
    tiles = cache.view(count, heads, 2, tokens // _TILE, head_size // 2, _TILE, 2)
    keys = tiles[:, :, 0].index_select(0, blocks)
    return keys.permute(1, 3, 5, 0, 2, 4).reshape(heads, head_size, -1)


def token_by_token(cache: torch.Tensor, blocks: torch.Tensor, head_size: int) -> torch.Tensor:
    """Of FlashAttention and Triton: see ``Keys``."""
    keys = cache[..., :head_size].index_select(0, blocks)
    return keys.permute(1, 3, 0, 2).reshape(keys.shape[1], head_size, -1)
