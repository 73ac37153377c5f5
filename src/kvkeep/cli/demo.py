"""`kvkeep demo`: conversations of several users, served by engine processes that come and go.

    turn          1   2          3                    4                     all turns again, at the end
    served by     first engine   second engine        second engine         an engine without any cache
                  (ends)         one by one: TTFT     together; the server  one by one where TTFT is compared
                                                      is killed meanwhile

In a terminal the server is started again at the end, with the blocks that it had; a third engine
answers turn 5 from them, and the dashboard shows that until Ctrl-C.

A turn's prompt is the whole conversation so far and a new message. The demo holds the
conversations, as a chat client does: both engines know a user only by the prompt and by what the
server has. Every answer is compared, token by token, with that of the engine without a cache."""

from __future__ import annotations

import importlib.util
import math
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from kvkeep.cli import demo_hosts
from kvkeep.cli.demo_engine import Answer, EngineProcess, EngineProgress, Question, same_tokens
from kvkeep.cli.output import Json, note, show_json, show_table
from kvkeep.cli.remote import ask
from kvkeep.errors import KVKeepError, SettingsError
from kvkeep.kv.identity import tenant_of
from kvkeep.server.settings import made_token
from kvkeep.testing.process import ServerProcess
from kvkeep.units import format_size

USERS = ("alice", "bob", "carol", "dave", "erin", "frank", "grace", "heidi")
MESSAGE_TOKENS, ANSWER_TOKENS = 24, 16
STRANGER = "mallory"  # a salt that no user has
NEW_PROMPTS = 4  # of the stranger: from them the engine learns how fast it computes
LONG_ANSWER_TOKENS = 64  # of the turn during which the server is killed
BLOCK_TOKENS = 16
PROMISED_SPEEDUP = 3.0
PROMISED_FROM_TOKENS = 1024  # shorter prompts are computed so fast that there is little to save
_POOL_BYTES_A_TOKEN = 16 << 10  # twice what the model's KV takes
_VOCAB_SIZE = 4096
_BAR_WIDTH = 40  # with what stands before it, a line has 80 columns
_PROGRESS_WIDTH = 32  # of the bar that shows how far it is, with numbers behind it
_FIRST_LINE_S, _NEXT_LINE_S = 2.0, 10.0  # how far it is, where there is no terminal
_A_MINUTE_TOKENS = 8192  # of all first prompts together
_COUNTS = {2: "Two", 3: "Three", 4: "Four", 5: "Five", 6: "Six", 7: "Seven", 8: "Eight"}
_END_WITHIN_S = 30  # an engine whose server is gone waits for its last stores to time out

Users = Annotated[int, typer.Option(min=2, max=len(USERS), help="Number of users.")]
PromptTokens = Annotated[
    int,
    typer.Option(
        min=64,
        max=8192,
        help="Tokens of the longest first prompt. The speed is checked from 1024 on.",
    ),
]

Hosts = Annotated[int, typer.Option(min=1, max=2, help="Number of hosts, each with a server.")]
SharedTier = Annotated[
    str, typer.Option(help="Address of the tier that two hosts share; else a new directory.")
]
Stay = Annotated[
    bool | None,
    typer.Option(
        "--stay/--no-stay",
        help="Keep a warm server with its dashboard at the end, until Ctrl-C; --no-stay: end. "
        "Default: stay in a terminal, without --json.",
    ),
]


def demo(
    users: Users = 4,
    prompt_tokens: PromptTokens = 1792,
    json: Json = False,
    hosts: Hosts = 1,
    tier: SharedTier = "",
    stay: Stay = None,
) -> None:
    """Serve conversations on two engine processes that share a cache, and kill the server under the
    second. With two hosts: kill one, and go on from the shared tier on the other."""
    if tier and hosts == 1:
        raise SettingsError("--tier is the tier that two hosts share", "add --hosts 2")
    if stay and hosts == 2:
        raise SettingsError("--stay is for one host", "leave out --hosts 2")
    if stay is None:
        stay = not json and sys.stdin.isatty() and sys.stdout.isatty()
    if importlib.util.find_spec("torch") is None:
        raise SettingsError(
            "the demo computes a model with torch, which is not installed", "install kvkeep[engine]"
        )
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop)
    try:
        if hosts == 2:
            broken = demo_hosts.run(tier, prompt_tokens, json)
        else:
            broken = _run(users, prompt_tokens, json, stay)
    except _Stopped as stopped:
        note("stopped")
        sys.exit(128 + stopped.number)
    for promise in broken:
        note(f"NOT as promised: {promise}")
    if broken:
        sys.exit(1)


