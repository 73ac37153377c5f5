"""Health, metrics and the admin API over HTTP, in a thread of their own.

    /healthz             is the server alive? Red while its loop is stuck, however well this thread still answers
    /readyz              may engines be sent here? Not while the pool is being filled, nor while the server stops
    /metrics             for Prometheus
    /v1/...              status, tenants, quotas, limits, settings; described by /openapi.json

Changes need a token, and with `admin_token` set so does reading; /healthz and /readyz never do (see
guard.py). Beyond loopback a server with `tls_cert` speaks HTTPS alone (see http_tls.py). Errors are
JSON: {"error": code, "message": ..., "field": ..., "hint": ...}.

A connection carries one request: there is no keep-alive and no pipelining. The request must come
whole, and its answer be read, in time. What has not been read yet is bounded over all connections,
and so is their number; beyond either limit the connection goes whose client has kept the server
waiting longest. The event loop accepts a few connections in a turn and reads from all it has before
it accepts more: a request that has arrived is read long before its connection is the oldest,
however many others connect."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from functools import partial
from typing import Annotated, Any, Final

import msgspec
import uvicorn
from fastapi import Body, FastAPI, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client.exposition import choose_encoder
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvkeep import __version__
from kvkeep.errors import KVKeepError, RequestError, SettingsError
from kvkeep.server.admin import Admin, Drain, SettingShown, Status, TenantList
from kvkeep.server.daemon import Daemon
from kvkeep.server.guard import Access, Guard, RefusalLog, make_token, token_reader
from kvkeep.server.http_tls import HANDSHAKE_WITHIN_S, Door, TlsLayer
from kvkeep.server.metrics import make_registry
from kvkeep.server.settings import Settings
from kvkeep.server.snapshot import TenantShown
from kvkeep.server.stranger_log import StrangerLog
from kvkeep.units import KIB, MIB
from kvkeep.wire.address import split_host
from kvkeep.wire.peers import HTTP, recognise

log = logging.getLogger(__name__)

STUCK_AFTER_S = 5.0
REQUEST_WITHIN_S = 5.0
READ_WITHIN_S = 10.0
TENANTS_SHOWN, TENANTS_SHOWN_AT_MOST = 1000, 100_000
CONFIRMATION: Final = "everything"
_STOP_WITHIN_S = 5.0
_CONNECTIONS = 256
_ACCEPTED_IN_A_TURN = (
    8  # of the event loop, which reads from a connection 3 turns after accepting it
)
_QUEUED = 2048  # connections in the kernel that are not accepted yet
_UNREAD_BYTES = 64 * MIB  # of all answers
_KERNEL_BYTES = 64 * KIB  # of one answer, in the kernel; without a limit it takes up to 4 MiB

_STATUS: Final = {
    "unknown_tenant": 404,
    "quota_too_large": 409,
    "limit_below_quota": 409,
    "too_many_tenants": 409,
    "loop_busy": 503,
    "outcome_unknown": 504,
    "not_saved": 500,
}
_HTTP_CODES: Final = {404: "not_found", 405: "method_not_allowed", 400: "bad_request"}


class Problem(BaseModel):
    """What every error looks like."""

    error: str
    message: str
    field: str = ""
    hint: str = ""


class QuotaChange(BaseModel):
    """A quota in bytes, or null for the default again."""

    model_config = ConfigDict(extra="forbid", strict=True)
    quota_bytes: int | None = Field(ge=0)


class LimitChange(BaseModel):
    """A limit in bytes, 0 for nothing at all, or null for the default again."""

    model_config = ConfigDict(extra="forbid", strict=True)
    limit_bytes: int | None = Field(ge=0)


class Cleared(BaseModel):
    """How many blocks were taken out of use."""

    blocks: int


class Health(BaseModel):
    """Whether the loop turns and the pool is its own, and for how long it has been busy with one
    turn."""

    healthy: bool
    busy_s: float
    reason: str


class Readiness(BaseModel):
    """Whether engines may be sent here, and if not, why."""

    ready: bool
    reason: str
    pool_bytes: int
    filled_bytes: int
    degraded: str


Tenant = Annotated[
    str, Path(description="A tenant id: `default`, or `t-` and 32 hex digits. Never a salt.")
]
_PROBLEMS: dict[int | str, dict[str, Any]] = {
    code: {"model": Problem} for code in (401, 403, 404, 409, 413, 422, 500, 503, 504)
}


def make_app(
    admin: Admin, access: Access, refusals: RefusalLog, stuck_after_s: float = STUCK_AFTER_S
) -> FastAPI:
    """The application over one daemon."""
    app = FastAPI(
        title="kvkeep",
        version=__version__,
        description="Health, metrics and administration of one kvkeep server.",
        responses=_PROBLEMS,
        docs_url=None,  # the pages that come with it load scripts from other sites
        redoc_url=None,
        # FastAPI would encode the document for each request: see _add_description
        openapi_url=None,
    )
    app.add_middleware(
        Guard,
        access=access,
        refusals=refusals,
        on_bad_token=partial(_count_failure, admin.daemon, "admin_token"),
    )
    app.add_exception_handler(KVKeepError, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_problem)
    app.add_exception_handler(Exception, partial(_failed, refusals))
    _add_health(app, admin.daemon, stuck_after_s)
    _add_metrics(app, admin)
    _add_tenants(app, admin)
    _add_settings(app, admin)
    _add_description(app)
    return app


def _count_failure(daemon: Daemon, reason: str) -> None:
    daemon.do_in_loop(lambda: daemon.service.counters.fail_auth(reason))


def _add_health(app: FastAPI, daemon: Daemon, stuck_after_s: float) -> None:
    # Coroutines, so that they answer although all worker threads may be waiting for a loop that is
    # stuck.
    @app.get("/healthz", tags=["health"], summary="Whether the server is alive")
    async def healthz(response: Response) -> Health:
        busy_since = daemon.busy_since
        busy_s = 0.0 if busy_since is None else time.monotonic() - busy_since
        reason = ""
        if busy_s > stuck_after_s:
            reason = "the server's loop is stuck"
        elif daemon.lost:
            reason = "the pool's lock file was removed: restart the server"
        response.status_code = 503 if reason else 200
        return Health(healthy=not reason, busy_s=round(busy_s, 3), reason=reason)

    @app.get("/readyz", tags=["health"], summary="Whether engines may be sent here")
    async def readyz(response: Response) -> Readiness:
        pool, busy_since = daemon.pool, daemon.busy_since
        reason = ""
        if daemon.stopping:
            reason = "the server is stopping"
        elif busy_since is not None and time.monotonic() - busy_since > stuck_after_s:
            reason = "the server's loop is stuck"
        elif not daemon.ready.is_set():
            reason = f"the pool is being filled: {pool.filled_bytes} of {pool.pool_bytes} bytes"
        elif not pool.is_in_place():
            reason = f"the pool's directory {pool.directory} was removed, or its lock: restart the server"
        elif not pool.filled_bytes:
            reason = "the pool has no memory"
        response.status_code = 503 if reason else 200
        return Readiness(
            ready=not reason,
            reason=reason,
            pool_bytes=pool.pool_bytes,
            filled_bytes=pool.filled_bytes,
            degraded=daemon.degraded,
        )


def _add_metrics(app: FastAPI, admin: Admin) -> None:
    registry = make_registry(admin.snapshot, admin.daemon.started)

    @app.get("/metrics", tags=["health"], summary="Metrics for Prometheus", response_class=Response)
    def metrics(request: Request) -> Response:
        try:
            encoder, content_type = choose_encoder(request.headers.get("accept", ""))
            text = encoder(registry)
        except (TypeError, ValueError):  # the Accept header names a version that is not a number
            encoder, content_type = choose_encoder("")
            text = encoder(registry)
        return Response(text, headers={"content-type": content_type})

    @app.get("/v1/status", tags=["status"], summary="The server at this moment")
    def status() -> Status:
        return admin.status()

    @app.post(
        "/v1/drain",
        tags=["status"],
        summary="Stop admitting, let leases and stores end, exit",
        status_code=202,
    )
    def drain() -> Drain:
        return admin.drain()


def _add_tenants(app: FastAPI, admin: Admin) -> None:
    @app.get(
        "/v1/tenants", tags=["tenants"], summary="Tenants, largest first", response_model=TenantList
    )
    def list_tenants(
        limit: Annotated[int, Query(ge=1, le=TENANTS_SHOWN_AT_MOST)] = TENANTS_SHOWN,
    ) -> Response:
        # Encoded here, in a worker thread: FastAPI would keep the thread that answers /healthz busy
        # for seconds.
        return Response(msgspec.json.encode(admin.tenants(limit)), media_type="application/json")

    @app.get("/v1/tenants/{tenant}", tags=["tenants"], summary="One tenant")
    def get_tenant(tenant: Tenant) -> TenantShown:
        return admin.tenant(tenant)

    @app.put(
        "/v1/tenants/{tenant}/quota",
        tags=["tenants"],
        summary="Set a tenant's quota",
        status_code=204,
    )
    def put_quota(tenant: Tenant, change: QuotaChange) -> None:
        admin.set_quota(tenant, change.quota_bytes)

    @app.put(
        "/v1/tenants/{tenant}/limit",
        tags=["tenants"],
        summary="Set a tenant's limit",
        status_code=204,
    )
    def put_limit(tenant: Tenant, change: LimitChange) -> None:
        admin.set_limit(tenant, change.limit_bytes)

    @app.delete("/v1/tenants/{tenant}/blocks", tags=["tenants"], summary="Clear a tenant")
    def clear_tenant(tenant: Tenant) -> Cleared:
        return Cleared(blocks=admin.clear(tenant))

    @app.delete("/v1/blocks", tags=["tenants"], summary="Clear everything")
    def clear_all(
        confirm: Annotated[str, Query(description=f"Must be `{CONFIRMATION}`.")] = "",
    ) -> Cleared:
        if confirm != CONFIRMATION:
            raise RequestError(
                "not_confirmed",
                "this takes every block of every tenant out of use",
                field="confirm",
                hint=f"add ?confirm={CONFIRMATION} if that is meant",
            )
        return Cleared(blocks=admin.clear_all())


def _add_settings(app: FastAPI, admin: Admin) -> None:
    @app.get("/v1/settings", tags=["settings"], summary="All settings and where each came from")
    def get_settings() -> list[SettingShown]:
        return admin.settings()

    @app.patch("/v1/settings", tags=["settings"], summary="Change live settings, all or none")
    def patch_settings(
        changes: Annotated[
            dict[str, str | bool | int | None],
            Body(min_length=1, examples=[{"default_quota": "2GiB", "log_level": "debug"}]),
        ],
    ) -> list[SettingShown]:
        return admin.change_settings({name: _as_text(value) for name, value in changes.items()})


def _add_description(app: FastAPI) -> None:
    """To be called when all other routes have been added."""
    document = msgspec.json.encode(app.openapi())

    async def describe(request: Request) -> Response:
        return Response(document, media_type="application/json")

    app.add_route("/openapi.json", describe, include_in_schema=False)


def _as_text(value: str | bool | int | None) -> str:
    """Settings are read from text wherever they come from; null is their word `none`."""
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


# -- errors


def _problem(
    status: int, error: str, message: str, field: str = "", hint: str = ""
) -> JSONResponse:
    said = {"error": error, "message": message, "field": field, "hint": hint}
    # It may quote what came, and JSON may bring half of a surrogate pair, which nobody can send
    # back.
    return JSONResponse(
        {name: text.encode(errors="backslashreplace").decode() for name, text in said.items()},
        status,
    )


def _refused(request: Request, error: Exception) -> Response:
    if isinstance(error, RequestError):
        return _problem(
            _STATUS.get(error.code, 422), error.code, error.message, error.field, error.hint
        )
    assert isinstance(error, KVKeepError)
    code = "bad_setting" if isinstance(error, SettingsError) else "internal_error"
    return _problem(422 if code == "bad_setting" else 500, code, error.message, "", error.hint)


def _invalid(request: Request, error: Exception) -> Response:
    """Names what was wrong, never what was sent: that may be a salt."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if first["loc"][0] == "body" and kind != "application/json":
        return _problem(
            422,
            "bad_request",
            "the body is not said to be JSON",
            "",
            "send it with content-type: application/json",
        )
    field = (
        str(first["loc"][1]) if len(first["loc"]) > 1 and first["type"] != "json_invalid" else ""
    )
    return _problem(422, "bad_request", first["msg"], field)


