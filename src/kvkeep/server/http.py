"""The routes of the HTTP port: health, metrics and the admin API.

    /healthz    whether the server is alive; 503 while its loop is stuck
    /readyz     whether engines may be sent here; 503 while the pool is filled or the server stops
    /metrics    for Prometheus
    /v1/...     status, tenants, quotas, limits, settings; described by /openapi.json
    /dashboard  for people with a browser (dashboard.py)

Changes need a token, and with `admin_token` set so does reading; /healthz and /readyz never do
(guard.py). Errors are JSON: {"error": code, "message": ..., "field": ..., "hint": ...}."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Final

import msgspec
from fastapi import Body, FastAPI, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from prometheus_client.exposition import choose_encoder
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from kvkeep import __version__
from kvkeep.errors import KVKeepError, RequestError, SettingsError
from kvkeep.server.admin import Admin, Drain, TenantList
from kvkeep.server.daemon import Daemon
from kvkeep.server.dashboard import add_dashboard
from kvkeep.server.explain import REQUESTS_KEPT, RequestShown
from kvkeep.server.guard import Access, Guard, answer_to
from kvkeep.server.log_limits import ProblemLog
from kvkeep.server.lower_tier import TierShown
from kvkeep.server.metrics import make_registry
from kvkeep.server.prefetches import PrefetchShown
from kvkeep.server.recording import Taken
from kvkeep.server.settings import SettingShown
from kvkeep.server.status import Status, TenantShown
from kvkeep.server.verification import VerificationShown
from kvkeep.wire.messages import MAX_REQUEST_CHARS

STUCK_AFTER_S = 5.0
TENANTS_SHOWN, TENANTS_SHOWN_AT_MOST = 1000, 100_000
REQUESTS_SHOWN: Final = 20
CONFIRMATION: Final = "everything"
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


class PrefetchWanted(BaseModel):
    """Whose blocks to bring to memory, and how many bytes of them at most; null: a quarter of the
    pool."""

    model_config = ConfigDict(extra="forbid", strict=True)
    tenant: str = Field(description="A tenant id. Never a salt.")
    most_bytes: int | None = Field(default=None, ge=1)


class RecordingWanted(BaseModel):
    """For how long to record requests, and how many bytes of lines at most."""

    model_config = ConfigDict(extra="forbid", strict=True)
    seconds: float
    most_bytes: int


class RecordingBegun(BaseModel):
    """The number by which the recording is taken and stopped."""

    recording: int


class Cancelled(BaseModel):
    """How many prefetches of operators were running."""

    prefetches: int


class Cleared(BaseModel):
    """How many blocks were taken out of use here, and which hosts that share a tier have not
    confirmed that they have cleared, too."""

    blocks: int
    unreached: list[str]


class Health(BaseModel):
    """Whether the loop turns and the pool is intact, and how long the current turn has taken."""

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
    admin: Admin, access: Access, problems: ProblemLog, stuck_after_s: float = STUCK_AFTER_S
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
        redirect_slashes=False,  # it would answer with an address from the request's Host header
    )
    app.add_middleware(
        Guard,
        access=access,
        problems=problems,
        on_bad_token=partial(count_failure, admin.daemon, "admin_token"),
    )
    app.add_exception_handler(KVKeepError, _refused)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_problem)
    app.add_exception_handler(Exception, partial(_failed, problems))
    _add_health(app, admin.daemon, stuck_after_s)
    _add_metrics(app, admin)
    _add_recording(app, admin)
    _add_tenants(app, admin)
    _add_tiers(app, admin)
    _add_settings(app, admin)
    _add_description(app)
    add_dashboard(app)
    return app


def count_failure(daemon: Daemon, reason: str) -> None:
    daemon.do_in_loop(lambda: daemon.service.counters.fail_auth(reason))


def _add_health(app: FastAPI, daemon: Daemon, stuck_after_s: float) -> None:
    # Coroutines: they answer even if all worker threads wait for a loop that is stuck.
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
            reason = (
                f"the pool's directory {pool.directory} or its lock was removed: restart the server"
            )
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
    def status(request: Request) -> Status:
        now = admin.status()
        is_operator = getattr(request.state, "is_operator", False)
        return now if is_operator else replace(now, sessions=None, not_shared=None)

    @app.get(
        "/v1/explain",
        tags=["status"],
        summary="What the last requests were served from, and why the rest missed",
    )
    def explain(
        request: Annotated[str, Query(max_length=MAX_REQUEST_CHARS)] = "",
        last: Annotated[int, Query(ge=1, le=REQUESTS_KEPT)] = REQUESTS_SHOWN,
    ) -> list[RequestShown]:
        return admin.explain(request) if request else admin.last_requests(last)

    @app.post(
        "/v1/drain",
        tags=["status"],
        summary="Stop admitting, let leases and stores end, exit",
        status_code=202,
    )
    def drain() -> Drain:
        return admin.drain()


def _add_recording(app: FastAPI, admin: Admin) -> None:
    @app.post("/v1/recording", tags=["status"], summary="Begin to record requests", status_code=201)
    def record(wanted: RecordingWanted) -> RecordingBegun:
        return RecordingBegun(recording=admin.record(wanted.seconds, wanted.most_bytes))

    @app.post(
        "/v1/recording/{number}/lines",
        tags=["status"],
        summary="Take the next lines of a recording",
        response_model=Taken,
    )
    def take(number: int) -> Response:
        # Encoded in this worker thread: see list_tenants.
        taken = admin.take_recorded(number)._asdict()
        return Response(msgspec.json.encode(taken), media_type="application/json")

    @app.delete(
        "/v1/recording/{number}", tags=["status"], summary="Stop recording", status_code=204
    )
    def stop(number: int) -> None:
        admin.stop_recording(number)


def _add_tiers(app: FastAPI, admin: Admin) -> None:
    @app.get("/v1/tiers", tags=["tiers"], summary="The tiers below memory")
    def tiers() -> list[TierShown]:
        return admin.tiers()

    @app.get("/v1/verify", tags=["tiers"], summary="What is or was verified")
    def verifications() -> list[VerificationShown]:
        return admin.verifications()

    @app.post(
        "/v1/verify",
        tags=["tiers"],
        summary="Check all blocks on disks; bad ones are dropped",
        status_code=202,
    )
    def verify() -> list[VerificationShown]:
        return admin.verify()

    @app.delete("/v1/verify", tags=["tiers"], summary="Stop verifying")
    def cancel_verifications() -> list[VerificationShown]:
        return admin.cancel_verifications()

    @app.get("/v1/prefetch", tags=["tiers"], summary="Prefetches that run or have ended")
    def prefetches() -> list[PrefetchShown]:
        return admin.prefetches()

    @app.post(
        "/v1/prefetch",
        tags=["tiers"],
        summary="Bring the blocks that a tenant used last to memory",
        status_code=202,
    )
    def prefetch(wanted: PrefetchWanted) -> PrefetchShown:
        return admin.prefetch(wanted.tenant, wanted.most_bytes)

    @app.delete("/v1/prefetch/{number}", tags=["tiers"], summary="Cancel a prefetch")
    def cancel_prefetch(number: int) -> PrefetchShown:
        return admin.cancel_prefetch(number)

    @app.delete("/v1/prefetch", tags=["tiers"], summary="Cancel all prefetches, also of engines")
    def cancel_prefetches() -> Cancelled:
        return Cancelled(prefetches=admin.cancel_prefetches())


def _add_tenants(app: FastAPI, admin: Admin) -> None:
    @app.get(
        "/v1/tenants", tags=["tenants"], summary="Tenants, largest first", response_model=TenantList
    )
    def list_tenants(
        limit: Annotated[int, Query(ge=1, le=TENANTS_SHOWN_AT_MOST)] = TENANTS_SHOWN,
    ) -> Response:
        # Encoded in this worker thread: FastAPI would block the thread of /healthz for seconds.
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
        return Cleared(blocks=admin.clear(tenant), unreached=admin.unreached())

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
        return Cleared(blocks=admin.clear_all(), unreached=admin.unreached())


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
    """Called when all other routes have been added."""
    document = msgspec.json.encode(app.openapi())

    async def describe(request: Request) -> Response:
        return Response(document, media_type="application/json")

    app.add_route("/openapi.json", describe, include_in_schema=False)


def _as_text(value: str | bool | int | None) -> str:
    """Settings are parsed from text, whatever their source; null is `none`."""
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


# -- errors


def _refused(request: Request, error: Exception) -> Response:
    if isinstance(error, RequestError):
        return answer_to(error)
    assert isinstance(error, KVKeepError)
    code = "bad_setting" if isinstance(error, SettingsError) else "internal_error"
    return answer_to(RequestError(code, error.message, hint=error.hint))


def _invalid(request: Request, error: Exception) -> Response:
    """Names what is wrong and never quotes what was sent, which may be a salt."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if first["loc"][0] == "body" and kind != "application/json":
        hint = "send it with content-type: application/json"
        return answer_to(RequestError("bad_request", "the content type is not JSON", hint=hint))
    has_field = len(first["loc"]) > 1 and first["type"] != "json_invalid"
    field = str(first["loc"][1]) if has_field else ""
    return answer_to(RequestError("bad_request", first["msg"], field=field))


def _http_problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = _HTTP_CODES.get(error.status_code, "bad_request")
    said = RequestError(code, str(error.detail), hint="/openapi.json lists what there is")
    response = answer_to(said, error.status_code)
    response.headers.update(error.headers or {})
    return response


async def _failed(problems: ProblemLog, request: Request, error: Exception) -> Response:
    """A coroutine, so that Starlette calls it in the thread that `problems` belongs to."""
    kind = f"internal_error by {type(error).__name__}"
    problems.note(kind, "an HTTP request failed inside the server", error)
    said, hint = "the server failed on this request", "see the server's log"
    return answer_to(RequestError("internal_error", said, hint=hint))
