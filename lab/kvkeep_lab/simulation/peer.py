"""A client that says exactly what it is told, right or wrong, one message at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from kvkeep.kv.checksum import checksum
from kvkeep.kv.keys import KEY_BYTES
from kvkeep.wire import messages as m
from kvkeep.wire.frames import Header, decode_header, decode_reply, encode

R = TypeVar("R")


class Peer:
    """One session with whatever takes frames and returns frames: a Service's `handle`, or a socket.

    peer = Peer(lambda frames: service.handle(frames, clock())).attach()
    found = peer.ask(m.Found, m.Lookup("default", peer.open_layout(), keys))
    """

    def __init__(self, exchange: Callable[[list[bytes]], Sequence[Any] | None]) -> None:
        self.session = 0
        self.number = 0
        self.payload: list[bytes] = []  # of the last reply
        self._exchange = exchange

    def say(
        self, message: m.Message, payload: Sequence[bytes] = (), *, number: int | None = None
    ) -> m.Reply | None:
        """Sends a message, under the next number unless told otherwise. Returns the reply, None if
        none came."""
        self.number = self.number + 1 if number is None else number
        frames = encode(Header(self.session, self.number), message, payload)
        reply = self._exchange([bytes(frame) for frame in frames])
        if reply is None:
            return None
        header = decode_header(reply)
        assert (header.session, header.number) == (self.session, self.number), (
            "a reply to another request"
        )
        self.payload = [bytes(frame) for frame in reply[2:]]
        return decode_reply(header, reply)

    def ask(
        self,
        kind: type[R],
        message: m.Message,
        payload: Sequence[bytes] = (),
        *,
        number: int | None = None,
    ) -> R:
        """Says a message and expects a reply of that kind."""
        reply = self.say(message, payload, number=number)
        assert isinstance(reply, kind), f"{type(message).__name__} was answered by {reply}"
        return reply

    def refusal(
        self, message: m.Message, payload: Sequence[bytes] = (), *, number: int | None = None
    ) -> str:
        """Says a message and expects to be refused. Returns the code."""
        return self.ask(m.Refused, message, payload, number=number).code

    def hello(self) -> m.Welcome:
        welcome = self.ask(m.Welcome, m.Hello("peer", 1))
        self.session = welcome.session
        return welcome

    def attach(self, plane: str = m.NETWORK) -> Peer:
        self.hello()
        self.ask(m.Done, m.Attach(plane))
        return self

    def open_layout(self, *shard_bytes: int, fingerprint: bytes = b"a test's layout.") -> int:
        return self.ask(
            m.LayoutOpened, m.OpenLayout(fingerprint, list(shard_bytes or (64,)))
        ).layout

    def store(
        self,
        layout: int,
        keys: bytes,
        blocks: Sequence[bytes],
        *,
        tenant: str = "default",
        shard: int = 0,
        parent: bytes = b"",
    ) -> int:
        """Stores one shard of a chain by the network plane. Returns how many blocks were
        written."""
        plan = self.ask(m.Prepared, m.PrepareStore(tenant, layout, shard, parent, keys))
        write = self.number
        wanted = [blocks[at] for at in np.frombuffer(plan.positions, "<i4").tolist()]
        if not wanted:
            return 0
        self.ask(m.Done, m.Put(write, 0), wanted)
        checksums = np.array([checksum(block) for block in wanted], dtype="<u8").tobytes()
        return self.ask(m.Done, m.CompleteStore(write, checksums)).count

    def load(
        self, layout: int, keys: bytes, *, tenant: str = "default", shard: int = 0
    ) -> list[bytes]:
        """The leading blocks that the server has, by the network plane."""
        found = self.ask(m.Found, m.Lookup(tenant, layout, keys))
        lease = self.number
        if not found.blocks:
            return []
        self.ask(m.Done, m.Fetch(lease, shard, 0, found.blocks))
        blocks = self.payload
        self.ask(m.Done, m.Release([lease]))
        return blocks


def chain(name: str, length: int) -> bytes:
    """Keys of a chain: two of the same name share their beginning."""
    return b"".join(
        f"{name}/{at}".encode().rjust(KEY_BYTES, b".")[-KEY_BYTES:] for at in range(length)
    )
