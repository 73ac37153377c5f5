"""Real vLLM on a GPU: what comes back from the server is what went there, byte for byte, and faults
are computed; with CUDA graphs, with several engines on the GPU, and when one of them is killed in
the middle of its copies."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvkeep.bench.vllm_setup import (
    Stored,
    arguments,
    environment,
    given_model,
    kvkeep_arguments,
    own_model,
)
from kvkeep.cli.remote import ask
from kvkeep.errors import KVKeepError
from kvkeep.testing.clock import eventually
from kvkeep.testing.process import ServerProcess
from kvkeep_lab.bench.vllm_lanes import Lane, LoadedEngine

if not torch.cuda.is_available():
    pytest.skip("CUDA is not available", allow_module_level=True)
if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here", allow_module_level=True)

TOKENS = 1600
HIT = TOKENS - 16  # the last token is always computed, so its block does not count
COUNT = "num_kvkeep_extra_cached_tokens"


class World:
    def __init__(
        self, server: ServerProcess, engine: LoadedEngine, watched: Path, seed: int = 3
    ) -> None:
        self.server, self.engine, self.watched = server, engine, watched
        self.stored = Stored(server.http)
        self._prompts = np.random.default_rng(seed)

    def prompt(self) -> list[int]:
        return self._prompts.integers(0, 4096, TOKENS).tolist()

    def cold(self, prompt: list[int], drop: bool = False) -> list[int]:
        if drop:
            self.engine.drop_local_cache()
        answer = self.engine.ask(prompt, 8)
        assert answer.cached_tokens == 0
        self.stored.wait(16, TOKENS)
        return answer.tokens

    def again(self, prompt: list[int]) -> Any:
        self.engine.drop_local_cache()
        return self.engine.ask(prompt, 8)

    @property
    def found(self) -> dict[str, int]:
        found: dict[str, int] = (
            json.loads(self.watched.read_text()) if self.watched.exists() else {}
        )
        return found

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = ask(self.server.http, "/v1/status")
        return status

    def segments(self) -> list[Path]:
        return sorted(Path("/dev/shm").glob(f"kvkeep-{self.server.name}/segment-*"))


class Maker:
    """Makes engines that speak to the server and watch what they load. Their processes import vLLM
    together, since that takes the better part of a minute. `stops_at`: KVKEEP_STOPS_AT of each, by
    its name."""

    def __init__(self, folder: Path, server: ServerProcess, stops_at: dict[str, str]) -> None:
        own_model(folder, "cpu")  # the small one, with real weights
        self._model = given_model(str(folder), "cuda")
        self._folder = folder
        self.server = server
        self.spares = {
            name: LoadedEngine.start_process(self._environment(name, at))
            for name, at in stops_at.items()
        }

    def watched(self, name: str) -> Path:
        return self._folder / f"{name}.json"

    def _environment(self, name: str, stops_at: str) -> dict[str, str]:
        ours = {"KVKEEP_WATCHED": str(self.watched(name)), "KVKEEP_STOPS_AT": stops_at}
        around = environment(self._model, TOKENS) | ours
        around["PYTHONPATH"] = os.pathsep.join(
            [str(Path(__file__).parent), *filter(None, [around.get("PYTHONPATH")])]
        )
        return around

    def engine(self, name: str, **more: Any) -> LoadedEngine:
        config = kvkeep_arguments(self.server.address)
        config["kv_transfer_config"]["kv_connector_module_path"] = "watching"
        config["kv_transfer_config"]["kv_connector_extra_config"]["kvkeep.load_when"] = "always"
        return LoadedEngine(
            "kvkeep", arguments(self._model, TOKENS, 4, config) | more, {}, COUNT, self.spares[name]
        )


@pytest.fixture(scope="module")
def maker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Maker]:
    with ServerProcess("--pool-size", "1GiB") as server:
        made = Maker(
            tmp_path_factory.mktemp("model"),
            server,
            {"first": "", "store": "store", "load": "load", "graphs": ""},
        )
        try:
            yield made
        finally:
            for spare in made.spares.values():
                spare.end()


@pytest.fixture(scope="module")
def world(maker: Maker) -> Iterator[World]:
    with maker.engine("first") as engine:
        yield World(maker.server, engine, maker.watched("first"))


def test_every_byte_that_comes_back_is_what_went_there(world: World) -> None:
    prompts = [world.prompt() for _ in range(4)]
    for prompt in prompts:
        world.cold(prompt)
    for prompt in prompts:
        assert world.again(prompt).cached_tokens == HIT
    assert world.found["compared"] >= 4 * TOKENS // 16 and world.found["wrong"] == 0
    assert world.found["at_once"], (
        "they were alone, and a GPU's only worker is in its scheduler's process"
    )


def test_what_is_damaged_in_the_pool_is_computed(world: World) -> None:
    prompt = world.prompt()
    expected = world.cold(prompt)
    for path in world.segments():
        with path.open("r+b") as file:
            for at in range(0, path.stat().st_size, 4096):
                file.seek(at + at // 4096 % 4096)
                byte = file.read(1)
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte[0] ^ 1]))
    answer = world.again(prompt)
    assert answer.tokens == expected and answer.cached_tokens == 0
    assert world.found["wrong"] == 0


def test_a_server_that_is_killed_and_comes_back(world: World) -> None:
    prompt, other = world.prompt(), world.prompt()
    expected = world.cold(prompt)
    world.server.stop(signal.SIGKILL)
    assert world.again(prompt).tokens == expected, "computed"
    world.server.start()
    world.stored = Stored(world.server.http)
    for _ in range(50):
        if world.again(other).cached_tokens:
            break
    else:
        raise AssertionError("nothing is cached again")
    assert world.found["wrong"] == 0


@pytest.mark.parametrize(("at", "held"), [("store", "writes"), ("load", "leases")])
def test_an_engine_that_is_killed_in_the_middle_of_its_copies(
    world: World, maker: Maker, at: str, held: str
) -> None:
    """What it was storing is either whole or not there, and what it held is free for the other
    engine."""
    known, new = world.prompt(), world.prompt()
    world.cold(known)
    victim = maker.engine(at).__enter__()
    try:
        prompts = [new, known] if at == "store" else [known, new]
        more = [
            world.prompt() for _ in range(8)
        ]  # if the first store was dropped: an engine at its start is slow
        lane = Lane([*prompts, *more], [1] * 10, at_a_time=1)
        asked = threading.Thread(target=_ask_in_vain, args=(victim, lane))
        asked.start()
        assert eventually(lambda: _has_stopped(maker.watched(at))), _log_of(victim)
        assert world.status()[held], "copies are under way"
        victim.process.kill()
        asked.join()
    finally:
        victim.process.end()
    assert eventually(lambda: not (world.status()["writes"] or world.status()["leases"])), (
        "nothing stays held"
    )
    found = []
    for prompt in prompts:
        found.append(world.again(prompt))
        world.engine.drop_local_cache()  # so it has stored what it computed
    assert [answer.cached_tokens for answer in found if answer.cached_tokens not in (0, HIT)] == []
    ask(world.server.http, "/v1/blocks?confirm=everything", "DELETE")
    # Other kernels compute a prompt than the last token behind a loaded one: each is compared with
    # its like.
    for prompt, answer in zip(prompts, found, strict=True):
        assert eventually(lambda: not world.status()["writes"])
        world.stored = Stored(world.server.http, world.stored.count())
        computed = world.cold(prompt, drop=True)
        assert answer.tokens == (world.again(prompt).tokens if answer.cached_tokens else computed)
    assert world.found["wrong"] == 0


def _has_stopped(watched: Path) -> bool:
    return watched.exists() and "stopped" in watched.read_text()


def _log_of(engine: LoadedEngine) -> str:
    return engine.process.log()[-4000:]


def _ask_in_vain(engine: LoadedEngine, lane: Lane) -> None:
    with suppress(KVKeepError):  # it is killed meanwhile
        engine.load([lane], 60.0)


GRAPHS = {
    "enforce_eager": False,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
}


def test_with_cuda_graphs_while_another_engine_stores_and_loads(world: World, maker: Maker) -> None:
    """Graphs are captured while our threads work, and replayed over blocks that were loaded,
    whoever stored them."""
    prompts = [world.prompt() for _ in range(4)]
    for prompt in prompts:
        world.cold(prompt)
    with maker.engine("graphs", **GRAPHS) as engine:
        other = World(world.server, engine, maker.watched("graphs"))
        found = [engine.ask(prompt, 8) for prompt in prompts]
        assert [answer.cached_tokens for answer in found] == [HIT] * 4, (
            "stored by the engine without graphs"
        )
        # Graphs take other kernels, so its tokens are its own: here it loads what it has computed
        # itself.
        ask(world.server.http, "/v1/blocks?confirm=everything", "DELETE")
        other.stored = Stored(world.server.http, other.stored.count())
        for prompt, answer in zip(prompts, found, strict=True):
            other.cold(prompt, drop=True)
            assert other.again(prompt).tokens == answer.tokens
        assert other.found["compared"] >= 4 * TOKENS // 16 and other.found["wrong"] == 0
        assert [world.again(prompt).cached_tokens for prompt in prompts] == [HIT] * 4
    assert world.found["wrong"] == 0
