"""Tests for the daemon with real sockets and real memory: what it does at its doors, and to those
who push them."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import resource
import signal
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvkeep.cli.remote import ask
from kvkeep.errors import KVKeepError, PoolError, SettingsError
from kvkeep.kv.checksum import checksum
from kvkeep.server import daemon as daemon_module
from kvkeep.server.daemon import Daemon
from kvkeep.server.settings import Settings
from kvkeep.testing.process import ServerProcess, wait_for
from kvkeep.tiers.memory import Pool
from kvkeep.units import KIB, MIB
from kvkeep.wire import messages as m
from kvkeep.wire.address import tcp_host, unix_name
from kvkeep.wire.frames import HEADER_BYTES, Header, encode, seal
from kvkeep.wire.pool_files import PoolFiles, hold
from kvkeep.wire.segments import Segments
from kvkeep.wire.stream import Stream
from kvkeep_lab.simulation.peer import Peer, chain
from kvkeep_lab.simulation.store_integrity import check_integrity

FRAME_BYTES = 64 * KIB
SLACK_BYTES = MIB
BLOCKS = [bytes([at + 1]) * 512 for at in range(4)]
PATIENCE_MS = 30_000  # ends a test that has failed; nothing is measured by it


class Running:
    """A daemon in a thread of its own."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon = daemon
        self.address = daemon.address
        self.thread = threading.Thread(target=daemon.run)
        self.thread.start()

    def in_loop(self, duty: Callable[[], Any]) -> Any:
        return self.daemon.run_in_loop(duty).result(PATIENCE_MS / 1000)

    def stop(self) -> None:
        self.daemon.stop()
        self.thread.join()
        self.daemon.close()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Daemon]]:
    """Makes daemons that are closed at the end, in a directory that must then be empty of pools."""
    made: list[Daemon] = []
    (tmp_path / "shm").mkdir()

    def make_daemon(**changes: str) -> Daemon:
        given = {
            "address": "tcp://127.0.0.1:0",
            "name": "test",
            "pool-size": "1MiB",
            "slab-size": "64KiB",
            "shm-dir": str(tmp_path / "shm"),
            "state-dir": str(tmp_path / "state"),
            "max-frame-size": "64KiB",
            "max-blocks-per-request": "1024",
            "session-check-interval": "20ms",
        } | {name.replace("_", "-"): value for name, value in changes.items()}
        flags = [word for name, value in given.items() for word in (f"--{name}", value)]
        made.append(Daemon(Settings.load(None, {}, flags)))
        return made[-1]

    yield make_daemon
    for daemon in made:
        daemon.close()
    assert list((tmp_path / "shm").iterdir()) == []


@pytest.fixture
def run(make: Callable[..., Daemon]) -> Iterator[Callable[..., Running]]:
    started: list[Running] = []

    def run_daemon(**changes: str) -> Running:
        started.append(Running(make(**changes)))
        return started[-1]

    yield run_daemon
    for running in started:
        running.stop()


class Wire:
    """A connection that says what it is told, and waits for what comes."""

    def __init__(self, address: str) -> None:
        where = tcp_host(address) or unix_name(address)
        connected = socket.socket(socket.AF_UNIX if isinstance(where, str) else socket.AF_INET)
        connected.settimeout(PATIENCE_MS / 1000)
        connected.connect(where)
        self.socket, self.stream = connected, Stream(connected, 1 << 30)

    def send(self, frames: list[Any]) -> None:
        self.stream.send(frames)

    def hear(self) -> list[bytes] | None:
        """The next message; None if the connection ends first."""
        give_up_s = time.monotonic() + PATIENCE_MS / 1000
        while (frames := self.stream.next()) is None:
            if self.stream.is_over or time.monotonic() >= give_up_s:
                return None
            wait_for(self.stream, 1_000, writable=bool(self.stream.unsent_bytes))
            self.stream.flush()
            self.stream.read()
        return frames

    def exchange(self, frames: list[bytes]) -> list[bytes] | None:
        self.send(frames)
        return self.hear()


