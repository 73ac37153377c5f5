"""The key of a block: 16 bytes that identify everything that its KV bytes depend on.

    root  = H("kvkeep.root",   all parts of the model identity, salt, LoRA, extra: each with name and length)
    key 0 = H("kvkeep.block",  root  ‖ tokens of block 0)
    key i = H("kvkeep.block",  key i-1 ‖ tokens of block i)
    with content that tokens do not show (an image, prompt embeddings), bound to its block:
    key i = H("kvkeep.block+", key i-1 ‖ block_tokens ‖ tokens ‖ content)
    where the engine has chained hashes of its own:
    key i = H("kvkeep.engine", root) ⊕ the first 16 bytes of hash i

H is BLAKE2b with 16 bytes of output; the name in quotes is its personalisation, so that no input of
one line can pass for an input of another. Tokens are little-endian 32-bit words, hence keys are
equal on every machine and in every process. Two equal keys mean equal model, tenant, adapter and
prefix; docs/decisions/0005-keys.md says why this hash."""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Protocol

import numpy as np

from kvkeep.errors import RequestError
from kvkeep.kv import native
from kvkeep.kv.identity import MAX_BLOCK_TOKENS, ModelIdentity

KEY_BYTES = 16
TOKEN_BYTES = 4
MAX_TOKEN = 2**32 - 1

# Up to this many tokens, a decode step's one above all, looking at each is faster than setting up
# numpy.
SHORT_TOKENS = 128

# For fewer blocks than these, a call of the C kernel costs more than it saves (measured).
NATIVE_FROM_BLOCKS = 8

# Copying a prepared hash state is a quarter cheaper than passing size and personalisation at each
# call.
_BLOCK = blake2b(digest_size=KEY_BYTES, person=b"kvkeep.block")
_BLOCK_WITH_CONTENT = blake2b(digest_size=KEY_BYTES, person=b"kvkeep.block+")
_ENGINE = blake2b(digest_size=KEY_BYTES, person=b"kvkeep.engine")
_ROOT = blake2b(digest_size=KEY_BYTES, person=b"kvkeep.root")


class TokenArray(Protocol):
    """What numpy arrays and CPU tensors have in common."""

    def __array__(self) -> Any: ...


Tokens = Sequence[int] | TokenArray


def root_key(
    identity: ModelIdentity, salt: str | None, *, lora: str = "", extra: bytes = b""
) -> bytes:
    """The root of every chain of this model, tenant and adapter.

    `lora` distinguishes adapters with different weights; "" is the base model. `extra` is anything
    else that changes KV bytes. A salt of None is the salt "". The raw salt is hashed, not the tenant
    id, so that keys cannot be computed from tenant ids."""
    salt = "" if salt is None else salt
    for field, given, wanted in (("salt", salt, str), ("lora", lora, str), ("extra", extra, bytes)):
        if not isinstance(given, wanted):
            problem = f"{field} must be {wanted.__name__}, not {type(given).__name__}"
            raise RequestError(f"bad_{field}", problem, field=field)
    state = _hashed(identity).copy()
    state.update(_field("salt", salt.encode("utf-8", "surrogatepass")))
    state.update(_field("lora", lora.encode("utf-8", "surrogatepass")))
    state.update(_field("extra", extra))
    return state.digest()


@lru_cache(maxsize=16)
def _hashed(identity: ModelIdentity) -> blake2b:
    """The hash state after the identity, which is the same for all requests of an engine."""
    state = _ROOT.copy()
    for name, text in sorted(identity.parts.items()):
        state.update(_field(f"identity.{name}", text.encode()))
    return state


def _field(name: str, value: bytes) -> bytes:
    label = name.encode()
    return len(label).to_bytes(4, "little") + label + len(value).to_bytes(8, "little") + value


def addresses(keys: bytes, fingerprint: bytes) -> bytes:
    """The addresses of these keys on the server: key ⊕ fingerprint of the layout.

    A key says what a block's numbers mean. Engines that cut the same numbers into other shards have
    the same keys but another layout, and their bytes must never mix."""
    mask = np.frombuffer(fingerprint, dtype=np.uint64)
    return (np.frombuffer(keys, dtype=np.uint64).reshape(-1, len(mask)) ^ mask).tobytes()


