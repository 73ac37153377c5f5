"""The network data plane, server side: the daemon moves blocks between the pool and a client on
another host.

Bytes that arrive are checked against the client's checksums before the block becomes visible; the
client checks the bytes that it fetches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice, takewhile
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvkeep.errors import RequestError
from kvkeep.kv.checksum import ABSENT, checksum
from kvkeep.server.auth import Caller
from kvkeep.server.sessions import NetworkLease, NetworkWrite, ServerSession
from kvkeep.store.store import Store
from kvkeep.units import MIB
from kvkeep.wire.messages import Fetch, Put

REPLY_BYTES = 8 * MIB  # in one reply to a Fetch, or one block where that is larger
_ENDED_A_CALL = 256


class PoolMemory(Protocol):
    """Bytes of the pool, by offset."""

    def view(self, offset: int, nbytes: int) -> NDArray[np.uint8]: ...


def fetch(
    session: ServerSession, request: Fetch, memory: PoolMemory, frame_bytes: int, caller: Caller
) -> list[bytes]:
    """One payload frame for each block asked for."""
    if request.lease not in session.network_leases:
        if request.lease in session.expired:
            raise RequestError(
                "lease_expired",
                f"lease {request.lease} was held longer than network_lease_timeout",
                field="lease",
                hint="look up again; raise --network-lease-timeout if loads take that long",
            )
        raise RequestError(
            "unknown_lease", f"this session has no lease {request.lease}", field="lease"
        )
    lease = session.network_leases[request.lease]
    layout, slots = lease.layout, lease.slots
    caller.check_tenant(lease.tenant)
    if not 0 <= request.shard < layout.shards:
        raise RequestError("bad_shard", f"shard {request.shard} of {layout.shards}", field="shard")
    if request.start < 0 or request.count < 1 or request.start + request.count > len(slots):
        raise RequestError(
            "bad_range",
            f"blocks {request.start} + {request.count} of {len(slots)} that are leased",
            field="start",
        )
    nbytes = layout.shard_bytes[request.shard]
    most_bytes = min(frame_bytes, max(REPLY_BYTES, nbytes))
    if nbytes * request.count > most_bytes:
        raise RequestError(
            "reply_too_large",
            f"{request.count} blocks of {nbytes} bytes are more than {most_bytes} in one reply",
            field="count",
            hint="fetch fewer blocks at a time",
        )
    at = layout.shard_offsets[request.shard]
    wanted = slots[request.start : request.start + request.count].tolist()
    return [memory.view(slot + at, nbytes).tobytes() for slot in wanted]


def put(session: ServerSession, request: Put, payload: Sequence[bytes], memory: PoolMemory) -> int:
    """Writes the payload frames into the write's slots. No block is visible before CompleteStore.
    Returns the number of bytes."""
    write = _write(session, request.write)
    if request.start < 0 or not payload or request.start + len(payload) > len(write.slots):
        raise RequestError(
            "bad_range",
            f"blocks {request.start} + {len(payload)} of {len(write.slots)} to write",
            field="start",
        )
    shard = write.shards[0] if request.shard == -1 else request.shard
    if shard not in write.shards or (request.shard == -1 and len(write.shards) > 1):
        raise RequestError(
            "bad_shard",
            f"the write has shards {list(write.shards)[:8]}, not {request.shard}",
            field="shard",
        )
    column, nbytes = write.shards.index(shard), write.layout.shard_bytes[shard]
    for frame in payload:
        if len(frame) != nbytes:
            raise RequestError(
                "bad_payload",
                f"a block's shard has {nbytes} bytes, not {len(frame)}",
                field="payload",
            )
    at = write.layout.shard_offsets[shard]
    for position, frame in enumerate(payload, request.start):
        area = memory.view(int(write.slots[position]) + at, nbytes)
        area[:] = np.frombuffer(frame, dtype=np.uint8)
        write.checksums[position, column] = checksum(area)  # now: CompleteStore only compares
        write.arrived[position, column] = True
    return nbytes * len(payload)


def check_arrived(session: ServerSession, number: int, checksums: NDArray[np.uint64]) -> None:
    """Raises unless every block of the write has arrived with the client's checksum."""
    write = _write(session, number)
    if not write.arrived.all():
        raise RequestError(
            "incomplete_write",
            f"{int((~write.arrived.all(axis=1)).sum())} of {len(write.slots)} blocks have not"
            " arrived",
            field="write",
        )
    arrived = write.checksums.ravel()
    count = min(len(checksums), len(arrived))  # the store refuses a wrong number of them
    differ = (checksums[:count] != arrived[:count]) & (checksums[:count] != ABSENT)
    if differ.any():
        raise RequestError(
            "bad_checksum", "the bytes that arrived are not those that were sent", field="checksums"
        )


def end_aged(session: ServerSession, store: Store, given_before_ms: int, now_ms: int) -> int:
    """Ends leases and writes that were given before that time, even if they are in use: otherwise
    one Fetch a minute would keep blocks in the pool for ever. Returns how many; some hundreds at
    most, the oldest first."""
    leases = _aged(session.network_leases, given_before_ms)
    writes = _aged(session.network_writes, given_before_ms)
    for lease in leases:
        del session.network_leases[lease]
        store.release(session.number, lease, now_ms)
    for write in writes:
        del session.network_writes[write]
        session.write_tenants.pop(write, None)
        store.abandon_store(session.number, write, now_ms)
    session.expired.extend((*leases, *writes))
    return len(leases) + len(writes)


def _aged(held: Mapping[int, NetworkLease | NetworkWrite], given_before_ms: int) -> list[int]:
    aged = takewhile(lambda number: held[number].since_ms < given_before_ms, held)
    return list(islice(aged, _ENDED_A_CALL))


def _write(session: ServerSession, number: int) -> NetworkWrite:
    write = session.network_writes.get(number)
    if write is None and number in session.expired:
        raise RequestError(
            "write_expired",
            f"write {number} was held longer than network_lease_timeout",
            field="write",
            hint="prepare the store again; raise --network-lease-timeout if stores take that long",
        )
    if write is None:
        raise RequestError("unknown_write", f"this session has no write {number}", field="write")
    return write