def _opening(users: int, prompt_tokens: int) -> str:
    lasts = "About 1 min." if users * prompt_tokens <= _A_MINUTE_TOKENS else "Some min."
    return f"{_COUNTS[users]} users talk to a model. Engines come and go, the cache stays. {lasts}"


class _Stopped(BaseException):
    """A signal asked us to end. On the way out every process that we started is ended, too."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _stop(number: int, frame: object) -> None:
    raise _Stopped(number)


def _run(users: int, prompt_tokens: int, json: bool, stay: bool) -> list[str]:
    """Runs the demo and shows its outcome; returns the promises that were broken. If none was, and
    the demo is to stay, it returns after Ctrl-C."""
    started = time.monotonic()
    screen = Screen(json)
    # Each a little shorter than the last, so that tenants differ in what they use.
    talks = [Talk(name, prompt_tokens * (12 - at) // 12) for at, name in enumerate(USERS[:users])]
    screen.say(_opening(users, prompt_tokens))
    server = ServerProcess("--pool-size", f"{_pool_mib(talks)}MiB")
    with ExitStack() as ends:
        ends.push(server)  # before it starts: an interrupt must not leave it behind
        outcome = _tell(talks, server, screen)
        outcome["seconds"] = round(time.monotonic() - started, 1)
        if json:
            show_json(outcome)
        else:
            _show(outcome)
        broken = broken_promises(outcome)
        if stay and not broken:
            _stay(talks, server, screen)
    return broken


def broken_promises(outcome: dict[str, Any]) -> list[str]:
    """The promises of the demo that it did not keep."""
    promises = {
        "tokens are the same as without a cache": outcome["same_tokens"],
        "the server is killed while requests are unfinished": outcome["server_killed"],
        "tokens are the same after the kill, too": outcome["same_tokens_after_kill"],
        "the second engine finds every user's history in the cache": all(
            user["external_cached_tokens"] > 0 for user in outcome["users"]
        ),
    }
    if outcome["prompt_tokens"] >= PROMISED_FROM_TOKENS:
        promises[f"warm TTFT is {PROMISED_SPEEDUP:g} times better than cold"] = (
            outcome["speedup"] >= PROMISED_SPEEDUP
        )
    return [promise for promise, kept in promises.items() if not kept]


# -- the conversations


@dataclass
class Talk:
    """One user's conversation: `tokens` are all so far, `asked` and `answers` one a turn."""

    user: str
    prompt_tokens: int
    tokens: list[int] = field(default_factory=list)
    asked: list[Question] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)

    def ask(self, max_tokens: int = ANSWER_TOKENS) -> Question:
        """The next turn: first a long prompt, then short messages, of random tokens."""
        turn = len(self.asked)
        rng = np.random.default_rng([USERS.index(self.user), turn])
        count = MESSAGE_TOKENS if turn else self.prompt_tokens
        self.tokens += rng.integers(0, _VOCAB_SIZE, count).tolist()
        self.asked.append(Question(self.user, list(self.tokens), max_tokens))
        return self.asked[-1]

    def hear(self, answer: Answer) -> None:
        self.answers.append(answer)
        self.tokens += answer.tokens


# -- the story


def _blocks(talks: list[Talk]) -> int:
    """Of a conversation, at most."""
    longest = talks[0].prompt_tokens + 4 * (MESSAGE_TOKENS + ANSWER_TOKENS) + LONG_ANSWER_TOKENS
    return longest // BLOCK_TOKENS + 2


def _pool_mib(talks: list[Talk]) -> int:
    return (len(talks) * _blocks(talks) * BLOCK_TOKENS * _POOL_BYTES_A_TOKEN >> 20) + 32


