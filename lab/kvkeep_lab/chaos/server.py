"""The server process of a chaos run: the real service, store and pool, on a simulated network, and
its ends."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from kvkeep.errors import RequestError
from kvkeep.server.auth import Caller
from kvkeep.server.connections import Connections
from kvkeep.server.listeners import Listening
from kvkeep.server.scrub import Scrub
from kvkeep.server.service import Service
from kvkeep.server.startup import open_store
from kvkeep.store.plans import Limits
from kvkeep.tiers.memory import Pool
from kvkeep.wire.frames import decode_header, decode_reply
from kvkeep.wire.messages import PoolPlace, Refused, WireLimits
from kvkeep.wire.segments import segment_path
from kvkeep_lab.chaos.disk import ChaosDisk
from kvkeep_lab.chaos.network import FAMILIES, OWN_UID, ChaosNetwork
from kvkeep_lab.chaos.record import Record, Violation
from kvkeep_lab.chaos.shared import ChaosShared
from kvkeep_lab.chaos.sockets import ChaosEpoll, ChaosSocket
from kvkeep_lab.simulation.simulation import Process, Simulation

_CHECK_US = 100_000  # how often it looks for dead sessions
_NETWORK_TIMEOUT_MS = 600  # three pings; a paused client is silent for longer
_NETWORK_LEASE_MS = 300  # some loads and stores over the network take longer
_FRAME_BYTES = 1 << 20
_MOST_CONNECTIONS = 64
_READ_AHEAD_BYTES = 1 << 20  # beyond a message: the largest read
_TURN_US = (10, 200)  # from a change to the loop's turn
# From one look at the clock to the next. Sometimes something takes long.
_LOOK_US = (*range(0, 300, 10), 15_000)


class _CutOff(BaseException):
    """The process is gone in the middle of something. No `except Exception` stops it."""


class ChaosConnections(Connections):
    """The server's connections, on sockets of the simulation."""

    def _peer_uid(self, connected: Any) -> int | None:
        assert isinstance(connected, ChaosSocket)
        connected.before_recv = self._before_recv
        return connected.uid

    def _before_recv(self, end: ChaosSocket) -> None:
        peer = self._peers.get(end.fileno())
        if peer is not None and peer.stream.unsent_bytes:
            text = "the server reads from a peer that does not take its replies"
            end.process.simulation.fail(Violation("broken_rules", text))

    def check(self) -> None:
        """What it holds is counted, and a peer whose replies wait is waited for."""
        for peer in self._peers.values():
            stream = peer.stream
            if bool(stream.unsent_bytes) != peer.waits_to_send or (
                stream.is_over and not stream.has_next
            ):
                raise Violation(
                    "broken_rules",
                    f"the server forgets a connection with {stream.unsent_bytes} bytes unsent",
                )
            if (
                peer.held_bytes != stream.held_bytes
                or stream._read_bytes > self._most_message_bytes + _READ_AHEAD_BYTES
            ):
                raise Violation(
                    "broken_rules",
                    f"{stream.held_bytes} bytes are held, and {peer.held_bytes} counted",
                )


def cut_off_after(lines: int, action: Callable[[], object]) -> None:
    """Runs it, up to so many lines of the store's code."""
    left = lines

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        if "/kvkeep/store/" not in frame.f_code.co_filename:
            return None
        if event == "line":
            left -= 1
            if left < 0:
                raise _CutOff
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    except _CutOff:
        pass
    finally:
        sys.settrace(before)


