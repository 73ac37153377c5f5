"""The demo's engine process answers, and says what went wrong when it does not."""

from __future__ import annotations

import dataclasses
import io
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from kvkeep.cli import demo_engine
from kvkeep.cli.demo_engine import EngineProcess, Progress, Question
from kvkeep.errors import KVKeepError, RequestError, SettingsError

QUESTION = Question("a", [1, 2, 3], 4)


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineProcess]:
    with EngineProcess(None, num_blocks=32) as running:
        yield running


def test_an_engine_says_what_it_computes(engine: EngineProcess) -> None:
    assert "8 layers" in engine.model


def test_questions_are_answered_with_progress_on_the_way(engine: EngineProcess) -> None:
    seen: list[Progress] = []
    first, second = engine.serve([QUESTION, Question("b", [4], 6)], seen.append)
    [again] = engine.serve([QUESTION])
    assert (len(first.tokens), len(second.tokens)) == (4, 6)
    assert again.tokens == first.tokens and again.finish_reason == "length"
    assert (
        first.arrived_s < first.finished_s
        and first.ttft_ms > 0
        and first.external_cached_tokens == 0
    )
    assert [each.answers for each in seen] == sorted(each.answers for each in seen)
    assert seen[0].running == 2 and seen[-1].answers == seen[-1].complete == 2
    assert {each.complete for each in seen} == {0, 1, 2} and all(
        each.complete <= each.answers for each in seen
    )


# -- what goes wrong inside the process: here without one


def speak(monkeypatch: pytest.MonkeyPatch, num_blocks: int, question: Question) -> None:
    said = [
        {"address": None, "num_blocks": num_blocks},
        {"questions": [dataclasses.asdict(question)]},
    ]
    monkeypatch.setattr(
        sys, "stdin", io.StringIO("".join(json.dumps(each) + "\n" for each in said))
    )
    demo_engine._main()


def test_an_engine_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match="num_blocks must be an integer of at least 1"):
        speak(monkeypatch, 0, QUESTION)


def test_a_question_that_cannot_be_answered_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="raise num_blocks"):
        speak(monkeypatch, 8, Question("a", [1] * 1000, 1))


# -- what the parent makes of a process that ends: one without a model

READY = 'import sys; sys.stdin.readline(); print(\'{"model": "none"}\', flush=True); sys.stdin.readline(); '


def child(program: str) -> EngineProcess:
    return EngineProcess(None, 8, ("-c", program))


def test_what_a_process_said_before_it_was_ready_is_told() -> None:
    with (
        pytest.raises(KVKeepError, match=r"(?s)exit code 1\. It said:\nno memory$"),
        child("raise SystemExit('no memory')"),
    ):
        raise AssertionError("it is not there")


def test_what_a_process_said_instead_of_an_answer_is_told() -> None:
    program = READY + "raise ValueError('too long')"
    with (
        pytest.raises(KVKeepError, match=r"(?s)exit code 1.*ValueError: too long"),
        child(program) as engine,
    ):
        engine.serve([QUESTION])


def test_a_process_that_ends_badly_is_noticed_at_the_end() -> None:
    with (
        pytest.raises(KVKeepError, match=r"exit code 3\. It said:\n\(nothing\)"),
        child(READY + "sys.exit(3)") as engine,
    ):
        assert engine.model == "none"


def kill_and_ask(process: EngineProcess) -> None:
    with process as engine:
        engine.process.kill()
        engine.serve([QUESTION])


def test_a_process_that_was_killed_is_noticed() -> None:
    with pytest.raises(KVKeepError, match="exit code -9"):
        kill_and_ask(child(READY))
    with pytest.raises(KVKeepError, match="exit code -9"), child(READY) as engine:
        engine.process.kill()


def test_whoever_fails_beside_a_process_ends_it() -> None:
    with pytest.raises(ZeroDivisionError), child(READY + "import time; time.sleep(600)") as engine:
        raise ZeroDivisionError
    assert engine.process.exit_code() == -9


def test_an_engine_to_which_nobody_speaks_ends() -> None:
    command = [sys.executable, "-m", "kvkeep.cli.demo_engine"]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_the_command_line_does_not_load_torch() -> None:
    program = "import sys, kvkeep.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0


def test_an_interrupt_while_a_process_ends_leaves_none_behind() -> None:
    engine = child(READY + "import time; time.sleep(600)")  # goes on without input
    with pytest.raises(KeyboardInterrupt), engine:
        threading.Timer(0.3, signal.raise_signal, [signal.SIGINT]).start()
    assert engine.process.exit_code() == -9
