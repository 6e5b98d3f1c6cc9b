"""Encryption of chunks at rest: AES-256-GCM, in the caller's memory.

Each chunk has a nonce of 96 random bits, and its key's id stands beside it in the clear.
The tag vouches for the metadata too, see ``format``. A chunk is decrypted where it was
received, in its slot: what a wrong tag leaves there is no chunk, and nobody reads it.

Random nonces bound how much one key may encrypt: after 2^32 chunks the chance that two
share a nonce is 2^-33, the most that NIST SP 800-38D allows. That is 16 PiB of chunks
of 4 MiB.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from kvtiers.tiers import format as chunk_format
from kvtiers.tiers.base import ChunkKey, TierConfigError
from kvtiers.tiers.encryption import AtRestConfig, keyring_of
from kvtiers.tiers.format import Defect, Metadata
from kvtiers.tiers.keyring import Keyring


def sealing_of(config: AtRestConfig) -> Sealing | None:
    """What encrypts the chunks of a tier, None if they lie in clear. Raises TierConfigError."""
    keyring = keyring_of(config)
    return None if keyring is None else Sealing(keyring)


class Sealing:
    """Encrypts with the active key of a keyring, decrypts with any of them. Thread-safe.

    Args:
        keyring: the keys.

    Raises:
        TierConfigError: the package cryptography is missing.

    """

    def __init__(self, keyring: Keyring) -> None:
        try:
            from cryptography.exceptions import InvalidTag
            from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
        except ImportError as error:
            raise TierConfigError(
                f"'encryption' needs the package 'cryptography', which is not there ({error}). "
                "Install it with: pip install 'kvtiers[encryption]'"
            ) from error
        self._cipher, self._gcm, self._wrong = Cipher, modes.GCM, InvalidTag
        self._keyring = keyring
        self._algorithms = {name: algorithms.AES(keyring[name]) for name in keyring}

    def seal(
        self,
        key: ChunkKey,
        payload: memoryview,
        created: float,
        block: memoryview,
        target: memoryview,
    ) -> None:
        """Encrypt a chunk.

        Args:
            key: names the chunk.
            payload: what to encrypt. Not changed.
            created: seconds since the epoch.
            block: for the metadata, see ``format.pack``.
            target: for the encrypted payload, as long as the payload.

        """
        name, nonce = self._keyring.active, os.urandom(chunk_format.NONCE_BYTES)

        def encrypt(metadata: bytes) -> bytes:
            encryptor = self._cipher(self._algorithms[name], self._gcm(nonce)).encryptor()
            encryptor.authenticate_additional_data(metadata)
            encryptor.update_into(payload, target)
            encryptor.finalize()
            return encryptor.tag

        chunk_format.pack_encrypted(key, payload.nbytes, created, (nonce, name), encrypt, block)

    def readable(self, metadata: Metadata) -> Defect | None:
        """Why a chunk with this metadata is none of ours to read; None if it is."""
        if metadata.codec != chunk_format.CODEC_AES_GCM:
            return Defect.NOT_ENCRYPTED
        return None if metadata.key_id in self._keyring else Defect.UNKNOWN_KEY

    def open(self, metadata: Metadata, block: memoryview, payload: memoryview) -> Defect | None:
        """Decrypt ``payload`` in place. Returns why it can't be trusted, None if it can.

        Args:
            metadata: what ``format.unpack`` said of the block.
            block: the metadata as read.
            payload: as read. Of no use any more unless the answer is None.

        """
        defect = self.readable(metadata)
        if defect is not None:
            return defect
        decryptor = self._decryptor(metadata, block)
        decryptor.update_into(payload, payload)
        return self._judged(decryptor)

    def check(
        self, metadata: Metadata, block: memoryview, pieces: Iterable[bytes | memoryview]
    ) -> Defect | None:
        """As ``open``, for a payload in pieces, which are left as they are."""
        defect = self.readable(metadata)
        if defect is not None:
            return defect
        decryptor = self._decryptor(metadata, block)
        for piece in pieces:
            decryptor.update(piece)
        return self._judged(decryptor)

    def _decryptor(self, metadata: Metadata, block: memoryview) -> Any:
        mode = self._gcm(metadata.nonce, metadata.checksum)
        decryptor = self._cipher(self._algorithms[metadata.key_id], mode).decryptor()
        decryptor.authenticate_additional_data(chunk_format.associated(block))
        return decryptor

    def _judged(self, decryptor: Any) -> Defect | None:
        try:
            decryptor.finalize()
        except self._wrong:
            return Defect.NOT_AUTHENTIC
        return None
