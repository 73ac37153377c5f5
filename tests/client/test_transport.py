"""A client's connection: nothing is sent before the server has proved who it is, and nothing
blocks."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import ssl
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvkeep
from kvkeep.cli.certificates import issue, new_authority
from kvkeep.cli.remote import ask
from kvkeep.client import transport as under_test
from kvkeep.client.connection import Connection
from kvkeep.client.options import ClientOptions
from kvkeep.client.scheduler import SchedulerAdapter
from kvkeep.client.transport import StreamTransport
from kvkeep.errors import SettingsError
from kvkeep.kv.identity import ModelIdentity
from kvkeep.kv.keys import KeyChain, root_key
from kvkeep.kv.shape import BlockShape
from kvkeep.server.listeners import Listeners
from kvkeep.testing.process import ServerProcess
from kvkeep.wire import messages as m
from kvkeep.wire.frames import Header, encode
from kvkeep.wire.stream import Stream
from kvkeep.wire.tls import TlsFiles, server_context

SHAPE = BlockShape(
    ModelIdentity(model="stream", revision="1", kv_dtype="|u1", block_tokens=4, content="bytes"),
    (64,),
)
CACHE: dict[str, Any] = {
    "model": "stream",
    "revision": "1",
    "block_tokens": 4,
    "block_shape": (2, 8),
    "dtype": "float32",
}
MOST = 64 << 20
FRAMES = encode(Header(1, 2), m.Ping())
LONG = encode(Header(1, 3), m.Lookup("default", 1, bytes(32 << 20)))


class Far:
    """A server's side, without a server. It says nothing by itself."""

    def __init__(self, address: str) -> None:
        self.listeners = Listeners(address)
        self.address = self.listeners.address
        self.streams: list[Stream] = []

    def accept(self) -> None:
        """Takes the connections that have come, and what they have sent."""
        for listening in self.listeners:
            if listening.socket.fileno() < 0:
                continue
            with contextlib.suppress(BlockingIOError):
                self.streams.append(Stream(listening.socket.accept()[0], MOST))
        for stream in self.streams:
            stream.read()

    def speaking(self) -> Stream | None:
        """The connection by which a whole message has come."""
        self.accept()
        return next((stream for stream in self.streams if stream.has_next), None)

    def hang_up(self) -> None:
        self.accept()
        for stream in self.streams:
            stream.close()
        self.streams.clear()

    def close(self) -> None:
        self.hang_up()
        self.listeners.close()


@pytest.fixture(params=["unix", "tcp"])
def far(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Far]:
    """Reached by a Unix socket, and by TCP."""
    far = Far(f"ipc://{tmp_path}/far" if request.param == "unix" else "tcp://127.0.0.1:0")
    if request.param == "tcp":
        list(far.listeners)[1].socket.close()  # that of the same name
    yield far
    far.close()


def until(happens: Callable[[], Any], poll: Callable[[], object] = lambda: None) -> Any:
    """The limit only ends a test that has failed."""
    give_up_s = time.monotonic() + 60
    while not (result := happens()):
        poll()
        time.sleep(0.001)
        assert time.monotonic() < give_up_s
    return result


def open_between(transport: StreamTransport, far: Far) -> Stream:
    """Both ends of an open connection: ours sends a Ping, theirs has read it."""
    until(lambda: transport.send(FRAMES), far.accept)
    stream: Stream = until(far.speaking)
    assert stream.next() == FRAMES
    return stream


# -- sending and receiving


def test_without_a_server_a_send_fails_at_once_and_nothing_is_queued_for_later(
    tmp_path: Path,
) -> None:
    transport = StreamTransport(f"ipc://{tmp_path}/far")
    assert not transport.send(FRAMES) and transport.receive() is None
    far = Far(f"ipc://{tmp_path}/far")
    stream = open_between(transport, far)
    stream.read()
    assert stream.next() is None, "what failed was not kept"
    transport.close()
    far.close()


def test_messages_go_both_ways_with_their_payload_and_wait_returns_when_one_has_come(
    far: Far,
) -> None:
    transport = StreamTransport(far.address)
    stream = open_between(transport, far)
    sent = encode(Header(1, 4), m.Put(5, 0), [memoryview(b"a block"), memoryview(b"another"[:7])])
    assert transport.send(sent)
    until(lambda: stream.has_next, stream.read)
    assert stream.next() == [bytes(frame) for frame in sent]
    stream.send(FRAMES)
    transport.wait(60_000)
    assert transport.receive() == FRAMES and transport.receive() is None
    transport.close()


