"""Requests on their way, what becomes of them, and what a reply must be like to be relied on.

The arrays in a reply index engine memory and the pool. A server that gets them wrong is a fault of
the server, so each reader here returns None or False instead of raising, and its caller counts a
miss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvkeep.kv.keys import KEY_BYTES
from kvkeep.wire.messages import (
    IN_MEMORY,
    MAX_LIST_ITEMS,
    ON_DISK,
    AbandonStore,
    Done,
    Found,
    LayoutOpened,
    Lookup,
    Message,
    PoolChanges,
    Prepared,
    PrepareStore,
    Release,
    Reply,
    Welcome,
)

_SAY_AGAIN_MS = 1_000
# Blocks that are coming from a tier are asked for after this time, then after twice as long, and so
# on, or when the server expects them: until it has measured its tier, that may be far too late.
FIRST_PAUSE_MS = 50
_U64 = 1 << 64
_MAX_SEGMENTS = 1 << 20


@dataclass(eq=False)
class Call:
    """One request. It ends exactly once: with a reply, or with a failure that says why there is
    none."""

    number: int
    deadline_ms: int
    # what the answer gives that must be given back: a "lease", a "write" or nothing
    gives: str = ""
    session: int = 0  # the session it was sent in, and the server process that its slots belong to
    epoch: int = 0
    words: int = 0  # how many the server had said when it was sent
    # it carries blocks, or asks for them: on a slow link nothing else comes through meanwhile
    bulk: bool = False
    reply: Reply | None = None
    payload: Sequence[bytes] = ()
    failure: str = ""
    unwanted: bool = False  # whatever it gives goes back
    loaded_tokens: int = 0  # that were loaded under the lease that it gave, and are used

    @property
    def done(self) -> bool:
        return self.reply is not None or bool(self.failure)


def gives(message: Message) -> str:
    """What the answer to a message gives, for `Call.gives`."""
    if isinstance(message, Lookup):
        return "lease"
    return "write" if isinstance(message, PrepareStore) else ""


@dataclass
class Breaker:
    """Opens when the server has said nothing at all from a call's sending to its deadline: then
    every other call fails at once, too. Closes with the server's next word, whatever that answers,
    and however late it is."""

    is_open: bool = False
    opened: int = 0  # how often
    words: int = 0  # that the server has said
    heard: bool = False  # whether it has said any since the connection was made

    def hear(self) -> None:
        self.words += 1
        self.heard, self.is_open = True, False

    def expire(self, call: Call) -> None:
        """The call's deadline has passed, and nothing was under way that would explain it."""
        if not self.is_open and call.words == self.words:
            self.is_open = True
            self.opened += 1


class Calls:
    """Those on their way, by number. Each is here until it has ended: whatever goes wrong before,
    somebody ends it."""

    def __init__(self) -> None:
        self._calls: dict[int, Call] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, call: Call) -> None:
        self._calls[call.number] = call

    def get(self, number: int) -> Call | None:
        return self._calls.get(number)

    def remove(self, call: Call) -> None:
        self._calls.pop(call.number, None)

    def end_all(self, failure: str) -> None:
        for call in self._calls.values():
            call.failure = failure
        self._calls.clear()

    def all(self, but: Call | None = None) -> list[Call]:
        return [call for call in self._calls.values() if call is not but]

    def overdue(self, now_ms: int) -> list[Call]:
        return [call for call in self._calls.values() if call.deadline_ms <= now_ms]

    def awaits_bulk(self, now_ms: int) -> bool:
        """Whether one that may take all of the link has time left."""
        return any(call.bulk and call.deadline_ms > now_ms for call in self._calls.values())


class Debts:
    """Leases and slots that are to be given back. Each is said to the server until it has confirmed
    it."""

    def __init__(self) -> None:
        # number -> tokens loaded under a lease
        self._owed: dict[str, dict[int, int]] = {"lease": {}, "write": {}}
        self._said: list[tuple[Call, str, dict[int, int]]] = []
        self._next_ms = 0

    def __bool__(self) -> bool:
        return bool(self._said or self.count)

    @property
    def count(self) -> int:
        """How many the server was not told of, or was told of in vain."""
        return sum(map(len, self._owed.values()))

    def add(self, call: Call) -> None:
        """Notes what a call gave, or may yet give. Giving back what was never given is no error,
        but a miss is known to have given nothing, and need not cost another message."""
        gave_nothing = (isinstance(call.reply, Found) and not call.reply.checksums) or (
            isinstance(call.reply, Prepared) and not call.reply.positions
        )
        if call.gives and not gave_nothing:
            self._owed[call.gives][call.number] = call.loaded_tokens
            self._next_ms = 0

    def pay(self, now_ms: int, send: Callable[[Message, int], Call]) -> None:
        """Says Release and AbandonStore, each at most once an interval for what was not
        confirmed."""
        unanswered = []
        for call, kind, numbers in self._said:
            if not call.done:
                unanswered.append((call, kind, numbers))
            elif not isinstance(call.reply, Done):
                self._owed[kind] |= numbers
        self._said = unanswered
        if now_ms < self._next_ms:
            return
        self._next_ms = now_ms + _SAY_AGAIN_MS
        for kind, owed in self._owed.items():
            if chosen := sorted(owed)[:MAX_LIST_ITEMS]:
                tokens = [owed.pop(number) for number in chosen]
                message = (
                    AbandonStore(chosen)
                    if kind == "write"
                    else Release(chosen, tokens if any(tokens) else [])
                )
                self._said.append(
                    (send(message, _SAY_AGAIN_MS), kind, dict(zip(chosen, tokens, strict=True)))
                )

    def clear(self) -> None:
        """The session is over, and with it everything that it held."""
        for numbers in self._owed.values():
            numbers.clear()
        self._said.clear()


