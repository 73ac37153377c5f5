"""What `kvkeep doctor` asks the running server, as an operator and as an engine."""

from __future__ import annotations

import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np

import kvkeep
from kvkeep import __version__
from kvkeep.cli.doctor_host import Finding, Skipped, Wrong, check
from kvkeep.cli.remote import ask, host_and_port, is_for_engines, time_at
from kvkeep.client.options import ClientOptions
from kvkeep.errors import KVKeepError
from kvkeep.server.settings import Settings
from kvkeep.vllm.releases import SUPPORTED, refusal
from kvkeep.wire.address import is_loopback, tcp_host
from kvkeep.wire.peers import is_trusted, peer_uid, remedy

_MOST_SKEW_S: Final = 5.0
_ANSWER_WITHIN_S: Final = 1.0
_TENANT: Final = "kvkeep doctor"  # also the name of its model
_START: Final = "start one with `kvkeep serve`, or name its address with --http; --no-server checks this host alone"


@dataclass
class Running:
    """The server at `http`. It is asked once."""

    http: str
    token_file: Path | None
    settings: Settings | None

    @cached_property
    def status(self) -> dict[str, Any]:
        """KVKeepError if it does not answer."""
        said: dict[str, Any] = ask(
            self.http, "/v1/status", token_file=self.token_file, needs_token=True
        )
        return said

    @property
    def has_answered(self) -> bool:
        return "status" in self.__dict__

    @property
    def trusted(self) -> tuple[int, ...]:
        return self.settings.trusted_users if self.settings is not None else ()


@check("ports")
def ports(running: Running) -> str:
    """Who listens at the two addresses."""
    shown = []
    addresses = {running.http: host_and_port(running.http)}
    if running.settings is not None and (tcp := tcp_host(running.settings.address)) is not None:
        addresses[running.settings.address] = tcp
    for name, (host, port) in addresses.items():
        if not is_loopback(host):
            continue
        try:
            with socket.create_connection((host, port), _ANSWER_WITHIN_S) as probe:
                uid = _uid_of(probe)
        except OSError:
            shown.append(f"{name} is free")
            continue
        if uid is not None and not is_trusted(uid, running.trusted):
            raise Wrong(f"another user (uid {uid}) listens at {name}", remedy(uid))
        if name != running.http and not is_for_engines(name.partition("://")[2]):
            raise Wrong(
                f"something that is not a kvkeep server listens at {name}",
                "end it, or choose another --address",
            )
        shown.append(f"{name} is taken")
    return ", ".join(shown) or "none on this host"


def _uid_of(connected: socket.socket) -> int | None:
    until_s = time.monotonic() + _ANSWER_WITHIN_S
    while (uid := peer_uid(connected)) is None and time.monotonic() < until_s:
        time.sleep(0.005)  # until the connection is accepted
    return uid


@check("server")
def answers(running: Running) -> str:
    try:
        said = running.status
    except KVKeepError as error:
        raise Wrong(error.message, error.hint or _START) from None
    if said["stopping"]:
        raise Wrong("the server is stopping", "start it again")
    if degraded := said["pool"]["degraded"]:
        raise Wrong(
            f"its pool is smaller than it should be: {degraded}",
            "free memory, or use a smaller --pool-size",
        )
    return f"{said['name']} (pid {said['pid']}) answers"


@check("version")
def version(running: Running) -> str:
    theirs = str(running.status["version"])
    if theirs != __version__:
        raise Wrong(
            f"the server is kvkeep {theirs}, this is kvkeep {__version__}",
            "install the same release for server and engines, and restart what is older",
        )
    return f"server and client are kvkeep {theirs}"


@check("engines")
def engine_versions(running: Running) -> str:
    """Of the engines that are connected. One of a newer vLLM has been allowed to."""
    sessions = running.status["sessions"]
    if sessions is None:
        raise Skipped("the server names them with its token only")
    counts = Counter(str(each["engine"]) for each in sessions)
    for engine in counts:
        name, _, release = engine.partition(" ")
        if name == "vllm" and (problem := refusal(release, allow_untested=True)):
            raise Wrong(f"connected: {problem}", f"serve with vLLM {SUPPORTED} there")
    shown = (f"{engine} ({count})" for engine, count in sorted(counts.items()))
    return ", ".join(shown) or "none is connected"


@check("server clock")
def server_clock(running: Running) -> str:
    there = time_at(running.http)
    if there is None:
        raise Skipped("the server tells no time")
    skew_s = there - time.time()
    if abs(skew_s) > _MOST_SKEW_S:
        raise Wrong(
            f"the server's clock is {abs(skew_s):,.0f} s {'ahead' if skew_s > 0 else 'behind'}",
            "synchronise both clocks (timedatectl set-ntp true): certificates and times depend "
            "on them",
        )
    return "the same time as here"


@check("server tiers")
def server_tiers(running: Running) -> str:
    for tier in running.status["tiers"]:
        if tier["problem"]:
            raise Wrong(
                f"{tier['tier']} is {tier['state']}: {tier['problem']}",
                "see `kvkeep tiers` and the server's log; a disk that was set aside is used again "
                "after a restart",
            )
    return f"{len(running.status['tiers'])} in order"


@check("round trip")
def round_trip(running: Running) -> str:
    """Stores a block as an engine of its own tenant, which expires at once, and loads it again. All
    runs are one tenant, and a block is one token, so that they hardly show in the server's
    figures."""
    address = str(running.status["address"])
    if (tcp := tcp_host(address)) is not None and tcp[0] in ("*", "0.0.0.0", "::"):
        address = f"tcp://{running.http.rpartition('://')[2].rpartition(':')[0]}:{tcp[1]}"
    block = np.frombuffer(secrets.token_bytes(4096), np.uint8).reshape(1, -1)
    started = time.perf_counter()
    with kvkeep.connect(
        address,
        model=_TENANT,
        revision="1",
        block_tokens=1,
        block_shape=(4096,),
        dtype="uint8",
        required=True,
        options=ClientOptions(address=address, lookup_deadline_ms=2_000),
    ) as cache:
        tokens = [secrets.randbits(31)]
        stored = cache.put(tokens, block, salt=_TENANT, ttl_ms=1)
        found = cache.get(tokens, salt=_TENANT)
    took_ms = (time.perf_counter() - started) * 1000
    if not stored:
        raise Wrong(
            "the server takes no block",
            "`kvkeep status` says whether the pool is full of leased blocks; see default_limit",
        )
    if not np.array_equal(found, block):
        raise Wrong(
            "a block that was just stored is not found",
            "see the server's log, and report it with `kvkeep status --json`",
        )
    return f"a block went there and back, in {took_ms:.0f} ms"


WITHOUT_ANSWER: Sequence[Callable[[Running], Finding]] = (ports, answers)
WITH_ANSWER: Sequence[Callable[[Running], Finding]] = (
    version,
    engine_versions,
    server_clock,
    server_tiers,
    round_trip,
)
