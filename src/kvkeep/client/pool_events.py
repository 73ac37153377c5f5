"""What the pool of this host has, for an engine that publishes it to routers.

    engine ─► descriptions of blocks that it stored or loaded ─► server
    server ─► changes, or all blocks page by page             ─► BlockReader

The engine asks ten times a second, in the Heartbeat's thread: no step waits, and an engine that
falls behind, or whose publisher does, misses changes and is given all blocks again."""

from __future__ import annotations

import logging
import time
from typing import NamedTuple, Protocol

from kvkeep.client.calls import Call, read_changes
from kvkeep.client.connection import Connection
from kvkeep.kv.keys import KEY_BYTES
from kvkeep.wire import messages as m

log = logging.getLogger(__name__)

_EVERY_MS = 100
_MANY = 256  # changes in an answer: there may be more, so the next question goes out at once
_AFTER_A_FAULT_MS = 1_000
_BLOCKS_A_MESSAGE = 512
_BLOCKS_A_SLICE = 64  # then the engine's thread may run


class Descriptions(NamedTuple):
    """Of blocks of one tenant, by their keys."""

    tenant: str
    keys: bytes
    texts: list[bytes]


class BlockReader(Protocol):
    """Who publishes. Called in one thread. `address`: key ⊕ fingerprint of the layout."""

    def describe(self, most: int) -> Descriptions | None:
        """The next blocks, `most` at most, that the server is to know a description of."""

    def forget_notes(self) -> None:
        """What was to be described next is not."""

    def begin_content(self) -> None:
        """All blocks that are there follow: what is not among them is gone."""

    def place(self, address: bytes, media: int, text: bytes) -> None:
        """Where a block is now, and its description if the server has one."""

    def end_content(self) -> None:
        """The rest is gone."""

    def tidy(self) -> None:
        """A turn is over. Does a piece of the work that `end_content` has left."""

    @property
    def is_full(self) -> bool:
        """Whether it has enough to publish for now."""


class PoolFeed:
    """Asks for one engine. `turn` is a connection's `background`."""

    def __init__(self, reader: BlockReader) -> None:
        self.must_restart = False  # another thread may set it: the reader is to be given all blocks
        self.is_allowed = True  # to ask the server, as far as is known
        self._reader = reader
        self._call: Call | None = None
        self._telling: Call | None = None
        self._epoch = 0
        self._after = self._cursor = -1
        self._next_ms = 0
        self._refused = ""

    def __repr__(self) -> str:
        return f"PoolFeed(after={self._after}, cursor={self._cursor})"

    def turn(self, connection: Connection) -> None:
        """Takes in an answer and asks the next question. Never blocks, never raises."""
        try:
            self._turn(connection)
            self._reader.tidy()
        except Exception:
            # guard: this thread also keeps sessions alive, and events are for routers only
            connection.counters.fail("internal_error")
            if connection.counters.failures["internal_error"] == 1:
                log.exception("kvkeep: the pool's events could not be taken in")
            self.must_restart = True
            self._next_ms = connection.now_ms + _AFTER_A_FAULT_MS

    def _turn(self, connection: Connection) -> None:
        welcome = connection.welcome
        if welcome is None or not connection.up:
            self._call = self._telling = None  # they have failed
            self._reader.forget_notes()
            return
        self.is_allowed = self._may_ask(connection, welcome)
        if not self.is_allowed:
            return
        if self.must_restart or welcome.epoch != self._epoch:
            self.must_restart, self._epoch = False, welcome.epoch
            self._after = self._cursor = -1
            self._call = None
        if self._telling is None or self._telling.done:
            self._tell(connection, min(_BLOCKS_A_MESSAGE, welcome.limits.blocks_per_request))
        if self._call is not None:
            if not self._call.done:
                return
            call, self._call = self._call, None
            self._take_in(call, connection)
        if connection.now_ms < self._next_ms or self._reader.is_full:
            return
        message = m.PoolEvents(connection.layout_number, self._after, self._cursor)
        self._call = connection.call(message, connection.options.store_deadline_ms)

    def _may_ask(self, connection: Connection, welcome: m.Welcome) -> bool:
        problem = ""
        if m.EVENTS not in welcome.capabilities:
            problem = "the server is of a release without events (upgrade it)"
        elif connection.shared_pool is None:
            problem = "this engine does not share memory with the server"
        if problem and problem != self._refused:
            text = "kvkeep: routers hear nothing of the pool of %s: %s"
            log.warning(text, connection.options.address, problem)
        self._refused = problem
        return not problem

    def _tell(self, connection: Connection, most: int) -> None:
        descriptions = self._reader.describe(most)
        self._telling = None
        if descriptions is not None:
            tenant, keys, texts = descriptions
            message = m.DescribeBlocks(tenant, connection.layout_number, keys, texts)
            self._telling = connection.call(message, connection.options.store_deadline_ms)

    def _take_in(self, call: Call, connection: Connection) -> None:
        changes = read_changes(call.reply, self._after, self._cursor)
        if changes is None:
            if not call.failure:
                connection.counters.fail("protocol")
            self._next_ms = connection.now_ms + _AFTER_A_FAULT_MS
            return
        for at, media in enumerate(changes.media):
            address = changes.addresses[at * KEY_BYTES : (at + 1) * KEY_BYTES]
            self._reader.place(address, media, changes.descriptions[at])
            if not at % _BLOCKS_A_SLICE:
                time.sleep(0)
        if self._cursor < 0 <= changes.cursor:
            self._reader.begin_content()
        elif self._cursor >= 0 > changes.cursor:
            self._reader.end_content()
        self._after, self._cursor = changes.after, changes.cursor
        is_behind = changes.cursor >= 0 or len(changes.media) >= _MANY
        self._next_ms = connection.now_ms + (0 if is_behind else _EVERY_MS)