@pytest.fixture
def wire() -> Iterator[Callable[[str], Wire]]:
    """Makes connections to the daemon's address."""
    made: list[Wire] = []

    def begin(address: str) -> Wire:
        made.append(Wire(address))
        return made[-1]

    yield begin
    for one in made:
        one.stream.close()


@pytest.fixture
def connect(wire: Callable[[str], Wire]) -> Callable[[str], Peer]:
    """Makes clients that wait for the answer to what they say."""
    return lambda address: Peer(wire(address).exchange)


def store_and_load(peer: Peer, name: str = "a") -> None:
    """What every client may expect, whatever others do."""
    layout = peer.open_layout(512)
    peer.store(layout, chain(name, 4), BLOCKS)
    assert peer.load(layout, chain(name, 4)) == BLOCKS


def settled(happens: Callable[[], bool]) -> bool:
    """Waits for something that must come; the limit only ends a test that has failed."""
    for _ in range(PATIENCE_MS // 10):
        if happens():
            return True
        time.sleep(0.01)
    return False


# -- doors


def test_a_client_is_served_over_tcp(
    run: Callable[..., Running], connect: Callable[[str], Peer]
) -> None:
    running = run()
    store_and_load(connect(running.address).attach())


def test_a_client_is_served_over_a_unix_socket_of_the_owner_only(
    run: Callable[..., Running], connect: Callable[[str], Peer], tmp_path: Path
) -> None:
    path = tmp_path / "kvkeep.sock"
    running = run(address=f"ipc://{path}")
    assert path.is_socket() and path.stat().st_mode & 0o777 == 0o600
    store_and_load(connect(running.address).attach())
    running.stop()
    assert not path.exists()


def test_a_client_is_served_over_a_unix_socket_without_a_file(
    run: Callable[..., Running], connect: Callable[[str], Peer], tmp_path: Path
) -> None:
    store_and_load(connect(run(address=f"ipc://@kvkeep-test-{tmp_path.name}").address).attach())


def test_localhost_is_taken_for_127_0_0_1(
    run: Callable[..., Running], connect: Callable[[str], Peer]
) -> None:
    running = run(address="tcp://localhost:0")
    assert running.address.startswith("tcp://127.0.0.1:")
    store_and_load(connect(running.address.replace("127.0.0.1", "localhost")).attach())


def refusal(make: Callable[..., Daemon], kind: type[KVKeepError], **changes: str) -> KVKeepError:
    with pytest.raises(kind) as caught:
        make(**changes)
    assert caught.value.hint
    return caught.value


def test_a_port_in_use_is_a_clear_error_and_costs_the_first_nothing(
    run: Callable[..., Running],
    make: Callable[..., Daemon],
    connect: Callable[[str], Peer],
    tmp_path: Path,
) -> None:
    running = run()
    error = refusal(make, SettingsError, address=running.address, name="second")
    assert (
        running.address in error.message and "in use" in error.message and "--address" in error.hint
    )
    assert [path.name for path in (tmp_path / "shm").iterdir()] == ["kvkeep-test"]
    store_and_load(connect(running.address).attach())


def test_a_second_daemon_on_a_unix_socket_is_refused_and_takes_nothing_over(
    run: Callable[..., Running],
    make: Callable[..., Daemon],
    connect: Callable[[str], Peer],
    tmp_path: Path,
) -> None:
    address = f"ipc://{tmp_path / 'kvkeep.sock'}"
    running = run(address=address)
    assert (
        "another server listens"
        in refusal(make, SettingsError, address=address, name="second").message
    )
    store_and_load(connect(running.address).attach())


def test_a_unix_socket_that_a_killed_daemon_left_is_taken_over(
    run: Callable[..., Running], connect: Callable[[str], Peer], tmp_path: Path
) -> None:
    path = tmp_path / "kvkeep.sock"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    store_and_load(connect(run(address=f"ipc://{path}").address).attach())


def test_a_file_that_is_no_socket_is_left_alone(
    make: Callable[..., Daemon], tmp_path: Path
) -> None:
    precious = tmp_path / "precious"
    precious.write_text("keep me")
    assert "not a socket" in refusal(make, SettingsError, address=f"ipc://{precious}").message
    assert precious.read_text() == "keep me"


def test_a_unix_socket_in_a_directory_that_is_not_there_is_a_clear_error(
    make: Callable[..., Daemon], tmp_path: Path
) -> None:
    error = refusal(make, SettingsError, address=f"ipc://{tmp_path}/nowhere/socket")
    assert "No such file" in error.message and f"{tmp_path}/nowhere does not exist" in error.hint


def test_a_state_directory_that_cannot_be_written_stops_the_start(
    make: Callable[..., Daemon],
) -> None:
    error = refusal(make, SettingsError, state_dir="/proc/nowhere")
    assert "/proc/nowhere" in error.message and "--state-dir" in error.hint


@pytest.mark.parametrize("kind", ["ext4", "tmpfs", ""])
def test_a_pool_that_is_not_in_memory_is_warned_of(
    make: Callable[..., Daemon],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: str,
) -> None:
    monkeypatch.setattr("kvkeep.server.startup.file_system_of", lambda directory: kind)
    make()
    assert ("blocks would go to disk" in caplog.text) == (kind == "ext4")


def test_a_second_daemon_on_the_same_pool_is_refused(
    run: Callable[..., Running], make: Callable[..., Daemon], connect: Callable[[str], Peer]
) -> None:
    running = run()
    assert "in use by another kvkeep server" in refusal(make, PoolError).message
    store_and_load(connect(running.address).attach())


# -- what a client is told


def test_the_welcome_says_where_the_pool_is_and_what_the_limits_are(
    run: Callable[..., Running], connect: Callable[[str], Peer]
) -> None:
    running = run(max_leases_per_session="7", max_writing_blocks_per_session="9")
    welcome = connect(running.address).hello()
    assert welcome.limits == m.WireLimits(FRAME_BYTES, 1024, 7, 9)
    assert PoolFiles(Path(welcome.pool.directory)).is_of(welcome.epoch)
    assert Path(welcome.pool.lock).stat().st_mode & 0o777 == 0o600
    assert welcome.pool.pool_bytes == MIB


def test_a_local_client_writes_and_reads_the_pool_itself(
    run: Callable[..., Running], connect: Callable[[str], Peer]
) -> None:
    running = run()
    local, far = connect(running.address), connect(running.address).attach()
    welcome = local.hello()
    place = welcome.pool
    fence = hold(Path(place.lock))
    local.ask(m.Done, m.Attach(m.SHARED_MEMORY))
    layout = local.open_layout(512)
    plan = local.ask(m.Prepared, m.PrepareStore("default", layout, 0, b"", chain("a", 4)))
    write = local.number
    segments = Segments(
        PoolFiles(Path(place.directory)), place.segment_bytes, place.pool_bytes, welcome.epoch
    )
    for slot, block in zip(np.frombuffer(plan.slots, "<i8").tolist(), BLOCKS, strict=True):
        segments.view(slot, 512)[:] = np.frombuffer(block, np.uint8)
    sums = np.array([checksum(block) for block in BLOCKS], dtype="<u8")
    local.ask(m.Done, m.CompleteStore(write, sums.tobytes()))
    assert far.load(far.open_layout(512), chain("a", 4)) == BLOCKS
    segments.close()
    os.close(fence)


def test_a_session_too_many_is_refused_and_the_others_are_served(
    run: Callable[..., Running], connect: Callable[[str], Peer]
) -> None:
    running = run(max_sessions="2")
    first, second, third = (connect(running.address) for _ in range(3))
    first.attach()
    second.attach()
    refused = third.ask(m.Refused, m.Hello("third", 1))
    assert refused.code == "too_many_sessions" and "--max-sessions" in refused.hint
    store_and_load(first)
    second.ask(m.Done, m.Goodbye())
    store_and_load(third.attach())


# -- those who push


def check_healthy(running: Running, peer: Peer) -> None:
    """The server's inside is sound, and it serves."""
    store_and_load(peer, name=f"after {peer.number}")
    running.in_loop(lambda: check_integrity(running.daemon.store))
    assert running.daemon.service.counters.internal_errors == 0


def test_garbage_in_good_frames_costs_others_nothing(
    run: Callable[..., Running],
    connect: Callable[[str], Peer],
    wire: Callable[[str], Wire],
) -> None:
    running, rng = run(), random.Random(1)
    good = connect(running.address).attach()
    bad, own = wire(running.address), connect(running.address).attach()
    for number in range(2_000):
        kind = rng.randrange(
            4
        )  # what is whole and names a session takes it along to this connection
        session = rng.choice([0, own.session if kind == 3 else good.session])
        frames = [bytes(frame) for frame in encode(Header(session, number + 10**6), m.Ping())]
        match kind:
            case 0:
                frames = [
                    bytes(frame)
                    for frame in seal(Header(session, number), rng.randbytes(rng.randrange(1, 99)))
                ]
            case 1:
                frames[1] = rng.randbytes(len(frames[1]))
            case 2:
                frames[0] = frames[0][:8] + rng.randbytes(16) + frames[0][24:]
        bad.send(frames)
        if number % 500 == 0:
            store_and_load(good, name=f"during {number}")
        while (
            number % 100 == 0 and bad.stream.unsent_bytes
        ):  # the server reads nothing while its replies are unread
            assert bad.hear() is not None
        bad.stream.read()
        while bad.stream.next() is not None:
            pass
    assert settled(lambda: running.daemon.service.counters.bad_frames > 500)
    check_healthy(running, good)


def test_garbage_over_plain_tcp_costs_others_nothing(
    run: Callable[..., Running], connect: Callable[[str], Peer]
) -> None:
    running, rng = run(), random.Random(2)
    good = connect(running.address).attach()
    host, port = running.address.removeprefix("tcp://").split(":")
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
    ours = b"".join(encode(Header(0, 1), m.Hello("peer", 1)))
    for number in range(2_000):
        with (
            socket.create_connection((host, int(port))) as raw,
            contextlib.suppress(ConnectionError),
        ):
            match rng.randrange(4):
                case 0:
                    raw.sendall(rng.randbytes(rng.randrange(200)))
                case 1:
                    raw.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                case 2:
                    raw.sendall(greeting[: rng.randrange(len(greeting))])
                case _:
                    raw.sendall(
                        ours[: rng.randrange(len(ours))] + rng.randbytes(rng.randrange(200))
                    )
        if number % 500 == 0:
            store_and_load(good, name=f"during {number}")
    check_healthy(running, good)


def test_a_frame_a_little_too_large_is_answered_with_a_clear_error(
    run: Callable[..., Running], connect: Callable[[str], Peer]
) -> None:
    running = run()
    good, bad = connect(running.address).attach(), connect(running.address).attach()
    refused = bad.ask(m.Refused, m.Put(1, 0), [bytes(FRAME_BYTES + 1)])
    assert refused.code == "frame_too_large" and "--max-frame-size" in refused.hint
    bad.ask(m.Done, m.Ping())
    check_healthy(running, good)


@pytest.mark.parametrize(
    "sizes", [(2 * FRAME_BYTES + SLACK_BYTES + 1, 0, 0), (100, 1 << 16, 1 << 16)]
)
def test_a_huge_message_costs_its_sender_the_connection_and_nobody_else_anything(
    run: Callable[..., Running],
    connect: Callable[[str], Peer],
    wire: Callable[[str], Wire],
    sizes: tuple[int, int, int],
) -> None:
    """Its header is enough: nobody waits for the rest."""
    running = run()
    good, bad = connect(running.address).attach(), wire(running.address)
    head = struct.pack("<4sHHQQIIII", b"KVKP", m.PROTOCOL_VERSION, 0, 0, 1, *sizes, 0)
    assert len(head) == HEADER_BYTES
    bad.socket.send(head)
    assert bad.hear() is None and bad.stream.is_over
    check_healthy(running, good)


def test_a_client_that_never_reads_costs_others_nothing(
    run: Callable[..., Running],
    connect: Callable[[str], Peer],
    wire: Callable[[str], Wire],
) -> None:
    running = run()
    good, bad = connect(running.address).attach(), wire(running.address)
    ping = b"".join(encode(Header(0, 1), m.Ping()))
    with contextlib.suppress(BlockingIOError):
        while True:
            bad.socket.send(ping * 1_000)
    check_healthy(running, good)


def test_a_burst_of_small_requests_is_answered_whole(
    run: Callable[..., Running], wire: Callable[[str], Wire]
) -> None:
    one = wire(run().address)
    for number in range(1_000):
        one.send(encode(Header(0, number), m.Ping()))
    assert all(one.hear() is not None for _ in range(1_000))


def test_a_turn_ends_after_a_while_though_there_is_more_to_answer(
    run: Callable[..., Running], wire: Callable[[str], Wire], monkeypatch: pytest.MonkeyPatch
) -> None:
    running = run()
    handled: list[float | None] = []  # since when the loop was busy: its turn

    def slow(frames: list[bytes], now_ms: int, caller: object, peer: int) -> None:
        time.sleep(0.01)
        handled.append(running.daemon.busy_since)

    monkeypatch.setattr(running.daemon.service, "handle", slow)
    one = wire(running.address)
    for number in range(60):
        one.send(encode(Header(0, number), m.Ping()))
    assert settled(lambda: len(handled) == 60)
    assert max(Counter(handled).values()) <= 3


def test_as_many_files_may_be_open_as_the_system_allows(make: Callable[..., Daemon]) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(before[0], 1024), before[1]))
    try:
        make()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_client_that_is_gone_before_its_answer_costs_others_nothing(
    run: Callable[..., Running],
    connect: Callable[[str], Peer],
    wire: Callable[[str], Wire],
) -> None:
    running = run()
    good = connect(running.address).attach()
    for number in range(50):
        hasty = wire(running.address)
        hasty.send(encode(Header(0, number), m.Hello("hasty", 1)))
        hasty.stream.close()
    check_healthy(running, good)


