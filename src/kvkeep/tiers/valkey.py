"""Valkey or Redis as the medium of a tier: valkey://host:6379/0, rediss://host, or a cluster.

A value is one string. It is written with SET, which the service does whole or not at all, and read
with GETRANGE, so that no reply is longer than the caller's views, whatever is stored. Give kvkeep a
database of its own: `usage` counts all keys of a database. Capacity is the service's `maxmemory`;
with an eviction policy it evicts by its own rules, without one it refuses what is new.

Needs the extra `kvkeep[valkey]`: only `open_valkey`'s caller imports this module."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import valkey
from valkey.backoff import NoBackoff
from valkey.cluster import ValkeyCluster
from valkey.exceptions import OutOfMemoryError, ResponseError, ValkeyError
from valkey.retry import Retry

from kvkeep.errors import TierError
from kvkeep.tiers.service_address import PASSWORD, USERNAME, ServiceAddress, credential
from kvkeep.tiers.tier import Part, Usage
from kvkeep.units import MIB

SCHEMES = ("valkey", "valkeys", "redis", "rediss")
OPTIONS = ("timeout", "ca", "cluster")
MOST_BYTES_A_VALUE = 64 * MIB  # what the service takes by default is 512 MiB
_MOST_BYTES_IN_FLIGHT = 8 * MIB  # of one pipeline, requests or replies
_MOST_NAMES_A_COMMAND = 4096
_KEYS_A_SCAN = 1000  # a step of a deletion; the service answers others between steps
_CONNECTIONS = 8
_PORT = 6379
_HINT = "look at the service's log, and at the network between"


def open_valkey(address: str) -> ValkeyTier:
    """SettingsError says what is wrong with the address or the credentials, TierError that the
    service cannot be reached."""
    where = ServiceAddress.parse(address, SCHEMES, OPTIONS, _PORT)
    options: dict[str, Any] = {
        "host": where.host,
        "port": where.port,
        "username": credential(USERNAME),
        "password": credential(PASSWORD),
        "socket_timeout": where.timeout_s,
        "socket_connect_timeout": where.timeout_s,
        "socket_keepalive": True,
        "ssl": where.scheme in ("rediss", "valkeys"),
    }
    if options["ssl"]:
        options |= {"ssl_ca_certs": where.options.get("ca"), "ssl_check_hostname": True}
    with _as_tier_errors():
        if where.yes("cluster"):
            return ValkeyTier(
                ValkeyCluster(
                    **options, cluster_error_retry_attempts=1, max_connections=_CONNECTIONS
                )
            )
        connection = valkey.SSLConnection if options.pop("ssl") else valkey.Connection
        pool = valkey.BlockingConnectionPool(  # type: ignore[no-untyped-call]
            max_connections=_CONNECTIONS,
            timeout=where.timeout_s,
            connection_class=connection,
            db=where.database,
            retry=Retry(NoBackoff(), 0),
            command_packer=_Packer(),
            **options,
        )
        client = valkey.Valkey(connection_pool=pool)
        client.ping()
        return ValkeyTier(client)


class ValkeyTier:
    best_bytes = MIB

    def __init__(self, client: valkey.Valkey | ValkeyCluster) -> None:
        # The library's annotations leave out what a pipeline and a cluster return.
        self._client: Any = client
        self._is_cluster = isinstance(client, ValkeyCluster)
        self._usage = Usage(0, 0, 0)
        self._counting = threading.Lock()

    @property
    def client(self) -> Any:
        """The client library's, for benchmarks."""
        return self._client

    def leading(self, names: Sequence[str]) -> int:
        found = 0
        for at in range(0, len(names), _MOST_NAMES_A_COMMAND):
            some = names[at : at + _MOST_NAMES_A_COMMAND]
            count = self._leading(some)
            found += count
            if count < len(some):
                break
        return found

    def read(self, parts: Sequence[Part]) -> list[int]:
        result: list[int] = []
        empty: list[int] = []
        for some in _by_bytes(parts):
            commands = [
                ("GETRANGE", part.name, part.offset, part.offset + max(part.nbytes, 1) - 1)
                for part in some
            ]
            for part, data in zip(some, self._pipeline(commands), strict=True):
                if data:
                    result.append(_fill(part, data))
                else:
                    empty.append(len(result))
                    result.append(-1)
        if empty:
            there = self._pipeline([("EXISTS", parts[number].name) for number in empty])
            for number, count in zip(empty, there, strict=True):
                result[number] = 0 if count else -1
        return result

    def write(self, parts: Sequence[Part]) -> list[bool]:
        kept: list[bool] = []
        for some in _by_bytes(parts):
            commands = [
                ("SET", part.name, self._value(part), "NX")  # None: it is there already
                for part in some
                if part.nbytes <= MOST_BYTES_A_VALUE
            ]
            done = iter(self._pipeline(commands, full_is_false=True))
            kept += [part.nbytes <= MOST_BYTES_A_VALUE and next(done) is not False for part in some]
        return kept

    def delete(self, prefix: str) -> int:
        """Keys that are written meanwhile may stay: of a place that no host writes to, none do."""
        count = 0
        pattern = "".join(f"\\{each}" if each in "*?[]\\^-" else each for each in prefix) + "*"
        names: list[bytes] = []
        with _as_tier_errors():
            for name in self._client.scan_iter(match=pattern, count=_KEYS_A_SCAN):
                names.append(name)
                if len(names) == _KEYS_A_SCAN:
                    count += self._unlink(names)
                    names = []
        return count + self._unlink(names)

    def drop(self, names: Sequence[str]) -> None:
        self._unlink([name.encode() for name in names])

    def usage(self) -> Usage:
        """What the service said last, while another thread asks or the service does not answer."""
        if self._counting.acquire(blocking=False):
            try:
                self._usage = self._ask_usage()
            except TierError:
                pass
            finally:
                self._counting.release()
        return self._usage

    def close(self) -> None:
        with _as_tier_errors():
            self._client.close()

    def _leading(self, names: Sequence[str]) -> int:
        if (
            self._is_cluster
        ):  # EXISTS takes keys of one slot only; a pipeline goes once to each node
            there = self._pipeline([("EXISTS", name) for name in names])
            return next((at for at, found in enumerate(there) if not found), len(names))
        count = self._count(names)
        if count == len(names) or count == 0 or self._count(names[:count]) == count:
            return count
        low, high = 0, count - 1  # something is missing among the first `count`
        while low < high:
            middle = (low + high + 1) // 2
            if self._count(names[:middle]) == middle:
                low = middle
            else:
                high = middle - 1
        return low

    def _count(self, names: Sequence[str]) -> int:
        with _as_tier_errors():
            return int(self._client.exists(*names))

    def _value(self, part: Part) -> list[memoryview] | bytes:
        """For `_Packer`; the library makes connections of a cluster without it."""
        return b"".join(part.views) if self._is_cluster else list(part.views)

    def _unlink(self, names: Sequence[bytes]) -> int:
        return sum(self._pipeline([("UNLINK", name) for name in names]))

    def _pipeline(
        self, commands: Sequence[tuple[Any, ...]], full_is_false: bool = False
    ) -> list[Any]:
        """One round trip. Replies; False for a write that found no room."""
        if not commands:
            return []
        with _as_tier_errors():
            pipeline = self._client.pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)
            replies = cast(list[Any], pipeline.execute(raise_on_error=False))
            for number, reply in enumerate(replies):
                if full_is_false and isinstance(reply, OutOfMemoryError):
                    replies[number] = False
                elif isinstance(reply, Exception):
                    raise reply
            return replies

    def _ask_usage(self) -> Usage:
        with _as_tier_errors():
            if not self._is_cluster:
                return _usage_of(self._client.info("memory"), self._client.dbsize())
            every = self._client.info("memory", target_nodes=ValkeyCluster.PRIMARIES)
            blocks = self._client.dbsize(target_nodes=ValkeyCluster.PRIMARIES)
            nodes = [_usage_of(info, 0) for info in every.values()]
            used = sum(node.used_bytes for node in nodes)
            return Usage(int(blocks), used, sum(node.capacity_bytes for node in nodes))


