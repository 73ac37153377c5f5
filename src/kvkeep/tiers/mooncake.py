"""A Mooncake cluster as the medium of a tier:
mooncake://master:50051?metadata=http://host:8080/metadata&metrics=9003

A block is one object in the memory of a store node. The nodes are processes of their own: this host
contributes no memory, so what it has stored outlives it. The master knows where each object is, and
evicts by its own rules when the nodes are full. It leases what was asked for to the asker for some
seconds, so deletions are forced. Bytes go by TCP between the nodes and the caller's views.

Give kvkeep a cluster of its own: `usage` counts all objects. It is what the master says at its
port for metrics.

Needs the extra `kvkeep[mooncake]` and libraries of the system, see `tier_address.SCHEMES`. The
client is loaded when a tier is opened. It takes its timeouts from the environment, as they are
then: those of the first tier that a process opens hold for all."""

from __future__ import annotations

import importlib
import math
import os
import re
import socket
import threading
import urllib.request
from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

import numpy as np

from kvkeep.errors import SettingsError, TierError
from kvkeep.tiers.service_address import ServiceAddress
from kvkeep.tiers.tier import Part, Usage
from kvkeep.units import MIB

SCHEMES = ("mooncake",)
OPTIONS = ("metadata", "metrics", "timeout")
_PORT, _METADATA_PORT, _METRICS_PORT = 50051, 8080, 9003  # the master's own
_MOST_METRICS_BYTES = 4 * MIB
_SCRATCH_BYTES = 4 * MIB
_METRIC = re.compile(r"^master_(\w+) (\d+)", re.MULTILINE)
_SPECIAL = re.compile(r"[\\^$.|?*+()\[\]{}]")  # in a pattern
_NO_ROOM, _ABSENT = -200, -704  # what the client returns
_MEANINGS: Final = {
    -800: "a store node did not answer",
    -900: "the master did not answer",
    -901: "the master did not answer in time",
}
_HINT = "look at the master, its store nodes, and the network between"
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def open_mooncake(address: str) -> MooncakeTier:
    """SettingsError says what is wrong with the address, TierError that the client cannot be loaded
    or that the cluster cannot be reached."""
    where = ServiceAddress.parse(address, SCHEMES, OPTIONS, _PORT)
    host = f"[{where.host}]" if ":" in where.host else where.host
    metadata = urlsplit(where.options.get("metadata", f"http://{host}:{_METADATA_PORT}/metadata"))
    metrics = where.options.get("metrics", str(_METRICS_PORT))
    if metadata.scheme != "http" or not metadata.hostname or not _is_port(metadata):
        raise SettingsError(
            "the address of a mooncake:// tier: metadata: expected http://host:8080/metadata"
        )
    if not re.fullmatch("[0-9]{1,5}", metrics):
        raise SettingsError("the address of a mooncake:// tier: metrics: expected a port")
    # The client itself would try for a minute and a half.
    own_host = _reach(where.host, where.port, where.timeout_s)
    _reach(metadata.hostname, metadata.port or 80, where.timeout_s)
    client = _load(where.timeout_s)()
    settings = {
        "local_hostname": own_host,
        "metadata_server": metadata.geturl(),
        "master_server_addr": f"{host}:{where.port}",
        "protocol": "tcp",
        "global_segment_size": "0",
        "local_buffer_size": "0",
    }
    code = client.setup(settings)
    if code:
        raise TierError(f"the Mooncake cluster cannot be joined: {_meaning(code)}", _HINT)
    return MooncakeTier(client, f"http://{host}:{metrics}/metrics", where.timeout_s)


