"""The service behind a shared tier of a chaos run: values in memory that all hosts see, with the
faults of services and of the way to them.

    host's CheckedTier ──► ServiceMedium (latency, stalls, a cut) ──► SharedService (values)

Beside each value it notes when the bytes were stored by an engine and by which host they were
written. The product cannot see that; the checks of clears go by it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from kvkeep.errors import TierError
from kvkeep.tiers.checked_tier import FRAME_BYTES
from kvkeep.tiers.clear_log import _ENTRY_BYTES, CLEARS, HOSTS, Entry
from kvkeep.tiers.tier import Part, Usage
from kvkeep_lab.chaos.record import Record
from kvkeep_lab.simulation.simulation import Simulation

CONTROL = "v1/control/"
_SUMMARIES = f"{CONTROL}summaries/"
_USUAL_US = (50, 2_000)
_SLOW_US = (5_000, 400_000)
_STALLS_US = (300_000, 3_000_000, 15_000_000)
_LATE_US = (100_000, 9_000_000)
_REFUSED_US = 200
_SILENT_US = 2_000_000  # until a client library gives up
_LOOK_US = 50_000


@dataclass(frozen=True)
class Origin:
    """Whose bytes a value has."""

    host: int
    stored_us: int  # when an engine began to store them


class SharedService:
    """What all hosts see. `rates` are those of plan.SERVICE_RATES that are in force."""

    def __init__(
        self, simulation: Simulation, rates: dict[str, float], record: Record, seed: int
    ) -> None:
        self.values: dict[str, bytes] = {}
        self.origins: dict[str, Origin] = {}
        self.put_us: dict[str, int] = {}  # since when each value is there
        self.acknowledged_us: dict[str, int] = {}  # when a host called a block written
        self.stalled_until_us = 0
        self.simulation = simulation
        self.random = random.Random(f"service of {seed}")
        self._rates = rates
        self._record = record

    def meets(self, fault: str) -> bool:
        if self.random.random() >= self._rates.get(fault, 0.0):
            return False
        self._record.faults[fault] += 1
        return True

    def empty(self) -> None:
        """It was restarted, and keeps nothing."""
        self.drop(list(self.values))

    def put(self, name: str, value: bytes, origin: Origin) -> None:
        """What is there stays."""
        if name not in self.values:
            self.values[name] = value
            self.origins[name] = origin
            self.put_us[name] = self.simulation.now_us

    def drop(self, names: Sequence[str]) -> None:
        for name in names:
            self.values.pop(name, None)
            self.origins.pop(name, None)
            self.put_us.pop(name, None)
            self.acknowledged_us.pop(name, None)

    def listed(self, since_us: int) -> set[str]:
        """Hosts that every reader of the list has found in it since then."""
        hosts: set[str] = set()
        for number in itertools.count(1):
            name = f"{HOSTS}/{number}"
            entry = self.values.get(name, b"")[FRAME_BYTES:]
            if len(entry) < _ENTRY_BYTES or self.put_us[name] > since_us:
                break  # those behind it were out of reach for a while
            hosts.add(msgspec.json.decode(entry, type=Entry).name)
        return hosts

    def lose_clear(self, chance: random.Random) -> bool:
        """One entry of the log of clears, if there are any."""
        names = sorted(name for name in self.values if name.startswith(CLEARS))
        if names:
            self.drop([chance.choice(names)])
        return bool(names)

    def evict(self) -> None:
        """Some blocks, by rules of its own. What hosts tell each other is read each second, so it is
        never what was used least recently."""
        blocks = [name for name in self.values if not name.startswith(CONTROL)]
        self.drop(self.random.sample(blocks, k=len(blocks) // self.random.choice((2, 5, 20))))


class ServiceMedium:
    """The service as the tier's process of one host uses it. `origin` tells of a block that is
    written, `has_read` is told whose bytes were read."""

    best_bytes = 4 * 4096

    def __init__(
        self,
        service: SharedService,
        origin: Callable[[str], Origin],
        has_read: Callable[[str, Origin], None],
    ) -> None:
        self.cut_until_us = 0
        self.is_silent = False  # while it is cut off: nothing answers, instead of refusing
        self._service = service
        self._simulation = service.simulation
        self._origin = origin
        self._has_read = has_read

    def leading(self, names: Sequence[str]) -> int:
        self._call()
        values = self._service.values
        return next((at for at, name in enumerate(names) if name not in values), len(names))

    def read(self, parts: Sequence[Part]) -> list[int]:
        self._call()
        return [self._read(part) for part in parts]

    def write(self, parts: Sequence[Part]) -> list[bool]:
        self._call()
        return [self._write(part) for part in parts]

    def delete(self, prefix: str) -> int:
        self._call()
        if self._service.meets("failing_delete"):
            raise TierError("the simulated service removes nothing")
        names = [name for name in self._service.values if name.startswith(prefix)]
        self._service.drop(names)
        return len(names)

    def drop(self, names: Sequence[str]) -> None:
        self._call()
        self._service.drop(names)

    def usage(self) -> Usage:
        values = self._service.values
        return Usage(len(values), sum(map(len, values.values())), 0)

    def close(self) -> None: ...

    # -- inside

    def _call(self) -> None:
        """The way there and back."""
        service, simulation = self._service, self._simulation
        simulation.sleep(service.random.randint(*_USUAL_US))
        if service.meets("slow_service"):
            simulation.sleep(service.random.randint(*_SLOW_US))
        if service.meets("stalled_service"):
            stall_us = service.random.choice(_STALLS_US)
            service.stalled_until_us = simulation.now_us + stall_us
        while simulation.now_us < service.stalled_until_us:
            simulation.sleep(_LOOK_US)
        if simulation.now_us < self.cut_until_us:
            simulation.sleep(_SILENT_US if self.is_silent else _REFUSED_US)
            raise TierError("the simulated service cannot be reached")
        if service.meets("failing_service"):
            raise TierError("the simulated service fails")
        if service.meets("evicting_service"):
            service.evict()

    def _read(self, part: Part) -> int:
        service = self._service
        if part.name not in service.values:
            return -1
        data = bytearray(service.values[part.name])
        if data and service.meets("garbage_of_service"):
            data[service.random.randrange(len(data))] ^= service.random.randrange(1, 256)
        left = memoryview(data)[part.offset :]
        if service.meets("half_value"):
            left = left[: len(left) // 2]
        self._has_read(part.name, service.origins[part.name])
        nbytes = 0
        for view in part.views:
            some = left[nbytes : nbytes + view.nbytes]
            half = some.nbytes // 2
            view.cast("B")[:half] = some[:half]
            self._simulation.step()
            view.cast("B")[half : some.nbytes] = some[half:]
            nbytes += some.nbytes
        return nbytes

    def _write(self, part: Part) -> bool:
        service, name = self._service, part.name
        origin = self._origin(name)
        value = b"".join(part.views)
        if service.meets("full_service"):
            return name in service.values
        # What hosts publish about their blocks may be lost, too: that only costs a hit.
        if not name.startswith(_SUMMARIES) and service.meets("lost_write"):
            return True
        if service.meets("late_write"):
            # the client gave up, and the service did it all the same
            delay_us = service.random.randint(*_LATE_US)
            self._simulation.after(delay_us, lambda: service.put(name, value, origin))
            raise TierError("the simulated service does not answer")
        if service.meets("half_value"):
            service.put(name, value[: len(value) // 2], origin)
            raise TierError("the simulated service fails in the middle of a write")
        service.put(name, value, origin)
        self._simulation.step()
        return True
