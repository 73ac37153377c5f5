"""Engines and clients that wait as long as it takes: what is asserted here is what happens, not
when."""

from __future__ import annotations

from typing import Any

import clients
from engines import engine, eventually

import kvkeep
from kvkeep.engine.backends import ServerBackend
from kvkeep.engine.llm import LLM
from kvkeep.engine.models.model import Model
from kvkeep.engine.models.settings import ModelSettings
from kvkeep.testing.process import ServerProcess

PATIENT = {
    "lookup_deadline_ms": 60_000,
    "store_deadline_ms": 60_000,
    "handshake_deadline_ms": 60_000,
}


def patient_engine(
    server: ServerProcess | str,
    model: Model | ModelSettings,
    extra: dict[str, Any] | None = None,
    **options: Any,
) -> LLM:
    """An engine whose connections are up."""
    patient = {f"kvkeep.{name}": value for name, value in PATIENT.items()}
    llm = engine(server, model, extra={**patient, **(extra or {})}, **options)
    backend = llm.engine.backend
    assert isinstance(backend, ServerBackend)
    assert eventually(lambda: all(connection.up for connection in backend.connections))
    return llm


def patient_client(server: ServerProcess | str, **options: Any) -> kvkeep.Cache:
    address = server if isinstance(server, str) else server.address
    return clients.connect(address, **{**PATIENT, **options})
