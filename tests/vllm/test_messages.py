"""What the two sides say to each other survives the way, and adds up."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

pytest.importorskip(
    "vllm", reason="vLLM is not installed here: `make test-vllm` runs this file with it"
)

from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from kvkeep.client.requests import Finished, LoadOutcome, LoadRequest, StoreRequest
from kvkeep.connector.step import StepMetadata
from kvkeep.kv.identity import ModelIdentity
from kvkeep.kv.keys import KEY_BYTES
from kvkeep.kv.shape import BlockShape
from kvkeep.vllm.messages import Handshake, Reports, Step

SHAPE = BlockShape(
    ModelIdentity(model="m", revision="r", kv_dtype="f", block_tokens=4, content="l"), (64,)
)


def test_a_step_survives_the_way() -> None:
    ids = np.array([3, 1], dtype=np.int64)
    load = LoadRequest(
        "default", bytes(3 * KEY_BYTES), 1, ids, 7, ids, np.ones((2, 1), dtype=np.uint64)
    )
    store = StoreRequest("default", b"", bytes(2 * KEY_BYTES), np.array([[1, 2], [-1, 3]]))
    step = Step(
        StepMetadata({1: load}, {2: store}, {3: store}, [4, 5], {1: "a"}),
        {"b": [1, 2]},
        all_withdrawn=True,
    )
    back = pickle.loads(pickle.dumps(step))
    assert (back.lost, back.all_withdrawn, back.step.withdrawn) == ({"b": [1, 2]}, True, [4, 5])
    assert back.step.requests == {1: "a"}
    assert back.step.loads[1].keys == load.keys and back.step.loads[1].block_ids.tolist() == [3, 1]
    assert back.step.stores_after[3].block_ids.tolist() == [[1, 2], [-1, 3]]


def test_an_empty_step_says_nothing() -> None:
    step = pickle.loads(pickle.dumps(Step()))
    assert not (
        step.step.loads
        or step.step.stores
        or step.step.stores_after
        or step.step.withdrawn
        or step.lost
    )
    assert not step.all_withdrawn


@pytest.mark.parametrize("handshake", [Handshake(SHAPE), Handshake(None, "because")])
def test_a_handshake_survives_the_way(handshake: Handshake) -> None:
    assert pickle.loads(pickle.dumps(handshake)) == handshake


def test_reports_survive_the_way_and_add_up() -> None:
    first = Reports([Finished(0, {1: 2}, [3], {4: LoadOutcome(frozenset({7}), 0.5)}, 5)])
    second = pickle.loads(pickle.dumps(Reports([Finished(1), Finished(1, {9: 1})])))
    both = first.aggregate(second)
    assert isinstance(both, Reports)
    assert both.finished == [
        Finished(0, {1: 2}, [3], {4: LoadOutcome(frozenset({7}), 0.5)}, 5),
        Finished(1),
        Finished(1, {9: 1}),
    ]
    assert len(first.finished) == 1


def test_vllm_brings_the_reports_of_all_ranks_together() -> None:
    def of_rank(rank: int) -> ModelRunnerOutput:
        meta = Reports([Finished(rank, loads={1: LoadOutcome()})]) if rank != 1 else None
        output = KVConnectorOutput(kv_connector_worker_meta=meta, finished_recving={"a"})
        return ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=output)

    output = KVOutputAggregator(3).aggregate([of_rank(rank) for rank in range(3)])
    assert output is not None and output.kv_connector_output is not None
    meta = output.kv_connector_output.kv_connector_worker_meta
    assert isinstance(meta, Reports) and [each.rank for each in meta.finished] == [0, 2]
    assert output.kv_connector_output.finished_recving == {"a"}


def test_outages_of_all_ranks_come_together() -> None:
    first, second = Reports(outages={0: ("it does not answer", "")}), Reports(outages={1: None})
    both = pickle.loads(pickle.dumps(first.aggregate(second)))
    assert both.outages == {0: ("it does not answer", ""), 1: None}