def test_payload_buffers_may_be_reused_as_soon_as_it_is_sent(far: Far) -> None:
    transport = StreamTransport(far.address)
    stream = open_between(transport, far)
    blocks = [bytearray(b"%d" % number * (4 << 20)) for number in range(4)]
    wanted = [bytes(block) for block in blocks]
    assert transport.send(encode(Header(1, 4), m.Put(5, 0), blocks))
    for block in blocks:
        block[:] = bytes(len(block))

    def both() -> None:
        stream.read()
        transport.receive()

    until(lambda: stream.has_next, both)
    message = stream.next()
    assert message is not None and message[2:] == wanted
    transport.close()


def unsent_bytes(transport: StreamTransport) -> int:
    found = re.search(r"unsent_bytes=(\d+)", repr(transport))
    assert found is not None
    return int(found[1])


def test_to_one_that_does_not_read_only_so_much_is_sent(far: Far) -> None:
    transport, sent = StreamTransport(far.address), 0
    open_between(transport, far)
    message = encode(Header(1, 3), m.Lookup("default", 1, bytes(1 << 20)))
    while transport.send(message):
        sent += 1
        assert sent < 100
    assert unsent_bytes(transport) < 18 << 20 and not transport.lost()
    transport.close()


def test_a_long_message_moves_on_while_the_other_side_reads_and_a_server_that_stands_still_costs_nothing(
    far: Far,
) -> None:
    transport = StreamTransport(far.address)
    stream = open_between(transport, far)
    waits: list[int] = []

    def wait(timeout_ms: int) -> None:
        waits.append(timeout_ms)
        time.sleep(timeout_ms / 1000)

    transport.wait = wait  # type: ignore[method-assign]
    assert transport.send(LONG) and unsent_bytes(transport)
    for _ in range(1_000):
        assert transport.receive() is None
    assert sum(waits) < 1_000, "once its patience is used up, it does not wait again and again"
    del transport.wait  # type: ignore[method-assign]

    def read_all() -> None:
        while not stream.has_next and not stream.is_over:
            stream.read()

    reader = threading.Thread(target=read_all)
    reader.start()
    until(lambda: not unsent_bytes(transport), lambda: transport.wait(1_000))
    reader.join(60)
    assert stream.next() == LONG
    transport.close()


def test_a_loss_is_told_once_and_the_next_connection_is_made(far: Far) -> None:
    transport = StreamTransport(far.address)
    open_between(transport, far)
    assert not transport.lost()
    far.hang_up()
    until(transport.lost, transport.receive)
    assert not transport.lost()
    open_between(transport, far)
    transport.close()
    assert not transport.send(FRAMES), "closed for good"


@pytest.mark.parametrize(
    "address", ["localhost:5555", "tcp://", "tcp://host:port", "smoke://signals", ""]
)
def test_an_address_that_is_none_is_named_with_a_remedy(address: str) -> None:
    with pytest.raises(SettingsError) as caught:
        StreamTransport(address)
    assert repr(address) in caught.value.message
    assert "tcp://host:port" in caught.value.hint


# -- proof


def test_nothing_is_said_to_another_user(far: Far, monkeypatch: pytest.MonkeyPatch) -> None:
    stranger = os.geteuid() + 4711
    monkeypatch.setattr(under_test, "peer_uid", lambda connected: stranger)
    transport = StreamTransport(far.address)
    until(transport.refusal, lambda: (far.accept(), transport.send(FRAMES)))
    assert not transport.send(FRAMES)
    assert f"uid {stranger}" in transport.refusal() and "trusted_users" in transport.refusal()
    transport.close()
    far.accept()
    assert far.streams and all(stream.first == b"" for stream in far.streams), "not one byte"
    far.hang_up()
    friendly = StreamTransport(far.address, trusted_users=(stranger,))
    open_between(friendly, far)
    friendly.close()