class KeyChain:
    """The keys of one request's blocks, extended as its tokens become known. Each token is hashed
    once.

        tokens   |········|········|········|····      block_tokens = 8
        blocks   [ key 0  ][ key 1  ][ key 2  ] tail    len(chain) == 3, chain.num_tokens == 28

    Tokens after the last full block wait in the tail. Tokens given in several pieces give the same
    keys as tokens given at once. `extend` changes all or nothing."""

    def __init__(self, root: bytes, block_tokens: int) -> None:
        _check_root(root)
        if type(block_tokens) is not int or not 1 <= block_tokens <= MAX_BLOCK_TOKENS:
            raise RequestError(
                "bad_block_tokens",
                f"block_tokens is {block_tokens!r}, allowed are integers from 1 to {MAX_BLOCK_TOKENS}",
                field="block_tokens",
            )
        self._block_tokens = block_tokens
        self._last = root
        self._keys = bytearray()
        self._tail = b""
        self._extras: dict[int, bytes] = {}

    def __len__(self) -> int:
        """The number of full blocks."""
        return len(self._keys) // KEY_BYTES

    @property
    def block_tokens(self) -> int:
        return self._block_tokens

    @property
    def num_tokens(self) -> int:
        """The number of tokens so far, including the tail."""
        return len(self) * self._block_tokens + len(self._tail) // TOKEN_BYTES

    def extend(self, tokens: Tokens, extras: Mapping[int, bytes] | None = None) -> None:
        """Appends tokens; every block that they fill gets its key.

        `extras` maps the index of a block that is not full yet to the content behind its tokens (an
        image's hash, embeddings). Empty content differs from no content.

        Raises RequestError for anything but integers from 0 to 2**32 - 1, and for extras that come
        too late or contradict earlier ones."""
        raw = _little_endian(tokens)
        if extras:
            self._extras.update(self._checked_extras(extras))
        raw = self._tail + raw
        width = self._block_tokens * TOKEN_BYTES
        full = len(raw) // width * width
        self._tail = raw[full:]
        if full:
            self._append_blocks(raw[:full], width)

    def keys(self, start: int = 0, stop: int | None = None) -> bytes:
        """The keys of blocks start..stop-1 (to the end by default), 16 bytes each, joined."""
        stop = len(self) if stop is None else stop
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"blocks {start}..{stop} of a chain of {len(self)}")
        return bytes(self._keys[start * KEY_BYTES : stop * KEY_BYTES])

    def key(self, index: int) -> bytes:
        """The key of one full block."""
        return self.keys(index, index + 1)

    def _append_blocks(self, filled: bytes, width: int) -> None:
        first = len(self)
        end = first + len(filled) // width
        at = 0
        for index in sorted(i for i in self._extras if i < end):
            here = (index - first) * width
            self._append_plain(filled[at:here], width)
            at = here + width
            self._append_with_content(filled[here:at], self._extras.pop(index))
        self._append_plain(filled[at:], width)

    def _append_plain(self, filled: bytes, width: int) -> None:
        """The hot loop of every lookup."""
        if native.available and len(filled) >= NATIVE_FROM_BLOCKS * width:
            keys = native.chain(self._last, filled, width, KEY_BYTES)
        else:
            keys = self._chained(filled, width)
        if keys:
            self._keys += keys
            self._last = keys[-KEY_BYTES:]

    def _chained(self, filled: bytes, width: int) -> bytes:
        # Unpacked bytes, not slices of a memoryview: the copy costs less here.
        key, fresh = self._last, _BLOCK.copy
        keys = []
        for (block,) in struct.iter_unpack(f"{width}s", filled):
            state = fresh()
            state.update(key + block)
            key = state.digest()
            keys.append(key)
        return b"".join(keys)

    def _append_with_content(self, block: bytes, content: bytes) -> None:
        # block_tokens says where tokens end and content begins.
        state = _BLOCK_WITH_CONTENT.copy()
        state.update(
            self._last + self._block_tokens.to_bytes(TOKEN_BYTES, "little") + block + content
        )
        self._last = state.digest()
        self._keys += self._last

    def _checked_extras(self, extras: Mapping[int, bytes]) -> dict[int, bytes]:
        for index, content in extras.items():
            if type(index) is not int or not isinstance(content, bytes):
                raise _bad_extras("map block indexes (int) to bytes", index)
            if index < len(self):
                raise _bad_extras("come before their block is full", index)
            if self._extras.get(index, content) != content:
                raise _bad_extras("stay the same for a block once given", index)
        return dict(extras)


