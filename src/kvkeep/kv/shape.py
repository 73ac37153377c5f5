"""How a model's blocks are cut into shards.

The identity says what the numbers of a block mean and is part of every key. The cut says which of
them each shard holds, in which order: it is part of the layout's fingerprint, and so of every
block's address on the server."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from operator import index

from kvkeep.errors import RequestError
from kvkeep.kv.identity import ModelIdentity
from kvkeep.kv.keys import root_key

DIGEST_CHARS = 12


@dataclass(frozen=True)
class BlockShape:
    """A model's blocks. `shard_bytes[s]` are the bytes of shard s of each block; a KV rank holds one
    or several neighbouring shards (`ParallelStrategy.shards`). If each has several pieces, because
    an engine separates kinds of layers, `shard_bytes[s * pieces + p]` is piece p of it, and the
    server knows each piece as a shard of its own. `cut` describes how shards divide a block: ranks,
    heads or layers, order in memory."""

    identity: ModelIdentity
    shard_bytes: tuple[int, ...]
    pieces: int = 1
    cut: str = "whole blocks"

    def __post_init__(self) -> None:
        try:  # accepts numpy's integers; plain ones are sent
            object.__setattr__(self, "shard_bytes", tuple(map(index, self.shard_bytes)))
        except TypeError as error:
            raise RequestError("bad_shards", f"shard_bytes: {error}", field="shard_bytes") from None
        if self.pieces < 1 or not self.shard_bytes or len(self.shard_bytes) % self.pieces:
            raise RequestError(
                "bad_shards",
                f"{len(self.shard_bytes)} shards do not divide into {self.pieces} pieces for each KV rank",
                field="shard_bytes",
            )
        if min(self.shard_bytes) < 1:
            raise RequestError(
                "bad_shards", "every shard has at least one byte", field="shard_bytes"
            )

    @property
    def kv_shards(self) -> int:
        """How many shards the ranks hold together, all pieces of each counted as one."""
        return len(self.shard_bytes) // self.pieces

    @property
    def parts(self) -> dict[str, str]:
        """Everything that must be equal for two engines to share blocks, as text by name."""
        sizes = ",".join(map(str, self.shard_bytes))
        return self.identity.parts | {
            "cut": self.cut,
            "shard_bytes": sizes,
            "pieces": str(self.pieces),
        }

    @cached_property
    def fingerprint(self) -> bytes:
        """Equal exactly if blocks can be exchanged. Not a key: it contains no tenant."""
        cut = f"block shape {self.pieces} {','.join(map(str, self.shard_bytes))} {self.cut}"
        return root_key(self.identity, None, extra=cut.encode())

    @property
    def digest(self) -> str:
        """A short fingerprint for logs and `kvkeep status`: equal for engines that share blocks."""
        return self.fingerprint.hex()[:DIGEST_CHARS]
