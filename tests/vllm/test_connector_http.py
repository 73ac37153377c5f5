"""`vllm serve` with kvkeep, as its users see it: over HTTP, with the processes that vLLM starts by
itself."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from replicas import (
    ENVIRONMENT,
    HERE,
    KEY,
    OTHER,
    START_WITHIN_S,
    Since,
    at_rest,
    clean_environment,
    cores,
    counted,
    eventually,
    prompt,
    status,
    transfer,
)

from kvkeep.cli.remote import ask
from kvkeep.errors import RequestError
from kvkeep.testing.process import ServerProcess

SWITCHES = ["--enforce-eager", "--skip-tokenizer-init"]

pytestmark = pytest.mark.usefixtures("_nothing_is_left")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Api:
    """One `vllm serve`, gone with all its processes when the block ends."""

    def __init__(self, model: Path, server: ServerProcess) -> None:
        self.http = f"127.0.0.1:{free_port()}"
        self._server = server
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  (as long as this object)
        flags: dict[str, Any] = {
            "--host": "127.0.0.1",
            "--port": self.http.rsplit(":", 1)[1],
            "--served-model-name": "tiny",
            "--dtype": "float32",
            "--block-size": 32,
            "--max-model-len": 2048,
            "--num-gpu-blocks-override": 512,
            "--kv-transfer-config": json.dumps(transfer(server, {"kvkeep.client": "api"})),
        }
        said = [str(part) for flag in flags.items() for part in flag]
        own = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_SERVER_DEV_MODE": "1",
        }  # the latter for resets
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "driver.py"), "serve", str(model), *said, *SWITCHES],
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
            env={
                **clean_environment(),
                **ENVIRONMENT,
                "VLLM_CPU_OMP_THREADS_BIND": str(cores()[0]),
                **own,
            },
        )

    def __enter__(self) -> Api:
        assert eventually(self._is_up, START_WITHIN_S), self.tail()
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()

    def _is_up(self) -> bool:
        assert self._process.poll() is None, self.tail()
        try:
            self.call("/health", method="GET")
        except OSError:
            return False
        return len(sessions(self._server)) >= 2

    def tail(self) -> str:
        with os.fdopen(os.dup(self._log.fileno())) as log:
            log.seek(0)
            return "\n".join(log.read().splitlines()[-60:])

    def call(self, path: str, body: Any = None, method: str = "POST") -> Any:
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(
            f"http://{self.http}{path}", data, {"content-type": "application/json"}, method=method
        )
        with urllib.request.urlopen(asked, timeout=60) as response:
            text = response.read().decode()
        return json.loads(text) if text.startswith(("{", "[")) else text

    def complete(self, tokens: list[int], **more: Any) -> dict[str, Any]:
        body = {
            "model": "tiny",
            "prompt": tokens,
            "max_tokens": 4,
            "temperature": 0,
            "ignore_eos": True,
        }
        answer: dict[str, Any] = self.call(
            "/v1/completions", {**body, "return_token_ids": True, "detokenize": False, **more}
        )
        return answer

    def fresh(self) -> Api:
        """vLLM's own prefix cache is empty."""
        self.call("/reset_prefix_cache")
        return self


@pytest.fixture(scope="module")
def api(models: Path, server: ServerProcess) -> Iterator[Api]:
    since = Since(server)
    with Api(models / "llama", server) as running:
        yield running
    assert eventually(lambda: not sessions(server)), "killed, as vLLM does when it stops in order"
    assert since("sessions_died") == 0, "it held nothing, so that was no crash"
    assert since("sessions_vanished") >= 2


def sessions(server: ServerProcess) -> list[Any]:
    return [each for each in status(server)["sessions"] if each["engine"] == "api"]


def words(answer: dict[str, Any]) -> Any:
    [choice] = answer["choices"]
    return choice["token_ids"]


def stored(server: ServerProcess, since: Since, blocks: int) -> None:
    assert eventually(lambda: since("stored_blocks") >= blocks)
    assert at_rest(server)


def test_the_number_comes_back_over_http(api: Api, server: ServerProcess) -> None:
    tokens = prompt(170)
    since = Since(server)
    cold = api.complete(tokens, kv_transfer_params={KEY: None, OTHER: None})
    stored(server, since, 5)
    warm = api.fresh().complete(tokens, kv_transfer_params={KEY: None, OTHER: None})
    assert cold["kv_transfer_params"] == {KEY: 0, OTHER: 0}
    assert warm["kv_transfer_params"] == {KEY: 160, OTHER: 160}
    assert words(cold) == words(warm)
    local = api.complete(tokens, kv_transfer_params={KEY: None})
    assert local["kv_transfer_params"] == {KEY: 0}, "vLLM's own prefix cache had it all"


def test_params_without_the_key_bring_an_empty_dict_and_none_nothing(api: Api) -> None:
    assert api.complete(prompt(70), kv_transfer_params={})["kv_transfer_params"] in ({}, None)
    assert api.complete(prompt(70), kv_transfer_params={"mine": 1})["kv_transfer_params"] == {}
    assert api.complete(prompt(70)).get("kv_transfer_params") is None