def test_a_user_that_is_not_known_yet_is_waited_for_and_not_for_ever(
    far: Far, monkeypatch: pytest.MonkeyPatch
) -> None:
    uids: list[int | None] = [None, None, os.geteuid()]
    monkeypatch.setattr(
        under_test, "peer_uid", lambda connected: uids.pop(0) if len(uids) > 1 else uids[0]
    )
    transport = StreamTransport(far.address)
    open_between(transport, far)
    assert len(uids) == 1
    transport.close()
    uids[:] = [None]
    far.hang_up()
    now_s = [0.0]
    monkeypatch.setattr(under_test, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    transport = StreamTransport(far.address)
    assert not transport.send(FRAMES)
    until(lambda: len(far.streams) == 1, far.accept)
    now_s[0] = 1.9
    assert not transport.send(FRAMES)
    far.accept()
    assert not far.streams[0].is_over
    now_s[0] = 2.1
    assert not transport.send(FRAMES)
    until(lambda: far.streams[0].is_over, far.accept)
    transport.close()


def test_who_has_taken_the_unix_socket_of_a_port_is_passed_by(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another user can take the name, but not who the kernel says they are."""
    far = Far("tcp://127.0.0.1:0")
    real = under_test.peer_uid
    monkeypatch.setattr(
        under_test, "peer_uid", lambda one: 4711 if one.family == socket.AF_UNIX else real(one)
    )
    transport = StreamTransport(far.address)
    stream = open_between(transport, far)
    assert stream.socket.family == socket.AF_INET
    transport.close()
    far.close()


def test_a_server_that_ends_every_connection_is_told_of(far: Far) -> None:
    transport = StreamTransport(far.address)

    def knock() -> None:
        far.hang_up()
        transport.send(FRAMES)
        transport.receive()

    until(transport.refusal, knock)
    assert "trusted_users" in transport.refusal()
    transport.close()


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (b"\xff" + bytes(8) + b"\x7f", "an earlier release"),
        (b"HTTP/1.1 400 Bad Request\r\n", "not a kvkeep server"),
    ],
)
def test_a_server_of_another_kind_is_named(far: Far, said: bytes, expected: str) -> None:
    transport = StreamTransport(far.address)
    open_between(transport, far).socket.sendall(said)
    until(transport.refusal, transport.receive)
    assert expected in transport.refusal() and transport.lost()
    transport.close()


# -- beyond this host


def test_beyond_loopback_there_is_no_connection_without_certificates() -> None:
    with pytest.raises(SettingsError) as caught:
        StreamTransport("tcp://kvkeep.example:5555")
    assert "tls_ca, tls_cert and tls_key" in caught.value.hint


def files_of(directory: Path, name: str, certificate: Any, authority: Any) -> TlsFiles:
    made = TlsFiles(
        directory / f"{name}.pem", directory / f"{name}.key", directory / f"{name}-ca.pem"
    )
    for path, text in (
        (made.cert, certificate.cert),
        (made.key, certificate.key),
        (made.ca, authority.cert),
    ):
        path.write_text(text)
        path.chmod(0o600)
    return made


def test_with_certificates_each_side_proves_itself_and_a_wrong_one_is_told(tmp_path: Path) -> None:
    ours, theirs = new_authority(1), new_authority(1)
    at_server = files_of(tmp_path, "server", issue(ours, "server", ("127.0.0.1",), days=1), ours)
    at_client = files_of(tmp_path, "client", issue(ours, "client", days=1), ours)
    at_stranger = files_of(tmp_path, "stranger", issue(theirs, "stranger", days=1), ours)
    at_other = files_of(tmp_path, "other", issue(ours, "other", days=1), theirs)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"tcp://127.0.0.1:{listening.getsockname()[1]}"
        listening.setblocking(False)

        def meet(files: TlsFiles) -> tuple[StreamTransport, Stream | None]:
            transport, stream, is_sent = StreamTransport(address, files), None, False

            def knock() -> None:
                nonlocal stream, is_sent
                try:
                    connected = listening.accept()[0]
                except BlockingIOError:
                    pass
                else:
                    context = server_context(at_server)
                    stream = Stream(
                        context.wrap_socket(
                            connected, server_side=True, do_handshake_on_connect=False
                        ),
                        MOST,
                    )
                if stream is not None:
                    stream.read()
                is_sent = is_sent or transport.send(FRAMES)
                transport.receive()

            until(lambda: transport.refusal() or (stream is not None and stream.has_next), knock)
            return transport, stream

        transport, stream = meet(at_client)
        assert (
            stream is not None
            and stream.next() == FRAMES
            and isinstance(stream.socket, ssl.SSLSocket)
        )
        long = encode(
            Header(1, 3), m.Lookup("default", 1, os.urandom(3 << 20)), [os.urandom(1 << 20)] * 2
        )
        assert transport.send(long)
        until(
            lambda: stream.next() == long, lambda: (stream.read(), transport.receive())
        )  # after more Pings
        transport.close()
        stream.close()
        for files, expected in ((at_stranger, "rejected"), (at_other, "CA")):
            transport, stream = meet(files)
            assert expected in transport.refusal(), transport.refusal()
            transport.close()
            if stream is not None:
                assert stream.first == b""
                stream.close()


def test_a_name_is_looked_up_in_a_thread_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    may_answer, asked = threading.Event(), threading.Event()

    def slow(host: str, port: None, *, type: int, flags: int) -> list[tuple[Any, ...]]:
        if flags:
            raise OSError
        asked.set()
        assert may_answer.wait(60)
        return [(socket.AF_INET, type, 0, "", ("127.0.0.1", 0))]

    far = Far("tcp://127.0.0.1:0")
    monkeypatch.setattr(socket, "getaddrinfo", slow)
    address = far.address.replace("127.0.0.1", "localhost")
    transport = StreamTransport(address, may_use_unix_socket=False)
    assert not transport.send(FRAMES) and asked.wait(60), "it does not wait for the answer"
    may_answer.set()
    open_between(transport, far)
    transport.close()
    far.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_an_address_in_numbers_needs_no_look_up(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    far, look_up = Far(f"tcp://{host}:0"), socket.getaddrinfo

    def by_numbers(*given: Any, flags: int = 0, **named: Any) -> Any:
        assert flags & socket.AI_NUMERICHOST
        return look_up(*given, flags=flags, **named)

    monkeypatch.setattr(socket, "getaddrinfo", by_numbers)
    transport = StreamTransport(far.address, may_use_unix_socket=False)
    open_between(transport, far)
    transport.close()
    far.close()


# -- with a real server


@pytest.fixture
def connect(server: ServerProcess) -> Iterator[Callable[..., Connection]]:
    made: list[Connection] = []

    def begin(to: ServerProcess = server, **options: object) -> Connection:
        made.append(Connection(SHAPE, ClientOptions(address=to.address, **options)))  # type: ignore[arg-type]
        assert made[-1].wait_until_up(60_000)
        return made[-1]

    yield begin
    for connection in made:
        connection.close()


def family(connection: Connection) -> str:
    found = re.search(r"StreamTransport\((\w+),", repr(connection))
    assert found is not None
    return found[1]


def answers(connection: Connection) -> bool:
    return connection.wait(connection.call(m.Ping(), 10_000)) is not None


@pytest.fixture
def break_last(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Breaks the connection that was made last."""
    streams: list[Stream] = []

    def make(*given: Any) -> Stream:
        streams.append(Stream(*given))
        return streams[-1]

    monkeypatch.setattr(under_test, "Stream", make)
    return lambda: streams[-1].socket.shutdown(socket.SHUT_RDWR)


def counted(server: ServerProcess) -> list[float]:
    """Sessions that ended, and that died."""
    with urllib.request.urlopen(
        f"http://{server.http.removeprefix('http://')}/metrics", timeout=60
    ) as reply:
        lines = str(reply.read().decode()).splitlines()
    names = ("kvkeep_sessions_ended_total", "kvkeep_sessions_died_total")
    return [float(line.split()[-1]) for name in names for line in lines if line.startswith(name)]


def test_a_server_on_this_host_is_asked_by_its_unix_socket(
    connect: Callable[..., Connection],
) -> None:
    near, network = connect(), connect(shared_memory=False)
    assert family(near) == family(network) == "AF_UNIX"
    assert answers(near) and answers(network)


def test_and_by_tcp_where_there_is_none(
    server: ServerProcess, connect: Callable[..., Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(under_test, "unix_name", lambda address: None)
    connection = connect()
    assert family(connection) == "AF_INET" and answers(connection)


@pytest.mark.parametrize("shared_memory", [True, False])
def test_blocks_go_in_and_come_out(server: ServerProcess, shared_memory: bool) -> None:
    options = ClientOptions(shared_memory=shared_memory)
    with kvkeep.connect(server.address, required=True, options=options, **CACHE) as cache:
        rows = np.random.default_rng(1).random((512, 2, 8), dtype=np.float32)
        tokens = range(2048) if shared_memory else range(2048, 4096)
        assert cache.put(tokens, rows) == 512
        assert np.array_equal(cache.get(tokens), rows)


def test_a_message_longer_than_any_buffer_of_the_kernels(
    connect: Callable[..., Connection],
) -> None:
    connection = connect()
    assert connection.layout is not None
    keys = os.urandom(16 * 100_000)
    call = connection.call(m.Lookup("default", connection.layout.layout, keys), 60_000)
    connection.wait(call)
    assert isinstance(call.reply, m.Found) or call.failure == "too_many_blocks", call.failure
    assert answers(connection)


def test_a_connection_that_breaks_costs_the_calls_on_their_way_and_no_session(
    connect: Callable[..., Connection], break_last: Callable[[], None]
) -> None:
    connection = connect(ping_interval_ms=500)
    before = connection.welcome
    for _ in range(3):
        break_last()
        call = connection.call(m.Ping(), 10_000)
        connection.wait(call)
        assert call.failure == "unreachable"
        until(lambda: answers(connection), connection.poll)
    assert connection.welcome is before and connection.counters.sessions == 1


def test_what_is_leased_stays_so_when_it_breaks(break_last: Callable[[], None]) -> None:
    """Others of the engine's processes read it, by connections of their own; with verification off
    nobody would notice that the slots are somebody else's."""
    with (
        ServerProcess(
            "--pool-size", "1MiB", "--slab-size", "256KiB", "--session-check-interval", "50ms"
        ) as server,
        kvkeep.connect(server.address, required=True, **CACHE) as cache,
    ):
        rows = np.full((256, 2, 8), 7, dtype=np.float32)
        assert cache.put(range(1024), rows) == 256
        scheduler = SchedulerAdapter(
            cache.connection.shape, ClientOptions(address=server.address, ping_interval_ms=200)
        )
        assert scheduler.connection.wait_until_up(60_000)
        chain = KeyChain(root_key(cache.identity, None), cache.identity.block_tokens)
        chain.extend(range(1024))
        keys = chain.keys()
        lookup = scheduler.lookup(None, keys)
        scheduler.connection.wait(lookup.call)
        answer = scheduler.answer(lookup)
        assert answer is not None and answer.blocks == 256
        break_last()
        give_up_s = time.monotonic() + 1.5
        while time.monotonic() < give_up_s:
            scheduler.connection.poll()
            time.sleep(0.01)
        assert (
            ask(server.http, "/v1/status")["leases"] == 1
            and scheduler.connection.counters.sessions == 1
        )
        scheduler.close()


def test_a_server_that_is_killed_and_started_again_is_found_again(
    connect: Callable[..., Connection],
) -> None:
    with ServerProcess("--pool-size", "16MiB", "--slab-size", "256KiB") as server:
        connection = connect(server)
        epoch = connection.epoch
        server.stop(signal.SIGKILL)
        call = connection.call(m.Ping(), 10_000)
        connection.wait(call)
        assert call.failure == "unreachable", "at once, and not at its deadline"
        server.start()
        until(lambda: connection.up and connection.epoch not in (0, epoch), connection.poll)
        assert answers(connection)
        connection.close()


def test_a_paused_server_is_waited_for_no_longer_than_a_deadline(
    connect: Callable[..., Connection],
) -> None:
    with ServerProcess("--pool-size", "16MiB", "--slab-size", "256KiB") as server:
        connection = connect(server)
        server.send(signal.SIGSTOP)
        call = connection.call(m.Ping(), 50)
        connection.wait(call)
        assert call.failure == "deadline"
        server.send(signal.SIGCONT)
        until(lambda: connection.answering, connection.poll)
        assert connection.counters.sessions == 1
        connection.close()


def test_goodbye_is_heard(server: ServerProcess, connect: Callable[..., Connection]) -> None:
    """Also of one who does not wait for the answer."""
    for _ in range(20):  # the server may look for the dead in that very moment
        connection, before = connect(), counted(server)
        connection.start_over()
        now = until(lambda before=before: (now := counted(server)) != before and now)  # type: ignore[misc]
        if now[0] > before[0]:
            return
    raise AssertionError("they died, and have not ended")
