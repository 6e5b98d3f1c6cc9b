"""Tells whether two engines run the same weights, from the files on disk.

KV computed with other weights has the right size and the wrong content, so the
weights are part of a namespace. Hashing a 70B checkpoint takes minutes; this
reads what any training step changes and no more:

- of a safetensors file its header (names, shapes, offsets of all tensors), its
  size, and one page of each tensor, at a place that the tensor's name decides;
- of any other weight file its size and ``PAGES_PER_FILE`` pages;
- the small JSON files that say how the weights are read.

A fine-tune changes every tensor of the layers it touches, so a page of each
shows it. A change of a few bytes that no sampled page covers goes unseen: the
fingerprint tells checkpoints apart, it is no seal against tampering. At most
``MAX_TENSORS`` tensors are sampled (the ones whose names hash lowest), so that a
mixture of experts with 90,000 tensors costs 16 MiB of reads and not 370. A
dense 70B model has about 720 tensors: 3 MiB and its headers.
"""

from __future__ import annotations

import heapq
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import xxhash

PAGE = 4096
MAX_TENSORS = 4096
PAGES_PER_FILE = 64
_MAX_HEADER = 100 << 20  # the bound of the safetensors format

_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".gguf", ".npy")
_CONFIG_FILES = frozenset(
    {
        "adapter_config.json",
        "config.json",
        "hf_quant_config.json",
        "params.json",
        "quant_config.json",
        "quantize_config.json",
    }
)

