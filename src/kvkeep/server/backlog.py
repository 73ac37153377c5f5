"""Replies that were given to ZMQ and that the other side has not taken: how many bytes, and whose.

A client that asks and does not read makes us keep what it asked for. ZMQ limits that by number, for each connection;
here it is limited by bytes, whatever the number of connections: for a session, for a client, and for all.

    a connection   │ small │ small │ ... │ MARK │ small │ large MARK │     replies leave in this order, so when a marked
                   └──── counted by ────────┘                            one has left, all before it have
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvkeep.errors import RequestError
from kvkeep.units import KIB, MIB

SESSION_BYTES: Final = 64 * MIB  # a client of ours waits for one reply of 8 MiB before it asks for the next
CLIENT_BYTES: Final = 512 * MIB
TOTAL_BYTES: Final = 1024 * MIB
MARK_BYTES: Final = 64 * KIB  # to mark a reply costs some 40 µs: small ones are marked together
_CONNECTIONS_REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class _Marked:
    has_left: Callable[[], bool]
    nbytes: int
    owners: tuple[object, ...]


class Backlog:
    """Bytes of replies under way, by connection in their order and by owner: a session, a client."""

    def __init__(
        self, session_bytes: int = SESSION_BYTES, client_bytes: int = CLIENT_BYTES, total_bytes: int = TOTAL_BYTES
    ) -> None:
        self._most = (session_bytes, client_bytes)
        self._total_bytes = total_bytes
        self._marked: dict[bytes, deque[_Marked]] = {}
        self._unmarked: dict[bytes, int] = {}  # of connections that were sent something since all were last forgotten
        self._has_forgotten = False
        self._held: dict[object, int] = {}
        self.nbytes = 0

    def wants_mark(self, peer: bytes, nbytes: int) -> bool:
        """Notes a reply to that connection. True if it is to be marked, and `add` called when it was sent. Less than
        MARK_BYTES of a connection are ever unmarked, however many there are: one that may have been forgotten is taken
        to have as much, so that its next reply is marked, and stands for those before it."""
        if peer not in self._unmarked:
            if len(self._unmarked) >= _CONNECTIONS_REMEMBERED:
                self._unmarked.clear()
                self._has_forgotten = True
            self._unmarked[peer] = MARK_BYTES if self._has_forgotten else 0
        self._unmarked[peer] += nbytes
        return self._unmarked[peer] >= MARK_BYTES

    def add(self, peer: bytes, session: object, client: object, has_left: Callable[[], bool]) -> None:
        """A marked reply was sent. It counts, with the unmarked ones before it, until `has_left`."""
        one = _Marked(has_left, self._unmarked.get(peer, 0), (("session", session), ("client", client)))
        self._unmarked[peer] = 0
        self._marked.setdefault(peer, deque()).append(one)
        self.nbytes += one.nbytes
        for owner in one.owners:
            self._held[owner] = self._held.get(owner, 0) + one.nbytes

    def check(self, session: object, client: object) -> None:
        """`too_fast` if more is under way than may be. What is let through is so whole: one reply may go beyond."""
        owners = (("session", session), ("client", client))
        if not self._is_over(owners):
            return
        self._forget_what_left()
        if self._is_over(owners):
            raise RequestError(
                "too_fast",
                "replies that were asked for have not been read",
                field="replies",
                hint="read replies before asking for more; if the client does, the network is too slow for it",
            )

    def waiting_bytes(self) -> int:
        """Of marked replies, and of those before them, that have not left."""
        self._forget_what_left()
        return self.nbytes

    def _is_over(self, owners: tuple[object, ...]) -> bool:
        held = [self._held.get(owner, 0) for owner in owners]
        return self.nbytes >= self._total_bytes or any(map(int.__ge__, held, self._most))

    def _forget_what_left(self) -> None:
        for peer, queue in list(self._marked.items()):
            while queue and queue[0].has_left():
                one = queue.popleft()
                self.nbytes -= one.nbytes
                for owner in one.owners:
                    self._held[owner] -= one.nbytes
                    if not self._held[owner]:
                        del self._held[owner]
            if not queue:
                del self._marked[peer]
