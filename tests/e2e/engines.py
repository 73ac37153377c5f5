"""Small engines for these tests, and what the server's side says about them. As a program: one
engine process.

python engines.py ADDRESS JOB      JOB is JSON; the answers go out as one JSON line
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kvkeep.cli.remote import ask
from kvkeep.engine.llm import LLM, Completion, Prompt
from kvkeep.engine.models.model import Model
from kvkeep.engine.models.sampling import SamplingParams
from kvkeep.engine.models.settings import ModelSettings
from kvkeep.kv.keys import KeyChain, root_key
from kvkeep.testing.clock import eventually
from kvkeep.testing.process import ServerProcess
from kvkeep_lab.simulation.oracle import OracleModel

# these models are tiny: threads that share a busy core make them ten times slower
torch.set_num_threads(1)

BLOCK_TOKENS = 4
POOL = ("--pool-size", "64MiB", "--slab-size", "256KiB", "--session-check-interval", "50ms")
PATIENT = {
    "kvkeep.lookup_deadline_ms": 60_000,
    "kvkeep.store_deadline_ms": 60_000,
}  # what is found is asserted, not how soon on a busy machine
BRISK = {  # for servers that go away: nobody waits long
    "kvkeep.lookup_deadline_ms": 200,
    "kvkeep.store_deadline_ms": 400,
    "kvkeep.handshake_deadline_ms": 200,
    "kvkeep.ping_interval_ms": 300,
    "kvkeep.reconnect_interval_ms": 50,
}
KEY = "num_kvkeep_extra_cached_tokens"
SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 32, "num_layers": 2}
GQA = ModelSettings(kind="gqa", **SIZES, num_heads=4, num_kv_heads=4, head_dim=8)
MLA = ModelSettings(
    kind="mla",
    **SIZES,
    num_heads=4,
    kv_lora_rank=8,
    qk_nope_head_dim=4,
    qk_rope_head_dim=4,
    v_head_dim=4,
)

_seeds = itertools.count(1000)
_prompts = itertools.count(1)


def oracle(**sizes: Any) -> OracleModel:
    """A model whose blocks no other test has stored."""
    return OracleModel(next(_seeds), **sizes)


def seed() -> int:
    """For weights that no other test has."""
    return next(_seeds)


def prompt(count: int) -> list[int]:
    """Tokens that no other prompt begins with."""
    number = next(_prompts)
    return [
        number % 97,
        number // 97 % 97,
        *((number * 7 + at * at) % 97 for at in range(2, count)),
    ][:count]


def engine(
    server: ServerProcess | str,
    model: Model | ModelSettings,
    *,
    extra: dict[str, Any] | None = None,
    policy: str = "recompute",
    **options: Any,
) -> LLM:
    """An engine that uses this server."""
    address = server if isinstance(server, str) else server.address
    return LLM(
        model,
        kv_offloading_size=1,
        kv_transfer_config={
            "kv_connector_extra_config": {
                "kvkeep.address": address,
                "kvkeep.load_when": "always",
                **PATIENT,
                **(extra or {}),
            },
            "kv_load_failure_policy": policy,
        },
        **{"block_tokens": BLOCK_TOKENS, "num_blocks": 256, **options},
    )


def serve(
    llm: LLM,
    prompts: Sequence[Prompt | list[int]],
    max_tokens: int = 3,
    sampling: SamplingParams | None = None,
) -> list[Completion]:
    """Answers, and waits until all that was computed is stored. Nothing may be left over."""
    answers = llm.generate(prompts, sampling or SamplingParams(max_tokens=max_tokens))
    assert llm.engine.flush()
    llm.engine.check_integrity()
    return answers


def tokens_of(answers: Sequence[Completion]) -> list[list[int]]:
    return [answer.token_ids for answer in answers]


def without_cache(
    model: Model | ModelSettings,
    prompts: Sequence[Prompt | list[int]],
    max_tokens: int = 3,
    sampling: SamplingParams | None = None,
    **options: Any,
) -> list[list[int]]:
    """What the model answers with nobody's help: each prompt alone, no prefix cache, one rank."""
    with LLM(model, block_tokens=BLOCK_TOKENS, enable_prefix_caching=False, **options) as llm:
        chosen = sampling or SamplingParams(max_tokens=max_tokens)
        return [llm.generate([each], chosen)[0].token_ids for each in prompts]


def counting(tokens: list[int], salt: str | None = None, **more: Any) -> Prompt:
    """A prompt that wants to know what the cache gave it."""
    return Prompt(tokens, salt=salt, kv_transfer_params={KEY: None, **more})


# -- the server's side


def status(server: ServerProcess) -> dict[str, Any]:
    answer: dict[str, Any] = ask(server.http, "/v1/status", needs_token=True)
    return answer