# Loaders that read the files of a folder or a hub snapshot, in any order.
_FILE_FORMATS = frozenset(
    {"auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "gguf"}
    | {"pt", "npcache", "bitsandbytes"}
)
_PICKLED_FORMATS = frozenset({"pt", "npcache"})


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What identifies the weights of an engine.

    Attributes:
        value: 32 hex digits, None if the weights cannot be told from files.
        reason: why ``value`` is None, and what follows for the user.
        bytes_read: what it cost to find out.

    """

    value: str | None
    reason: str = ""
    bytes_read: int = 0


def engine_fingerprint(vllm_config: Any, weights_version: str | None = None) -> Fingerprint:
    """Fingerprint of everything the engine loads: the model and its drafter.

    Args:
        vllm_config: vLLM's ``VllmConfig``, or anything with its attributes.
        weights_version: the user's word for what the files cannot tell. Stands
            in for the content where a loader streams it from elsewhere, but
            never for random weights.

    """
    models = [vllm_config.model_config]
    speculative = getattr(vllm_config, "speculative_config", None)
    draft = getattr(speculative, "draft_model_config", None)
    if draft is not None and draft.model != models[0].model:
        models.append(draft)
    parts = [_model_fingerprint(m, vllm_config.load_config, weights_version) for m in models]
    missing = next((part for part in parts if part.value is None), None)
    if missing is not None:
        return missing
    values = [part.value for part in parts if part.value is not None]
    total = sum(part.bytes_read for part in parts)
    value = values[0] if len(values) == 1 else xxhash.xxh3_128_hexdigest("/".join(values).encode())
    return Fingerprint(value, bytes_read=total)


def path_fingerprint(
    model: str,
    *,
    revision: str | None = None,
    download_dir: str | None = None,
    pickled: bool = False,
) -> Fingerprint:
    """Fingerprint of a folder, a weight file, or a hub id that is in the local cache.

    Serves adapters too. ``pickled`` prefers ``*.bin`` and ``*.pt`` where a
    folder has both kinds. Never goes to the network.
    """
    path = local_path(model, revision, download_dir)
    if path is None:
        return Fingerprint(None, f"the files of {model!r} are not in the local hub cache")
    try:
        names = [""] if os.path.isfile(path) else _chosen_files(sorted(os.listdir(path)), pickled)
        if not any(_is_weights(name or path) for name in names):
            return Fingerprint(None, f"{path!r} holds no weight files")
        return _Sampler().run({name: os.path.join(path, name) if name else path for name in names})
    except (OSError, ValueError, KeyError, TypeError) as error:
        return Fingerprint(None, f"the weights of {model!r} cannot be read: {error}")


def local_path(
    model: str, revision: str | None = None, download_dir: str | None = None
) -> str | None:
    """Where the files lie: the path itself, or a hub id's snapshot in the local cache."""
    return model if os.path.exists(model) else _snapshot(model, revision, download_dir)


def _model_fingerprint(model: Any, load: Any, weights_version: str | None) -> Fingerprint:
    load_format = str(getattr(load.load_format, "value", load.load_format))
    streamed = getattr(model, "model_weights", "") or load_format not in _FILE_FORMATS
    if load_format == "dummy":
        return Fingerprint(None, "load_format=dummy makes random weights")
    if streamed and weights_version:
        return Fingerprint(xxhash.xxh3_128_hexdigest(f"{model.model}\0{weights_version}".encode()))
    if streamed:
        return Fingerprint(
            None,
            f"load_format={load_format} takes the weights from where they cannot be read twice; "
            "set weights_version to name what it loads",
        )
    return path_fingerprint(
        model.model,
        revision=getattr(model, "revision", None),
        download_dir=getattr(load, "download_dir", None),
        pickled=load_format in _PICKLED_FORMATS,
    )


def _snapshot(repo: str, revision: str | None, download_dir: str | None) -> str | None:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ImportError:
        return None
    try:
        return str(
            snapshot_download(
                repo, revision=revision, cache_dir=download_dir, local_files_only=True
            )
        )
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def _is_weights(name: str) -> bool:
    return name.endswith((".safetensors", *_OTHER_WEIGHTS))


def _chosen_files(names: list[str], pickled: bool) -> list[str]:
    """The weight files a loader would take, and the configuration beside them."""
    safe = [name for name in names if name.endswith(".safetensors")]
    other = [name for name in names if name.endswith(_OTHER_WEIGHTS)]
    preferred = (other or safe) if pickled else (safe or other)
    return preferred + [name for name in names if name in _CONFIG_FILES]


@dataclass(frozen=True, slots=True, order=True)
class _Page:
    """Where to sample. Sorted by the hash of the name, which decides who is sampled."""

    rank: int
    label: str
    path: str
    offset: int
    length: int


class _Sampler:
    """Reads the pages of one set of files and folds them into a digest."""

    def __init__(self) -> None:
        self._parts: dict[str, bytes] = {}
        self._bytes_read = 0

    def run(self, files: dict[str, str]) -> Fingerprint:
        """``files`` maps the name that counts to the path it is read from."""
        tensors: list[_Page] = []
        for name, path in files.items():
            if path.endswith(".safetensors"):
                tensors.extend(self._safetensors(name, path))
            elif _is_weights(path):
                for page in self._spread(name, path):
                    self._add(page)
            else:
                self._add(_Page(0, f"{name}\0all", path, 0, os.path.getsize(path)))
        for page in heapq.nsmallest(MAX_TENSORS, tensors):
            self._add(page)
        digest = xxhash.xxh3_128()
        for label in sorted(self._parts):
            digest.update(f"{len(label)}:{label}:".encode())
            digest.update(self._parts[label])
        return Fingerprint(digest.hexdigest(), bytes_read=self._bytes_read)

    def _read(self, path: str, offset: int, length: int) -> bytes:
        with open(path, "rb", buffering=0) as file:
            data = os.pread(file.fileno(), length, offset)
        if len(data) != length:
            raise ValueError(f"{path} ends before byte {offset + length}")
        self._bytes_read += length
        return data

    def _add(self, page: _Page) -> None:
        data = self._read(page.path, page.offset, page.length)
        self._parts[page.label] = xxhash.xxh3_128_digest(data)

    def _safetensors(self, name: str, path: str) -> Iterator[_Page]:
        size = os.path.getsize(path)
        header_bytes = int.from_bytes(self._read(path, 0, 8), "little")
        if header_bytes > min(_MAX_HEADER, size):
            raise ValueError(f"{path} is not a safetensors file")
        header = self._read(path, 8, header_bytes)
        self._parts[f"{name}\0header"] = xxhash.xxh3_128_digest(header)
        self._parts[f"{name}\0size"] = str(size).encode()
        for tensor, entry in json.loads(header).items():
            if tensor == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            rank = xxhash.xxh3_64_intdigest(tensor.encode())
            length = min(PAGE, end - begin)
            offset = 8 + header_bytes + begin + rank % (end - begin - length + 1)
            yield _Page(rank, f"{name}\0{tensor}", path, offset, length)

    def _spread(self, name: str, path: str) -> Iterator[_Page]:
        """Pages of a file without a table: one in each of equal stretches of it."""
        size = os.path.getsize(path)
        self._parts[f"{name}\0size"] = str(size).encode()
        length = min(PAGE, size)
        room = size - length
        stretch = room / PAGES_PER_FILE
        for index in range(PAGES_PER_FILE if room else 1):
            start = int(index * stretch)
            jitter = xxhash.xxh3_64_intdigest(f"{name}/{index}".encode()) % (int(stretch) + 1)
            yield _Page(0, f"{name}\0{index}", path, min(start + jitter, room), length)