class _Packer:
    """Packs commands for the client library. Views, or a list of them, are not copied."""

    def pack(self, *arguments: Any) -> list[bytes | memoryview]:
        words = [*str(arguments[0]).encode().split(), *arguments[1:]]
        packed: list[bytes | memoryview] = []
        text = b"*%d\r\n" % len(words)
        for word in words:
            if isinstance(word, list | memoryview):
                views = word if isinstance(word, list) else [word]
                nbytes = sum(view.nbytes for view in views)
                packed += [text + b"$%d\r\n" % nbytes, *views]
                text = b"\r\n"
            else:
                data = word if isinstance(word, bytes) else str(word).encode()
                text += b"$%d\r\n%b\r\n" % (len(data), data)
        return [*packed, text]


def _usage_of(memory: dict[str, Any], blocks: int) -> Usage:
    return Usage(int(blocks), int(memory["used_memory"]), int(memory.get("maxmemory", 0)))


def _fill(part: Part, data: bytes) -> int:
    at = 0
    with memoryview(data) as found:
        for view in part.views:
            some = found[at : at + view.nbytes]
            view[: some.nbytes] = some
            at += some.nbytes
    return at


def _by_bytes(parts: Sequence[Part]) -> Iterator[list[Part]]:
    """In lists of a bounded number of bytes; a part that is longer comes alone."""
    some: list[Part] = []
    nbytes = 0
    for part in parts:
        if some and nbytes + part.nbytes > _MOST_BYTES_IN_FLIGHT:
            yield some
            some, nbytes = [], 0
        some.append(part)
        nbytes += part.nbytes
    if some:
        yield some


@contextmanager
def _as_tier_errors() -> Iterator[None]:
    try:
        yield
    except ResponseError as error:
        raise TierError(f"the service refused a command: {error}", _HINT) from error
    except (ValkeyError, OSError, ValueError, UnicodeError) as error:
        raise TierError(f"the service failed: {error or type(error).__name__}", _HINT) from error