class MooncakeTier:
    best_bytes = 4 * MIB

    def __init__(self, client: Any, metrics_url: str, timeout_s: float) -> None:
        self._client = client
        self._metrics_url = metrics_url
        self._timeout_s = timeout_s
        self._scratch = np.empty(_SCRATCH_BYTES, np.uint8)  # ranges go to registered memory only
        self._scratch_lock = threading.Lock()
        code = client.register_buffer(self._scratch.ctypes.data, self._scratch.nbytes)
        if code:
            raise _error(code)
        self._usage = Usage(0, 0, 0)
        self._counting = threading.Lock()

    @property
    def client(self) -> Any:
        """The client library's, for benchmarks."""
        return self._client

    def leading(self, names: Sequence[str]) -> int:
        for at, there in enumerate(self._client.batch_is_exist(list(names))):
            if there < 0:
                raise _error(there)
            if not there:
                return at
        return len(names)

    def read(self, parts: Sequence[Part]) -> list[int]:
        lengths = self._lengths([part.name for part in parts])
        # The client reads an object into views of exactly its size, or ranges of it.
        result, whole = lengths[:], list[int]()
        for number, (part, length) in enumerate(zip(parts, lengths, strict=True)):
            if length <= part.offset:
                result[number] = min(length, 0)
            elif part.offset or length > part.nbytes:
                result[number] = self._read_range(part, min(part.nbytes, length - part.offset))
            else:
                whole.append(number)
        if whole:
            places = [_Places(parts[number].views, lengths[number]) for number in whole]
            found = self._client.batch_get_into_multi_buffers(
                [parts[number].name for number in whole],
                [each.addresses for each in places],
                [each.sizes for each in places],
            )
            _raise_if_all_failed(found)
            for number, nbytes in zip(whole, found, strict=True):
                result[number] = max(nbytes, -1)
        return result

    def write(self, parts: Sequence[Part]) -> list[bool]:
        places = [_Places(part.views, part.nbytes) for part in parts]
        codes = self._client.batch_put_from_multi_buffers(
            [part.name for part in parts],
            [each.addresses for each in places],
            [each.sizes for each in places],
        )
        _raise_if_all_failed(codes)
        return [code == 0 for code in codes]

    def delete(self, prefix: str) -> int:
        """Objects that are written meanwhile may stay: of a place that no host writes to, none do."""
        pattern = "^" + _SPECIAL.sub(r"\\\g<0>", prefix)
        count = int(self._client.remove_by_regex(pattern, True))
        if count < 0:
            raise _error(count)
        return count

    def drop(self, names: Sequence[str]) -> None:
        for code in self._client.batch_remove(list(names), True):
            if code not in (0, _ABSENT):
                raise _error(code)

    def usage(self) -> Usage:
        """What the master said last, while another thread asks or it does not answer."""
        if self._counting.acquire(blocking=False):
            try:
                self._usage = self._ask_usage()
            except (OSError, ValueError, KeyError):
                pass
            finally:
                self._counting.release()
        return self._usage

    def close(self) -> None:
        self._client.close()

    def _lengths(self, names: Sequence[str]) -> list[int]:
        """-1: there is no such object. The client prints an error for one that it is asked for and
        that is not there, such as the summary of a host that has written none."""
        codes = self._client.batch_is_exist(list(names))
        if (code := min(codes, default=0)) < 0:
            raise _error(code)
        there = [name for name, code in zip(names, codes, strict=True) if code]
        stored = self._client.batch_get_replica_desc(there) if there else {}
        return [self._length(name, stored[name]) if name in stored else -1 for name in names]

    def _length(self, name: str, replicas: Sequence[Any]) -> int:
        for each in replicas:
            if each.is_memory_replica():
                return int(each.get_memory_descriptor().buffer_descriptor.size)
        return _found(self._client.get_size(name))

    def _read_range(self, part: Part, wanted: int) -> int:
        done = 0
        with self._scratch_lock:
            while done < wanted:
                some = self._scratch[: wanted - done]
                [[[code]]] = self._client.get_into_ranges(
                    [some.ctypes.data],
                    [[part.name]],
                    [[[0]]],
                    [[[part.offset + done]]],
                    [[[some.nbytes]]],
                )
                if _found(code) != some.nbytes:
                    return -1
                _copy(some.data, part.views, done)
                done += some.nbytes
        return done

    def _ask_usage(self) -> Usage:
        with _opener.open(self._metrics_url, timeout=self._timeout_s) as answer:
            text = answer.read(_MOST_METRICS_BYTES).decode(errors="replace")
        found = {name: int(value) for name, value in _METRIC.findall(text)}
        return Usage(found["key_count"], found["allocated_bytes"], found["total_capacity_bytes"])


