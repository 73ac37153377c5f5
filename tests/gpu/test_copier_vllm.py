"""Real vLLM on a GPU: what comes back from the server is what went there, byte for byte, and faults are computed."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvkeep.bench.vllm_run import EngineProcess
from kvkeep.bench.vllm_setup import Stored, arguments, environment, given_model, kvkeep_arguments, own_model
from kvkeep.testing.process import ServerProcess

if not torch.cuda.is_available():
    pytest.skip("CUDA is not available", allow_module_level=True)
if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here", allow_module_level=True)

TOKENS = 1600
COUNT = "num_kvkeep_extra_cached_tokens"


class World:
    def __init__(self, server: ServerProcess, engine: EngineProcess, watched: Path) -> None:
        self.server, self.engine, self.watched = server, engine, watched
        self.stored = Stored(server.http)
        self._prompts = np.random.default_rng(3)

    def prompt(self) -> list[int]:
        return self._prompts.integers(0, 4096, TOKENS).tolist()

    def cold(self, prompt: list[int]) -> list[int]:
        answer = self.engine.ask(prompt, 8)
        assert answer.cached_tokens == 0
        self.stored.wait(16, TOKENS)
        return answer.tokens

    def again(self, prompt: list[int]) -> Any:
        self.engine.drop_local_cache()
        return self.engine.ask(prompt, 8)

    @property
    def found(self) -> dict[str, int]:
        found: dict[str, int] = json.loads(self.watched.read_text()) if self.watched.exists() else {}
        return found

    def segments(self) -> list[Path]:
        return sorted(Path("/dev/shm").glob(f"kvkeep-{self.server.name}/segment-*"))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder, watched = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("watched") / "found.json"
    own_model(folder, "cpu")  # the small one, with real weights
    model = given_model(str(folder), "cuda")
    around = environment(model, TOKENS) | {"KVKEEP_WATCHED": str(watched)}
    around["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *filter(None, [around.get("PYTHONPATH")])])
    with ServerProcess("--pool-size", "1GiB") as server:
        config = kvkeep_arguments(server.address)
        config["kv_transfer_config"]["kv_connector_module_path"] = "watching"
        config["kv_transfer_config"]["kv_connector_extra_config"]["kvkeep.load_when"] = "always"
        made = arguments(model, TOKENS, 4, config)
        with EngineProcess("kvkeep", made, around, COUNT) as engine:
            yield World(server, engine, watched)


def test_every_byte_that_comes_back_is_what_went_there(world: World) -> None:
    prompts = [world.prompt() for _ in range(4)]
    for prompt in prompts:
        world.cold(prompt)
    for prompt in prompts:
        assert world.again(prompt).cached_tokens == TOKENS
    assert world.found["compared"] >= 4 * TOKENS // 16 and world.found["wrong"] == 0


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
