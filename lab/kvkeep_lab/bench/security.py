"""What TLS costs, and what time tells one tenant about another.

Two servers, one with TLS and one without, are asked in turns, so that noise of the machine meets
both: a handshake (from a new socket to the first Welcome), a ping, a lookup that misses, and blocks
over the network plane.

Time: a lookup of a key that only another tenant has must take as long as one of a key that nobody
has, or one tenant could ask what another one is talking about. `told_apart` is the chance of
guessing right which of two lookups was which, from their times alone: 0.5 is a coin. Lookups that
hit are the control: can those be told apart, the clock is good."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from kvkeep.cli.keygen import make
from kvkeep.client.connection import Connection
from kvkeep.client.options import ClientOptions
from kvkeep.client.transport import StreamTransport
from kvkeep.errors import Unavailable
from kvkeep.kv.checksum import checksum
from kvkeep.kv.identity import DEFAULT_TENANT, ModelIdentity, tenant_of
from kvkeep.kv.keys import KEY_BYTES
from kvkeep.kv.shape import BlockShape
from kvkeep.testing.process import ServerProcess
from kvkeep.units import MIB
from kvkeep.wire import messages as m
from kvkeep.wire.frames import Header, encode
from kvkeep.wire.tls import tls_files
from kvkeep_lab.simulation.peer import Peer
from kvkeep_lab.simulation.server import SimulatedServer

_BLOCK_BYTES = MIB
_BLOCKS = 4
_LOOKUP_BLOCKS = 512
_PATIENCE_MS = 10_000
_SAMPLES_A_ROUND = 20
_ZEROS = bytes(_BLOCK_BYTES)


def run(rounds: int = 300, repeats: int = 50) -> dict[str, Any]:
    """`rounds` pings, lookups and moves of blocks, `repeats` handshakes, for each of the two
    servers."""
    measured: dict[str, dict[str, list[float]]] = {}
    with ExitStack() as stack:
        servers = {name: stack.enter_context(_server(name == "tls")) for name in ("none", "tls")}
        for _ in range(repeats):
            for name, options in servers.items():
                measured.setdefault(name, {}).setdefault("handshake_us", []).append(
                    _handshake_us(options)
                )
        open_ones = {name: _connect(options) for name, options in servers.items()}
        for connection in open_ones.values():
            stack.callback(connection.close)
        for _ in range(rounds):
            for name, connection in open_ones.items():
                for what, value in _round(connection).items():
                    measured[name].setdefault(what, []).append(value)
    rows: list[dict[str, Any]] = [
        {"security": name, **{what: _median(values) for what, values in all_.items()}}
        for name, all_ in measured.items()
    ]
    plain, tls = rows
    ratios = {what: round(tls[what] / plain[what], 2) for what in plain if what != "security"}
    return {"rows": rows, "tls_to_none": ratios, "timing": timing(rounds * _SAMPLES_A_ROUND)}


def timing(samples: int) -> dict[str, Any]:
    """How long the server takes inside for lookups of one tenant, by who has the block."""
    service = SimulatedServer(64 * MIB, MIB).service
    peer = Peer(lambda frames: service.handle(frames, 0)).attach()
    layout = peer.open_layout(4096)
    mine, other = tenant_of("mine"), tenant_of("other")
    kept = {mine: os.urandom(256 * KEY_BYTES), other: os.urandom(256 * KEY_BYTES)}
    for tenant, keys in kept.items():
        for at in range(0, len(keys), KEY_BYTES):
            peer.store(layout, keys[at : at + KEY_BYTES], [bytes(4096)], tenant=tenant)
    asked = {
        "absent": os.urandom(256 * KEY_BYTES),
        "other_tenant": kept[other],
        "absent_again": os.urandom(256 * KEY_BYTES),
    }
    asked["hit"] = kept[mine]
    times: dict[str, list[int]] = {name: [] for name in asked}
    order, generator = list(asked), np.random.default_rng(0)
    for number in range(samples):
        generator.shuffle(order)  # or what comes after a hit would always be the same kind
        for name in order:
            key = asked[name][number % 256 * KEY_BYTES :][:KEY_BYTES]
            times[name].append(_lookup_ns(service.handle, peer, m.Lookup(mine, layout, key)))
    return {
        "samples": samples,
        **{
            f"{name}_us": round(float(np.median(values)) / 1000, 2)
            for name, values in times.items()
        },
        "told_apart": told_apart(times["absent"], times["other_tenant"]),
        "told_apart_absent_from_absent": told_apart(times["absent"], times["absent_again"]),
        "told_apart_hit_from_absent": told_apart(times["absent"], times["hit"]),
    }


def told_apart(one: list[int], two: list[int]) -> float:
    """The chance to guess right which of a pair is which by which took longer; 0.5 for a coin, 1
    for certainty."""
    values = np.concatenate([np.asarray(one), np.asarray(two)])
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]  # ties share a rank
    above = (ranks[len(one) :].sum() - len(two) * (len(two) + 1) / 2) / (len(one) * len(two))
    return round(float(max(above, 1 - above)), 3)


def _lookup_ns(handle: Any, peer: Peer, message: m.Lookup) -> int:
    peer.number += 1
    frames = [bytes(frame) for frame in encode(Header(peer.session, peer.number), message)]
    lease = peer.number
    started = time.perf_counter_ns()
    handle(frames, 0)
    took = time.perf_counter_ns() - started
    peer.ask(m.Done, m.Release([lease]))
    return took


@contextmanager
def _server(tls: bool) -> Iterator[ClientOptions]:
    """A server, and what a client has to be told to reach it over the network plane."""
    with tempfile.TemporaryDirectory(prefix="kvkeep-") as directory:
        flags, files = make_certificates(Path(directory)) if tls else ([], {})
        with ServerProcess("--pool-size", "256MiB", *flags) as server:
            yield ClientOptions(
                address=server.address, shared_memory=False, lookup_deadline_ms=10_000, **files
            )


def make_certificates(where: Path) -> tuple[list[str], dict[str, Any]]:
    """The server's flags and the client's options for TLS. SettingsError if none can be made."""
    made = make(where, ["bench"])
    flags = [
        word
        for name, value in made["server"].items()
        for word in (f"--{name.replace('_', '-')}", value)
    ]
    return flags, {name: made["clients"][0][name] for name in ("tls_cert", "tls_key", "tls_ca")}


def _connect(options: ClientOptions) -> Connection:
    identity = ModelIdentity(
        model="bench", revision="1", kv_dtype="uint8", block_tokens=16, content="bench security"
    )
    # TCP is compared with TLS over TCP, so the Unix socket is left out that a client on this host
    # would use.
    transport = StreamTransport(options.address, tls_files(options), may_use_unix_socket=False)
    connection = Connection(BlockShape(identity, (_BLOCK_BYTES,)), options, transport)
    if not connection.wait_until_up(_PATIENCE_MS):
        raise Unavailable(f"no session with {options.address}: {connection.refusal}")
    return connection


def _handshake_us(options: ClientOptions) -> float:
    started = time.perf_counter()
    connection = _connect(options)
    took = (time.perf_counter() - started) * 1e6
    connection.close()
    return took


def _round(connection: Connection) -> dict[str, float]:
    """One of each. Blocks go out and come back over the socket."""
    assert connection.layout is not None
    layout = connection.layout.layout
    times = {"ping_us": _timed(connection, m.Ping())[0]}
    missing = m.Lookup(DEFAULT_TENANT, layout, os.urandom(_LOOKUP_BLOCKS * KEY_BYTES))
    times["lookup_us"], _, lease = _timed(connection, missing)
    _timed(connection, m.Release([lease]))
    keys = os.urandom(_BLOCKS * KEY_BYTES)
    _, _, write = _timed(connection, m.PrepareStore(DEFAULT_TENANT, layout, 0, b"", keys))
    put_us, _, _ = _timed(connection, m.Put(write, 0), [_ZEROS] * _BLOCKS)
    times["put_us_per_mib"] = put_us / _BLOCKS
    checksums = np.full(_BLOCKS, checksum(_ZEROS), dtype="<u8").tobytes()
    _timed(connection, m.CompleteStore(write, checksums))
    _, found, lease = _timed(connection, m.Lookup(DEFAULT_TENANT, layout, keys))
    assert isinstance(found, m.Found) and found.blocks == _BLOCKS
    fetch_us, _, _ = _timed(connection, m.Fetch(lease, 0, 0, _BLOCKS))
    times["fetch_us_per_mib"] = fetch_us / _BLOCKS
    _timed(connection, m.Release([lease]))
    return times


def _timed(
    connection: Connection, message: m.Message, payload: list[bytes] | None = None
) -> tuple[float, Any, int]:
    started = time.perf_counter()
    call = connection.call(message, _PATIENCE_MS, payload or ())
    reply = connection.wait(call)
    if reply is None:
        raise Unavailable(f"{type(message).__name__} failed: {call.failure}", connection.refusal)
    return (time.perf_counter() - started) * 1e6, reply, call.number


def _median(values: list[float]) -> float:
    return round(float(np.median(values)), 1)
