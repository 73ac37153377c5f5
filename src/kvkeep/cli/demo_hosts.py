"""`kvkeep demo --hosts 2`: two servers with memory of their own and one shared tier.

    host A      server 127.0.0.1, an engine computes a conversation's first turn; then SIGKILL
    host B      server 127.0.0.2, an engine goes on with the second turn
    no cache    an engine computes both turns: the same tokens?

Both hosts are this one: what is shown is that nothing but the tier connects the servers."""

from __future__ import annotations

import shutil
import signal
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from kvkeep.cli.demo_engine import EngineProcess, Question, same_tokens
from kvkeep.cli.output import note, show_json
from kvkeep.cli.remote import ask
from kvkeep.errors import KVKeepError
from kvkeep.testing.clock import eventually
from kvkeep.testing.process import ServerProcess

_SALT = "alice"
_VOCAB_SIZE = 4096
_BLOCK_TOKENS = 16
_MESSAGE_TOKENS, _ANSWER_TOKENS = 24, 16
_POOL = ("--pool-size", "256MiB")
_WRITTEN_WITHIN_S = 60.0
_WAITS = {"kvkeep.tier_patience": "wait"}


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
        "host A is killed": outcome["killed"],
        "host B starts from what host A has computed": outcome["tokens_from_other_host"] > 0,
    }
    return [promise for promise, kept in promises.items() if not kept]


def _tell(tier: str, prompt_tokens: int, json: bool) -> dict[str, Any]:
    say = note if json else print
    room = (prompt_tokens + 2 * (_MESSAGE_TOKENS + _ANSWER_TOKENS)) // _BLOCK_TOKENS + 4
    rng = np.random.default_rng(prompt_tokens)
    first = Question(_SALT, rng.integers(0, _VOCAB_SIZE, prompt_tokens).tolist(), _ANSWER_TOKENS)
    with ExitStack() as ends:
        hosts = [
            ServerProcess(*_POOL, "--address", f"tcp://127.0.0.{at}:0", "--tier", tier)
            for at in (1, 2)
        ]
        for server in hosts:
            ends.push(server)  # before it starts: an interrupt must not leave it behind
            server.start()
        say(f"1. Two servers, {hosts[0].address} and {hosts[1].address}, share {tier}")
        with EngineProcess(hosts[0].address, room) as engine:
            [one] = engine.serve([first])
        _wait_until_written(hosts[0], len(first.prompt) // _BLOCK_TOKENS)
        say(f"2. Host A computed {prompt_tokens:,} tokens in {one.ttft_ms:.0f} ms and wrote them")
        hosts[0].stop(signal.SIGKILL)
        killed = hosts[0].process is None
        say("3. Host A was killed (SIGKILL)")
        words = rng.integers(0, _VOCAB_SIZE, _MESSAGE_TOKENS).tolist()
        second = Question(_SALT, [*first.prompt, *one.tokens, *words], _ANSWER_TOKENS)
        with EngineProcess(hosts[1].address, room, extra=_WAITS) as engine:
            [two] = engine.serve([second])
    found = two.external_cached_tokens
    say(
        f"4. Host B took {found:,} of {len(second.prompt):,} tokens of the next turn from the "
        f"tier, first token after {two.ttft_ms:.0f} ms"
    )
    with EngineProcess(None, room) as engine:
        reference = [*engine.serve([first]), *engine.serve([second])]
    same = same_tokens([one, two], reference)
    say(
        f"5. Without any cache: first token after {reference[1].ttft_ms:.0f} ms, tokens are "
        f"{'the same' if same else 'NOT the same'}"
    )
    return {
        "hosts": len(hosts),
        "tier": tier,
        "tokens_from_other_host": found,
        "prompt_tokens": len(second.prompt),
        "same_tokens": same,
        "killed": killed,
        "ttft_ms": round(two.ttft_ms, 1),
        "ttft_without_cache_ms": round(reference[1].ttft_ms, 1),
    }


def _wait_until_written(server: ServerProcess, blocks: int) -> None:
    def written() -> int:
        return int(ask(server.http, "/v1/tiers")[0]["counts"]["written_blocks"])

    if not eventually(lambda: written() >= blocks, _WRITTEN_WITHIN_S):
        [shown] = ask(server.http, "/v1/tiers")
        raise KVKeepError(
            f"host A wrote {written()} of {blocks} blocks to the shared tier: "
            f"{shown['problem'] or 'it is slow'}",
            "check the address in --tier, and that the tier is reachable",
        )
