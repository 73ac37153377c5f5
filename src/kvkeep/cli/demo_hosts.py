"""`kvkeep demo --hosts 2`: two servers with memory of their own and one shared tier.

    host A      server, engine: answers a conversation's first turn, begins the second; both killed
    host B      server, engine: answers the second turn
    no cache    an engine answers both turns: the same tokens?

Both hosts are this machine: what is shown is that nothing but the tier connects them."""

from __future__ import annotations

import json as json_text
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from kvkeep.cli.demo_engine import Answer, EngineProcess, EngineProgress, Question, same_tokens
from kvkeep.cli.demo_network import Host, two_hosts
from kvkeep.cli.output import show_json
from kvkeep.errors import KVKeepError
from kvkeep.testing.clock import eventually
from kvkeep.testing.process import ServerProcess
from kvkeep.tiers.service_address import given_credentials

_SALT = "alice"
_VOCAB_SIZE = 4096
_BLOCK_TOKENS = 16
_MESSAGE_TOKENS, _ANSWER_TOKENS = 24, 16
_WRITTEN_WITHIN_S = 60.0
_WAITS = {"kvkeep.tier_patience": "wait"}


class _HostServer(ServerProcess):
    """The server of a host, with the caller's credentials for the tier."""

    def __init__(self, host: Host) -> None:
        flags = ("--address", f"tcp://{host.loopback}:0", "--tier", host.tier)
        super().__init__("--pool-size", "256MiB", *flags, environment=given_credentials())
        self.host = host

    def command(self) -> Sequence[str]:
        return [*self.host.inside, *super().command()]

    def shared_tier(self) -> dict[str, Any]:
        """Its state. Asked on the host, whose loopback is its own."""
        kvkeep = (sys.executable, "-m", "kvkeep.cli.main")
        command = [*self.host.inside, *kvkeep, "tiers", "--json", "--http", self.http]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise KVKeepError(f"a host's server does not answer: {done.stderr.strip()}")
        [tier] = json_text.loads(done.stdout)
        return dict(tier)


def run(tier: str, prompt_tokens: int, json: bool) -> list[str]:
    """Runs the demo and shows its outcome; returns the promises that were broken."""
    directory = Path(tempfile.mkdtemp(prefix="kvkeep-demo-"))
    try:
        outcome = _tell(tier or f"file://{directory / 'shared'}?size=1GiB", prompt_tokens, json)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    if json:
        show_json(outcome)
    promises = {
        "tokens are the same as without a cache": outcome["same_tokens"],
        "host A is killed while it works": outcome["killed"],
        "host B starts from what host A has computed": outcome["tokens_from_other_host"] > 0,
    }
    return [promise for promise, kept in promises.items() if not kept]


def _tell(tier: str, prompt_tokens: int, json: bool) -> dict[str, Any]:
    room = (prompt_tokens + 2 * (_MESSAGE_TOKENS + _ANSWER_TOKENS)) // _BLOCK_TOKENS + 4
    rng = np.random.default_rng(prompt_tokens)
    first = Question(_SALT, rng.integers(0, _VOCAB_SIZE, prompt_tokens).tolist(), _ANSWER_TOKENS)
    words = rng.integers(0, _VOCAB_SIZE, _MESSAGE_TOKENS).tolist()
    with ExitStack() as ends:
        (host_a, host_b), kind = two_hosts(tier, ends)
        _say(f"1. Two hosts, which are {kind}, share {tier}", json)
        servers = [_HostServer(host) for host in (host_a, host_b)]
        for server in servers:
            ends.push(server)  # before it starts: an interrupt must not leave it behind
            server.start()
        with EngineProcess(servers[1].address, room, _WAITS, host_b.inside) as engine:
            one, second, killed = _lose_host_a(servers[0], room, first, words, json)
            _say(f"3. Host A was {'' if killed else 'NOT '}killed (SIGKILL) during turn 2", json)
            [two] = engine.serve([second])
    found = two.external_cached_tokens
    _say(
        f"4. Host B took {found:,} of the {len(second.prompt):,} tokens of turn 2 from the tier, "
        f"first token after {two.ttft_ms:.0f} ms",
        json,
    )
    with EngineProcess(None, room) as engine:
        reference = [*engine.serve([first]), *engine.serve([second])]
    same = same_tokens([one, two], reference)
    _say(
        f"5. Without any cache: first token after {reference[1].ttft_ms:.0f} ms, tokens are "
        f"{'the same' if same else 'NOT the same'}",
        json,
    )
    return {
        "hosts": len(servers),
        "tier": tier,
        "tokens_from_other_host": found,
        "prompt_tokens": len(second.prompt),
        "same_tokens": same,
        "killed": killed,
    }


def _say(line: str, json: bool) -> None:
    print(line, file=sys.stderr if json else sys.stdout, flush=True)


def _lose_host_a(
    server: _HostServer, room: int, first: Question, words: list[int], json: bool
) -> tuple[Answer, Question, bool]:
    """The first answer, the second question, and whether host A was killed while it computed
    that."""
    engine = EngineProcess(server.address, room, inside=server.host.inside)

    is_struck = False

    def kill(progress: EngineProgress) -> None:
        nonlocal is_struck
        if progress.running:
            server.send(signal.SIGKILL)
            engine.process.kill()
            is_struck = True

    try:
        with engine:
            [one] = engine.serve([first])
            _wait_until_written(server, len(first.prompt) // _BLOCK_TOKENS)
            _say(
                f"2. Host A computed {len(first.prompt):,} tokens in {one.ttft_ms:.0f} ms and "
                "wrote them",
                json,
            )
            second = Question(_SALT, [*first.prompt, *one.tokens, *words], _ANSWER_TOKENS)
            engine.serve([second], kill)
    except KVKeepError:
        if not is_struck:
            raise
    assert server.process is not None
    killed = is_struck and server.process.wait() == engine.process.exit_code() == -signal.SIGKILL
    return one, second, killed


def _wait_until_written(server: _HostServer, blocks: int) -> None:
    def written() -> int:
        return int(server.shared_tier()["counts"]["written_blocks"])

    if not eventually(lambda: written() >= blocks, _WRITTEN_WITHIN_S):
        problem = server.shared_tier()["problem"]
        raise KVKeepError(
            f"host A wrote {written()} of {blocks} blocks to the shared tier: "
            f"{problem or 'it is slow'}",
            "check the address in --tier, and that the tier is reachable",
        )
