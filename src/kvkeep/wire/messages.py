"""The protocol, version 3.

A client speaks to the daemon over a Unix socket, TCP or TLS (stream.py). Every request gets exactly
one reply: the reply named below, or Refused. A reply carries the number of its request; a client
that has waited long enough gives up on it, and a late reply is then dropped.

**Handshake.** Hello opens a session and is answered by Welcome: the session's number, the server's
epoch, the limits, and where the pool's shared memory lies. A client that can see that memory (the
epoch file in it tells) takes the session's lock and says Attach("shared_memory"): from then on the
kernel tells the daemon when the process is gone. A client elsewhere says Attach("network"), gets no
slots to touch, and moves bytes with Fetch and Put. After Attach the client says OpenLayout, and
everything else names that layout by the number in LayoutOpened. OpenLayout brings the parts of the
engine's identity by name, so that both sides can say which part keeps two engines of one model from
sharing. Ping asks whether the session is still there; Goodbye ends it. Requests that have nothing
to tell are answered by Done.

**Epoch.** A random number of this server process. A session ends with its epoch: a request that
names a session unknown to the server is refused with `unknown_session`, and the client says Hello
again. Slots of an older epoch are never used.

**Numbers that the client chooses.** Each request has a number, unique in its session. A lease *is*
the number of the Lookup that asked for it, a write the number of its PrepareStore. So a client that
lost a reply can still say Release or AbandonStore. Requests are carried out in the order in which
the client sent them: a connection keeps it, and when a session has moved to a later connection, the
server refuses what still comes over the earlier one.

**Load.** Lookup names the keys of a whole prompt and how many leading blocks to `skip` (the engine
has them). The answer, Found, counts the leading blocks that are ready and gives, beyond `skip`,
each block's slot and checksums, under a lease. Workers copy from the slots themselves, verify, and
the client says Release. A block whose checksum does not match is named in ReportBad.

**Store.** PrepareStore names the keys and, if the first is not a root, its parent. The answer,
Prepared, says which blocks to write and where: those that exist already, or that another session is
writing, are left out. The worker copies, then says CompleteStore with the checksums, or
AbandonStore. A block is visible when all its shards are in.

**Hints.** PrepareStore carries a priority (0 to 100, 50 is normal, higher stays longer) and a time
to live; Finish says that the request that used a chain has finished. Hints only change the order in which
blocks are evicted.

**Arrays** travel as little-endian bytes: keys of 16 bytes each, slots int64, positions int32,
checksums uint64 (block after block, a block's shards together). Lists have at most 65,536 items:
one message must not keep the others waiting."""

from __future__ import annotations

from typing import Annotated

import msgspec

PROTOCOL_VERSION = 3
MAX_LIST_ITEMS = 65_536

SHARED_MEMORY, NETWORK = "shared_memory", "network"
LOADED_TOKENS = "loaded_tokens"  # the server takes them in Release
CAPABILITIES = (SHARED_MEMORY, NETWORK, "hints", LOADED_TOKENS)

MAX_PARTS, MAX_PART_NAME_CHARS, MAX_PART_CHARS, MAX_ROLE_CHARS = 64, 64, 512, 64

Numbers = Annotated[list[int], msgspec.Meta(max_length=MAX_LIST_ITEMS)]
Parts = Annotated[
    dict[
        Annotated[str, msgspec.Meta(max_length=MAX_PART_NAME_CHARS)],
        Annotated[str, msgspec.Meta(max_length=MAX_PART_CHARS)],
    ],
    msgspec.Meta(max_length=MAX_PARTS),
]


class Message(
    msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True, omit_defaults=True
):
    """The base of all messages; the tag is the class name. A field at its default is not sent: a
    peer of an earlier release, which may not know the field, accepts the message."""


# -- requests


class Hello(Message, frozen=True):
    """Opens a session. The only request that needs none. Answered by Welcome."""

    client: str
    pid: int


class Attach(Message, frozen=True):
    """Chooses the data plane: "shared_memory" (the session's lock is held now) or "network".
    Answered by Done."""

    plane: str


class Ping(Message, frozen=True):
    """Asks whether the server lives and still knows the session. Answered by Done."""