class _Places:
    """Where the first `nbytes` of these views are, as long as this object lives. The client moves
    each place by itself, so views side by side are one."""

    def __init__(self, views: Sequence[memoryview], nbytes: int) -> None:
        self._arrays = []
        self.addresses: list[int] = []
        self.sizes: list[int] = []
        for view in views:
            if not view.nbytes or not nbytes:
                continue
            array = np.frombuffer(view, np.uint8)[:nbytes]
            self._arrays.append(array)
            nbytes -= array.nbytes
            if self.sizes and array.ctypes.data == self.addresses[-1] + self.sizes[-1]:
                self.sizes[-1] += array.nbytes
            else:
                self.addresses.append(array.ctypes.data)
                self.sizes.append(array.nbytes)


def _copy(data: memoryview, views: Sequence[memoryview], at: int) -> None:
    """Copies to this place of the views."""
    for view in views:
        if at < view.nbytes and data.nbytes:
            target = view.cast("B")[at : at + data.nbytes]
            target[:] = data[: target.nbytes]
            data = data[target.nbytes :]
        at = max(0, at - view.nbytes)


def environment(timeout_s: float) -> dict[str, str]:
    """What the client reads when it is loaded: how long it waits for one answer of a node or of the
    master, and what it prints."""
    seconds, milliseconds = str(max(1, math.ceil(timeout_s))), str(math.ceil(timeout_s * 1000))
    return {
        "MC_TCP_STATUS_TIMEOUT_SEC": seconds,
        "MC_TCP_PROGRESS_TIMEOUT_SEC": seconds,
        "MC_RPC_TIMEOUT_MS": milliseconds,
        "MC_RPC_CONNECT_TIMEOUT_MS": milliseconds,
        "MC_STORE_CLIENT_METRIC": "0",
        "MC_LOG_LEVEL": "ERROR",
    }


def _load(timeout_s: float) -> Any:
    """The class of clients."""
    os.environ.update({**environment(timeout_s), **os.environ})
    try:
        return importlib.import_module("mooncake.store").MooncakeDistributedStore
    except ImportError as error:
        raise TierError(
            f"the Mooncake client cannot be loaded: {error}",
            "the guide on shared tiers says which libraries it needs",
        ) from error


def _reach(host: str, port: int, timeout_s: float) -> str:
    """Connects once. Returns the address that this host has there."""
    try:
        with socket.create_connection((host, port), timeout_s) as connected:
            return str(connected.getsockname()[0])
    except OSError as error:
        raise TierError(
            f"{host}:{port} cannot be reached: {error.strerror or 'no answer'}", _HINT
        ) from error


def _is_port(url: SplitResult) -> bool:
    try:
        return url.port != 0
    except ValueError:
        return False


def _found(code: int) -> int:
    """Bytes; -1: there is no such object."""
    if code < 0 and code != _ABSENT:
        raise _error(code)
    return max(code, -1)


def _meaning(code: int) -> str:
    return _MEANINGS.get(code, f"code {code}")


def _raise_if_all_failed(codes: Sequence[int]) -> None:
    """One node of several may be gone, until the master notices after some seconds: the others go
    on."""
    if codes and all(code < 0 and code not in (_NO_ROOM, _ABSENT) for code in codes):
        raise _error(codes[0])


def _error(code: int) -> TierError:
    return TierError(f"the cluster failed: {_meaning(code)}", _HINT)
