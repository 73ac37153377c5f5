"""Blocks on a shared tier, encrypted and authenticated: AES-256-GCM, under names that tell nothing.

    secret of the file (`tier_keys`) ─ HKDF ─► key of names
                                     └ HKDF ─► key of a tenant's generation ─► key of a segment

    v1/<tenant>/<generation>/<layout>/<key>    becomes  v1/<id of the secret>/<h>/<h>/<h>/<h>
    v1/control/<what hosts tell each other>    becomes  v1/control/<h>/<h>...

Each <h> is a keyed hash (BLAKE2b) of the path up to there: a place stays the beginning of the names
in it. Head and name of a segment are associated data, so that what is changed, cut off or moved to
another name does not open.

A segment has a key of its own, made with 128 random bits, and is the only one to be encrypted with
it: no nonce is used twice, whatever hosts write and however often (docs/decisions/0033). The proof
is the secret's id, those random bits, and the tag.

Needs the extra `kvkeep[encryption]`: imported only where tiers are encrypted."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from hashlib import blake2b

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import GCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from kvkeep.errors import TierError
from kvkeep.tiers.checked_tier import Verdict
from kvkeep.tiers.tier_keys import TierKeys, id_of

CONTROL = "control"
PROOF = struct.Struct("<8s16s16s")  # id of the secret, random bits, tag
_SALT_BYTES = 16
_KEY_BYTES = 32
_NAME_BYTES = 16
_NONCE = bytes(12)  # each key encrypts once
_GENERATION = 4  # parts of a name up to a tenant's generation
_PLACES = 4096  # derived for so many: a new one takes some microseconds


class Encryption:
    """`current` gives the keys as they are now. What they do not open is none of ours: a frame of
    another kind under a name of our keys is a forgery."""

    kind = 1
    is_secret = True
    other_kind = Verdict.BAD

    def __init__(self, current: Callable[[], TierKeys]) -> None:
        self._current = current

    def names(self, name: str) -> Sequence[str]:
        keys = self._current()
        version, _, path = name.partition("/")
        if path.startswith(f"{CONTROL}/"):
            return [f"{version}/{CONTROL}/{_hidden(keys.log, path[len(CONTROL) + 1 :])}"]
        return [f"{version}/{id_of(key)}/{_hidden(key, path)}" for key in keys.keys]

    def seal(self, name: str, head: bytes, data: memoryview) -> tuple[bytes, bytes | memoryview]:
        secret = self._secret(name)
        if secret is None:
            raise TierError("the keys of the shared tier have changed meanwhile")
        salt, context = os.urandom(_SALT_BYTES), head + name.encode()
        cipher = Cipher(AES(_segment_key(secret, name, salt)), GCM(_NONCE)).encryptor()
        cipher.authenticate_additional_data(context)
        sealed = bytearray(data.nbytes)
        cipher.update_into(data, sealed)
        cipher.finalize()
        return PROOF.pack(bytes.fromhex(id_of(secret)), salt, cipher.tag), memoryview(sealed)

    def open(self, name: str, head: bytes, proof: bytes, data: memoryview) -> Verdict:
        secret = self._secret(name)
        if secret is None:
            return Verdict.UNKNOWN  # the keys have changed meanwhile
        by, salt, tag = PROOF.unpack(proof)
        if by.hex() != id_of(secret):
            return Verdict.BAD
        cipher = Cipher(AES(_segment_key(secret, name, salt)), GCM(_NONCE, tag)).decryptor()
        cipher.authenticate_additional_data(head + name.encode())
        cipher.update_into(data, data)
        try:
            cipher.finalize()
        except InvalidTag:
            return Verdict.BAD
        return Verdict.GOOD

    def _secret(self, name: str) -> bytes | None:
        """The one that this name, as the medium has it, was made with; None if we lack it."""
        keys, by = self._current(), name.split("/", 2)[1]
        if by == CONTROL:
            return keys.log
        return next((key for key in keys.keys if id_of(key) == by), None)


def _hidden(secret: bytes, path: str) -> str:
    """A path or the beginning of one, which ends with a slash, as the medium has it."""
    place, slash, last = path.rpartition("/")
    hidden = _hidden_place(secret, place) + slash
    return hidden + _hash(secret, path) if last else hidden


@lru_cache(_PLACES)
def _hidden_place(secret: bytes, place: str) -> str:
    parts = place.split("/") if place else []
    return "/".join(_hash(secret, "/".join(parts[: at + 1])) for at in range(len(parts)))


def _hash(secret: bytes, path: str) -> str:
    key = _derived(secret, "names")
    return blake2b(path.encode(), key=key, digest_size=_NAME_BYTES).hexdigest()


def _segment_key(secret: bytes, name: str, salt: bytes) -> bytes:
    parts = name.split("/")
    place = "/".join(parts[: 2 if parts[1] == CONTROL else _GENERATION])
    key = _derived(secret, f"data {place}")
    return blake2b(salt + name.encode(), key=key, digest_size=_KEY_BYTES).digest()


@lru_cache(_PLACES)
def _derived(secret: bytes, purpose: str) -> bytes:
    info = f"kvkeep tier 1: {purpose}".encode()
    return HKDF(SHA256(), _KEY_BYTES, salt=None, info=info).derive(secret)