def keys_from_engine_hashes(root: bytes, hashes: Sequence[bytes]) -> bytes:
    """The joined keys for an engine with chained block hashes of its own, bound to `root`.

    The caller makes sure that the hashes are chained and stable across processes. Hashes of less
    than 128 bits are refused with RequestError."""
    _check_root(root)
    if not hashes:
        return b""
    are_bytes = all(issubclass(kind, bytes) for kind in set(map(type, hashes)))
    lengths = set(map(len, hashes)) if are_bytes else {0}
    if min(lengths) < KEY_BYTES:
        wrong = next(
            at
            for at, each in enumerate(hashes)
            if not isinstance(each, bytes) or len(each) < KEY_BYTES
        )
        raise RequestError(
            "bad_hashes",
            f"engine hash {wrong} is no bytes object of at least {KEY_BYTES} bytes",
            field="hashes",
            hint="choose sha256 as the engine's prefix-caching hash",
        )
    bound = _ENGINE.copy()
    bound.update(root)
    # The hashes are digests already. To separate roots takes no further hash of each block.
    pad = bound.digest()
    if len(hashes) == 1:  # arrays would take several times as long
        return bytes(a ^ b for a, b in zip(hashes[0][:KEY_BYTES], pad, strict=True))
    if len(lengths) > 1:
        hashes = [block_hash[:KEY_BYTES] for block_hash in hashes]
    rows = np.frombuffer(b"".join(hashes), dtype=np.uint8).reshape(len(hashes), -1)
    heads = np.ascontiguousarray(rows[:, :KEY_BYTES]).view(np.uint64)
    return (heads ^ np.frombuffer(pad, dtype=np.uint64)).tobytes()


def _little_endian(tokens: Tokens) -> bytes:
    """The tokens as little-endian 32-bit words, or RequestError."""
    if isinstance(tokens, (list, tuple)):
        return _from_integers(tokens)
    if isinstance(tokens, (bytes, bytearray, memoryview, str)):
        raise _bad_tokens(f"a {type(tokens).__name__} is no sequence of tokens")
    if isinstance(tokens, array) or hasattr(tokens, "__array__"):
        return _from_array(tokens)
    try:
        return _from_integers(list(tokens))
    except TypeError as error:
        raise _bad_tokens(str(error)) from error


def _from_array(tokens: Any) -> bytes:
    try:
        words = np.asarray(tokens)
    except (TypeError, ValueError, RuntimeError) as error:
        # a tensor on a GPU, or one that needs a gradient
        raise _bad_tokens(f"cannot be read as an array: {error}") from error
    if words.dtype.kind not in "iu" or words.ndim != 1:
        raise _bad_tokens(
            f"an array of {words.dtype} with {words.ndim} dimensions is no row of integers"
        )
    if words.size and (int(words.min()) < 0 or int(words.max()) > MAX_TOKEN):
        wrong = next(i for i, word in enumerate(words.tolist()) if not 0 <= word <= MAX_TOKEN)
        raise _bad_tokens(f"token {wrong} is {words[wrong]}")
    return words.astype("<u4").tobytes()


def _from_integers(items: Sequence[int]) -> bytes:
    try:
        # Refuses floats, negatives and what needs more than 32 bits, but takes a bool for an
        # integer.
        words = array("I", items)
    except (TypeError, OverflowError) as error:
        raise _bad_tokens(_first_wrong(items) or str(error)) from error
    if _holds_bool(items, words):
        raise _bad_tokens(_first_wrong(items))
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def _holds_bool(items: Sequence[int], words: array[int]) -> bool:
    if len(items) <= SHORT_TOKENS:
        return bool in map(type, items)
    # Only zeros and ones can be bools, and few tokens are either: looking at those alone costs
    # little.
    suspects = (np.frombuffer(words, dtype=np.uintc) <= 1).nonzero()[0]
    return any(type(items[i]) is bool for i in suspects.tolist())


def _first_wrong(items: Sequence[object]) -> str:
    for index, item in enumerate(items):
        if isinstance(item, bool) or not hasattr(item, "__index__"):
            return f"token {index} is a {type(item).__name__}"
        if isinstance(item, int) and not 0 <= item <= MAX_TOKEN:
            return f"token {index} is {item}"
    return ""


def _check_root(root: bytes) -> None:
    if not isinstance(root, bytes) or len(root) != KEY_BYTES:
        raise RequestError(
            "bad_root", f"a root is {KEY_BYTES} bytes, from root_key()", field="root"
        )


def _bad_tokens(problem: str) -> RequestError:
    return RequestError(
        "bad_tokens", f"{problem}; tokens are integers from 0 to {MAX_TOKEN}", field="tokens"
    )


def _bad_extras(rule: str, index: object) -> RequestError:
    return RequestError(
        "bad_extras", f"extras must {rule}; block {index!r} does not", field="extras"
    )
