"""Trap 11: open ports, pickle on network bytes, a route that dumps the environment, raw salts in
names and labels."""

from __future__ import annotations

import ast
import json
import os
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from engines import POOL, counting, metrics_text, oracle, prompt, serve
from patience import patient_engine

import kvkeep
from kvkeep.errors import Unavailable
from kvkeep.kv.identity import tenant_of
from kvkeep.testing.process import ServerProcess

SOURCES = sorted(Path(kvkeep.__file__).parent.rglob("*.py"))
RUNS_CODE = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
RUNS_CODE_CALLS = {"eval", "exec", "compile", "__import__"}
SALT = "correct-horse-battery-staple"
SECRET = "the-value-of-a-secret-variable"


def offences(text: str) -> list[str]:
    """What in a source could run code that came as data."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found += [
                alias.name for alias in node.names if alias.name.partition(".")[0] in RUNS_CODE
            ]
        elif (
            isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in RUNS_CODE
        ):
            found.append(str(node.module))
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if (
                name in RUNS_CODE_CALLS
                or name.endswith(("recv_pyobj", "send_pyobj"))
                or name == "torch.load"
            ):
                found.append(name)
            found += [word.arg for word in node.keywords if word.arg == "allow_pickle"]
    return found


def test_nothing_in_the_source_unpickles_or_evaluates() -> None:
    assert len(SOURCES) > 100
    assert {path.name: bad for path in SOURCES if (bad := offences(path.read_text()))} == {}


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "eval(x)",
        "s.recv_pyobj()",
        "np.load(f, allow_pickle=True)",
        "torch.load(f)",
    ],
)
def test_it_would_be_seen(text: str) -> None:
    assert offences(text)


@pytest.mark.parametrize(
    "flags", [("--address", "tcp://0.0.0.0:0"), ("--http-address", "0.0.0.0:0")]
)
def test_no_port_opens_beyond_loopback_without_certificates(flags: tuple[str, str]) -> None:
    with pytest.raises(Unavailable, match=r"tls_cert is not set|admin_token"):
        ServerProcess(*POOL, *flags).start()


def test_no_route_tells_the_environment_and_no_place_has_a_salt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SOME_API_KEY", SECRET)
    with ServerProcess(*POOL, "--log-level", "debug") as server:
        with patient_engine(server, oracle()) as llm:
            serve(llm, [counting(prompt(22), SALT)])
            said = {path: get(server, path) for path in routes(server)}
            said["/metrics"] = (200, metrics_text(server))
            tenant = tenant_of(SALT)
            assert tenant in said["/metrics"][1] and tenant in said["/v1/tenants"][1], (
                "it was seen, by its id"
            )
            assert {
                get(server, path)[0]
                for path in ("/env", "/debug", "/v1/env", "/../proc/self/environ")
            } == {404}
            directory = Path(f"/dev/shm/kvkeep-{server.name}")
            assert server.state_dir is not None
            files = [*directory.rglob("*"), *server.state_dir.rglob("*")]
            assert len(files) > 5 and not [path for path in files if SALT in str(path)]
            small = [
                path for path in files if path.is_file() and not path.name.startswith("segment-")
            ]
            assert not [path for path in small if SALT.encode() in path.read_bytes()], (
                "nor in the index"
            )
            assert {oct(path.stat().st_mode)[-2:] for path in directory.rglob("*")} == {"00"}, (
                "for its owner alone"
            )
        everything = json.dumps(said) + server.log()
    assert SALT not in everything and SECRET not in everything
    assert os.environ["SOME_API_KEY"] == SECRET, "the server had it, too"


def routes(server: ServerProcess) -> list[str]:
    paths = json.loads(get(server, "/openapi.json")[1])["paths"]
    assert "/v1/settings" in paths
    return [
        "/openapi.json",
        *(path for path, operations in paths.items() if "get" in operations and "{" not in path),
    ]


def get(server: ServerProcess, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{server.http}{path}", timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
