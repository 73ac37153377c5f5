"""Fuzz target of the admin API: requests made from its own OpenAPI description, and nearly so, to
the real application over a real daemon. Every answer is one that the description promises."""

from __future__ import annotations

import asyncio
import json
import threading
from functools import cache
from pathlib import Path
from typing import Any

from starlette.types import Message

from kvkeep.kv.identity import tenant_of
from kvkeep.server.admin import Admin
from kvkeep.server.daemon import Daemon
from kvkeep.server.guard import Access
from kvkeep.server.http import make_app
from kvkeep.server.log_limits import ProblemLog
from kvkeep.server.settings import Settings
from kvkeep_lab.fuzz.choices import Choices, Leak, Ran, memory_directory

_MOST_REQUESTS = 6
_MOST_TENANTS = 64
_TOKEN = b"a-token-for-fuzzing"
WITH_TOKEN = (b"authorization", b"Bearer " + _TOKEN)
_TENANTS: tuple[str, ...] = ("default", tenant_of("a"), tenant_of("b"), "t-" + "0" * 31)
_TENANTS += ("salt", "..", "%00", "a/b", "é")
_METHODS = ("GET", "PUT", "POST", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "x")
_HEADERS: tuple[tuple[bytes, bytes], ...] = (
    (b"host", b"evil.example"),
    (b"host", b"[::1"),
    (b"origin", b"http://evil.example"),
    (b"sec-fetch-site", b"cross-site"),
    (b"content-type", b"text/plain"),
    (b"content-length", b"9" * 12),
    (b"content-length", b"-1"),
    (b"authorization", b"Bearer \xff"),
    (b"accept", b"application/openmetrics-text; version=1.0.0"),
    (b"accept", b";;q=,"),
)
_GUARDED = {401, 403, 404, 405, 413, 400}  # may come from what stands before any operation
_TEXTS = ("none", "1MiB", "debug", "true", "-1", "99999GiB", "", "\ud800", "x" * 100)
_SETTINGS = ("default_quota", "verify", "log_level", "pool_size", "unknown", "")


class _Unstoppable(Daemon):
    """Draining is answered, and goes no further: the next input needs the server."""

    def stop(self) -> None:
        pass

    def end(self) -> None:
        super().stop()


