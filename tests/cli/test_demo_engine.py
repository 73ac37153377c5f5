"""The demo's engine process answers, and says what went wrong when it does not."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvkeep.cli.demo_engine import EngineProcess, Progress, Question
from kvkeep.errors import KVKeepError


def test_questions_are_answered_with_progress_on_the_way() -> None:
    seen: list[Progress] = []
    with EngineProcess(None, num_blocks=32) as engine:
        assert "layers" in engine.model
        first, second = engine.serve([Question("a", [1, 2, 3], 4), Question("b", [4], 6)], seen.append)
        [again] = engine.serve([Question("a", [1, 2, 3], 4)])
    assert (len(first.tokens), len(second.tokens)) == (4, 6)
    assert again.tokens == first.tokens and again.finish_reason == "length"
    assert first.arrived_s < first.finished_s and first.ttft_ms > 0 and first.external_cached_tokens == 0
    assert [each.answers for each in seen] == sorted(each.answers for each in seen)
    assert seen[0].running == 2 and seen[-1].answers == 2


def test_an_engine_that_cannot_start_says_why() -> None:
    with pytest.raises(KVKeepError, match="num_blocks must be an integer of at least 1"), EngineProcess(None, 0):
        raise AssertionError("it is not there")


def ask(engine: EngineProcess, tokens: int, *, kill: bool = False) -> None:
    with engine:
        if kill:
            engine._process.kill()
        engine.serve([Question("a", [1] * tokens, 1)])


def test_an_engine_that_fails_says_why() -> None:
    with pytest.raises(KVKeepError, match=r"(?s)exit code 1.*RequestError.*raise num_blocks"):
        ask(EngineProcess(None, num_blocks=8), tokens=1000)


def test_an_engine_that_was_killed_is_noticed() -> None:
    with pytest.raises(KVKeepError, match="exit code -9"):
        ask(EngineProcess(None, num_blocks=8), tokens=1, kill=True)
    with pytest.raises(KVKeepError, match="exit code -9"), EngineProcess(None, num_blocks=8) as engine:
        engine._process.kill()


def test_an_engine_to_which_nobody_speaks_ends() -> None:
    command = [sys.executable, "-m", "kvkeep.cli.demo_engine"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_the_command_line_does_not_load_torch() -> None:
    program = "import sys, kvkeep.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0
