"""Whose bytes a block holds: the model that computed them and the tenant they belong to.

`ModelIdentity` lists everything about a model and an engine that decides what the bytes of a KV
block mean. The root of every key is taken over all of its parts (see `kvkeep.kv.keys`), so equal
keys mean equal numbers. How shards cut those numbers is not part of it: that is in the address of a
block (`kvkeep.kv.shape`). docs/concepts/identity.md lists every part and its reason.

A tenant is a request's `cache_salt`. The salt itself stays in the engine process: what is sent to
the server, quoted in logs and drawn on dashboards is `tenant_of(salt)`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import blake2b

import msgspec

from kvkeep.errors import RequestError

# The version of what a key binds and of how a block's bytes lie in a slot. Raised with every change
# of either: what an older version stored is then a miss, never a misreading.
LAYOUT_VERSION = 2

MAX_TEXT_CHARS = 4096
MAX_BLOCK_TOKENS = 65_536
MAX_DETAILS = 48
MAX_NAME_CHARS = 64

DEFAULT_TENANT = "default"

_TENANT = re.compile(r"t-[0-9a-f]{32}")


class ModelIdentity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What has to be equal for one engine's KV numbers to mean the same to another; all of it is in
    every key.

    model          the model's name or path, as the engine was given it
    revision       the revision or a digest of the weights; two fine-tunes of one name differ here
    kv_dtype       the type of the cached numbers, and of their scales if any: "bfloat16", "fp8_e4m3"
    block_tokens   tokens per block
    content        what a block holds and in which order: layers, KV heads, head size; not how shards cut it
    details        whatever else an engine knows to change the numbers or their encoding, as (name, value) pairs:
                   the attention backend, position embeddings, quantization
    layout_version our own arrangement; leave it alone

    Raises RequestError, naming the field, for a value that is missing, of another type or out of
    its limits."""

    model: str
    revision: str
    kv_dtype: str
    block_tokens: int
    content: str
    details: tuple[tuple[str, str], ...] = ()
    layout_version: int = LAYOUT_VERSION

    def __post_init__(self) -> None:
        for field in ("model", "revision", "kv_dtype", "content"):
            _check_text(field, getattr(self, field))
        _check_count("block_tokens", self.block_tokens, MAX_BLOCK_TOKENS)
        _check_count("layout_version", self.layout_version, 2**31)
        _check_details(self.details, set(self.__struct_fields__))

    @property
    def parts(self) -> dict[str, str]:
        """Every part by its name, as text. Two identities are equal exactly where these are."""
        own = {
            name: str(getattr(self, name)) for name in self.__struct_fields__ if name != "details"
        }
        return own | dict(self.details)


def differing_parts(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """The names of the parts that keep two engines from sharing, in the order in which they are
    listed."""
    return [name for name in {**one, **other} if one.get(name) != other.get(name)]


def tenant_of(salt: str | None) -> str:
    """The id that stands for a salt outside the engine: "default" for none, else "t-" and 32 hex
    digits.

    Takes any string, lone surrogates included, and never raises on one. Distinct salts give
    distinct ids (up to a collision of a 128-bit hash); no salt can take the name "default"."""
    if salt is not None and not isinstance(salt, str):
        raise RequestError(
            "bad_salt", f"a salt is a string, not {type(salt).__name__}", field="salt"
        )
    if not salt:
        return DEFAULT_TENANT
    digest = blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=16, person=b"kvkeep.tenant")
    return "t-" + digest.hexdigest()


def is_tenant(text: object) -> bool:
    """Whether `text` has the form of a tenant id, and so may be used in a label or a file name as
    it is."""
    return isinstance(text, str) and (text == DEFAULT_TENANT or _TENANT.fullmatch(text) is not None)


def check_tenant(text: object, hint: str) -> None:
    """RequestError unless `text` is a tenant id. It is not quoted: it may be a salt that somebody
    took for one."""
    if not is_tenant(text):
        problem = "a tenant is named `default` or `t-` and 32 hex digits"
        raise RequestError("bad_tenant", problem, field="tenant", hint=hint)


def _check_details(details: object, taken: set[str]) -> None:
    if not isinstance(details, tuple) or len(details) > MAX_DETAILS:
        raise _refusal("details", f"must be a tuple of at most {MAX_DETAILS} (name, value) pairs")
    for pair in details:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise _refusal("details", f"must hold (name, value) pairs, not {pair!r}")
        name, value = pair
        if (
            not isinstance(name, str)
            or not re.fullmatch(r"[a-z][a-z0-9_.]*", name)
            or len(name) > MAX_NAME_CHARS
        ):
            raise _refusal(
                "details", f"has the bad name {name!r}: lower-case letters, digits, '_' and '.'"
            )
        if name in taken:
            raise _refusal(
                "details", f"has the name {name!r} twice, or it is the name of another field"
            )
        taken.add(name)
        _check_text(f"details.{name}", value)


def _check_text(field: str, value: object) -> None:
    if not isinstance(value, str):
        raise _refusal(field, f"must be a string, not {type(value).__name__}")
    if not value:
        # An empty revision would let two fine-tunes of one model read each other's blocks.
        raise _refusal(field, "must not be empty")
    if len(value) > MAX_TEXT_CHARS:
        raise _refusal(field, f"has {len(value)} characters, the limit is {MAX_TEXT_CHARS}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _refusal(field, "holds a lone surrogate and cannot be sent as UTF-8") from None


def _check_count(field: str, value: object, limit: int) -> None:
    if type(value) is not int:  # a bool is an int to isinstance, and a mistake here
        raise _refusal(field, f"must be an integer, not {type(value).__name__}")
    if not 1 <= value <= limit:
        raise _refusal(field, f"is {value}, allowed are 1 to {limit}")


def _refusal(field: str, problem: str) -> RequestError:
    return RequestError("bad_identity", f"model identity: {field} {problem}", field=field)