def test_two_salts_never_share_and_one_does(api: Api, server: ServerProcess) -> None:
    tokens = prompt(100)
    since = Since(server)
    first = api.complete(tokens, cache_salt="alice")
    stored(server, since, 3)
    api.fresh()
    counts = {}
    for salt in ("bob", "alice"):
        answer = api.complete(tokens, cache_salt=salt, kv_transfer_params={KEY: None})
        assert words(answer) == words(first)
        counts[salt] = answer["kv_transfer_params"][KEY]
    unsalted = api.complete(tokens, kv_transfer_params={KEY: None})
    assert (counts, unsalted["kv_transfer_params"][KEY]) == ({"bob": 0, "alice": 96}, 0)


def test_what_a_request_missed_is_explained(api: Api, server: ServerProcess) -> None:
    tokens = prompt(170)
    since = Since(server)
    first = api.complete(tokens, cache_salt="carol")
    stored(server, since, 5)
    api.fresh()
    other, again = (api.complete(tokens, cache_salt=salt) for salt in ("dave", "carol"))
    assert words(first) == words(other) == words(again)

    def reported(answer: dict[str, Any]) -> Any:
        with contextlib.suppress(RequestError):  # its report is still on its way
            return ask(server.http, f"/v1/explain?request={answer['id']}", needs_token=True)
        return None

    def explained(answer: dict[str, Any]) -> Any:
        [shown] = eventually(lambda: reported(answer)) or [{}]
        assert sum(shown["outcomes"].values()) == shown["blocks"] == 6
        return shown

    assert explained(first)["outcomes"] == {"never_stored": 5, "last": 1}
    assert explained(other)["outcomes"] == {"other_salt": 5, "last": 1}
    shown = explained(again)
    assert shown["outcomes"] == {"loaded": 5, "last": 1}
    assert (shown["tokens_loaded"], shown["tokens_computed"]) == (160, 10)
    assert (shown["model"], shown["engine"]) == ("llama", "api")


@pytest.mark.parametrize(
    "salt", ["a/b", "a\0b", "x" * 4000, "\ud800", "", 7, ["a"]], ids=lambda salt: repr(salt)[:9]
)
def test_a_hostile_salt_is_refused_or_served(api: Api, salt: Any) -> None:
    try:
        answer = api.complete(prompt(70), cache_salt=salt, kv_transfer_params={KEY: None})
    except urllib.error.HTTPError as error:
        assert error.code in (400, 422, 500)  # noqa: PT017  (either way out is fine)
    else:
        assert answer["kv_transfer_params"] == {KEY: 0}
    assert words(api.complete(prompt(40)))


@pytest.mark.parametrize(
    "params",
    [[1], "text", 7, True, 1.5, {KEY: [{}]}, {"kvkeep_priority": "high"}, {"kvkeep_ttl_ms": -1}],
    ids=repr,
)
def test_bad_params_are_refused_or_served(api: Api, params: Any) -> None:
    tokens = prompt(70)
    try:
        answer = api.complete(tokens, kv_transfer_params=params)
    except urllib.error.HTTPError as error:
        assert error.code in (400, 422) and not isinstance(params, dict)  # noqa: PT017
    else:
        assert len(words(answer)) == 4
    assert words(api.complete(prompt(40)))


def test_metrics_tell_of_the_cache(api: Api, server: ServerProcess) -> None:
    tokens = prompt(170)
    since = Since(server)
    api.complete(tokens)
    stored(server, since, 5)
    before = counted(api.http)
    api.fresh().complete(tokens)
    api.complete(prompt(40))  # workers report with a later step

    def grown(part: str) -> float:
        now = counted(api.http)
        return sum(
            value - before.get(name, 0)
            for name, value in now.items()
            if part in name and "_total" in name
        )

    assert grown("vllm:external_prefix_cache_hits_total") == 160
    assert any("kvkeep" in name for name in before), "the connector's own"
    assert eventually(lambda: grown("kvkeep") > 0)


def test_streams_and_broken_connections_leave_nothing_behind(
    api: Api, server: ServerProcess
) -> None:
    host, port = api.http.split(":")
    tokens = prompt(500)
    since = Since(server)
    expected = words(api.complete(tokens))
    stored(server, since, 15)
    api.fresh()
    body = json.dumps(
        {"model": "tiny", "prompt": tokens, "max_tokens": 500, "stream": True, "ignore_eos": True}
    )
    lines = [
        "POST /v1/completions HTTP/1.1",
        "Host: x",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    ]
    head = "\r\n".join([*lines, "", ""])
    for _ in range(5):
        with socket.create_connection((host, int(port))) as client:
            client.sendall((head + body).encode())
            client.recv(1)
    assert at_rest(server)
    assert words(api.complete(tokens)) == expected


def test_a_paused_server_fails_no_request(api: Api, server: ServerProcess) -> None:
    prompts = [prompt(120) for _ in range(4)]
    since = Since(server)
    expected = [words(api.complete(tokens)) for tokens in prompts]
    stored(server, since, 12)
    api.fresh()
    server.send(signal.SIGSTOP)
    try:
        assert [words(api.complete(tokens)) for tokens in prompts] == expected
    finally:
        server.send(signal.SIGCONT)
    assert [words(api.fresh().complete(tokens)) for tokens in prompts] == expected

    def caches() -> bool:
        tokens, since = prompt(64), Since(server)
        api.complete(tokens)
        return eventually(lambda: since("stored_blocks") >= 2, 1)

    assert eventually(caches, 60), "caching resumes by itself"