class PoorServer(ServerProcess):
    """One that may have so many descriptors, and no more."""

    DESCRIPTORS = 120

    def command(self) -> list[str]:
        return ["sh", "-c", f'ulimit -n {self.DESCRIPTORS}; exec "$0" "$@"', *super().command()]

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))


def test_who_takes_all_descriptors_does_not_end_the_server(
    connect: Callable[[str], Peer], wire: Callable[[str], Wire]
) -> None:
    """Those who are connected are served, and others afterwards."""
    with PoorServer("--pool-size", "64MiB", "--session-check-interval", "50ms") as server:
        peer = connect(server.address).attach()
        store_and_load(peer)
        idle = [wire(server.address) for _ in range(PoorServer.DESCRIPTORS - 20)]
        assert settled(lambda: server.descriptors() >= PoorServer.DESCRIPTORS - 1)
        for _ in range(10):
            time.sleep(0.05)  # a look or more
            store_and_load(peer)
        for each in idle:
            each.stream.close()
        late = Peer(lambda frames: wire(server.address).exchange(frames))
        assert settled(lambda: late.say(m.Hello("late", 1)) is not None)
        store_and_load(connect(server.address).attach())
        assert ask(server.http, "/v1/status")["counters"]["internal_errors"] == 0


# -- the loop and its end


