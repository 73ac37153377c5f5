from __future__ import annotations

import dataclasses
import time
from typing import Any

from kvkeep.cli.explain import facts, rows
from kvkeep.server.explain import EvictionShown, RequestShown


def shown(**changes: Any) -> dict[str, Any]:
    outcomes = {"local": 1, "loaded": 2, "evicted": 3, "never_stored": 4, "last": 1}
    request = RequestShown(
        *(1, "cmpl-1-0", time.time() - 5, "default", 3, "vllm 0.32.0", "llama"),
        *(170, 64, 32, 74, 0.413, 0.25, 11, outcomes, list(outcomes.items())),
        EvictionShown(2.0, 7.5, "t-0"),
        [],
    )
    return dataclasses.asdict(request) | changes


def test_a_line_says_why_blocks_missed_the_most_frequent_reason_first() -> None:
    _, [row] = rows([shown()])
    assert row[0] == "cmpl-1-0" and row[-1] == "4 never stored, 3 evicted"
    assert row[3:7] == (170, 64, 74, "0.41s")


def test_facts_name_every_run_of_blocks() -> None:
    lines = dict(facts(shown()))
    assert lines["prompt"] == "170 tokens: 32 local, 64 loaded, 74 computed"
    assert lines["  0"].startswith("local: ") and lines["  3-5"].startswith("evicted: ")
    assert lines["evicted"] == "2.0 to 7.5 s before it was asked for, for tenant t-0"
    assert lines["took"] == "0.413 s until the engine had all of its prompt"
    assert lines["time saved"] == "0.250 s" and "differs" not in lines
    assert dict(facts(shown(saved_s=None)))["time saved"] == "not known"
    assert dict(facts(shown(differs=["attention"])))["differs"] == "attention"