class ChaosServer:
    """One server at a time, under one name; `start` makes the next."""

    def __init__(
        self,
        simulation: Simulation,
        network: ChaosNetwork,
        record: Record,
        directory: Path,
        pool_bytes: int,
        slab_bytes: int,
        seed: int,
        disk: ChaosDisk | None = None,
        shared: ChaosShared | None = None,
        host: int = 0,
    ) -> None:
        self.disk = disk
        self.shared = shared
        self.host = host
        self.before_tier_copy: Callable[[int, bool], None] = lambda slot, is_write: None
        self.after_movement: Callable[[], None] = lambda: None
        self.after_request: Callable[[], None] = lambda: None
        self.after_start: Callable[[], None] = lambda: None
        self._simulation = simulation
        self._network = network
        self._record = record
        self._directory = directory
        self._sizes = (pool_bytes, slab_bytes)
        self._random = random.Random(f"server {seed}{f' of host {host}' if host else ''}")
        # The next request is cut off after so many lines of the store's code: the process is gone,
        # and this is next.
        self.crash_in_request: tuple[int, Callable[[], None]] | None = None
        self._turn_is_due = False
        self._spent_us = 0  # in this turn
        self._answered: set[tuple[int, int]] = set()
        self.hit_blocks = 0  # of all lives that are over
        self.adopted_blocks = 0
        self._lives = 0
        self._stumble = "while it looked for dead sessions"
        self.process = Process(simulation, self._name)
        self.process.dead = True  # until the first is started

    # -- its life

    @property
    def is_up(self) -> bool:
        return not self.process.dead

    @property
    def tier(self) -> ChaosDisk | ChaosShared | None:
        """What is below memory."""
        return self.disk or self.shared

    @property
    def _name(self) -> str:
        return f"server {f'{self.host}.' if self.host else ''}{self._lives}"

    def start(self, *, fresh: bool = False) -> None:
        """A new server, which adopts what the one before it left; `fresh`: which begins empty."""
        assert not self.is_up
        self._lives += 1
        offset_us = self.process.offset_us
        self.process = Process(self._simulation, self._name)
        self.process.offset_us = offset_us
        self.epoch = self._random.getrandbits(62) + 1
        pool_bytes, slab_bytes = self._sizes
        limits = Limits()
        self.pool = Pool(
            self._directory, "chaos", pool_bytes, slab_bytes, self.epoch, keep=True, fresh=fresh
        )
        on_disk_bytes = self.tier.nbytes if self.tier else 0
        self.store, warm = open_store(self.pool, limits, self.process.now_ms(), on_disk_bytes)
        if not self.pool.filled_bytes:
            self.store.add_slabs(*self.pool.fill_next())
        self.store.blocks.a_turn = self._random.choice((2, 8, 1024))
        self.service = Service(
            self.store,
            self.pool.segments,
            PoolPlace(str(self.pool.directory), "", self.pool.segment_bytes, self.pool.pool_bytes),
            WireLimits(
                _FRAME_BYTES,
                limits.blocks_per_request,
                limits.leases_per_session,
                limits.writing_blocks_per_session,
            ),
            self.epoch,
            self.pool.watch,
            _NETWORK_TIMEOUT_MS,
            old_sessions=self.pool.old_sessions,
            network_lease_ms=_NETWORK_LEASE_MS,
        )
        if self.tier is not None:
            self._open_tier(self.tier, self.process)
        self._answer = self.service._answer
        self.service._answer = self._answer_or_tell  # type: ignore[method-assign, assignment]
        self._scrub = Scrub(
            self.store, self.pool.segments, self.service.counters, warm.adoption.rows
        )
        self.adopted_blocks += warm.adoption.blocks
        self.memory = os.stat(segment_path(self.pool.directory, 0)).st_ino
        self._answered.clear()
        self._turn_is_due = False
        self._epoll = ChaosEpoll(self._network.find)
        self.connections = ChaosConnections(
            self._listen(),
            _MOST_CONNECTIONS,
            _FRAME_BYTES,
            counters=self.service.counters,
            clock=self._now_s,
            epoll=self._epoll,
        )
        self._look_after_sessions(self.process)
        adoption = warm.adoption
        found = (
            f"{adoption.blocks} blocks adopted, {adoption.dropped} dropped, {adoption.held} held"
        )
        self._record.tell(
            self.process.name, f"serves, {found}" if self.pool.is_left else "serves, empty"
        )
        self.after_start()

    def _open_tier(self, tier: ChaosDisk | ChaosShared, process: Process) -> None:
        self.service.tiers = tier.open(self.pool, self.store, self.epoch)
        tier.after_result = lambda: self._rouse(process)
        tier.before_copy = lambda slot, is_write: self.before_tier_copy(slot, is_write)

    def _listen(self) -> list[Listening]:
        """By TCP, and by its Unix socket unless another process has that name."""
        process, listening = self.process, []
        for family in FAMILIES:
            with (
                contextlib.suppress(OSError)
                if family == socket.AF_UNIX
                else contextlib.nullcontext()
            ):
                listener: Any = self._network.listen(
                    process, family, OWN_UID, lambda: self._rouse(process)
                )
                listening.append(Listening(listener, f"simulated {family}"))
        return listening

    def crash(self) -> None:
        """Its process is gone, and with it its locks and its mappings, and nothing else."""
        self._end()
        if self.tier is not None:
            self.tier.end()
        for session in self.service.sessions.all():
            if session.watch is not None:
                os.close(session.watch._descriptor)
        self.pool.let_go()

    def stop(self, *, keep: bool) -> None:
        """Ends in order, and leaves the pool to the next, or not."""
        self._end()
        if self.tier is not None:
            self.tier.stop(self.process.now_ms())
        if keep:
            self.service.sessions.leave_all()
        for session in self.service.sessions.all():
            self.service.sessions.remove(session)
        self.pool.close(keep=keep)

    def _end(self) -> None:
        assert self.is_up
        self._record.tell(self.process.name, "is gone")
        self.hit_blocks += self.service.counters.hit_blocks
        self.process.kill()
        self.crash_in_request = None
        self._network.end_process(self.process)

    def pause(self) -> None:
        self.process.paused = True

    def resume(self) -> None:
        self.process.paused = False
        self._rouse(self.process)

    # -- its work

    def _now_s(self) -> float:
        """Its clock. Each look at it takes a moment, so that a long turn ends."""
        self._spent_us += self._random.choice(_LOOK_US)
        return (self._simulation.now_us + self.process.offset_us + self._spent_us) / 1e6

    def _rouse(self, process: Process) -> None:
        """Something has changed at one of its sockets, or it goes on."""
        if process is self.process and not (self._turn_is_due or process.dead or process.paused):
            self._turn_is_due = True
            delay_us = self._random.randint(*_TURN_US) + self._spent_us
            self._simulation.after(delay_us, lambda: self._turn(process))

    def _turn(self, process: Process) -> None:
        """One turn of the daemon's loop."""
        if process is not self.process:
            return
        self._turn_is_due, self._spent_us = False, 0
        if process.dead or process.paused:
            return
        try:
            self.connections.wait(0)
            self.connections.serve(self._handle)
        except _CutOff:
            assert self.crash_in_request is not None
            _, then = self.crash_in_request
            self.crash()
            then()
            return
        self._move()
        self.connections.check()
        if self.service.counters.internal_errors:
            raise Violation(
                "broken_rules", f"the server failed inside on a request: {self._stumble}"
            )
        if self.connections._ready or self._epoll.poll() or self._has_to_move():
            self._rouse(process)

    def _move(self) -> None:
        """What the loop does for the tier."""
        if self.tier is not None:
            evictions = self.store.eviction.evictions
            self.tier.turn(self.process.now_ms())
            if self.store.eviction.evictions > evictions:
                self.after_movement()

    def _has_to_move(self) -> bool:
        movement = self.tier.movement if self.tier else None
        return movement is not None and movement.has_to_do

    def _handle(self, frames: list[bytes], caller: Caller, peer: int) -> list[Any] | None:
        def handle() -> list[Any] | None:
            return self.service.handle(frames, self.process.now_ms(), caller, peer)

        self._record.messages += 1
        if self.crash_in_request is not None:
            cut_off_after(self.crash_in_request[0], handle)
            raise _CutOff
        try:
            reply = handle()
            if reply is not None:
                self._record.messages += 1
                self._note_reply(reply)
            if not self.service.counters.internal_errors:
                self.after_request()
                self._tidy()
        except Exception as error:  # guard: the loop survives whatever is raised; the run does not
            self._simulation.fail(error)
            raise
        return reply

    def _tidy(self) -> None:
        """Carries on with what a request has begun: sometimes before the next one comes, sometimes
        not."""
        if self.store.has_to_tidy and self._random.random() < 0.7:
            self.store.tidy(self.process.now_ms())

    def _answer_or_tell(self, *request: Any) -> Any:
        """Keeps what the service only logs."""
        try:
            return self._answer(*request)
        except RequestError:
            raise
        except Exception as error:  # guard: raised again
            place = traceback.extract_tb(error.__traceback__)[-1]
            self._stumble = (
                f"{type(error).__name__}: {error}, at {Path(place.filename).name}:{place.lineno}"
            )
            raise

    def _note_reply(self, reply: list[bytes]) -> None:
        """Every request gets one reply. Only one of no session, or none any more, may be told so
        twice."""
        header = decode_header(reply)
        said = decode_reply(header, reply)
        request = (header.session, header.number)
        if header.session and not (isinstance(said, Refused) and said.code == "unknown_session"):
            if request in self._answered:
                raise Violation("broken_rules", f"request {header.number} was answered twice")
            self._answered.add(request)

    def _look_after_sessions(self, process: Process) -> None:
        if process.dead:
            return
        if not process.paused:
            self.service.end_dead_sessions(process.now_ms())
            self.connections.tend(self.service.sessions.is_on)
            self._scrub.judge(self._scrub.look(self._scrub.take()))
            self._move()
            self._tidy()
            if self._has_to_move():
                self._rouse(process)
        self._simulation.after(_CHECK_US, lambda: self._look_after_sessions(process))
