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
AbandonStore. A block is visible when all its shards are in. A worker that holds several shards of
each block (OpenLayout names them) stores them together.

**Hints.** PrepareStore carries a priority (0 to 100, 50 is normal, higher stays longer) and a time
to live; Finish says that the request that used a chain has finished. Hints only change the order in which
blocks are evicted.

**Reports.** A server with the capability "reports" is told of every request that has finished what
its prompt was served from (ReportRequests): how many blocks each cache gave, and why the rest was
computed (kv/outcomes.py). What the server lacked it explains itself, from what it knew when it answered
the lookup. Reports are for operators: no reply depends on them, and a lost one is not sent again.

**Tiers.** A server with the capability "tiers" also keeps blocks on slower tiers, such as a disk. A
Lookup is answered at once with what memory has, and the server begins to bring up what a tier has
beyond that. To a client that says how long it is willing to wait (`patience_ms`), Found adds how
many blocks are `coming` and when the server expects the last of them (`again_ms`). The client may
then ask again: a new Lookup with a lease of its own. Prefetch asks for blocks to be brought up
without a lookup. Only a client that knows the capability sends these fields and messages, and only
a client that sends patience gets those of Found.

**Traces.** A server with the capability "traces" exports spans of its work to a collector. A client
that traces a request sends the place of its own span with the Lookup, PrepareStore and
CompleteStore that belong to it, so that both sides' spans are in one trace.

**Events.** For routers, engines publish which blocks the pool of their host has. An engine that does
so describes blocks that were stored (DescribeBlocks) in a form of its own, and asks several times a
second what has changed (PoolEvents, answered by PoolChanges). The server keeps descriptions in
memory, as long as it has their blocks and within a limit, and does not read them. Both requests are
refused unless the session uses shared memory: descriptions hold prompts and salts.