def at_rest(server: ServerProcess) -> bool:
    """Whether the server holds nothing for anybody."""
    return eventually(lambda: (now := status(server))["leases"] == now["writes"] == 0)


def usage(server: ServerProcess) -> dict[str, int]:
    """Blocks by tenant."""
    return {
        each["tenant"]: each["blocks"]
        for each in ask(server.http, "/v1/tenants?limit=100000")["tenants"]
    }


def metrics_text(server: ServerProcess) -> str:
    with urllib.request.urlopen(f"http://{server.http}/metrics", timeout=30) as response:
        text: str = response.read().decode()
        return text


def _counted(server: ServerProcess) -> dict[str, float]:
    lines = [line for line in metrics_text(server).splitlines() if line[:1] != "#"]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


class Since:
    """What the server's counters have grown by since this was made."""

    def __init__(self, server: ServerProcess) -> None:
        self._server, self._before = server, _counted(server)

    def __call__(self, name: str) -> int:
        name = f"kvkeep_{name}_total"
        return int(_counted(self._server).get(name, 0) - self._before.get(name, 0))

    def requests(self, kind: str) -> int:
        name = f'kvkeep_request_duration_seconds_count{{kind="{kind}"}}'
        return int(_counted(self._server).get(name, 0) - self._before.get(name, 0))


# -- memory


def local_blocks(llm: LLM, tokens: list[int], salt: str | None = None) -> list[int]:
    """The engine's blocks that hold the beginning of this prompt."""
    chain = KeyChain(root_key(llm.engine.workers.shape.identity, salt), BLOCK_TOKENS)
    chain.extend(tokens)
    return llm.engine.scheduler.pool.longest_prefix(chain, len(chain))


def forget_local(llm: LLM) -> None:
    """Empties the engine's own prefix cache."""
    llm.engine.scheduler.pool.forget_all()


def content(llm: LLM, block: int, rank: int = 0, layer: int = 0) -> bytes:
    """What an engine block holds on one rank in one of its layers."""
    kv = llm.engine.workers.ranks[rank].kv
    held: bytes = kv[list(kv)[layer]][block].contiguous().view(torch.uint8).numpy().tobytes()
    return held


class PoolMemory:
    """The server's memory, as somebody who does it harm sees it."""

    def __init__(self, server: ServerProcess) -> None:
        self._paths = sorted(Path(f"/dev/shm/kvkeep-{server.name}").glob("segment-*"))

    def overwrite(self, old: bytes, new: bytes) -> None:
        """These bytes, wherever they are, become those."""
        self._write(self._place(old), new)

    def swap(self, one: bytes, other: bytes) -> None:
        """These bytes change places."""
        first, second = self._place(one), self._place(other)
        self._write(first, other)
        self._write(second, one)

    def flip(self, old: bytes, at: int = 5) -> None:
        """One bit of these bytes changes."""
        new = bytearray(old)
        new[at] ^= 0x10
        self.overwrite(old, bytes(new))

    def _place(self, wanted: bytes) -> tuple[Path, int]:
        found = [
            (path, held.find(wanted))
            for path in self._paths
            if (held := path.read_bytes()).count(wanted) == 1
        ]
        assert len(found) == 1, f"the bytes are in {len(found)} places"
        return found[0]

    def _write(self, place: tuple[Path, int], new: bytes) -> None:
        path, at = place
        with open(path, "r+b") as file:
            file.seek(at)
            file.write(new)


# -- processes


def run(address: str, job: dict[str, Any], become: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Serves a job in an engine process of its own, behind a command that makes it another user."""
    ended = subprocess.run(
        [*become, sys.executable, __file__, address, json.dumps(job)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONHASHSEED": "random"},
    )
    assert ended.returncode == 0, ended.stderr
    answers: list[dict[str, Any]] = json.loads(ended.stdout)
    return answers


def main(address: str, job: str) -> None:
    what = json.loads(job)
    kind = what.get("model", "oracle")
    model = OracleModel(what["seed"]) if kind == "oracle" else {"gqa": GQA, "mla": MLA}[kind]
    dtype = {} if kind == "oracle" else {"seed": what["seed"], "dtype": torch.float64}
    salts = what.get("salts") or [None] * len(what["prompts"])
    prompts = [counting(tokens, salt) for tokens, salt in zip(what["prompts"], salts, strict=True)]
    with engine(address, model, **dtype, **what.get("options", {})) as llm:
        for _ in range(what.get("rounds", 1)):
            answers = serve(llm, prompts, what.get("max_tokens", 3))
    said = [
        {"tokens": each.token_ids, "extra": (each.kv_transfer_params or {})[KEY]}
        for each in answers
    ]
    print(json.dumps(said))


if __name__ == "__main__":
    main(*sys.argv[1:])
