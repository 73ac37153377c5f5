"""The demo is run whole: it is the first thing a new user sees. What it promises is checked here
once more."""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvkeep.cli import demo, demo_engine
from kvkeep.cli.demo import (
    ANSWER_TOKENS,
    BLOCK_TOKENS,
    MESSAGE_TOKENS,
    USERS,
    Answer,
    EngineProcess,
    EngineProgress,
    Kill,
    Question,
    Screen,
    _killed,
    _opening,
    _show,
    bar,
    broken_promises,
    same_tokens,
)
from kvkeep.errors import KVKeepError, RequestError, SettingsError
from kvkeep.kv.identity import tenant_of
from kvkeep.testing.clock import eventually
from kvkeep.testing.process import ServerProcess

# Small: what is shown holds for any size, and how fast is not a test's business.
DEMO = [sys.executable, "-m", "kvkeep.cli.main", "demo", "--users", "2", "--prompt-tokens", "128"]


def start(*flags: str) -> subprocess.Popen[str]:
    """In a session of its own, so that whatever it leaves behind can be told from others."""
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [*DEMO, *flags], stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )


def left_behind(run: subprocess.Popen[str]) -> list[str]:
    """Processes of the demo's session, and pools of its servers."""
    left = [str(path) for path in Path("/dev/shm").glob(f"kvkeep-p{run.pid}-*")]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            after_name = (process / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        if int(after_name[3]) == run.pid:
            left.append(process.name)
    return left


@dataclasses.dataclass
class Run:
    demo: subprocess.Popen[str]
    stdout: str
    stderr: str


@pytest.fixture(scope="module")
def whole() -> Iterator[Run]:
    with start("--json") as running:
        yield Run(running, *running.communicate(timeout=300))


@pytest.fixture(scope="module")
def outcome(whole: Run) -> dict[str, Any]:
    assert whole.demo.returncode == 0, whole.stderr
    said: dict[str, Any] = json.loads(whole.stdout)
    return said


def test_all_promises_are_kept(outcome: dict[str, Any]) -> None:
    for promise in ("same_tokens", "server_killed", "same_tokens_after_kill"):
        assert outcome[promise] is True, promise
    assert outcome["unfinished_at_kill"] >= 1
    assert outcome["warm_ttft_ms"] > 0 and outcome["cold_ttft_ms"] > 0
    assert broken_promises(outcome) == []


def test_tokens_come_from_what_the_first_engine_stored(outcome: dict[str, Any]) -> None:
    """All but the last answer's last token were computed there, and full blocks of them stored."""
    assert [user["user"] for user in outcome["users"]] == ["alice", "bob"]
    for user in outcome["users"]:
        stored = user["prompt_tokens"] - MESSAGE_TOKENS - 1
        assert stored > 100 + 2 * ANSWER_TOKENS
        assert user["external_cached_tokens"] == stored // BLOCK_TOKENS * BLOCK_TOKENS
    assert outcome["external_cached_tokens"] == sum(
        user["external_cached_tokens"] for user in outcome["users"]
    )


def test_usage_of_each_tenant_is_what_it_stored(outcome: dict[str, Any]) -> None:
    for user in outcome["users"]:
        assert user["tenant"] == tenant_of(user["user"])
        assert user["blocks"] == user["external_cached_tokens"] // BLOCK_TOKENS
        assert user["usage_bytes"] > 0


def test_the_story_is_told_in_five_steps(whole: Run, outcome: dict[str, Any]) -> None:
    story = whole.stderr.splitlines()
    assert (
        story[0] == "Two users talk to a model. Engines come and go, the cache stays. About 1 min."
    )
    assert [line[:2] for line in story if line[:1].isdigit()] == ["1.", "2.", "3.", "4.", "5."]
    left = outcome["unfinished_at_kill"]
    assert (
        f"4. Server killed (SIGKILL) with {left} of 2 requests under way; all 2 were answered"
        in story
    )
    assert story[-1] == "   turns 1 to 3: the same tokens; turn 4, after the kill: the same tokens"
    assert all(len(line) <= 80 for line in story)


def test_the_opening_fits_for_any_number_of_users() -> None:
    for users in range(2, len(USERS) + 1):
        assert len(_opening(users, 64)) <= 80 and _opening(users, 8192).endswith("Some min.")
    assert _opening(4, 1792).startswith("Four users talk to a model.")


def test_progress_goes_to_stderr_without_a_bar(whole: Run) -> None:
    for engine in ("first engine", "second engine", "no cache at all"):
        assert f"   {engine}: starting\n" in whole.stderr
    assert "\x1b" not in whole.stderr + whole.stdout and "Traceback" not in whole.stderr


def test_nothing_is_left(whole: Run) -> None:
    assert left_behind(whole.demo) == []


def test_the_outcome_is_shown(outcome: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    _show(outcome | {"seconds": 12.3})
    shown = capsys.readouterr().out
    for words in (
        "time to first token (TTFT)",
        "TTFT cold",
        "TTFT warm",
        "█",
        "alice",
        tenant_of("bob"),
        "took 12 s",
    ):
        assert words in shown
    assert "Each user has a secret, the salt" in shown and outcome["model"] in shown
    assert all(len(line) <= 80 for line in shown.splitlines()[:-1]), "the last line names the model"


def test_what_is_shown_of_many_and_long_prompts_fits(capsys: pytest.CaptureFixture[str]) -> None:
    user = {
        "tenant": tenant_of("heidi"),
        "blocks": 9999,
        "usage_bytes": 1234 << 20,
        "prompt_tokens": 8192,
    }
    times = {"external_cached_tokens": 8176, "cold_ttft_ms": 99999.0, "warm_ttft_ms": 99.0}
    users = [user | times | {"user": name} for name in USERS]
    _show({"users": users, **times, "speedup": 1010.1, "seconds": 600.0, "model": "a model"})
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80 and sum(line.startswith("heidi") for line in lines) == 2


@pytest.mark.parametrize(
    ("done", "unfinished", "complete", "said"),
    [
        (True, 4, 4, "Server killed (SIGKILL) with 4 of 4 requests under way; all 4 were answered"),
        (
            True,
            2,
            3,
            "Server killed (SIGKILL) with 2 of 4 requests under way; ONLY 3 of 4 were answered",
        ),
        (False, 0, 4, "Server NOT killed; all 4 were answered"),
    ],
)
def test_what_is_said_of_the_kill_is_what_happened(
    done: bool, unfinished: int, complete: int, said: str
) -> None:
    assert _killed(done, unfinished, complete, users=4) == said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_leaves_nothing(number: signal.Signals) -> None:
    with start() as run:
        assert run.stderr is not None
        for line in run.stderr:
            if line == "   first engine: starting\n":
                break
        # Ctrl-C goes to all processes of a terminal; SIGTERM usually to the one that was asked for.
        os.killpg(run.pid, number) if number == signal.SIGINT else run.send_signal(number)
        _, said = run.communicate(timeout=60)
        assert (run.returncode, said) == (128 + number, "stopped\n")
        # An engine that was being started in that moment sees that nobody speaks to it, and ends by
        # itself.
        deadline = time.monotonic() + 30
        while left_behind(run) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert left_behind(run) == []


# -- what stays in a terminal


def ask(address: str, path: str, token: str) -> Any:
    request = urllib.request.Request(
        f"http://{address}{path}", headers={"Authorization": f"Bearer {token}"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def test_in_a_terminal_a_warm_server_stays_with_its_dashboard_until_ctrl_c() -> None:
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        DEMO, stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL, start_new_session=True
    ) as run:
        os.close(theirs)
        said = ""
        while "Ctrl-C" not in said:
            said += os.read(ours, 1 << 16).decode()  # OSError if it ends instead
        [address] = re.findall(r"Dashboard: +http://(\S+)/dashboard\r\n", said)
        [file] = re.findall(r"Admin token: +(\S+)\r\n", said)
        token = Path(file).read_text().strip()
        assert token not in said
        with urllib.request.urlopen(f"http://{address}/dashboard", timeout=30) as answer:
            assert b"Time saved" in answer.read()
        # The two users, four prompts that nobody had sent and one of another salt.
        assert eventually(lambda: ask(address, "/v1/status", token)["figures"]["requests"] == 7)
        shown = ask(address, "/v1/status", token)
        assert shown["figures"]["tokens_loaded"] > 2 * 128
        assert shown["figures"]["tokens_unpriced"] == 0, "so all of the time saved is known"
        assert shown["prompt_blocks"]["other_salt"] > 128 // BLOCK_TOKENS
        assert shown["prompt_blocks"]["never_stored"] > 0
        tenants = {each["tenant"] for each in shown["largest_tenants"]}
        assert tenants == {tenant_of(salt) for salt in ("alice", "bob", "mallory")}
        assert shown["sessions"], "the engine is still there"
        assert all(len(line) <= 80 for line in said.partition("\n6. ")[2].splitlines()[:3])
        os.killpg(run.pid, signal.SIGINT)
        assert run.wait(60) == 0
        os.close(ours)
        assert left_behind(run) == []


@pytest.mark.parametrize(
    ("stay", "json", "is_terminal", "expected"),
    [
        (None, False, True, True),
        (None, False, False, False),
        (None, True, True, False),
        (False, False, True, False),
        (True, False, False, True),
        (True, True, False, True),
    ],
)
def test_it_stays_in_a_terminal_or_if_asked(
    monkeypatch: pytest.MonkeyPatch,
    stay: bool | None,
    json: bool,
    is_terminal: bool,
    expected: bool,
) -> None:
    given: list[bool] = []
    monkeypatch.setattr(demo, "_run", lambda *words: given.append(words[-1]) or [])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    for file in (sys.stdin, sys.stdout):
        monkeypatch.setattr(file, "isatty", lambda: is_terminal, raising=False)
    demo.demo(json=json, stay=stay)
    assert given == [expected]


def test_two_hosts_do_not_stay() -> None:
    with pytest.raises(SettingsError, match="--stay is for one host"):
        demo.demo(hosts=2, stay=True)


def test_a_server_that_ends_while_it_stays_is_told() -> None:
    with ServerProcess("--pool-size", "16MiB") as server:
        server.send(signal.SIGTERM)
        with pytest.raises(KVKeepError, match="the server has ended"):
            demo._wait_for_interrupt(server)


# -- what is not as promised is found


ANSWER = Answer([1, 2, 3], "length", 10.0, 100.0, 200.0, 32, 0)


def test_a_planted_difference_is_found() -> None:
    assert same_tokens([ANSWER, ANSWER], [ANSWER, ANSWER])
    for other in (
        dataclasses.replace(ANSWER, tokens=[1, 2, 4]),
        dataclasses.replace(ANSWER, tokens=[1, 2]),
        dataclasses.replace(ANSWER, finish_reason="error"),
    ):
        assert not same_tokens([ANSWER, other], [ANSWER, ANSWER])
    assert not same_tokens([ANSWER], [ANSWER, ANSWER])
    assert not same_tokens([], [])
    unfinished = dataclasses.replace(ANSWER, finish_reason="error")
    assert not same_tokens([unfinished], [unfinished]), (
        "an answer that is equally incomplete is none"
    )


@pytest.mark.parametrize(
    "planted",
    [
        {"same_tokens": False},
        {"same_tokens_after_kill": False},
        {"server_killed": False},
        {"users": [{"external_cached_tokens": 16}, {"external_cached_tokens": 0}]},
        {"speedup": 2.9, "prompt_tokens": 1024},
    ],
)
def test_a_broken_promise_is_named(planted: dict[str, Any]) -> None:
    good = {
        "same_tokens": True,
        "same_tokens_after_kill": True,
        "server_killed": True,
        "users": [{"external_cached_tokens": 16}],
        "speedup": 2.9,
        "prompt_tokens": 1023,
    }
    assert broken_promises(good) == []
    assert len(broken_promises(good | planted)) == 1


def test_a_broken_promise_ends_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    user = {"external_cached_tokens": 16}
    planted = {"same_tokens": False, "server_killed": True, "same_tokens_after_kill": True}
    monkeypatch.setattr(
        demo, "_tell", lambda *_: planted | {"users": [user], "prompt_tokens": 64, "speedup": 1.0}
    )
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as ended:
        demo.demo(users=2, prompt_tokens=64, json=True)
    assert ended.value.code == 1
    said = capsys.readouterr()
    assert json.loads(said.out)["same_tokens"] is False
    assert "NOT as promised: tokens are the same as without a cache" in said.err


def test_a_kill_counts_only_what_was_unfinished() -> None:
    with ServerProcess("--pool-size", "16MiB") as server:
        kill = Kill(server)
        kill(EngineProgress(answers=0.0, complete=0, running=0))
        assert not kill.done and kill.unfinished([ANSWER]) == 0
        kill(EngineProgress(answers=0.5, complete=0, running=1))
        assert kill.done
        assert server.process is not None
        assert server.process.returncode == -signal.SIGKILL
    early = dataclasses.replace(ANSWER, arrived_s=kill.died_s - 2, finished_s=kill.died_s - 1)
    midst = dataclasses.replace(early, finished_s=kill.died_s + 1)
    late = dataclasses.replace(midst, arrived_s=kill.died_s + 0.5)
    assert kill.unfinished([early, midst, late]) == 1


def test_a_server_that_died_before_was_not_killed() -> None:
    with ServerProcess("--pool-size", "16MiB") as server:
        assert server.process is not None
        server.send(signal.SIGTERM)
        server.process.wait()
        kill = Kill(server)
        kill(EngineProgress(answers=0.5, complete=0, running=1))
        assert not kill.done and kill.unfinished([ANSWER]) == 0


def test_bars() -> None:
    assert bar(0) == "" and bar(0.0001) == "▏" and len(bar(1)) == 40
    assert bar(0.5) == "█" * 20 and bar(0.5 + 1 / 80) == "█" * 20 + "▌"


def test_a_terminal_gets_a_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    screen = Screen(json=False)
    with screen.progress("an engine", 4) as show:
        show(2.5, 1)
        screen.say("1. Something is told meanwhile")
        show(4, 4)
    said = capsys.readouterr()
    assert said.out == "1. Something is told meanwhile\n"
    assert "an engine" in said.err and "━" in said.err
    assert " 1 of 4 answers" in said.err and " 4 of 4 answers" in said.err


def test_no_terminal_gets_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now_s = 100.0
    monkeypatch.setattr(demo, "time", SimpleNamespace(monotonic=lambda: now_s))
    with Screen(json=False).progress("an engine", 40) as show:
        for second in range(24):
            now_s = 100.0 + second
            show(second + 0.5, second)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.splitlines() == [
        "   an engine: starting",
        "   an engine: 6%, 2 of 40 answers",
        "   an engine: 31%, 12 of 40 answers",
        "   an engine: 56%, 22 of 40 answers",
    ]


def test_without_torch_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SettingsError) as refusal:
        demo.demo()
    assert refusal.value.hint == "install kvkeep[engine]"


QUESTION = Question("a", [1, 2, 3], 4)


@pytest.fixture(scope="module")
def engine() -> Iterator[EngineProcess]:
    with EngineProcess(None, num_blocks=32) as running:
        yield running


def test_an_engine_says_what_it_computes(engine: EngineProcess) -> None:
    assert "8 layers" in engine.model


def test_questions_are_answered_with_progress_on_the_way(engine: EngineProcess) -> None:
    seen: list[EngineProgress] = []
    first, second = engine.serve([QUESTION, Question("b", [4], 6)], seen.append)
    [again] = engine.serve([QUESTION])
    assert (len(first.tokens), len(second.tokens)) == (4, 6)
    assert again.tokens == first.tokens and again.finish_reason == "length"
    assert first.arrived_s < first.finished_s
    assert first.ttft_ms > 0
    assert first.external_cached_tokens == 0
    assert [each.answers for each in seen] == sorted(each.answers for each in seen)
    assert seen[0].running == 2 and seen[-1].answers == seen[-1].complete == 2
    assert {each.complete for each in seen} == {0, 1, 2}
    assert all(each.complete <= each.answers for each in seen)


# -- what goes wrong inside the process: here without one


def speak(monkeypatch: pytest.MonkeyPatch, num_blocks: int, question: Question) -> None:
    said = [
        {"address": None, "num_blocks": num_blocks, "extra": {}},
        {"questions": [dataclasses.asdict(question)]},
    ]
    monkeypatch.setattr(
        sys, "stdin", io.StringIO("".join(json.dumps(each) + "\n" for each in said))
    )
    demo_engine.serve_engine()


def test_an_engine_that_cannot_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match="num_blocks must be an integer of at least 1"):
        speak(monkeypatch, 0, QUESTION)


def test_a_question_that_cannot_be_answered_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="raise num_blocks"):
        speak(monkeypatch, 8, Question("a", [1] * 1000, 1))


# -- what the parent makes of a process that ends: one without a model

READY = 'import sys; sys.stdin.readline(); print(\'{"model": "none"}\', flush=True); sys.stdin.readline(); '


def child(program: str) -> EngineProcess:
    return EngineProcess(None, 8, program=("-c", program))


def test_a_process_that_ends_badly_is_noticed_at_the_end() -> None:
    with (
        pytest.raises(KVKeepError, match=r"exit code 3\. It said:\n\(nothing\)"),
        child(READY + "sys.exit(3)") as engine,
    ):
        assert engine.model == "none"


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