def _http_problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = _HTTP_CODES.get(error.status_code, "bad_request")
    response = _problem(
        error.status_code, code, str(error.detail), hint="/openapi.json lists what there is"
    )
    response.headers.update(error.headers or {})
    return response


async def _failed(refusals: RefusalLog, request: Request, error: Exception) -> Response:
    """A coroutine, so that Starlette calls it in the thread that `refusals` belongs to."""
    refusals.note(
        f"internal_error by {type(error).__name__}",
        "an HTTP request failed inside the server",
        error,
    )
    return _problem(
        500, "internal_error", "the server failed on this request", hint="see the server's log"
    )


# -- the thread


class _Connection(H11Protocol):
    """Carries one request and ends with its answer: first it waits for the request, then the server
    works on it, then it waits until the client has read the answer. Both waits end in time, or
    sooner when others need the room."""

    strangers: StrangerLog
    refusals: RefusalLog
    request_within_s: float
    read_within_s: float
    _is_known = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._waiting_since = self.loop.time()
        self._timer = self.loop.call_later(
            self.request_within_s, self._end_unless_working, "sent no whole request"
        )
        if len(self._all()) > _CONNECTIONS:
            self._end_longest_waiting("too many connections")

    def data_received(self, data: bytes) -> None:
        if not self._is_known:  # the first that comes tells
            self._is_known = True
            if (stranger := recognise(data)) is not HTTP:
                self.strangers.note("the HTTP port", self._peer(), stranger)
        super().data_received(data)

    def on_response_complete(self) -> None:
        """The whole answer is in the transport's buffer, from which the client may read it or
        not."""
        super().on_response_complete()
        self._waiting_since = self.loop.time()
        self._timer.cancel()
        self._timer = self.loop.call_later(
            self.read_within_s, self._end_unless_working, "did not read its answer"
        )
        while sum(each.transport.get_write_buffer_size() for each in self._all()) > _UNREAD_BYTES:
            self._end_longest_waiting("too much is unread")

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def _is_working(self) -> bool:
        """Whether the client waits for the server, and not the server for the client."""
        has_request = self.cycle is not None and not self.cycle.more_body
        return has_request and not self.cycle.response_complete and not self.transport.is_closing()

    def _end_unless_working(self, why: str) -> None:
        if not self._is_working():
            self._end(why)

    def _end_longest_waiting(self, why: str) -> None:
        """Clients that do not read their answers go first: one that has just connected may wait
        longer than they, while the server was busy with theirs."""
        waiting = [each for each in self._all() if not each._is_working()]
        unread = [each for each in waiting if each.transport.get_write_buffer_size()]
        min(unread or waiting, key=lambda each: each._waiting_since, default=self)._end(why)

    def _end(self, why: str) -> None:
        """At once: to close it would wait until the client has read what it does not read."""
        self.refusals.note(why, f"the HTTP connection of {self._peer()} was closed")
        self.connections.discard(self)
        self.transport.abort()

    def _all(self) -> list[_Connection]:
        return [each for each in self.connections if isinstance(each, _Connection)]

    def _peer(self) -> str:
        return self.client[0] if self.client else ""


