"""Sessions: one for each engine process, and how the daemon knows that one is gone.

    Hello ──► open ── Attach ──► attached ──┬── Goodbye                              ──► ended
                                            ├── shared memory: its lock has fallen    ──► died
                                            └── network: silent for too long          ──► died

A session on this host touches the pool's memory itself, so only the kernel's word ends it. One on
another host touches nothing: the daemon moves its bytes, and silence is enough."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvkeep.errors import RequestError
from kvkeep.server.limits import Pace, client_of
from kvkeep.store.layouts import Layout
from kvkeep.wire.messages import NETWORK, SHARED_MEMORY
from kvkeep.wire.pool_files import Watch

_NUMBERS_REMEMBERED = 4096
_ATTACH_WITHIN_MS = 10_000


@dataclass(frozen=True, slots=True)
class NetworkLease:
    """A lease whose bytes leave by Fetch: where they are, and whose: the client's key may lose that
    tenant."""

    layout: Layout
    slots: NDArray[np.int64]
    tenant: str
    since_ms: int


@dataclass
class NetworkWrite:
    """A write whose bytes come by Put: where they go, which have come, and their checksums as they
    came."""

    layout: Layout
    shard: int
    slots: NDArray[np.int64]
    arrived: NDArray[np.bool_]
    checksums: NDArray[np.uint64]
    since_ms: int


@dataclass
class ServerSession:
    """One engine process as the daemon knows it. `token` is in every request; nobody else can guess
    it."""

    token: int
    number: int
    client: str
    pid: int
    watch: Watch | None
    opened_ms: int
    last_seen_ms: int
    key: str = ""  # that of the client, "" where there is no authentication
    pace: Pace = field(default_factory=Pace)
    plane: str = ""
    role: str = ""  # what the engine uses it for
    identity: str = (
        ""  # digest of the layout that it opened last: sessions that show the same one share blocks
    )
    parts: Mapping[str, str] = field(
        default_factory=dict
    )  # what that digest was taken over, by name
    network_leases: dict[int, NetworkLease] = field(default_factory=dict)  # both oldest first
    network_writes: dict[int, NetworkWrite] = field(default_factory=dict)
    expired: deque[int] = field(
        default_factory=lambda: deque(maxlen=_NUMBERS_REMEMBERED)
    )  # ended by their age
    write_tenants: dict[int, str] = field(
        default_factory=dict
    )  # of writes under way, on either plane
    peer: int = 0  # the connection that it is on

    @property
    def owner(self) -> str | int:
        """The client it counts for."""
        return client_of(self.key, self.pid)

    def is_on(self, peer: int) -> bool:
        """Whether the session is on that connection. One that was accepted later takes it over,
        since the one before may have broken. An earlier one cannot use it again: what a client sent
        over a connection that it has given up is not carried out after what it sent over the
        next."""
        self.peer = max(self.peer, peer)
        return peer == self.peer

    def is_gone(self, now_ms: int, network_timeout_ms: int) -> bool:
        if self.plane == SHARED_MEMORY:
            return self.watch is not None and not self.watch.is_held()
        if self.plane == NETWORK:
            return now_ms - self.last_seen_ms > network_timeout_ms
        return now_ms - self.opened_ms > _ATTACH_WITHIN_MS


class Sessions:
    """All open sessions, by token."""

    def __init__(self) -> None:
        self._by_token: dict[int, ServerSession] = {}
        self._barred: list[ServerSession] = []
        self._next = 1

    def __len__(self) -> int:
        return len(self._by_token) + len(self._barred)

    def all(self) -> list[ServerSession]:
        """Those that are barred, too: what they hold is still theirs."""
        return [*self._by_token.values(), *self._barred]

    def next_number(self) -> int:
        self._next += 1
        return self._next - 1

    def add(
        self,
        number: int,
        client: str,
        pid: int,
        watch: Watch | None,
        now_ms: int,
        key: str = "",
        pace: Pace | None = None,
        peer: int = 0,
    ) -> ServerSession:
        token = secrets.randbits(63) | 1
        session = ServerSession(
            token, number, client, pid, watch, now_ms, now_ms, key, pace or Pace(), peer=peer
        )
        self._by_token[token] = session
        return session

    def get(self, token: int, key: str = "", peer: int = 0) -> ServerSession:
        """The session of that token, if it is asked for with the key that opened it, and not by a
        connection that it has left."""
        session = self._by_token.get(token)
        if session is None or session.key != key or not session.is_on(peer):
            raise RequestError(
                "unknown_session",
                "this server does not know the session",
                field="session",
                hint="the server was restarted or ended the session; say Hello again",
            )
        return session

    def is_on(self, token: int, peer: int) -> bool:
        session = self._by_token.get(token)
        return session is not None and session.peer == peer

    def bar(self, session: ServerSession) -> bool:
        """From now on nobody can ask for it. What it holds stays its own until it is removed. False
        if it was so."""
        if self._by_token.pop(session.token, None) is None:
            return False
        self._barred.append(session)
        return True

    def leave_all(self) -> None:
        """Forgets all sessions and leaves their lock files: their processes may outlive this
        server."""
        for session in self.all():
            if session.watch is not None:
                session.watch.leave()
                session.watch = None
            self.remove(session)

    def remove(self, session: ServerSession) -> None:
        """Forgets the session and its lock file."""
        self._by_token.pop(session.token, None)
        self._barred = [other for other in self._barred if other is not session]
        if session.watch is not None:
            session.watch.close()
            session.watch = None