def test_the_pool_is_filled_beside_the_loop(make: Callable[..., Daemon]) -> None:
    running = Running(make())
    assert running.daemon.ready.wait(PATIENCE_MS / 1000)
    assert running.in_loop(lambda: running.daemon.store.slabs.slabs) == 16
    assert running.daemon.degraded == ""
    running.stop()


def test_a_pool_that_cannot_be_filled_is_served_as_far_as_it_goes(
    make: Callable[..., Daemon], connect: Callable[[str], Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon_module, "Pool", partial(Pool, segment_bytes=64 * KIB))
    daemon = make()
    monkeypatch.setattr(os, "posix_fallocate", no_space)
    running = Running(daemon)
    assert daemon.ready.wait(PATIENCE_MS / 1000)
    assert "could not be had" in daemon.degraded
    peer = connect(running.address).attach()
    plan = peer.ask(
        m.Prepared, m.PrepareStore("default", peer.open_layout(512), 0, b"", chain("a", 20))
    )
    assert plan.refused == 4, "one slab of sixteen slots is there"
    peer.ask(m.Done, m.AbandonStore([peer.number]))
    running.stop()


def test_a_pool_of_which_nothing_can_be_filled_stops_the_start(
    make: Callable[..., Daemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", no_space)
    assert "could not be had" in refusal(make, PoolError).message


def no_space(descriptor: int, offset: int, nbytes: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_duty_that_fails_fails_for_whoever_asked(
    run: Callable[..., Running], connect: Callable[[str], Peer]
) -> None:
    running = run()
    with pytest.raises(ZeroDivisionError):
        running.in_loop(lambda: 1 // 0)
    store_and_load(connect(running.address).attach())


def test_a_store_in_progress_is_finished_before_the_end(
    run: Callable[..., Running], connect: Callable[[str], Peer], tmp_path: Path
) -> None:
    running = run(shutdown_grace="60s")
    peer = connect(running.address).attach()
    layout = peer.open_layout(512)
    peer.ask(m.Prepared, m.PrepareStore("default", layout, 0, b"", chain("a", 4)))
    write = peer.number
    running.daemon.stop()
    assert settled(lambda: running.daemon.service.draining)
    assert connect(running.address).refusal(m.Hello("late", 1)) == "shutting_down"
    assert peer.refusal(m.PrepareStore("default", layout, 0, b"", chain("b", 1))) == "shutting_down"
    peer.ask(m.Done, m.Put(write, 0), BLOCKS)
    sums = np.array([checksum(block) for block in BLOCKS], dtype="<u8")
    assert peer.ask(m.Done, m.CompleteStore(write, sums.tobytes())).count == 4
    running.stop()
    assert list((tmp_path / "shm").iterdir()) == []


def test_a_real_server_told_to_end_finishes_a_store_in_progress_first(
    connect: Callable[[str], Peer],
) -> None:
    with ServerProcess(
        "--pool-size", "1MiB", "--slab-size", "64KiB", "--shutdown-grace", "60s"
    ) as server:
        pool = Path("/dev/shm") / f"kvkeep-{server.name}"
        peer, late = connect(server.address).attach(), connect(server.address)
        peer.ask(
            m.Prepared, m.PrepareStore("default", peer.open_layout(512), 0, b"", chain("a", 4))
        )
        write = peer.number
        server.send(signal.SIGTERM)
        assert settled(lambda: isinstance(late.say(m.Hello("late", 1)), m.Refused))
        assert pool.exists()
        peer.ask(m.Done, m.Put(write, 0), BLOCKS)
        sums = np.array([checksum(block) for block in BLOCKS], dtype="<u8")
        assert peer.ask(m.Done, m.CompleteStore(write, sums.tobytes())).count == 4
        assert server.process is not None and server.process.wait(PATIENCE_MS / 1000) == 0
        assert (pool / "index-header").exists(), "the next server finds what was stored"


def test_grace_ends_for_a_client_that_does_not_finish(
    run: Callable[..., Running], connect: Callable[[str], Peer], tmp_path: Path
) -> None:
    running = run(shutdown_grace="100ms")
    peer = connect(running.address).attach()
    peer.ask(m.Prepared, m.PrepareStore("default", peer.open_layout(512), 0, b"", chain("a", 4)))
    running.stop()
    assert list((tmp_path / "shm").iterdir()) == []


def test_closing_without_ever_running_leaves_nothing(
    make: Callable[..., Daemon], tmp_path: Path
) -> None:
    make().close()
    assert list((tmp_path / "shm").iterdir()) == []


def test_the_index_goes_before_the_lock_of_anybody_who_may_be_at_work(
    make: Callable[..., Daemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = make()
    daemon.store.open_session(1)
    daemon.service.sessions.add(1, "client", 1, daemon.pool.watch(1), 0)
    removed: list[str] = []
    unlink = Path.unlink

    def note(path: Path, missing_ok: bool = False) -> None:
        removed.append(path.name.partition("-")[0])
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", note)
    daemon.close()
    assert removed[:2] == ["index", "session"]


def test_nobody_waits_for_a_loop_that_has_ended(make: Callable[..., Daemon]) -> None:
    """Or a request by HTTP at that moment would hang until it is cut off, with a traceback in the
    log."""
    running = Running(make())
    stop = running.daemon.run_in_loop(
        lambda: (running.daemon.stop(), running.daemon.run_in_loop(lambda: "told"))[1]
    )
    assert stop.result(10).result(10) == "told"
    running.thread.join(10)
    assert running.daemon.run_in_loop(lambda: "never").cancelled()
    running.daemon.close()


def test_what_fails_and_nobody_waits_for_is_counted_and_logged(
    make: Callable[..., Daemon], caplog: pytest.LogCaptureFixture
) -> None:
    running = Running(make())
    running.daemon.do_in_loop(lambda: 1 // 0)
    assert running.in_loop(lambda: running.daemon.service.counters.internal_errors) == 1
    running.stop()
    running.daemon.do_in_loop(lambda: 1 // 0)  # nobody is left to do it
    [said] = [
        record for record in caplog.records if "background task failed" in record.getMessage()
    ]
    assert said.exc_info is not None and said.exc_info[0] is ZeroDivisionError


# --- strangers ------------------------------------------------------------------------------------


def test_a_foreign_client_gets_one_line_that_says_what_it_seems_to_be(
    run: Callable[..., Running],
    wire: Callable[[str], Wire],
    caplog: pytest.LogCaptureFixture,
) -> None:
    running = run()
    for _ in range(3):
        foreign = wire(running.address)
        foreign.socket.send(
            b"\xff" + bytes(7) + b"\x01\x7f"
        )  # as LMCache's client does, and an older one of ours
        assert foreign.hear() is None
    for number in range(3):
        newer = wire(running.address)
        reply = newer.exchange(encode(Header(0, number, m.PROTOCOL_VERSION + 1), m.Ping()))
        assert reply is not None and b"protocol_version" in reply[1], (
            "it is told that it has another version"
        )
        newer.stream.close()
    said: list[str] = []

    def heard_of_both() -> bool:
        said[:] = [line for line in caplog.messages if "seems to be" in line]
        return len(said) >= 2

    assert settled(heard_of_both)
    expected = ["a ZMQ client", f"a kvkeep of protocol version {m.PROTOCOL_VERSION + 1}"]
    assert [line.split(": ")[0] for line in said] == [
        f"127.0.0.1 talks to {running.address} and seems to be {kind}" for kind in expected
    ]
