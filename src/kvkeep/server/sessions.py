"""Sessions: one for each engine process, how the daemon knows that its process is gone, and which
sessions share blocks.

    Hello ──► open ── Attach ──► attached ──┬── Goodbye                               ──► ended
                                            ├── shared memory: its lock was released  ──► died
                                            └── network: silent for too long          ──► died

A session on this host touches the pool's memory itself, so it ends only when the kernel has
released its lock. A session on another host touches nothing: the daemon moves its bytes, and a
timeout is enough.

Every session names the parts of its engine's identity. Sessions with the same digest share blocks;
sessions of one model with different digests are compared part by part, so that an operator sees
which part differs."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvkeep.errors import RequestError
from kvkeep.kv.identity import differing_parts
from kvkeep.server.figures import Figures
from kvkeep.server.limits import Pace, client_of
from kvkeep.store.layouts import Layout
from kvkeep.wire.messages import NETWORK, SHARED_MEMORY
from kvkeep.wire.pool_files import Watch

_NUMBERS_REMEMBERED = 4096
_ATTACH_WITHIN_MS = 10_000
LOOKUPS_KEPT = 1_024  # that missed, of one session
# A lookup that missed: its number, how many blocks it asked for, how many it found (-1: it was
# refused), and of the next ones how many were in the index and not ready, were withheld, and were
# coming from a tier; when. A plain tuple: making one must cost nothing.
Missed = tuple[int, int, int, int, int, int, int]
ASKED, HIT_BLOCKS = 1, 2
MOST_PAIRS = 16  # shown in a status
_SHOWN_CHARS = 120


@dataclass(frozen=True, slots=True)
class NetworkLease:
    """A lease whose bytes leave by Fetch. Its tenant is checked again at each Fetch: the client may
    have lost the right to it."""

    layout: Layout
    slots: NDArray[np.int64]
    tenant: str
    since_ms: int


@dataclass
class NetworkWrite:
    """A write whose bytes come by Put: the slots; which blocks have arrived, a column for each
    shard; and the checksums of the bytes that arrived."""

    layout: Layout
    shards: tuple[int, ...]
    slots: NDArray[np.int64]
    arrived: NDArray[np.bool_]
    checksums: NDArray[np.uint64]
    since_ms: int


@dataclass
class ServerSession:
    """One engine process. `token` is in every request, and cannot be guessed."""

    token: int
    number: int
    client: str
    pid: int
    watch: Watch | None
    opened_ms: int
    last_seen_ms: int
    key: str = ""  # the client's name in its certificate; "" without TLS
    pace: Pace = field(default_factory=Pace)
    plane: str = ""
    role: str = ""  # what the engine uses it for
    identity: str = ""  # digest of the layout opened last: sessions with the same one share blocks
    parts: Mapping[str, str] = field(default_factory=dict)  # what the digest is of, by name
    network_leases: dict[int, NetworkLease] = field(default_factory=dict)  # both oldest first
    network_writes: dict[int, NetworkWrite] = field(default_factory=dict)
    # Leases and writes that ended by their age.
    expired: deque[int] = field(default_factory=lambda: deque(maxlen=_NUMBERS_REMEMBERED))
    write_tenants: dict[int, str] = field(default_factory=dict)  # of writes under way
    peer: int = 0  # the number of its connection
    layout: int = 0  # the number of the layout opened last
    figures: Figures = field(default_factory=Figures)
    missed: deque[Missed] = field(default_factory=lambda: deque(maxlen=LOOKUPS_KEPT))

    @property
    def owner(self) -> str | int:
        """The client that its limits count for."""
        return client_of(self.key, self.pid)

    def is_on(self, peer: int) -> bool:
        """Whether the session is on that connection. A connection that was accepted later takes the
        session over, since the one before may have broken. An earlier one cannot use it again:
        requests on an abandoned connection are not carried out after those on the next."""
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
        """All sessions, barred ones included: what those hold is still theirs."""
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
        """The session of that token, if the caller has the key that opened it, and does not use a
        connection that the session has left."""
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
        """Refuses the session's requests from now on. What it holds stays its own until it is
        removed. False if it was barred before."""
        if self._by_token.pop(session.token, None) is None:
            return False
        self._barred.append(session)
        return True

    def leave_all(self) -> None:
        """Forgets all sessions and leaves their lock files: their processes may outlive the
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


# -- sharing: which parts of their identities keep engines of one model from sharing blocks


@dataclass(frozen=True)
class NotShared:
    """Two groups of sessions that serve one model under two identities. `differs` maps each part
    that differs to the values of the first and the second group."""

    model: str
    identities: tuple[str, str]
    sessions: tuple[list[int], list[int]]
    differs: dict[str, tuple[str, str]] = field(default_factory=dict)


def nearest_difference(session: ServerSession, others: Iterable[ServerSession]) -> list[str]:
    """The parts in which a session differs from the most similar session of its model. Empty if
    none differs."""
    model = session.parts.get("model")
    apart = {
        other.identity: differing_parts(session.parts, other.parts)
        for other in others
        if model and other.parts.get("model") == model and other.identity != session.identity
    }
    return min(apart.values(), key=len, default=[])


def not_shared(sessions: Iterable[ServerSession]) -> list[NotShared]:
    """For each model, the identities that differ from the one that connected first. At most
    MOST_PAIRS."""
    models: dict[str, dict[str, list[ServerSession]]] = {}
    for session in sessions:
        if model := session.parts.get("model"):
            groups = models.setdefault(model, {})
            groups.setdefault(session.identity, []).append(session)
    pairs = []
    for model, groups in models.items():
        (first, here), *rest = groups.items()
        for second, there in rest:
            pairs.append(_compared(model, (first, second), here, there))
    return pairs[:MOST_PAIRS]


def _compared(
    model: str, identities: tuple[str, str], here: list[ServerSession], there: list[ServerSession]
) -> NotShared:
    one, other = here[0].parts, there[0].parts
    numbers = [session.number for session in here], [session.number for session in there]
    names = differing_parts(one, other)
    differs = {name: (_shown(one.get(name)), _shown(other.get(name))) for name in names}
    return NotShared(model, identities, numbers, differs)


def _shown(text: str | None) -> str:
    if text is None:
        return "not said"
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"
