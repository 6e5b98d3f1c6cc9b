"""Encrypted tiers for tests, and a reader of their chunks that shares no code with them."""

from __future__ import annotations

import struct
from pathlib import Path

from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from kvtiers.tiers.base import ALIGNMENT
from kvtiers.tiers.keyring import new_key, parse


def write_keys(file: Path, *lines: str) -> Path:
    """A key file that only this user can read."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch(0o600)
    file.write_text("\n".join(lines or [new_key("test")]) + "\n")
    return file


def decrypted(content: bytes, payload_bytes: int, key_file: Path) -> bytes:
    """The payload of a chunk at rest, by the layout that ``tiers/format.py`` documents."""
    payload, block = content[:payload_bytes], content[payload_bytes : payload_bytes + ALIGNMENT]
    assert block[:8] == b"KVTCHUNK"
    assert struct.unpack_from("<H", block, 10) == (1,)
    tag, nonce = block[40:56], block[248:260]
    key_id = block[260:292].rstrip(b"\0").decode()
    key = parse(key_file.read_text(), "the test's keys")[key_id]
    metadata = block[:40] + bytes(16) + block[56:4080]
    return AESGCM(key).decrypt(nonce, payload + tag, metadata)
