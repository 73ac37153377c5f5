"""An engine process answers, ends with all that it started, and says what went wrong. vLLM is a
stub here."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from kvkeep.bench import vllm_run
from kvkeep.bench.vllm_lanes import Lane, digest
from kvkeep.bench.vllm_run import EngineProcess, ImportingProcess
from kvkeep.errors import KVKeepError

PROMPT = list(range(100))


@pytest.fixture
def around(tmp_path: Path) -> dict[str, str]:
    """An environment whose vLLM is the stub."""
    shutil.copy(Path(__file__).with_name("vllm_stub.py"), tmp_path / "vllm.py")
    return dict(os.environ) | {"PYTHONPATH": str(tmp_path)}


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
        running._process.stderr.seek(0)
        [child] = re.findall(r"child (\d+)", running._process.stderr.read())
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
        KVKeepError, match=r"(?s)connector some ended. It said:.*this engine cannot start"
    ):
        engine(around, behaviour="no start").__enter__()


def test_an_engine_that_dies_says_its_last_word(around: dict[str, str]) -> None:
    running = engine(around, behaviour="dies")
    with pytest.raises(KVKeepError, match=r"(?s)ended. It said:.*a last word"), running:
        running.ask(PROMPT)


def test_an_engine_that_falls_silent_is_given_up(
    around: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_run, "_ANSWER_WITHIN_S", 0.1)
    monkeypatch.setattr(vllm_run, "_GIVE_UP_WITHIN_S", 0.1)
    running = engine(around, behaviour="silent")
    with pytest.raises(KVKeepError, match=r"said nothing for 0.1 s"), running:
        running.ask(PROMPT)


def test_a_cache_that_cannot_be_dropped_is_given_up(
    around: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_run, "_DROP_WITHIN_S", 0.1)
    running = engine(around, behaviour="busy")
    with pytest.raises(KVKeepError, match=r"could not drop its prefix cache within 0.1 s"), running:
        running.drop_local_cache()


def test_a_stream_is_served_until_time_is_over_and_all_are_done(around: dict[str, str]) -> None:
    prompts = [[at] * 40 for at in range(200)]
    with engine(around) as running:
        served = running.serve(prompts, 4, 0.3, 2)
        rest = running.serve(prompts[:6], 4, 60.0, 2)
    begun = served["begun"]
    assert 4 <= begun < 200 and set(served["answers"]) == {str(at) for at in range(begun)}
    assert (
        served["answers"]["3"] == digest([120, 121])
        and served["tokens"] == 2 * begun
        and served["seconds"] >= 0.3
    )
    assert served["failed"] == (begun > 13)
    assert rest["begun"] == len(rest["answers"]) == 6 and rest["seconds"] < 60


def test_lanes_are_served_together_and_the_rest_is_aborted(around: dict[str, str]) -> None:
    decoding = Lane([[at] * 4 for at in range(50)], [10_000] * 50, at_a_time=2)
    arriving = Lane([[at] * 40 for at in range(3)], [1] * 3, every_s=0.05)
    with engine(around) as running:
        said = running.load([decoding, arriving], 0.5, finish=False)
        assert running.ask(PROMPT, 2).tokens, "it goes on"
    assert [each["begun"] for each in said["lanes"]] == [2, 3] and [
        each["done"] for each in said["lanes"]
    ] == [0, 3]
    assert said["lanes"][0]["itl_ms"]["samples"] > 20 and said["seconds"] >= 0.5


def test_what_goes_on_behind_an_engines_start_is_waited_for(
    around: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_run, "_READY_WITHIN_S", 0.1)
    arguments = {"block_size": 32, "behaviour": "ready later"}
    with EngineProcess("some", arguments, around, ready_when="all is ready") as running:
        with pytest.raises(
            KVKeepError, match=r"(?s)is not ready after 0.1 s. It said:.*a greeting"
        ):
            running.wait_until_ready()
        monkeypatch.setattr(vllm_run, "_READY_WITHIN_S", 60)
        running.wait_until_ready()
        log = running._process.stderr.fileno()
        assert b"all is ready" in os.pread(log, 1 << 20, 0) and running.ask(PROMPT).tokens
    with engine(around) as running:
        running.wait_until_ready()


def test_a_process_that_has_imported_is_taken(around: dict[str, str]) -> None:
    spare, unused = ImportingProcess(around), ImportingProcess(around)
    with EngineProcess("some", {"block_size": 32}, around, spare=spare) as running:
        assert running._process is spare and running.ask(PROMPT, 2).tokens
    for process in (spare, unused, unused):
        process.end()
        assert process.popen.returncode is not None
