"""What a client tells the server about its blocks: whose they are and how many bytes each shard has."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from operator import index

from kvkeep.errors import RequestError
from kvkeep.kv.identity import ModelIdentity
from kvkeep.kv.keys import root_key


@dataclass(frozen=True)
class BlockShape:
    """A model's blocks. `shard_bytes[r]` is what KV rank r holds of each block; where a rank's part comes in several
    pieces, because its engine keeps layers of several kinds apart, `shard_bytes[r * pieces + p]` is piece p of it."""

    identity: ModelIdentity
    shard_bytes: tuple[int, ...]
    pieces: int = 1

    def __post_init__(self) -> None:
        try:  # numpy's integers too; what is sent must be plain ones
            object.__setattr__(self, "shard_bytes", tuple(map(index, self.shard_bytes)))
        except TypeError as error:
            raise RequestError("bad_shards", f"shard_bytes: {error}", field="shard_bytes") from None
        if len(self.shard_bytes) != self.identity.kv_world_size * self.pieces or self.pieces < 1:
            raise RequestError(
                "bad_shards",
                f"{len(self.shard_bytes)} shards for a KV world size of {self.identity.kv_world_size}"
                + f" and {self.pieces} pieces" * (self.pieces != 1),
                field="shard_bytes",
            )
        if min(self.shard_bytes) < 1:
            raise RequestError("bad_shards", "every shard has at least one byte", field="shard_bytes")

    @cached_property
    def fingerprint(self) -> bytes:
        """Equal exactly where blocks can be exchanged. Not a key: no tenant is in it."""
        sizes = ",".join(map(str, self.shard_bytes))
        return root_key(self.identity, None, extra=b"block shape " + sizes.encode())
