"""An engine process answers, ends with all that it started, and says what went wrong. vLLM is a
stub here."""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from kvkeep.bench.vllm_run import EngineProcess, Patience
from kvkeep.errors import KVKeepError

PROMPT = list(range(100))


@pytest.fixture
def around(stubbed_vllm: Any) -> dict[str, str]:
    """An environment whose vLLM is the stub."""
    environment: dict[str, str] = stubbed_vllm.environment
    return environment


def engine(around: dict[str, str], counting: str = "", **arguments: Any) -> EngineProcess:
    return EngineProcess("some", {"block_size": 32} | arguments, around, counting)


def test_prompts_are_answered_with_what_was_found(around: dict[str, str]) -> None:
    with engine(around, external=True) as running:
        assert running.vllm == "0.0.stub"
        cold, local = running.ask(PROMPT, 3), running.ask(PROMPT, 3)
        running.drop_local_cache()
        external = running.ask(PROMPT, 3)
    assert [each.cached_tokens for each in (cold, local, external)] == [0, 96, 96]
    assert cold.tokens == local.tokens == external.tokens and len(cold.tokens) == 3
    assert min(cold.ms, external.ms, local.ms) > 0


def test_where_a_connector_counts_its_own_that_is_taken(around: dict[str, str]) -> None:
    with engine(around, "num_extra", external=True) as running:
        found = [running.ask(PROMPT).cached_tokens, running.ask(PROMPT).cached_tokens]
        running.drop_local_cache()
        assert [*found, running.ask(PROMPT).cached_tokens] == [0, 0, 96]


@pytest.mark.parametrize("fails", [False, True])
def test_whatever_an_engine_started_ends_with_it(around: dict[str, str], fails: bool) -> None:
    running = engine(around, behaviour="child")
    with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext(), running:
        [child] = re.findall(r"child (\d+)", running.process.log())
        os.kill(int(child), 0)
        if fails:
            raise ZeroDivisionError
    until = time.monotonic() + 10
    while _alive(int(child)):
        assert time.monotonic() < until
        time.sleep(0.01)


def _alive(pid: int) -> bool:
    """A process whose parent is gone may stay as a zombie for a while."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_an_engine_that_cannot_start_says_why(around: dict[str, str]) -> None:
    with pytest.raises(
        KVKeepError,
        match=r"(?s)connector some ended with exit code 1. It said:.*this engine cannot start",
    ):
        engine(around, behaviour="no start").__enter__()


def test_an_engine_that_dies_says_its_last_word(around: dict[str, str]) -> None:
    running = engine(around, behaviour="dies")
    with (
        pytest.raises(KVKeepError, match=r"(?s)ended with exit code 7. It said:.*a last word"),
        running,
    ):
        running.ask(PROMPT)


def test_an_engine_that_falls_silent_is_given_up(
    around: dict[str, str],
) -> None:
    running = engine(around, behaviour="silent")
    running.patience = Patience(answer_s=0.1, give_up_s=0.1)
    with pytest.raises(KVKeepError, match=r"said nothing for 0.1 s"), running:
        running.ask(PROMPT)


def test_a_cache_that_cannot_be_dropped_is_given_up(
    around: dict[str, str],
) -> None:
    running = engine(around, behaviour="busy")
    running.patience = Patience(drop_s=0.1)
    with pytest.raises(KVKeepError, match=r"could not drop its prefix cache within 0.1 s"), running:
        running.drop_local_cache()


def test_what_goes_on_behind_an_engines_start_is_waited_for(
    around: dict[str, str],
) -> None:
    arguments = {"block_size": 32, "behaviour": "ready later"}
    with EngineProcess("some", arguments, around, ready_when="all is ready") as running:
        running.patience = Patience(ready_s=0.1)
        with pytest.raises(
            KVKeepError, match=r"(?s)is not ready after 0.1 s. It said:.*a greeting"
        ):
            running.wait_until_ready()
        running.patience = Patience(ready_s=60)
        running.wait_until_ready()
        assert "all is ready" in running.process.log() and running.ask(PROMPT).tokens
    with engine(around) as running:
        running.wait_until_ready()


def test_a_process_that_has_imported_is_taken(around: dict[str, str]) -> None:
    with EngineProcess.importing(["used", "unused"], around) as spares:
        with EngineProcess("some", {"block_size": 32}, around, spare=spares["used"]) as running:
            assert running.process is spares["used"] and running.ask(PROMPT, 2).tokens
        assert spares["unused"].exit_code() is None
    assert all(spare.exit_code() is not None for spare in spares.values())
