from __future__ import annotations

from kvkeep.client.hints import Hints
from kvkeep.connector.request_state import RequestState
from kvkeep.kv.keys import KEY_BYTES

KEYS = [bytes([at]) * KEY_BYTES for at in range(1, 6)]


def state() -> RequestState:
    return RequestState("r", None, Hints(), bytearray(b"".join(KEYS)), prompt_blocks=5)


def test_keys_by_block() -> None:
    it = state()
    assert it.num_blocks == 5
    assert [it.key(at) for at in range(5)] == KEYS
    assert it.key(-1) == b"", "nothing comes before the first"
    assert it.key(5) == b""
    assert it.keys_of(0, 5) == b"".join(KEYS)
    assert it.keys_of(1, 3) == KEYS[1] + KEYS[2]
    assert it.keys_of(2, 2) == b""
    assert type(it.keys_of(0, 1)) is bytes, (
        "a copy that can go to others: the request's own keys grow"
    )


def test_keys_that_were_handed_out_do_not_grow() -> None:
    it = state()
    before = it.keys_of(0, 5)
    it.keys += KEYS[0]
    assert len(before) == 5 * KEY_BYTES and it.num_blocks == 6


def test_blocks_count_once_however_often_they_come() -> None:
    it = state()
    it.hold(2)
    it.count_loaded(4)
    assert it.loaded == 2, "the engine's own cache had the first two"
    it.count_loaded(4)
    it.count_loaded(1)
    assert it.loaded == 2
    it.count_loaded(5)
    assert it.loaded == 3


def test_what_the_request_had_before_a_preemption_is_not_given_by_the_cache() -> None:
    it = state()
    it.hold(3)
    it.hold(0)
    it.count_loaded(3)
    assert it.loaded == 0


def test_blocks_of_generated_tokens_do_not_count() -> None:
    it = state()
    it.count_loaded(9)
    it.count_loaded(12)
    assert it.loaded == 5
