from __future__ import annotations

import logging
from collections import OrderedDict
from types import MappingProxyType
from typing import Any

import pytest

from kvkeep.client.hints import EXTRA_CACHED_TOKENS, Hints

THEIRS, OURS = EXTRA_CACHED_TOKENS
FIELDS = {
    "kvkeep_priority": "priority",
    "kvkeep_ttl_ms": "ttl_ms",
    "kvkeep_session_finished": "conversation_finished",
    "kvkeep_prefetch": "prefetch",
}


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_the_names_are_those_that_clients_send() -> None:
    assert (THEIRS, OURS) == ("num_lmcache_extra_cached_tokens", "num_kvkeep_extra_cached_tokens")


@pytest.mark.parametrize(
    ("params", "counts"),
    [
        ({}, ()),
        ({"other": 1}, ()),
        ({OURS: None}, (OURS,)),
        ({THEIRS: None}, (THEIRS,)),
        ({OURS: 0, THEIRS: "x"}, (THEIRS, OURS)),
        ({OURS.upper(): None}, ()),
        (OrderedDict({OURS: {"deep": []}}), (OURS,)),
        (MappingProxyType({THEIRS: 1}), (THEIRS,)),
    ],
    ids=str,
)
def test_a_name_asks_whatever_its_value(
    params: Any, counts: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    assert Hints.of(params).counts == counts
    assert Hints.of(params).reply(8) == dict.fromkeys(counts, 8)
    assert not warnings(caplog)


def test_no_params_get_no_reply_and_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert Hints.of(None) == Hints()
    assert Hints.of(None).reply(4) is None
    assert not warnings(caplog)


@pytest.mark.parametrize(
    "params", [[], [OURS], OURS, "", b"x", 0, 7, 1.5, True, False, object(), {1}, (1, 2)], ids=str
)
def test_what_is_no_mapping_is_as_if_nothing_was_sent(
    params: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert Hints.of(params) == Hints()
    [said] = warnings(caplog)
    assert type(params).__name__ in said


def test_hints_are_taken_at_their_limits(caplog: pytest.LogCaptureFixture) -> None:
    for priority in (0, 50, 100):
        assert Hints.of({"kvkeep_priority": priority}).priority == priority
    for ttl_ms in (0, 1, 2**53):
        assert Hints.of({"kvkeep_ttl_ms": ttl_ms}).ttl_ms == ttl_ms
    for finished in (True, False):
        assert Hints.of({"kvkeep_session_finished": finished}).conversation_finished is finished
    assert not warnings(caplog)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        (
            "kvkeep_priority",
            [-1, 101, 10**30, "50", "", 50.0, True, None, [], {}, float("nan"), b"1"],
        ),
        ("kvkeep_ttl_ms", [-1, 2**53 + 1, "0", 0.0, False, None, [1], {"a": 1}, float("inf")]),
        ("kvkeep_session_finished", [0, 1, "true", "", None, [], {}, 1.0]),
        ("kvkeep_prefetch", [0, 1, "true", "", None, [1, 2], {}, 1.0]),
    ],
)
def test_a_bad_hint_is_left_out_with_a_warning_and_the_others_count(
    name: str, values: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    good = {OURS: None, "kvkeep_priority": 80, "kvkeep_ttl_ms": 9}
    good |= {"kvkeep_session_finished": True, "kvkeep_prefetch": True}
    for value in values:
        caplog.clear()
        params = Hints.of({**good, name: value})
        field = FIELDS[name]
        assert getattr(params, field) == getattr(Hints(), field), value
        assert params.counts == (OURS,)
        for other in FIELDS.keys() - {name}:
            assert getattr(params, FIELDS[other]) == good[other]
        [said] = warnings(caplog)
        assert name in said


def test_a_long_value_is_not_repeated_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    Hints.of({"kvkeep_priority": "secret" * 1000})
    [said] = warnings(caplog)
    assert "secret" not in said


def test_a_mapping_that_raises_is_ignored_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    class Hostile(OrderedDict[str, object]):
        def __contains__(self, name: object) -> bool:
            raise RuntimeError("no")

        def get(self, *args: object) -> Any:
            raise RuntimeError("no")

        __getitem__ = __iter__ = items = keys = get  # type: ignore[assignment]

    assert Hints.of(Hostile({OURS: None})) == Hints()
    assert warnings(caplog) == ["kvkeep: kv_transfer_params cannot be read: ignored"]