class OpenLayout(Message, frozen=True):
    """Names what blocks mean and how they are cut: a 16-byte fingerprint of everything that decides
    it, bytes of each shard. A worker adds its shard and a fingerprint of how its tensors lie in
    memory. `parts` is what the fingerprint was taken over, by name; `role` says what the session is
    for. Both are for people: only the fingerprint decides which blocks are found. Answered by
    LayoutOpened."""

    fingerprint: bytes
    shard_bytes: Numbers
    shard: int = -1
    physical: bytes = b""
    parts: Parts = msgspec.field(default_factory=dict)
    role: Annotated[str, msgspec.Meta(max_length=MAX_ROLE_CHARS)] = ""


class Lookup(Message, frozen=True):
    """Asks for the longest ready prefix. Answered by Found; the lease has this request's number."""

    tenant: str
    layout: int
    keys: bytes
    skip: int = 0


class Release(Message, frozen=True):
    """Ends leases, named by the numbers of their Lookups. Unknown ones are no error.
    `loaded_tokens` says for each how many tokens were loaded under it and are used; those that are
    left out count as 0. Answered by Done."""

    leases: Numbers
    loaded_tokens: Numbers = []


class Finish(Message, frozen=True):
    """Hint: the request that used the chain that ends in `key` has finished. Answered by Done."""

    tenant: str
    layout: int
    key: bytes


class PrepareStore(Message, frozen=True):
    """Asks for slots for one shard of a run of blocks. Answered by Prepared; the write has this
    request's number."""

    tenant: str
    layout: int
    shard: int
    parent: bytes
    keys: bytes
    priority: int = 50
    ttl_ms: int = 0


class CompleteStore(Message, frozen=True):
    """The bytes are in their slots; `checksums` is one uint64 a block written. Answered by Done."""

    write: int
    checksums: bytes


class AbandonStore(Message, frozen=True):
    """Gives slots back unwritten, named by the numbers of their PrepareStores. Answered by Done."""

    writes: Numbers


class ReportBad(Message, frozen=True):
    """A loaded block did not match its checksum. The server checks the block itself and drops it if
    it is bad. Answered by Done."""

    tenant: str
    layout: int
    key: bytes


class Fetch(Message, frozen=True):
    """Network plane: asks for one shard of `count` leased blocks from the `start`-th described one
    on. Answered by Done with one payload frame a block."""

    lease: int
    shard: int
    start: int
    count: int


class Put(Message, frozen=True):
    """Network plane: brings the bytes of blocks of a write, from the `start`-th on, one payload
    frame a block. Answered by Done."""

    write: int
    start: int


class Goodbye(Message, frozen=True):
    """Ends the session: nothing of its memory is in use any more. Answered by Done."""


# -- replies


class PoolPlace(Message, frozen=True):
    """Where the pool's shared memory lies, and this session's lock."""

    directory: str
    lock: str
    segment_bytes: int
    pool_bytes: int


class WireLimits(Message, frozen=True):
    """What the server accepts, so that a client keeps within it."""

    frame_bytes: int
    blocks_per_request: int
    leases_per_session: int
    writing_blocks_per_session: int


class Welcome(Message, frozen=True):
    """A session is open."""

    session: int
    epoch: int
    server: str
    pool: PoolPlace
    limits: WireLimits
    capabilities: list[str]
    verify: bool


class Done(Message, frozen=True):
    """The request was carried out. `count`: leases released, blocks stored, blocks dropped,
    whatever the request counts."""

    count: int = 0


class LayoutOpened(Message, frozen=True):
    """The layout's number, and where in a slot each shard begins. `differs` names the parts of the
    identity that keep this engine from sharing with another one of its model that is connected now."""

    layout: int
    slot_bytes: int
    shard_offsets: list[int]
    differs: list[str] = msgspec.field(default_factory=list)


class Found(Message, frozen=True):
    """How many leading blocks are ready; slots and checksums of those beyond `skip`, leased."""

    blocks: int
    slots: bytes
    checksums: bytes


class Prepared(Message, frozen=True):
    """Which positions of the keys to write, into which slots. `refused`: last keys that found no
    room, or all if the parent is not here (`orphan`). With nothing to write there is no write to
    complete."""

    positions: bytes
    slots: bytes
    refused: int
    orphan: bool


class Refused(Message, frozen=True):
    """The request was not carried out, and nothing changed. `code` is for programs, the rest for
    people."""

    code: str
    message: str
    field: str = ""
    hint: str = ""


Request = (
    Hello
    | Attach
    | Ping
    | OpenLayout
    | Lookup
    | Release
    | Finish
    | PrepareStore
    | CompleteStore
    | AbandonStore
    | ReportBad
    | Fetch
    | Put
    | Goodbye
)
Reply = Welcome | Done | LayoutOpened | Found | Prepared | Refused
