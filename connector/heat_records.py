"""Measured prompts as bytes, for other engines to read.

    header  what this is (8), bytes that follow (4), their checksum (8, xxh3_64)
    prompt  chunks (4), bytes of a chunk's name (1), layers (2), KV heads (2); the names, the
            layers' numbers (2 each), the attention (2 each: layers, heads, chunks)

A prompt's chunks have the names they have in tiers, where whoever may read this could list
them anyway.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import xxhash
from kvtiers.connector.heat_log import Measured
from numpy.typing import NDArray

_HEADER = struct.Struct("<8sIQ")
_MAGIC = b"kvtheat1"
_PROMPT = struct.Struct("<IBHH")
_LAYERS, _MASS = np.dtype("<u2"), np.dtype("<f2")


@dataclass(frozen=True)
class Prompt:
    """The chunks of a prompt from the first on, and the attention per layer."""

    chunks: tuple[bytes, ...]
    measured: Measured

    @property
    def heads(self) -> int:
        """KV heads."""
        heads: int = next(iter(self.measured.values())).shape[0]
        return heads


def encode(prompts: Iterable[Prompt], most: int) -> bytes:
    """As many of the prompts, from the last back, as ``most`` bytes have room for."""
    parts: list[bytes] = []
    left = most - _HEADER.size
    for prompt in reversed(list(prompts)):
        part = _encoded(prompt)
        left -= len(part)
        if left < 0:
            break
        parts.append(part)
    body = b"".join(reversed(parts))
    return _HEADER.pack(_MAGIC, len(body), xxhash.xxh3_64_intdigest(body)) + body


def _encoded(prompt: Prompt) -> bytes:
    mass = np.stack([prompt.measured[layer] for layer in prompt.measured])
    heads, size = mass.shape[1], len(prompt.chunks[0])
    return b"".join(
        (
            _PROMPT.pack(len(prompt.chunks), size, len(mass), heads),
            *prompt.chunks,
            np.array(list(prompt.measured), _LAYERS).tobytes(),
            mass[:, :, : len(prompt.chunks)].astype(_MASS).tobytes(),
        )
    )


def decode(data: bytes) -> list[Prompt]:
    """What ``encode`` made, whatever follows it.

    Raises:
        ValueError: it is something else.

    """
    if len(data) < _HEADER.size:
        raise ValueError("it is too short")
    magic, length, checksum = _HEADER.unpack_from(data)
    body = data[_HEADER.size : _HEADER.size + length]
    if magic != _MAGIC or len(body) != length or xxhash.xxh3_64_intdigest(body) != checksum:
        raise ValueError("it holds no attention that this version reads")
    return list(_decoded(body))


def _decoded(body: bytes) -> Iterator[Prompt]:
    at = 0

    def take(nbytes: int) -> bytes:
        nonlocal at
        at += nbytes
        if at > len(body):
            raise ValueError("it ends in the middle of a prompt")
        return body[at - nbytes : at]

    def numbers(count: int, kind: np.dtype[np.generic]) -> NDArray[np.generic]:
        return np.frombuffer(take(count * kind.itemsize), kind)

    while at < len(body):
        chunks, size, layers, heads = _PROMPT.unpack(take(_PROMPT.size))
        names = take(chunks * size)
        which = numbers(layers, _LAYERS).tolist()
        mass = numbers(layers * heads * chunks, _MASS).astype(np.float32)
        if not (chunks and size and layers and heads and np.all((mass >= 0) & (mass <= 1))):
            raise ValueError("its figures are no attention")
        yield Prompt(
            tuple(names[i : i + size] for i in range(0, len(names), size)),
            dict(zip(which, mass.reshape(layers, heads, chunks), strict=True)),
        )
