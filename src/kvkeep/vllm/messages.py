"""What the two sides of the connector say to each other through vLLM: plain data, pickled by it."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvkeep.client.requests import Finished, LoadOutcome
from kvkeep.connector.step import StepMetadata
from kvkeep.kv.shape import BlockShape


@dataclass
class Handshake(KVConnectorHandshakeMetadata):
    """From a worker, once its memory is there: what blocks are like. Without a shape: why they are
    not cached, or that the worker is still finding out (`is_pending`): then another handshake comes
    with the results of a step. `name` is the worker's own, by which the scheduler finds it if it is
    in the same process. `siblings`: the connectors that stand beside this one in a MultiConnector.
    `sleeps`: how often vLLM has taken its memory away and given it again."""

    shape: BlockShape | None
    refusal: str = ""
    name: str = field(default="", compare=False)
    siblings: tuple[str, ...] = ()
    sleeps: int = field(default=0, compare=False)
    is_pending: bool = False


@dataclass
class Step(KVConnectorMetadata):
    """To every worker with a step.

    lost           the outcomes of loads that vLLM waits for and that could not be prepared, by
                   request
    all_withdrawn  which blocks the step writes into is not known, so nothing that is still to be
                   copied may be stored
    idle           it computes nothing
    """

    step: StepMetadata = field(default_factory=StepMetadata)
    lost: dict[str, LoadOutcome] = field(default_factory=dict)
    all_withdrawn: bool = False
    idle: bool = False


@dataclass
class Reports(KVConnectorWorkerMetadata):
    """From the workers with a step's results, one of each rank that has something to say.
    `handshakes` that could not be told at start-up come with the first of them. `outages` has the
    ranks whose connection to the server has failed since they last said so, and why
    (client/outage.py), or None if it is over."""

    finished: list[Finished] = field(default_factory=list)
    handshakes: list[Handshake] = field(default_factory=list)
    outages: dict[int, tuple[str, str] | None] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, Reports)
        handshakes, outages = self.handshakes + other.handshakes, self.outages | other.outages
        return Reports(self.finished + other.finished, handshakes, outages)
