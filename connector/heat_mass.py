"""Attention mass per chunk, from queries and keys.

The observation window of SnapKV (Li et al., 2024, arXiv:2404.14469): what the last
queries of a prompt attend to is what the tokens after it will attend to. Here the mass
is summed per chunk, which is what tiers move, and kept apart for each KV head.
"""

from __future__ import annotations

import torch

# Memory for logits at most, in elements: a long window over a long prompt comes in parts.
_MOST_LOGITS = 1 << 24


def attention_mass(
    query: torch.Tensor,
    keys: torch.Tensor,
    first: int,
    scale: float,
    chunk_tokens: int,
    softcap: float = 0.0,
) -> torch.Tensor:
    """Share of its attention that a visible query pays to each chunk, 0 to 1, on average.

    Args:
        query: ``[queries, query_heads, head_size]``, of neighbouring positions.
        keys: ``[kv_heads, head_size, tokens]``, of the positions from 0 on; more than
            the last query may see are left out.
        first: position of the first query.
        scale: what logits are multiplied by.
        chunk_tokens: tokens of a chunk; the last chunk may have fewer.
        softcap: bound of the logits as in Gemma 2, 0 for none.

    Returns:
        ``[kv_heads, chunks]``, float32: summed over the query heads of a KV head and
        divided by how many there are and by how many queries see any of the chunk.

    """
    queries, tokens = query.shape[0], first + query.shape[0]
    heads = keys.shape[0]
    keys = keys[:, :, :tokens]
    chunks = -(-tokens // chunk_tokens)
    grouped = query.reshape(queries, heads, -1, query.shape[2])
    total = torch.zeros(heads, chunks, dtype=torch.float32, device=query.device)
    step = max(1, _MOST_LOGITS // (query.shape[1] * tokens))
    for begin in range(0, queries, step):
        part = grouped[begin : begin + step]
        total += _summed(part, keys, first + begin, scale, chunk_tokens, softcap)
    starts = torch.arange(chunks, device=query.device) * chunk_tokens
    visible = (tokens - starts.clamp(min=first)).clamp(min=1)
    return total / (visible * grouped.shape[2])


def _summed(
    part: torch.Tensor,
    keys: torch.Tensor,
    first: int,
    scale: float,
    chunk_tokens: int,
    softcap: float,
) -> torch.Tensor:
    """``[kv_heads, chunks]``: the mass of all queries of ``[queries, kv_heads, group, size]``."""
    queries, heads, group, size = part.shape
    tokens = keys.shape[2]
    flat = part.permute(1, 2, 0, 3).reshape(heads, group * queries, size)
    # Scaled before the product: there are fewer queries than logits.
    logits = torch.bmm(flat.float() * scale, keys.float())
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    hidden = _hidden(queries, first, tokens, logits.device)
    view = logits.view(heads, group, queries, tokens)
    view[..., first + 1 :].masked_fill_(hidden, float("-inf"))
    mass = torch.softmax(logits, dim=-1).sum(dim=1)
    padded = torch.nn.functional.pad(mass, (0, -tokens % chunk_tokens))
    return padded.view(heads, -1, chunk_tokens).sum(dim=-1)


def _hidden(queries: int, first: int, tokens: int, device: torch.device) -> torch.Tensor:
    """``[queries, tokens - first - 1]``: what comes after each query."""
    later = torch.arange(first + 1, tokens, device=device)
    own = torch.arange(first, first + queries, device=device)
    return later[None, :] > own[:, None]