@dataclass
class ClientCounters:
    """What happened to a client's requests. Every fault is counted under the reason it was
    given."""

    sent: int = 0
    answered: int = 0
    late_replies: int = 0
    sessions: int = 0
    failures: dict[str, int] = field(default_factory=dict)

    def fail(self, reason: str) -> None:
        self.failures[reason] = self.failures.get(reason, 0) + 1


# -- replies


@dataclass(frozen=True)
class Hit:
    """A Found, read: arrays describe the blocks beyond `skip`. Without slots on the network
    plane. `coming` more blocks are on their way from a tier, the last of them in `again_ms`."""

    blocks: int
    slots: NDArray[np.int64]
    checksums: NDArray[np.uint64]  # [described blocks, shards]
    coming: int = 0
    again_ms: int = 0


@dataclass(frozen=True)
class Plan:
    """A Prepared, read: positions are ascending and within the part that was asked about."""

    positions: NDArray[np.int32]
    slots: NDArray[np.int64]
    refused: int
    orphan: bool
    apart: bool = False


def is_sound_welcome(welcome: Welcome) -> bool:
    """Whether the session can be named in a header and its pool cut into segments."""
    segment_bytes, pool_bytes = welcome.pool.segment_bytes, welcome.pool.pool_bytes
    return (
        0 <= welcome.session < _U64
        and segment_bytes > 0
        and 0 < pool_bytes <= segment_bytes * _MAX_SEGMENTS
    )


def is_sound_layout(opened: LayoutOpened, shard_bytes: tuple[int, ...]) -> bool:
    """Whether every shard has a place of its own in a slot."""
    offsets = opened.shard_offsets
    if len(offsets) != len(shard_bytes) or opened.slot_bytes >= 1 << 62:
        return False
    ends = [offset + nbytes for offset, nbytes in zip(offsets, shard_bytes, strict=True)]
    places = zip([0, *ends], [*offsets, opened.slot_bytes], strict=True)
    return all(end <= offset for end, offset in places)


def read_found(reply: object, keys: bytes, skip: int, shards: int) -> Hit | None:
    """The answer to a Lookup, or None for anything that cannot be one."""
    if not isinstance(reply, Found) or not 0 <= reply.blocks <= len(keys) // KEY_BYTES:
        return None
    described = max(reply.blocks - skip, 0)
    if len(reply.slots) not in (0, described * 8) or len(reply.checksums) != described * shards * 8:
        return None
    return Hit(
        reply.blocks,
        np.frombuffer(reply.slots, dtype="<i8"),
        np.frombuffer(reply.checksums, dtype="<u8").reshape(-1, shards),
        min(max(0, reply.coming), len(keys) // KEY_BYTES - reply.blocks),
        max(1, reply.again_ms),
    )


def read_plan(reply: object, count: int) -> Plan | None:
    """The answer to a PrepareStore of `count` blocks, or None for anything that cannot be one."""
    if (
        not isinstance(reply, Prepared)
        or len(reply.positions) % 4
        or not 0 <= reply.refused <= count
    ):
        return None
    positions = np.frombuffer(reply.positions, dtype="<i4")
    if len(reply.slots) not in (0, len(positions) * 8):
        return None
    if len(positions) and not (
        positions[0] >= 0 and positions[-1] < count and (positions[1:] > positions[:-1]).all()
    ):
        return None
    slots = np.frombuffer(reply.slots, dtype="<i8")
    return Plan(positions, slots, reply.refused, reply.orphan, reply.apart)


def read_changes(reply: object, after: int, cursor: int) -> PoolChanges | None:
    """The answer to PoolEvents, or None for anything that cannot be one."""
    if not isinstance(reply, PoolChanges):
        return None
    count = len(reply.media)
    if len(reply.addresses) != count * KEY_BYTES or len(reply.descriptions) != count:
        return None
    if max(reply.media, default=0) > IN_MEMORY | ON_DISK:
        return None
    is_content = (
        cursor >= 0 and reply.after == after and (reply.cursor < 0 or reply.cursor > cursor)
    )
    is_news = cursor < 0 and (reply.after >= max(after, 0) or reply.cursor == 0)
    return reply if is_content or is_news else None
