"""Where an engine's external cache is: in a kvkeep server, or in this process."""

from __future__ import annotations

import time
from typing import Protocol

from kvkeep.client.connection import Connection
from kvkeep.client.options import CONNECT_PATIENCE_MS, ClientOptions
from kvkeep.client.scheduler import SchedulerAdapter
from kvkeep.client.worker import WorkerAdapter
from kvkeep.connector.cost_model import LoadWhen
from kvkeep.connector.options import client_options, load_when, tp_shards, tracing
from kvkeep.connector.step import LookupSide, TransferSide
from kvkeep.engine.offloading import CPU_BYTES, NATIVE, KVTransferConfig
from kvkeep.errors import SettingsError
from kvkeep.kv.parallel import ParallelStrategy
from kvkeep.kv.shape import BlockShape
from kvkeep.server.embedded import EmbeddedServer

ENGINE = "reference"  # the name of sessions of this engine


class CacheBackend(Protocol):
    """Makes the scheduler's and the workers' side of a cache for one engine; `load_when` says which
    hits the engine loads, `tp_shards` how many shards it cuts KV heads into, `tracing` whether it
    exports spans."""

    load_when: LoadWhen
    tp_shards: int | None
    tracing: bool

    def lookup_side(self, shape: BlockShape) -> LookupSide: ...
    def transfer_side(self, shape: BlockShape, strategy: ParallelStrategy) -> TransferSide: ...
    def connect(self) -> None:
        """Gives the sides, now that they are made, a moment to connect."""

    def close(self) -> None:
        """Lets go of what the sides share. They are closed before."""


class ServerBackend:
    """A kvkeep server, on this host or another. It need not be there: until it is, everything is a
    miss. `connections` are those of all open sides."""

    def __init__(
        self,
        options: ClientOptions | None = None,
        load_when: LoadWhen = "faster",
        tp_shards: int | None = None,
        *,
        tracing: bool = False,
    ) -> None:
        self.load_when = load_when
        self.tp_shards = tp_shards
        self.tracing = tracing
        self._options = options or ClientOptions(client=ENGINE)
        self.connections: list[Connection] = []

    def lookup_side(self, shape: BlockShape) -> LookupSide:
        adapter = SchedulerAdapter(shape, self._options, self._connection(shape))
        self.connections.append(adapter.connection)
        return adapter

    def transfer_side(self, shape: BlockShape, strategy: ParallelStrategy) -> TransferSide:
        adapter = WorkerAdapter(shape, strategy, self._options, self._connection(shape))
        self.connections.append(adapter.connection)
        return adapter

    def connect(self) -> None:
        """Waits until all are up, or patience is over for all of them together."""
        deadline_s = time.monotonic() + CONNECT_PATIENCE_MS / 1000
        for connection in self.connections:
            connection.wait_until_up(int((deadline_s - time.monotonic()) * 1000))

    def close(self) -> None:
        self.connections.clear()

    def _connection(self, shape: BlockShape) -> Connection | None:
        """None: each side makes its own."""
        return None


class NativeBackend(ServerBackend):
    """Host memory of this process: nobody else sees it, and it ends with the engine."""

    def __init__(
        self,
        nbytes: int,
        options: ClientOptions | None = None,
        load_when: LoadWhen = "faster",
        *,
        tracing: bool = False,
    ) -> None:
        # no engine of another size sees it, so there is nothing to cut heads for
        super().__init__(options, load_when, tracing=tracing)
        self.server = EmbeddedServer(nbytes)

    def close(self) -> None:
        super().close()
        self.server.close()

    def _connection(self, shape: BlockShape) -> Connection:
        return self.server.connection(shape, self._options)


def backend_of(config: KVTransferConfig | None) -> CacheBackend | None:
    """The backend that a KV-transfer config asks for; None if it asks for none."""
    if config is None or config.kv_connector is None:
        return None
    extra = config.kv_connector_extra_config
    if config.kv_connector == NATIVE:
        nbytes = extra.get(CPU_BYTES)
        if type(nbytes) is not int or nbytes < 1:
            raise SettingsError(
                f"{CPU_BYTES} in kv_connector_extra_config must be a number of bytes, not"
                f" {nbytes!r}",
                "set it, or set kv_offloading_size instead",
            )
        options = client_options(extra, ENGINE)
        return NativeBackend(nbytes, options, load_when(extra), tracing=tracing(extra))
    options = client_options(extra, ENGINE)
    return ServerBackend(options, load_when(extra), tp_shards(extra), tracing=tracing(extra))
