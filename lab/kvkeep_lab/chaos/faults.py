"""The faults that come at a moment of a chaos run: each does what its name says, to whomever its
seed picks."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable, Sequence

from kvkeep.engine.engine import Engine
from kvkeep.errors import RequestError
from kvkeep.kv.identity import tenant_of
from kvkeep.store.operators import clear, set_default_limit, set_default_quota, set_limit, set_quota
from kvkeep.store.table import READY
from kvkeep_lab.chaos.checks import Checks
from kvkeep_lab.chaos.client import ChaosClient, Stop
from kvkeep_lab.chaos.network import FAMILIES, ChaosNetwork, Stranger
from kvkeep_lab.chaos.plan import SALTS, Moment
from kvkeep_lab.chaos.record import Record
from kvkeep_lab.chaos.server import ChaosServer
from kvkeep_lab.simulation.simulation import Simulation

_DOWN_US = (1_000, 400_000)
_PAUSE_US = (5_000, 900_000)
_SOON_US = (1_000, 60_000)
_SHORT_US = (20_000, 400_000)
_LONG_US = (200_000, 1_500_000)
_FOR_EVER_US = 86_400_000_000
_NEVER_READS = 0.3  # of stalled connections
_TRY_AGAIN_US = 20_000
_DRAIN_US = (1_000, 200_000)
_PROVEN_COLUMNS = ("keys", "parent", "tenant", "layout", "check", "slot", "seal")
_CUT_US = (200_000, 14_000_000)
_JUMP_US = (500_000, 86_400_000_000)


class Faults:
    """Carries out moments. What is impossible just then (a crash of a server that is down) does not
    happen."""

    def __init__(
        self,
        simulation: Simulation,
        network: ChaosNetwork,
        server: ChaosServer,
        clients: Sequence[ChaosClient],
        checks: Checks,
        record: Record,
    ) -> None:
        self.strangers: list[Stranger] = []
        self._simulation = simulation
        self._network = network
        self._server = server
        self._clients = clients
        self._checks = checks
        self._record = record

    def carry_out(self, moment: Moment) -> None:
        chance = random.Random(moment.seed)
        if moment.fault.startswith("server_") or hasattr(self, f"_{moment.fault}"):
            happened = getattr(self, f"_{moment.fault}")(chance)
        else:
            happened = self._in_engine(moment.fault, chance)
        if happened:
            if not moment.fault.endswith("in_copy"):  # they are counted when they happen
                self._count(moment.fault)
            self._checks.forget_usage()

    # -- the server

    def _server_crash(self, chance: random.Random) -> bool:
        if not self._server.is_up:
            return False
        self._server.crash()
        self._start_later(chance)
        return True

    def _server_crash_in_request(self, chance: random.Random) -> bool:
        if not self._server.is_up:
            return False
        self._server.crash_in_request = (
            int(chance.expovariate(1 / 80)),
            lambda: self._start_later(chance),
        )
        return True

    def _torn_index(self, chance: random.Random) -> bool:
        """A crash after which part of what the index says about a ready block is nonsense."""
        if not self._server.is_up:
            return False
        table = self._server.store.blocks.table
        ready = [row for row in table.live_rows().tolist() if table.state[row] == READY]
        if not ready:
            return False
        row, column = chance.choice(ready), chance.choice(_PROVEN_COLUMNS)
        if column == "slot" and table.many.pins.any():
            # only a reader's checksum can tell then that it reads what is another's by now
            return False
        cells = (
            table.keys.words[row : row + 1]
            if column == "keys"
            else getattr(table.many, column)[row : row + 1]
        )
        octets = cells.view("u1").reshape(-1)
        octets[chance.randrange(len(octets))] ^= chance.randrange(1, 256)
        self._server.crash()
        self._start_later(chance)
        return True

    def _server_crash_then_fresh(self, chance: random.Random) -> bool:
        if not self._server.is_up:
            return False
        self._server.crash()
        self._start_later(chance, fresh=True)
        return True

    def _power_cut(self, chance: random.Random) -> bool:
        """The server's host is gone with all that was in memory, and what was not synced to its
        disk."""
        if not self._server.is_up:
            return False
        self._server.crash()
        if self._server.disk is not None:
            self._server.disk.cut_power()
        self._start_later(chance, fresh=True)
        for client in self._clients:
            if client.item.shared_memory and not client.process.dead:
                client.crash()
                self._simulation.after(chance.randint(*_DOWN_US), client.start_if_dead)
        return True

    def _evicted_memory(self, chance: random.Random) -> bool:
        """Memory loses all blocks, as if others had taken their place: only the tier has them."""
        if not self._server.is_up or self._server.tier is None:
            return False
        clear(self._server.store)
        for client in self._clients:
            client.commands.append(lambda engine, client=client: _forget(engine, client, chance))  # type: ignore[misc]
        return True

    # -- the shared tier

    def _service_restart(self, chance: random.Random) -> bool:
        """It begins empty: hosts tell each other anew what was cleared."""
        if self._server.shared is None:
            return False
        self._server.shared.service.empty()
        return True

    def _lost_entry(self, chance: random.Random) -> bool:
        """It evicts an entry of the log of clears."""
        if self._server.shared is None:
            return False
        return self._server.shared.service.lose_clear(chance)

    def _cut_off(self, chance: random.Random) -> bool:
        """The host does not reach the service: it is refused, or hears nothing."""
        if self._server.shared is None:
            return False
        medium, now_us = self._server.shared.medium, self._simulation.now_us
        medium.cut_until_us = now_us + chance.randint(*_CUT_US)
        medium.is_silent = chance.random() < 0.5
        return True

    # -- the server's process

    def _server_restart(self, chance: random.Random) -> bool:
        if not self._server.is_up:
            return False
        self._server.stop(keep=chance.random() < 0.75)
        self._start_later(chance)
        return True

    def _server_pause(self, chance: random.Random) -> bool:
        server, process = self._server, self._server.process
        if not server.is_up or process.paused:
            return False
        server.pause()
        self._simulation.after(
            chance.randint(*_PAUSE_US), lambda: server.resume() if process.paused else None
        )
        return True

    def _server_of_other_user(self, chance: random.Random) -> bool:
        """The server ends, and somebody else listens in its place: on both sockets, or on one of
        them, and then beside the next server."""
        if not self._server.is_up or self.strangers:
            return False
        self._server.crash()
        families = chance.choice((FAMILIES, FAMILIES[:1], FAMILIES[1:]))
        stranger = Stranger(self._network, families)
        self.strangers.append(stranger)
        self._simulation.after(chance.randint(*_LONG_US), self.end_strangers)
        self._start_later(chance, _LONG_US)
        return True

    def end_strangers(self) -> None:
        for stranger in self.strangers:
            stranger.leave()
        self.strangers.clear()

    def _stalled_connection(self, chance: random.Random) -> bool:
        """For a while, or because one side never reads again, until the connection is given up."""
        never_reads = chance.random() < _NEVER_READS
        return self._network.stall(
            chance, _FOR_EVER_US if never_reads else chance.randint(*_LONG_US)
        )

    def _server_clock_jump(self, chance: random.Random) -> bool:
        self._server.process.jump(chance.randint(*_JUMP_US))
        return True

    def _start_later(
        self, chance: random.Random, down_us: tuple[int, int] = _DOWN_US, *, fresh: bool = False
    ) -> None:
        def start() -> None:
            # by a stranger: a server without its port does not start
            if self._network.is_taken(socket.AF_INET):
                self._simulation.after(_TRY_AGAIN_US, start)
            elif not self._server.is_up:
                self._server.start(fresh=fresh)

        self._simulation.after(chance.randint(*down_us), start)

    def _flipped_pool_bit(self, chance: random.Random) -> bool:
        """Mostly in a block that is ready, else anywhere."""
        if not self._server.is_up:
            return False
        store = self._server.store
        table, rows = store.blocks.table, store.blocks.table.live_rows().tolist()
        ready = [row for row in rows if table.state[row] == READY]
        at = chance.randrange(store.pool_bytes)
        if ready and chance.random() < 0.8:
            row = chance.choice(ready)
            layout = store.layouts[table.layout[row]]
            shard = chance.randrange(layout.shards)
            at = (
                table.slot[row]
                + layout.shard_offsets[shard]
                + chance.randrange(layout.shard_bytes[shard])
            )
        self._server.pool.segments.view(at, 1)[0] ^= 1 << chance.randrange(8)
        for row in rows:
            if (
                table.slot[row]
                <= at
                < table.slot[row] + store.layouts[table.layout[row]].slot_bytes
            ):
                self._checks.flipped.add((table.keys[row], table.slot[row]))
        return True

    # -- operators

    def _quota_change(self, chance: random.Random) -> bool:
        if not self._server.is_up:
            return False
        store, now_ms = self._server.store, self._server.process.now_ms()
        tenant, is_own = tenant_of(chance.choice(SALTS)), chance.random() < 0.8
        sizes = (None, 0, store.pool_bytes // 4, store.pool_bytes // 2, 2 * 4096 + 1, 4 * 4096 - 1)
        nbytes, is_quota = chance.choice(sizes), chance.random() < 0.6
        known = store.tenants.get(tenant)
        if known is not None and known.usage_bytes and chance.random() < 0.5:
            # Less than a block is above this quota, so no block may be taken.
            nbytes, is_quota, is_own = known.usage_bytes - 1, True, True
        try:
            if is_quota:
                set_quota(store, tenant, nbytes, now_ms) if is_own else set_default_quota(
                    store, nbytes, now_ms
                )
            else:
                set_limit(store, tenant, nbytes, now_ms) if is_own else set_default_limit(
                    store, nbytes, now_ms
                )
        except RequestError:  # it does not fit what others were promised, or what the tenant was
            return False
        if self._server.tier is not None and self._server.tier.movement is not None:
            self._server.tier.movement.follow_quotas([tenant])
        return True

    def _clear(self, chance: random.Random) -> bool:
        if not self._server.is_up:
            return False
        names = sorted(tenant.name for tenant in self._server.store.tenants)
        tenant = chance.choice(names) if names and chance.random() < 0.5 else None
        if self._server.tier is not None:
            self._server.tier.clear(tenant)
        clear(self._server.store, tenant)
        return True

    def _drain(self, chance: random.Random) -> bool:
        """Takes no more, and is replaced a little later."""
        server, process = self._server, self._server.process
        if not server.is_up:
            return False
        server.service.draining = True

        def end() -> None:
            if not process.dead:
                server.stop(keep=True)
                self._start_later(chance)

        self._simulation.after(chance.randint(*_DRAIN_US), end)
        return True

    # -- clients

    def _client(self, chance: random.Random) -> ChaosClient | None:
        alive = [client for client in self._clients if not client.process.dead]
        return chance.choice(alive) if alive else None

    def _client_crash(self, chance: random.Random) -> bool:
        client = self._client(chance)
        if client is None:
            return False
        client.crash()
        self._simulation.after(chance.randint(*_DOWN_US), client.start_if_dead)
        return True

    def _client_crash_in_copy(self, chance: random.Random) -> bool:
        down_us = chance.randint(*_DOWN_US)

        def crash(client: ChaosClient) -> int:
            self._count("client_crash_in_copy")
            client.crash()
            self._simulation.after(down_us, client.start_if_dead)
            return 1

        return self._stop_in_copy(self._client(chance), [Stop(crash)])

    def _client_pause_in_copy(self, chance: random.Random) -> bool:
        pause_us = chance.randint(*_PAUSE_US)

        def pause(client: ChaosClient) -> int:
            self._count("client_pause_in_copy")
            client.pause(pause_us)
            return 1

        return self._stop_in_copy(self._client(chance), [Stop(pause)])

    def _server_crash_in_copy(self, chance: random.Random) -> bool:
        """The next server is there before the copy goes on, and others are at work with it. Before
        and after it other copies are slow, so that more of them wait."""

        def slow(count: int) -> list[Stop]:
            stops_us = [chance.randint(*_SHORT_US) for _ in range(count)]
            return [Stop(lambda client, us=us: us, in_store=True) for us in stops_us]  # type: ignore[misc]

        def crash_server() -> None:
            if self._server.is_up:
                self._server.crash()
                self._start_later(chance, _SOON_US)

        def crash(client: ChaosClient) -> int:
            self._count("server_crash_in_copy")
            self._simulation.after(chance.choice((1, 3_000, 60_000)), crash_server)
            if chance.random() < 0.3:
                client.pause(stop_us)
            return stop_us

        stop_us = chance.randint(*_LONG_US)
        stops = [
            *slow(chance.choice((0, 2, 7))),
            Stop(crash, in_store=True),
            *slow(chance.choice((0, 3, 9))),
        ]
        shared = [
            client
            for client in self._clients
            if client.item.shared_memory and not client.process.dead
        ]
        client = (
            chance.choice([each for each in shared if each.item.kept] or shared) if shared else None
        )
        return self._stop_in_copy(client, stops)

    def _stop_in_copy(self, client: ChaosClient | None, stops: list[Stop]) -> bool:
        if client is not None:
            client.stops.extend(stops)
        return client is not None

    def _count(self, fault: str) -> None:
        self._record.faults[fault] += 1
        self._record.tell("fault", fault.replace("_", " "))

    def _client_pause(self, chance: random.Random) -> bool:
        client = self._client(chance)
        if client is None or client.process.paused:
            return False
        client.pause(chance.randint(*_PAUSE_US))
        return True

    def _client_clock_jump(self, chance: random.Random) -> bool:
        client = self._client(chance)
        if client is not None:
            client.process.jump(chance.randint(*_JUMP_US))
        return client is not None

    def _in_engine(self, fault: str, chance: random.Random) -> bool:
        client = self._client(chance)
        command = {"abort": _abort, "preemption": _preempt, "forgotten_prefixes": _forget}[fault]
        if client is not None:
            client.commands.append(lambda engine: command(engine, client, chance))
        return client is not None


_Command = Callable[[Engine, ChaosClient, random.Random], None]


def _abort(engine: Engine, client: ChaosClient, chance: random.Random) -> None:
    if live := [request for _, request in client.turns if not request.finish_reason]:
        engine.abort(chance.choice(live).request_id)


def _preempt(engine: Engine, client: ChaosClient, chance: random.Random) -> None:
    if live := [request for _, request in client.turns if not request.finish_reason]:
        engine.scheduler.preempt(chance.choice(live))


def _forget(engine: Engine, client: ChaosClient, chance: random.Random) -> None:
    engine.scheduler.pool.forget_all()