**Arrays** travel as little-endian bytes: keys of 16 bytes each, slots int64, positions int32,
checksums uint64 (block after block, a block's shards together). Lists have at most 65,536 items:
one message must not keep the others waiting."""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvkeep.kv.outcomes import MAX_PROBES

PROTOCOL_VERSION = 3
MAX_LIST_ITEMS = 65_536

SHARED_MEMORY, NETWORK = "shared_memory", "network"
LOADED_TOKENS = "loaded_tokens"  # the server takes them in Release
REPORTS = "reports"  # the server takes ReportRequests
TIERS = "tiers"  # announced only by a server that has a tier: it takes patience and Prefetch
TRACES = "traces"  # announced only by a server that exports spans: it takes `trace`
SEVERAL_SHARDS = "several_shards"  # the server takes them in OpenLayout and PrepareStore
EVENTS = "events"  # the server takes DescribeBlocks and PoolEvents
CAPABILITIES = (SHARED_MEMORY, NETWORK, "hints", LOADED_TOKENS, REPORTS, SEVERAL_SHARDS, EVENTS)

MAX_FURTHER_SHARDS = 1023  # a block has 1,024 at most
SCHEDULER = "scheduler"  # the role of sessions whose lookups are explained to operators

MAX_PARTS, MAX_PART_NAME_CHARS, MAX_PART_CHARS, MAX_ROLE_CHARS = 64, 64, 512, 64
MAX_REPORTS, MAX_RUNS, MAX_REQUEST_CHARS = 256, 64, 128
MAX_LOOKUPS, PROBE_BYTES = 4, 8
MAX_TRACE_CHARS = 55  # of a W3C traceparent
MAX_DESCRIPTIONS, MAX_DESCRIPTION_BYTES = 512, 1 << 16
IN_MEMORY, ON_DISK = 1, 2  # where a block is, in PoolChanges; both may be set

Numbers = Annotated[list[int], msgspec.Meta(max_length=MAX_LIST_ITEMS)]
Shards = Annotated[list[int], msgspec.Meta(max_length=MAX_FURTHER_SHARDS)]
Trace = Annotated[str, msgspec.Meta(max_length=MAX_TRACE_CHARS)]
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
    it, bytes of each shard. A worker adds its shard, `further_shards` if it has several, in
    ascending order, and a fingerprint of how its tensors lie in memory, which is the same for each
    of them. `parts` is what the fingerprint was taken over, by name; `role` says what the session is
    for. Both are for people: only the fingerprint decides which blocks are found. Answered by
    LayoutOpened."""

    fingerprint: bytes
    shard_bytes: Numbers
    shard: int = -1
    physical: bytes = b""
    parts: Parts = msgspec.field(default_factory=dict)
    role: Annotated[str, msgspec.Meta(max_length=MAX_ROLE_CHARS)] = ""
    further_shards: Shards = []


class Lookup(Message, frozen=True):
    """Asks for the longest ready prefix. `patience_ms` is how long the client is willing to wait for
    blocks that come from a tier; the answer never waits for them. `found_before` says that the same
    question is asked again: how many blocks its last answer counted. `trace` is the span that asks,
    as a W3C traceparent. Answered by Found; the lease has this request's number."""

    tenant: str
    layout: int
    keys: bytes
    skip: int = 0
    patience_ms: int = 0
    found_before: int = -1
    trace: Trace = ""


class Prefetch(Message, frozen=True):
    """Hint: the blocks of this prompt will be needed soon. The server brings those that only a tier
    has into memory. Answered by Done, which counts the blocks that are coming."""

    tenant: str
    layout: int
    keys: bytes


class Release(Message, frozen=True):
    """Ends leases, named by the numbers of their Lookups. Unknown ones are no error.
    `loaded_tokens` says for each how many tokens were loaded under it and are used; those that are
    left out count as 0. Answered by Done."""

    leases: Numbers
    loaded_tokens: Numbers = []


class RequestReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What one request's prompt was served from. `runs` are pairs of an outcome and a number of
    blocks, from the first block on. `lookups` are the numbers of the Lookups whose answers lacked
    blocks, and `keys` those of the blocks from `keys_from` on, of which the first was lacking.
    `probes` are hashes of its first tokens, tenant and adapter, without the identity, 8
    bytes each: after 1, 2, 4, ... blocks, and after the last full one.

    The figures are of the prompt: tokens that were loaded, that the engine's own prefix cache had,
    and that were computed; how long it took until the engine had all of it; the estimated time of
    computing the loaded tokens, the time of their loads, and loaded tokens of which neither is
    known. Totals of loaded tokens are of Release."""

    request: Annotated[str, msgspec.Meta(max_length=MAX_REQUEST_CHARS)]
    tenant: str
    runs: Annotated[list[tuple[str, int]], msgspec.Meta(max_length=MAX_RUNS)]
    prompt_tokens: int = 0
    loaded_tokens: int = 0
    local_tokens: int = 0
    computed_tokens: int = 0
    prompt_us: int = 0
    unpriced_tokens: int = 0
    avoided_us: int = 0
    load_us: int = 0
    lookups: Annotated[list[int], msgspec.Meta(max_length=MAX_LOOKUPS)] = []
    keys_from: int = 0
    keys: bytes = b""
    probes: Annotated[bytes, msgspec.Meta(max_length=MAX_PROBES * PROBE_BYTES)] = b""


class ReportRequests(Message, frozen=True):
    """Requests have finished. For operators: no reply depends on it. Answered by Done."""

    requests: Annotated[list[RequestReport], msgspec.Meta(max_length=MAX_REPORTS)]


class Finish(Message, frozen=True):
    """Hint: the request that used the chain that ends in `key` has finished. Answered by Done."""

    tenant: str
    layout: int
    key: bytes


class PrepareStore(Message, frozen=True):
    """Asks for slots for one shard of a run of blocks, or for it and `further_shards`, in ascending
    order. `trace` is as in Lookup. Answered by Prepared; the write has this request's number."""

    tenant: str
    layout: int
    shard: int
    parent: bytes
    keys: bytes
    priority: int = 50
    ttl_ms: int = 0
    further_shards: Shards = []
    trace: Trace = ""


class CompleteStore(Message, frozen=True):
    """The bytes are in their slots; `checksums` is one uint64 for each shard of each block written.
    `trace` is as in Lookup. Answered by Done."""

    write: int
    checksums: bytes
    trace: Trace = ""


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
    frame a block. `shard` says which of the write's shards they are, if it has several. Answered by
    Done."""

    write: int
    start: int
    shard: int = -1


class DescribeBlocks(Message, frozen=True):
    """Says what an engine would publish of each of these blocks, for others that publish them. Only
    from a session on shared memory. Answered by Done, which counts the descriptions that are
    kept."""

    tenant: str
    layout: int
    keys: bytes
    descriptions: Annotated[
        list[Annotated[bytes, msgspec.Meta(max_length=MAX_DESCRIPTION_BYTES)]],
        msgspec.Meta(max_length=MAX_DESCRIPTIONS),
    ]


class PoolEvents(Message, frozen=True):
    """Asks which blocks of a layout may have come or gone after change `after`, or, with a `cursor`,
    for the next blocks of all that are there. Only from a session on shared memory, which hears of
    tenants that it may name. Answered by PoolChanges."""

    layout: int
    after: int = -1
    cursor: int = -1


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
    """How many leading blocks are ready; slots and checksums of those beyond `skip`, leased.
    `coming` more blocks after them are on their way from a tier; the server expects the last of
    them in `again_ms`, which is when to ask again. Both are 0 without patience."""

    blocks: int
    slots: bytes
    checksums: bytes
    coming: int = 0
    again_ms: int = 0


class Prepared(Message, frozen=True):
    """Which positions of the keys to write, into which slots. `refused`: last keys that found no
    room, or all if the parent is not here (`orphan`). With nothing to write there is no write to
    complete. `apart`: some blocks lack only some of several shards and are not among those to
    write; a PrepareStore for each shard alone names them."""

    positions: bytes
    slots: bytes
    refused: int
    orphan: bool
    apart: bool = False


class PoolChanges(Message, frozen=True):
    """Where blocks are now, by their addresses (key ⊕ fingerprint): a byte each, 0 for nowhere, 1 in
    memory, 2 on a disk, 3 both; and the description of each, empty if there is none. Changes up to
    `after` are told. A `cursor` that is not negative asks for PoolEvents with it: the client has
    missed changes, or there is more of what it asked for."""

    after: int
    addresses: bytes = b""
    media: bytes = b""
    descriptions: list[bytes] = []
    cursor: int = -1


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
    | Prefetch
    | Release
    | ReportRequests
    | Finish
    | PrepareStore
    | CompleteStore
    | AbandonStore
    | ReportBad
    | Fetch
    | Put
    | DescribeBlocks
    | PoolEvents
    | Goodbye
)
Reply = Welcome | Done | LayoutOpened | Found | Prepared | PoolChanges | Refused
