"""The server's span of a request that names the span of its client.

`trace` decides where the span hangs, and a client's sampling whether it is made: nothing else that
a client sends gets into it, unless the request was carried out."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvkeep.wire import messages as m

if TYPE_CHECKING:  # imported where tracing is switched on, and nowhere else
    from kvkeep.wire.tracing import Tracing

_Traced = m.Lookup | m.PrepareStore | m.CompleteStore

_NAMES = {
    m.Lookup: "server.lookup",
    m.PrepareStore: "server.prepare_store",
    m.CompleteStore: "server.complete_store",
}


def trace_request(
    tracing: Tracing, request: m.Request | None, reply: m.Reply, took_us: float
) -> None:
    """Makes the span of a request that was answered this moment, after so long."""
    if not isinstance(request, _Traced) or not request.trace:
        return
    start_ns = time.time_ns() - int(took_us * 1e3)
    span = tracing.resume(_NAMES[type(request)], request.trace, kind="server", start_ns=start_ns)
    if span is None:
        return
    tenant = None if isinstance(request, m.CompleteStore) else request.tenant
    match reply:
        case m.Found():
            span.end(tenant=tenant, found_blocks=reply.blocks, coming_blocks=reply.coming)
        case m.Prepared():
            blocks = len(reply.positions) // 4
            span.end(tenant=tenant, blocks=blocks, refused_blocks=reply.refused)
        case m.Done():
            span.end(blocks=reply.count)
        case m.Refused():
            span.end(failure=reply.code)