def _tell(talks: list[Talk], server: ServerProcess, screen: Screen) -> dict[str, Any]:
    blocks = _blocks(talks)
    server.start()
    pool = format_size(_pool_mib(talks) << 20)
    screen.say(f"1. A server is running: {server.address}, pool {pool}")
    _first_engine(talks, server.address, len(talks) * blocks + 1, screen)
    tenants = {each["tenant"]: each for each in ask(server.http, "/v1/tenants")["tenants"]}
    # Room for half of the conversations: the others come from the server again in turn 4.
    kill = Kill(server)
    _second_engine(talks, kill, max(3, len(talks)) * blocks // 2 + 1, screen)
    server.stop()
    model, reference = _reference(talks, len(talks) * blocks + 1, screen)
    outcome = _outcome(talks, reference, tenants, kill)
    same, after = outcome["same_tokens"], outcome["same_tokens_after_kill"]
    screen.say(f"   turns 1 to 3: {_same(same)}; turn 4, after the kill: {_same(after)}")
    return outcome | {"model": model}


@dataclass
class Kill:
    """Kills the server during requests. `died_s` is when it was dead, on the clock that all
    processes share."""

    server: ServerProcess
    died_s: float = math.inf

    def __call__(self, progress: EngineProgress) -> None:
        """Kills it as soon as requests are running. When this returns, the server is dead."""
        if progress.running and not self.done:
            assert self.server.process is not None
            self.server.send(signal.SIGKILL)
            if self.server.process.wait() == -signal.SIGKILL:  # and of no other cause before
                self.died_s = time.monotonic()

    @property
    def done(self) -> bool:
        return self.died_s < math.inf

    def unfinished(self, answers: Iterable[Answer]) -> int:
        """How many of these requests had arrived, and were not answered, when the server died."""
        return sum(answer.arrived_s < self.died_s < answer.finished_s for answer in answers)


def _first_engine(talks: list[Talk], address: str, room: int, screen: Screen) -> None:
    with (
        screen.progress("first engine", 2 * len(talks)) as show,
        EngineProcess(address, room) as engine,
    ):
        for turn in range(2):
            answers = engine.serve([talk.ask() for talk in talks], _after(turn * len(talks), show))
            for talk, answer in zip(talks, answers, strict=True):
                talk.hear(answer)
    screen.say(
        f"2. Engine process {engine.process.pid} served {len(talks)} users together, two turns "
        "each, and has ended"
    )


def _second_engine(talks: list[Talk], kill: Kill, room: int, screen: Screen) -> None:
    users = len(talks)
    with (
        screen.progress("second engine", 2 * users) as show,
        EngineProcess(kill.server.address, room) as engine,
    ):
        for at, talk in enumerate(talks):  # one by one: TTFT without waiting for each other
            [answer] = engine.serve([talk.ask()])
            talk.hear(answer)
            show(at + 1, at + 1)
        asked = sum(len(talk.asked[2].prompt) for talk in talks)
        cached = sum(talk.answers[2].external_cached_tokens for talk in talks)
        screen.say(
            f"3. Engine process {engine.process.pid} goes on with turn 3: {cached:,} of {asked:,} "
            "tokens from the cache"
        )
        answers = engine.serve(
            [talk.ask(LONG_ANSWER_TOKENS) for talk in talks], _after(users, show, kill)
        )
        for talk, answer in zip(talks, answers, strict=True):
            talk.hear(answer)
        complete = sum(answer.finish_reason == "length" for answer in answers)
        screen.say(f"4. {_killed(kill.done, kill.unfinished(answers), complete, users)}")


def _killed(done: bool, unfinished: int, complete: int, users: int) -> str:
    """What became of turn 4's requests."""
    killed = f"Server killed (SIGKILL) with {unfinished} of {users} requests under way"
    answered = f"all {users}" if complete == users else f"ONLY {complete} of {users}"
    return f"{killed if done else 'Server NOT killed'}; {answered} were answered"


def _reference(talks: list[Talk], room: int, screen: Screen) -> tuple[str, list[list[Answer]]]:
    """The model and the answers, a list a turn, of an engine that computes everything."""
    turns = [[talk.asked[turn] for talk in talks] for turn in range(4)]
    answers: list[list[Answer]] = []
    with (
        screen.progress("no cache at all", 4 * len(talks)) as show,
        EngineProcess(None, room) as engine,
    ):
        for turn, questions in enumerate(turns):
            answers.append([])
            for some in [questions] if turn != 2 else [[each] for each in questions]:
                before = turn * len(talks) + len(answers[-1])
                answers[-1] += engine.serve(some, _after(before, show))
    screen.say(
        f"5. Engine process {engine.process.pid}, without any cache, answered the same "
        f"{4 * len(talks)} prompts:"
    )
    return engine.model, answers


def _stay(talks: list[Talk], server: ServerProcess, screen: Screen) -> None:
    """Starts the server again, with the blocks that it had, lets a third engine answer turn 5 and a
    stranger, and waits for Ctrl-C."""
    server.start()
    adopted = server.ask()["restart"]["adopted_blocks"]
    screen.say(f"\n6. The server runs again, with the {adopted:,} blocks that it had")
    room = (len(talks) + 2) * _blocks(talks) + 1
    with EngineProcess(server.address, room) as engine:
        with screen.progress("third engine", NEW_PROMPTS + 1 + len(talks)) as show:
            _fifth_turn(talks, engine, show, screen)
        _say_where_the_dashboard_is(server, screen)
        _wait_for_interrupt(server)


def _fifth_turn(talks: list[Talk], engine: EngineProcess, show: Show, screen: Screen) -> None:
    """One by one: the stranger's own prompts, turn 5 of the first user, the same prompt from the
    stranger, turn 5 of the others."""
    first, *others = (talk.ask() for talk in talks)
    rng = np.random.default_rng(len(USERS))
    new = [
        Question(STRANGER, rng.integers(0, _VOCAB_SIZE, MESSAGE_TOKENS * 4).tolist(), ANSWER_TOKENS)
        for _ in range(NEW_PROMPTS)
    ]
    questions = [*new, first, Question(STRANGER, first.prompt, ANSWER_TOKENS), *others]
    cached = {question.salt: 0 for question in questions}
    for at, question in enumerate(questions):
        [answer] = engine.serve([question], _after(at, show))
        cached[question.salt] += answer.external_cached_tokens
    found = cached.pop(STRANGER)
    asked = sum(len(talk.tokens) for talk in talks)
    screen.say(
        f"   Engine process {engine.process.pid} answered turn 5: {sum(cached.values()):,} of "
        f"{asked:,} tokens from the cache"
    )
    screen.say(
        f"   A stranger, {STRANGER}, sent {NEW_PROMPTS} new prompts and that of {talks[0].user}: "
        f"{found:,} tokens"
    )
    screen.say(f"   The server knows {STRANGER} as {tenant_of(STRANGER)}")


def _say_where_the_dashboard_is(server: ServerProcess, screen: Screen) -> None:
    assert server.state_dir is not None
    screen.say(f"\nDashboard:    http://{server.http}/dashboard")
    screen.say(f"Admin token:  {made_token(server.state_dir, server.name)}")
    screen.say("Enter what that file has on the page, to see engines and requests.")
    screen.say("Ctrl-C ends the demo and removes its cache.")


def _wait_for_interrupt(server: ServerProcess) -> None:
    """KVKeepError, with what it said, if the server ends by itself."""
    assert server.process is not None
    try:
        server.process.wait()
    except _Stopped as stopped:
        if stopped.number != signal.SIGINT:
            raise
        return
    raise KVKeepError(f"the server has ended. It said:\n{server.log()[-2000:]}")


def _after(
    before: int, show: Show, also: Callable[[EngineProgress], None] = lambda progress: None
) -> Callable[[EngineProgress], None]:
    """Shows an engine's progress after `before` answers."""

    def watch(progress: EngineProgress) -> None:
        also(progress)
        show(before + progress.answers, before + progress.complete)

    return watch


def _outcome(
    talks: list[Talk], reference: list[list[Answer]], tenants: dict[str, Any], kill: Kill
) -> dict[str, Any]:
    last = [talk.answers[3] for talk in talks]
    cold = statistics.median(answer.ttft_ms for answer in reference[2])
    warm = statistics.median(talk.answers[2].ttft_ms for talk in talks)
    return {
        "cold_ttft_ms": round(cold, 1),
        "warm_ttft_ms": round(warm, 1),
        "speedup": round(cold / warm, 1),
        "external_cached_tokens": sum(talk.answers[2].external_cached_tokens for talk in talks),
        "same_tokens": all(
            same_tokens([talk.answers[at] for talk in talks], reference[at]) for at in range(3)
        ),
        "server_killed": kill.done and kill.unfinished(last) > 0,
        "same_tokens_after_kill": same_tokens(last, reference[3]),
        "unfinished_at_kill": kill.unfinished(last),
        "failed_loads_at_kill": sum(answer.failed_loads for answer in last),
        "prompt_tokens": talks[0].prompt_tokens,
        "users": [
            {
                "user": talk.user,
                "tenant": tenant_of(talk.user),
                "blocks": tenants.get(tenant_of(talk.user), {}).get("blocks", 0),
                "usage_bytes": tenants.get(tenant_of(talk.user), {}).get("usage_bytes", 0),
                "prompt_tokens": len(talk.asked[2].prompt),
                "external_cached_tokens": talk.answers[2].external_cached_tokens,
                "cold_ttft_ms": round(reference[2][at].ttft_ms, 1),
                "warm_ttft_ms": round(talk.answers[2].ttft_ms, 1),
            }
            for at, talk in enumerate(talks)
        ],
    }


# -- what is seen


# Called with the number of answers, begun ones by their parts, and the number of whole ones.
Show = Callable[[float, int], None]


class Screen:
    """The demo's lines on stdout (with JSON on stderr), and its progress on stderr."""

    def __init__(self, json: bool) -> None:
        self._print: Callable[[str], None] = note if json else lambda line: print(line, flush=True)
        self._bar: Progress | None = None

    def say(self, line: str) -> None:
        """Prints a line above the progress bar."""
        if self._bar is not None:
            self._bar.stop()
        self._print(line)
        if self._bar is not None:
            self._bar.start()

    @contextmanager
    def progress(self, what: str, total: int) -> Iterator[Show]:
        """Yields a function to call with the answers so far. Shows a bar in a terminal, and a line
        now and then elsewhere."""
        if not sys.stderr.isatty():
            yield _lines(what, total)
            return
        columns = (
            TextColumn("   {task.description:<16}"),
            BarColumn(_PROGRESS_WIDTH),
            TextColumn("{task.fields[whole]:>2} of {task.total} answers"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=Console(stderr=True), transient=True) as self._bar:
            bar, task = self._bar, self._bar.add_task(what, total=total, whole=0)
            try:
                yield lambda answers, whole: bar.update(task, completed=answers, whole=whole)
            finally:
                self._bar = None


def _lines(what: str, total: int) -> Show:
    next_s = time.monotonic() + _FIRST_LINE_S
    note(f"   {what}: starting")

    def show(answers: float, whole: int) -> None:
        nonlocal next_s
        if time.monotonic() >= next_s:
            next_s = time.monotonic() + _NEXT_LINE_S
            note(f"   {what}: {answers / total:.0%}, {whole} of {total} answers")

    return show


def _show(outcome: dict[str, Any]) -> None:
    users = outcome["users"]
    print("\nTurn 3, time to first token (TTFT): cold without a cache, warm from the server")
    rows = [
        (
            user["user"],
            user["prompt_tokens"],
            user["external_cached_tokens"],
            f"{user['cold_ttft_ms']:,.0f} ms",
            f"{user['warm_ttft_ms']:,.0f} ms",
        )
        for user in users
    ]
    show_table(("user", "prompt tokens", "from the cache", "TTFT cold", "TTFT warm"), rows)
    print()
    longest = max(outcome["cold_ttft_ms"], outcome["warm_ttft_ms"])
    bars = [
        (name, f"{outcome[key]:,.0f} ms", bar(outcome[key] / longest))
        for name, key in (
            ("cold, without a cache", "cold_ttft_ms"),
            ("warm, from the server", "warm_ttft_ms"),
        )
    ]
    show_table(("median time to first token", "", f"{outcome['speedup']:.1f} times faster"), bars)
    print("\nEach user has a secret, the salt. The server sees only what is made of it:")
    most = max(user["usage_bytes"] for user in users) or 1
    shares = [
        (
            user["user"],
            user["tenant"],
            user["blocks"],
            format_size(user["usage_bytes"]),
            bar(user["usage_bytes"] / most * 0.4),
        )
        for user in users
    ]
    show_table(("salt", "known to the server as", "blocks", "usage", ""), shares)
    print(f"\nAll this took {outcome['seconds']:.0f} s.")
    print(f"The model: {outcome['model']}.")


def bar(share: float) -> str:
    """A bar of at least one eighth of a character, unless `share` is 0."""
    eighths = max(1, round(share * _BAR_WIDTH * 8)) if share > 0 else 0
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def _same(same: bool) -> str:
    return "the same tokens" if same else "OTHER TOKENS"
