"""The door for users: a model, prompts, answers.

    llm = LLM("path/to/checkpoint", kv_offloading_size=4)      # `kvkeep serve` may run, or not
    [answer] = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=8))
    answer.token_ids, answer.metrics.ttft_ms, answer.metrics.external_cached_tokens

`kv_offloading_size` switches offloading on. The backend is our server unless "native" is chosen,
which keeps blocks in this process; the size is meant for that one, since a server has a size of its
own."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from kvkeep.connector.options import load_failure_policy, load_mode
from kvkeep.connector.recoveries import log_policy
from kvkeep.engine.backends import backend_of
from kvkeep.engine.config import EngineConfig
from kvkeep.engine.engine import Engine
from kvkeep.engine.models.gqa import GQAModel
from kvkeep.engine.models.mla import MLAModel
from kvkeep.engine.models.model import Model
from kvkeep.engine.models.sampling import SamplingParams
from kvkeep.engine.models.settings import ModelSettings, read_settings
from kvkeep.engine.models.weights import load_weights, random_weights
from kvkeep.engine.offloading import KVTransferConfig, resolve
from kvkeep.engine.request import Request, RequestMetrics
from kvkeep.errors import RequestError, SettingsError

log = logging.getLogger(__name__)

_OPTIONS = {option.name for option in fields(EngineConfig)} - {
    "sync_loads",
    "kv_load_failure_policy",
}


@dataclass(frozen=True)
class Prompt:
    """Tokens, and what is special about this one request.

    salt                 whose it is: only requests with the same one share blocks
    priority             lower ones are served first
    kv_transfer_params   hints to the cache, and what the answer tells (docs/engine.md)
    """

    tokens: Sequence[int]
    salt: str | None = None
    priority: int = 0
    kv_transfer_params: Mapping[str, Any] | None = None
    sampling: SamplingParams | None = None


@dataclass(frozen=True)
class Completion:
    """The answer to one prompt. `finish_reason` is "length", "stop", "abort" or "error"; then
    `error` says what."""

    request_id: str
    token_ids: list[int]
    finish_reason: str
    error: str
    kv_transfer_params: dict[str, int] | None
    metrics: RequestMetrics


class LLM:
    """A model that answers prompts. Not safe for several threads."""

    def __init__(
        self,
        model: str | Path | ModelSettings | Model,
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        kv_offloading_backend: str = "kvkeep",
        kv_offloading_size: float | None = None,
        kv_transfer_config: KVTransferConfig | Mapping[str, Any] | str | None = None,
        **options: Any,
    ) -> None:
        """`model` is a checkpoint's directory, or sizes, which get random weights from `seed`, or a
        model. `options` are those of EngineConfig. SettingsError for whatever is wrong with any of
        it."""
        unknown = sorted(options.keys() - _OPTIONS)
        if unknown:
            raise SettingsError(
                f"{unknown[0]} is no option of an engine",
                f"there are {', '.join(sorted(_OPTIONS))}",
            )
        given = KVTransferConfig.of(kv_transfer_config)
        self.kv_transfer_config = resolve(kv_offloading_backend, kv_offloading_size, given)
        transfer = self.kv_transfer_config or KVTransferConfig()
        if transfer.kv_connector is None and transfer.kv_connector_extra_config:
            log.warning(
                "kvkeep: no external cache is used: set kv_offloading_size, or kv_connector in"
                " kv_transfer_config"
            )
        extra = transfer.kv_connector_extra_config
        config = EngineConfig(
            **options,
            sync_loads=load_mode(extra) == "sync",
            kv_load_failure_policy=load_failure_policy(
                {"kvkeep.load_failure_policy": transfer.kv_load_failure_policy, **extra}
            ),
        )
        if transfer.kv_connector is not None:
            set_by = [key for key in ("kvkeep.load_failure_policy",) if key in extra]
            set_by += ["kv_transfer_config"] if config.kv_load_failure_policy != "recompute" else []
            log_policy(
                config.kv_load_failure_policy, f"set by {set_by[0]}" if set_by else "the default"
            )
        kind = _device_type(device)
        if kind not in ("cpu", "cuda") and transfer.kv_connector is not None:
            hint = (
                "leave kv_offloading_size and kv_transfer_config out, or compute on a CPU or an"
                " NVIDIA GPU"
            )
            raise SettingsError(f"blocks on {device} cannot be offloaded", hint)
        if kind == "cuda" and not torch.cuda.is_available():
            raise SettingsError(
                f"device is {device!r}, but torch finds no GPU", "compute on the CPU"
            )
        loaded = _model(model, seed, dtype, device)
        backend = backend_of(self.kv_transfer_config)
        try:
            self.engine = Engine(loaded, config, backend)
        except BaseException:
            # guard: whatever it is, no memory of ours and no thread may stay behind
            if backend is not None:
                backend.close()
            raise

    def generate(
        self,
        prompts: Sequence[Prompt | Sequence[int]],
        sampling: SamplingParams | None = None,
        on_progress: Callable[[int], None] | None = None,
    ) -> list[Completion]:
        """Answers all prompts, in their order. RequestError, before anything runs, if one of them
        cannot be served.

        `on_progress` is called after each step with the number of answers that are complete.
        """
        requests: list[Request] = []
        with _interrupts_between_steps() as let_interrupt:
            try:
                requests.extend(self._add(prompt, sampling) for prompt in _listed(prompts))
                done = 0
                while self.engine.busy:
                    done += len(self.engine.step())
                    self.engine.pause()
                    let_interrupt()
                    if on_progress is not None:
                        on_progress(done)
            finally:
                for request in requests:
                    self.engine.abort(request.request_id)
                self.engine.step()  # hands the last blocks over; they are stored in the background
        return [_completion(request) for request in requests]

    def _add(self, prompt: Prompt | Sequence[int], sampling: SamplingParams | None) -> Request:
        prompt = prompt if isinstance(prompt, Prompt) else Prompt(prompt)
        return self.engine.add(
            prompt.tokens,
            prompt.sampling or sampling,
            salt=prompt.salt,
            priority=prompt.priority,
            kv_transfer_params=prompt.kv_transfer_params,
        )

    def close(self) -> None:
        """Waits until the last blocks are stored, and lets go of the cache."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


