"""A connector for tests: kvkeep's own, which also remembers the bytes of every block that it
stores, and compares those that it loads with them. What it found is in the file that KVKEEP_WATCHED
names: blocks compared, wrong ones, and loads that the engine has waited for.

With KVKEEP_STOPS_AT=store or load, a thread of it stays for ever where the first such copies have
begun and nobody has waited for them, and the file KVKEEP_WATCHED says so: the moment to be
killed."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvkeep.client.loads import Load
from kvkeep.client.requests import LoadOutcome, LoadRequest, StoreRequest
from kvkeep.client.stores import Store
from kvkeep.client.worker import WorkerAdapter
from kvkeep.kv.keys import KEY_BYTES
from kvkeep.vllm.connector import KVKeepConnector as Connector

_begun: dict[Hashable, StoreRequest] = {}
_known: dict[bytes, list[torch.Tensor]] = {}
_found = {"compared": 0, "wrong": 0, "at_once": 0}
_begun_copies: list[Any] = []
_telling = threading.Lock()
_store_all, _end_store, _end_loads = (
    WorkerAdapter.store_all,
    WorkerAdapter._end_store,
    WorkerAdapter._end_loads,
)
_load_now = WorkerAdapter.load_now


def _bytes_of(worker: WorkerAdapter, block: int) -> list[torch.Tensor]:
    assert worker.memory is not None
    layers: Any = worker.memory.groups[0].runs.keepalive
    return [layer[block].contiguous().view(torch.uint8) for layer in layers]


def store_all(worker: WorkerAdapter, requests: Mapping[Any, StoreRequest]) -> None:
    _begun.update(requests)
    _store_all(worker, requests)


def end_store(worker: WorkerAdapter, job: Hashable, *written: int, **is_complete: bool) -> None:
    request = _begun.pop(job, None)
    if request is not None:
        torch.cuda.synchronize()
        for at, block in enumerate(request.block_ids.tolist()):
            key = request.keys[at * KEY_BYTES : (at + 1) * KEY_BYTES]
            _known[key] = [part.clone() for part in _bytes_of(worker, block)]
    _end_store(worker, job, *written, **is_complete)


def end_loads(worker: WorkerAdapter, loads: Any, loaded: Any) -> None:
    for number, (_, request, _) in enumerate(loads if loaded is not None else ()):
        _compare(worker, request, loaded[number])
    _tell()
    _end_loads(worker, loads, loaded)


def load_now(worker: WorkerAdapter, request: LoadRequest, owner: Hashable = None) -> LoadOutcome:
    outcome = _load_now(worker, request, owner)
    _found["at_once"] += 1
    _compare(worker, request, ~np.isin(request.block_ids, sorted(outcome.failed)))
    _tell()
    return outcome


def _compare(worker: WorkerAdapter, request: LoadRequest, loaded: Any) -> None:
    for at, block in enumerate(request.block_ids.tolist()):
        key = request.keys[(request.skip + at) * KEY_BYTES :][:KEY_BYTES]
        if loaded[at] and key in _known:
            pairs = zip(_known[key], _bytes_of(worker, block), strict=True)
            _found["compared"] += 1
            _found["wrong"] += any(not torch.equal(was, now) for was, now in pairs)


def _tell() -> None:
    watched = Path(os.environ["KVKEEP_WATCHED"])
    with _telling:  # of two threads the later one knows more
        made = watched.with_suffix(".new")
        made.write_text(json.dumps(_found))
        made.replace(watched)


def then_stop(begin: Callable[..., Any]) -> Callable[..., Any]:
    def begin_and_stop(*args: Any, **named: Any) -> Any:
        _begun_copies.append(begin(*args, **named))  # or its memory would be free again
        _found["stopped"] = True  # whatever is told of loads after that
        _tell()
        while True:
            time.sleep(60)

    return begin_and_stop


match os.environ.get("KVKEEP_STOPS_AT"):
    case "store":
        Store._write = then_stop(Store._write)  # type: ignore[method-assign]
    case "load":
        Load._begin = then_stop(Load._begin)  # type: ignore[method-assign]

WorkerAdapter.store_all = store_all  # type: ignore[method-assign, assignment]
WorkerAdapter._end_store = end_store  # type: ignore[method-assign, assignment]
WorkerAdapter._end_loads = end_loads  # type: ignore[method-assign, assignment]
WorkerAdapter.load_now = load_now  # type: ignore[method-assign, assignment]


class KVKeepConnector(Connector):
    """Under its own name, so that vLLM finds it in this module."""
