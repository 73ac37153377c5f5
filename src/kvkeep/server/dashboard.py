"""The dashboard: a document for browsers that asks the admin API and draws the answers.

Its files are in `dashboard_files/`: no build step, nothing from other sites, so it works offline.
They hold nothing of the server and need no token; what their script asks is guarded like any other
request, and the script sends the token that the operator enters in a header. The policy below keeps
the browser from running or sending anything else, even if a name that is shown contained markup."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import Final

from fastapi import FastAPI, Request, Response
from fastapi.responses import RedirectResponse

from kvkeep.kv.outcomes import OUTCOMES

_FILES: Final = {
    "/dashboard": ("index.html", "text/html; charset=utf-8"),
    "/dashboard/script.js": ("script.js", "text/javascript; charset=utf-8"),
    "/dashboard/style.css": ("style.css", "text/css; charset=utf-8"),
}
_OUTCOMES_PATH: Final = "/dashboard/outcomes.json"  # what each outcome of a block means
PATHS: Final = frozenset({"/", _OUTCOMES_PATH, *_FILES})
_HEADERS: Final = {
    # Widths of bars are set by the script through the style object, which needs no permission.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def add_dashboard(app: FastAPI) -> None:
    """Serves it at /dashboard; / leads there."""
    folder = files("kvkeep.server") / "dashboard_files"
    for path, (name, kind) in _FILES.items():
        app.add_route(path, _sender((folder / name).read_bytes(), kind), include_in_schema=False)
    outcomes = json.dumps(dict(OUTCOMES)).encode()
    app.add_route(_OUTCOMES_PATH, _sender(outcomes, "application/json"), include_in_schema=False)

    async def lead(request: Request) -> Response:
        return RedirectResponse("/dashboard", headers=_HEADERS)

    app.add_route("/", lead, include_in_schema=False)


def _sender(content: bytes, kind: str) -> Callable[[Request], Awaitable[Response]]:
    async def send(request: Request) -> Response:
        return Response(content, headers=_HEADERS, media_type=kind)

    return send