class App:
    """The application over a daemon whose loop runs in a thread, asked without sockets."""

    def __init__(self) -> None:
        self._directory = memory_directory()
        base = Path(self._directory.name)
        flags = {"pool-size": "1MiB", "slab-size": "64KiB", "address": "tcp://127.0.0.1:0"}
        flags |= {
            "http-address": "127.0.0.1:0",
            "shm-dir": str(base),
            "state-dir": str(base / "state"),
        }
        flags |= {"max-tenants": str(_MOST_TENANTS)}
        argv = [word for name, value in flags.items() for word in (f"--{name}", value)]
        self.daemon = _Unstoppable(Settings.load(None, {}, argv))
        self._thread = threading.Thread(target=self.daemon.run, daemon=True)
        self._thread.start()
        assert self.daemon.ready.wait(60)
        self._app = make_app(
            Admin(self.daemon), Access(lambda: _TOKEN, for_reading=False), ProblemLog()
        )
        self.description: dict[str, Any] = self._app.openapi()
        self._loop = asyncio.new_event_loop()

    def ask(
        self, method: str, path: str, query: bytes, headers: list[Any], body: bytes
    ) -> tuple[int, bytes]:
        return self._loop.run_until_complete(self._ask(method, path, query, headers, body))

    async def _ask(
        self, method: str, path: str, query: bytes, headers: list[Any], body: bytes
    ) -> tuple[int, bytes]:
        told: list[Message] = []
        waiting = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            return waiting.pop() if waiting else {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            told.append(message)

        raw_path = path.encode(errors="replace")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "scheme": "http",
            "method": method,
            "path": raw_path.decode(),  # a server decodes it, and leaves no surrogates
            "raw_path": raw_path,
            "query_string": query,
            "root_path": "",
            "headers": headers,
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        await self._app(scope, receive, send)
        content = b"".join(message.get("body", b"") for message in told[1:])
        return int(told[0]["status"]), content

    def close(self) -> None:
        self.daemon.end()
        self._thread.join(60)
        self.daemon.close()
        self._loop.close()
        self._directory.cleanup()


@cache
def shared_app() -> App:
    """One for the whole process; a process that ends takes it along."""
    return App()


def run_http(data: bytes) -> Ran:
    """Some requests, one after the other."""
    choices, app, requests = Choices(data), shared_app(), 0
    while choices.left and requests < _MOST_REQUESTS:
        requests += 1
        _request(choices, app)
    tenants = len(app.daemon.store.tenants)
    if tenants > _MOST_TENANTS:
        raise Leak(f"{tenants} tenants, {_MOST_TENANTS} are allowed")
    return Ran(requests)


def _request(choices: Choices, app: App) -> None:
    template, method = _operation(choices, app.description["paths"])
    operation = app.description["paths"][template].get(method.lower(), {})
    path, query = template, []
    for parameter in operation.get("parameters", ()):
        value = _text(choices, app, parameter["schema"])
        if parameter["in"] == "path":
            path = path.replace(
                "{" + parameter["name"] + "}", choices.pick((*_TENANTS[:3], choices.pick(_TENANTS)))
            )
        else:
            query.append(f"{parameter['name']}={value}")
    if choices.seldom():
        path += choices.text()
    headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json"), WITH_TOKEN]
    if choices.seldom():
        headers.append(choices.pick(_HEADERS))
    body = _body(choices, app, operation) if "requestBody" in operation or choices.seldom() else b""
    odd_query = choices.take(choices.byte() % 20) if choices.seldom() else b""
    encoded = "&".join(query).encode(errors="replace") + odd_query
    status, content = app.ask(method, path, encoded, headers, body)
    _check(app, operation, method, status, content)


def _operation(choices: Choices, paths: dict[str, Any]) -> tuple[str, str]:
    """A path and a method. The method is chosen first: most paths can only be read, and a kind of
    operation that few paths have would hardly be tried. Seldom any method on any path."""
    if choices.seldom():
        return choices.pick(sorted(paths)), choices.pick(_METHODS).upper()
    method = choices.pick(sorted({each for operations in paths.values() for each in operations}))
    return choices.pick(sorted(path for path in paths if method in paths[path])), method.upper()


def _body(choices: Choices, app: App, operation: dict[str, Any]) -> bytes:
    if choices.seldom():
        return choices.take(choices.byte())
    if choices.seldom():
        return b"[" * 10_000
    schema = (
        operation.get("requestBody", {})
        .get("content", {})
        .get("application/json", {})
        .get("schema", {})
    )
    return json.dumps(_value(choices, app, schema), default=repr).encode(errors="replace")


def _value(choices: Choices, app: App, schema: dict[str, Any]) -> Any:
    """A value that the schema allows, or seldom any other."""
    if choices.seldom():
        return choices.value()
    if "$ref" in schema:
        return _value(
            choices,
            app,
            app.description["components"]["schemas"][schema["$ref"].rpartition("/")[2]],
        )
    if "anyOf" in schema:
        return _value(choices, app, choices.pick(schema["anyOf"]))
    match schema.get("type"):
        case "object" if "properties" in schema:
            return {name: _value(choices, app, each) for name, each in schema["properties"].items()}
        case "object":
            inner = schema.get("additionalProperties", {})
            return {
                choices.pick(_SETTINGS): _value(choices, app, inner)
                for _ in range(choices.byte() % 4)
            }
        case "integer":
            return choices.number()
        case "string":
            return choices.pick(_TEXTS)
        case "boolean":
            return choices.byte() % 2 == 1
        case "null":
            return None
        case _:
            return choices.value()


def _text(choices: Choices, app: App, schema: dict[str, Any]) -> str:
    return choices.pick(("everything", "10", "0", "-1", str(_value(choices, app, schema))))


def _check(app: App, operation: dict[str, Any], method: str, status: int, content: bytes) -> None:
    """The status is promised, an error says what and where, and no answer is an internal error."""
    assert status != 500, f"{method}: {content!r}"
    promised = {int(code) for code in operation.get("responses", {})}
    assert status in promised | _GUARDED, f"{status} is not in the description: {content!r}"
    if status >= 400 and status != 503 and method != "HEAD":
        problem = json.loads(content)
        assert {"error", "message", "field", "hint"} <= problem.keys() and problem["error"], problem
    if status == 200 and method != "HEAD":
        described = (
            operation["responses"]["200"]
            .get("content", {})
            .get("application/json", {})
            .get("schema")
        )
        if described is not None:
            _conform(app, json.loads(content), described)


def _conform(app: App, value: Any, schema: dict[str, Any]) -> None:
    """Whether an answer is what the schema says, as far as its types go."""
    if "$ref" in schema:
        schema = app.description["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    kinds: dict[str, Any] = {
        "object": dict,
        "array": list,
        "string": str,
        "integer": int,
        "boolean": bool,
        "number": (int, float),
    }
    if schema.get("type") in kinds:
        assert isinstance(value, kinds[schema["type"]]), f"{value!r} is no {schema['type']}"
    if isinstance(value, dict):
        missing = set(schema.get("required", ())) - value.keys()
        assert not missing, f"{missing} are missing"
        for name, each in schema.get("properties", {}).items():
            if name in value:
                _conform(app, value[name], each)
    if isinstance(value, list) and "items" in schema:
        for each in value:
            _conform(app, each, schema["items"])