class HttpServer:
    """Listens from construction on, serves from `start` to `stop`."""

    def __init__(
        self,
        daemon: Daemon,
        stuck_after_s: float = STUCK_AFTER_S,
        request_within_s: float = REQUEST_WITHIN_S,
        read_within_s: float = READ_WITHIN_S,
        handshake_within_s: float = HANDSHAKE_WITHIN_S,
        **admin_options: float,
    ) -> None:
        self.admin = Admin(daemon, **admin_options)
        refusals = RefusalLog()
        access = _access(daemon.settings, refusals)
        self._socket = _listen(daemon.settings.http_address)
        host, port = self._socket.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        limits = {"request_within_s": request_within_s, "read_within_s": read_within_s}
        make: Any = type(
            "Connection",
            (_Connection,),
            {"strangers": daemon.strangers, "refusals": refusals, **limits},
        )
        if daemon.settings.http_has_tls:
            self.address = f"https://{self.address}"
            make = _over_tls(
                make,
                Door(
                    daemon.authority, refusals, partial(_count_failure, daemon), handshake_within_s
                ),
            )
        elif not daemon.settings.http_is_local:
            log.warning(
                "the admin API at %s is not encrypted: its token crosses the network in the clear (set tls_cert, "
                "tls_key and tls_ca, as `kvkeep keygen` makes them, or an http_address on loopback)",
                self.address,
            )
        self.admin.http_address = self.address
        config = uvicorn.Config(
            make_app(self.admin, access, refusals, stuck_after_s),
            log_config=None,
            log_level="critical",  # what is below has a line of ours, at a bounded rate
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            headers=[("connection", "close")],
            http=make,
            proxy_headers=False,  # nobody says for others who they are
            timeout_graceful_shutdown=1,
            loop="asyncio",  # uvloop, which vLLM installs, accepts all that wait in one turn
            backlog=_ACCEPTED_IN_A_TURN,  # see _Listener
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._serve, name="kvkeep-http", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread and closes the port. Fine also where it was never started."""
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(_STOP_WITHIN_S)
        self._socket.close()

    def _serve(self) -> None:
        self._server.run(sockets=[self._socket])


def _access(settings: Settings, refusals: RefusalLog) -> Access:
    """Makes the server's own token where `admin_token` is not set."""
    is_local = settings.http_is_local
    certificate = (
        "; or show a certificate with the right admin in authorized_clients" * settings.http_has_tls
    )
    if settings.admin_token is not None:
        return Access(token_reader(settings.admin_token, refusals), True, is_local, certificate)
    make_token(settings.made_token)
    token = token_reader(settings.made_token, refusals, ours=True)
    where = (
        f"; the token is in {settings.made_token}" if is_local else certificate
    )  # no paths for other hosts
    return Access(token, not is_local, is_local, where)


def _over_tls(make: Any, door: Door) -> Any:
    """What uvicorn calls for each connection, as it would call `make`."""

    def make_layer(*, server_state: Any, app_state: dict[str, Any], **options: Any) -> TlsLayer:
        return TlsLayer(
            door,
            server_state.connections,
            lambda state: make(
                server_state=server_state, app_state={**app_state, **state}, **options
            ),
        )

    return make_layer


class _Listener(socket.socket):
    """Keeps a long queue in the kernel. asyncio uses its `backlog` twice: for this queue, and as
    the number of connections that it accepts in one turn."""

    def listen(self, backlog: int = _QUEUED) -> None:
        super().listen(_QUEUED)


def _listen(address: str) -> socket.socket:
    host, port = split_host(address)
    host = "127.0.0.1" if host == "localhost" else host
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, port), family=family) as bound:
            listener = _Listener(fileno=bound.detach())
        listener.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDBUF, _KERNEL_BYTES
        )  # connections have it from here
        listener.listen()
        return listener
    except OSError as error:
        raise SettingsError(
            f"cannot listen on {address} for HTTP: {error.strerror}",
            "if another server runs there, give this one a --name, an --address and an --http-address of its own",
        ) from error