@contextlib.contextmanager
def _interrupts_between_steps() -> Iterator[Callable[[], None]]:
    """Holds Ctrl-C back until it is let: in the middle of a step it would leave a job that nobody
    has begun. A second one comes through at once. Only the main thread gets any."""
    held: list[int] = []

    def hold(number: int, frame: FrameType | None) -> None:
        if held:
            raise KeyboardInterrupt
        held.append(number)

    def let() -> None:
        if held:
            held.clear()
            raise KeyboardInterrupt

    ours = threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: None
        return
    signal.signal(signal.SIGINT, hold)
    try:
        yield let
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    let()


def _listed(prompts: Sequence[Prompt | Sequence[int]]) -> list[Prompt | Sequence[int]]:
    try:
        return list(prompts)
    except TypeError:
        problem = f"prompts is a {type(prompts).__name__}"
        raise RequestError(
            "bad_tokens", problem, field="prompts", hint="pass a list of prompts"
        ) from None


def _device_type(device: str) -> str:
    try:
        return torch.device(device).type
    except (RuntimeError, TypeError):
        raise SettingsError(f"device is {device!r}", "write cpu, cuda or cuda:1") from None


def _model(
    model: str | Path | ModelSettings | Model, seed: int, dtype: torch.dtype, device: str
) -> Model:
    if not isinstance(model, str | Path | ModelSettings):
        if not callable(getattr(model, "forward", None)):
            problem = f"model is a {type(model).__name__}"
            raise SettingsError(
                problem, "pass the directory of a checkpoint, a ModelSettings or a model"
            )
        return model
    if isinstance(model, ModelSettings):
        settings, name = model, f"random-{model.kind}"
        weights = random_weights(settings, seed, dtype, device)
    else:
        directory = Path(model)
        # its fingerprint tells it from others, not its place
        settings, name = read_settings(directory), "checkpoint"
        weights = load_weights(directory, settings, dtype, device)
    return (MLAModel if settings.kind == "mla" else GQAModel)(settings, weights, name)


def _completion(request: Request) -> Completion:
    return Completion(
        request.request_id,
        request.output_tokens,
        request.finish_reason,
        request.error,
        request.reply_params,
        request.metrics,
    )
