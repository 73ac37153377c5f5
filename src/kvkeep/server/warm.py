"""The start of a server over what the one before it left: adopted where it can be proven, removed
where not.

Nothing that lies there can keep a server from starting. If anything is odd it starts empty and says
why in one line."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

from kvkeep.store.adopt import Adoption, adopt
from kvkeep.store.plans import Limits
from kvkeep.store.store import Store
from kvkeep.tiers.memory import Pool
from kvkeep.units import format_size

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WarmStart:
    """What was adopted, and how long it took; or why the server starts empty, `why_cold`."""

    adoption: Adoption = field(default_factory=Adoption)
    seconds: float = 0.0
    why_cold: str = ""


def open_store(pool: Pool, limits: Limits, now_ms: int) -> tuple[Store, WarmStart]:
    """A store over the pool, with what is left in it. The pool's memory that is there is the
    store's."""
    if pool.not_adopted:
        log.warning(
            "what is left in %s is not adopted, the server starts empty: %s. It is removed "
            "(pool_size = auto takes the size of what is left, if the rest of it fits)",
            pool.directory,
            pool.not_adopted,
        )
    why_cold = pool.why_empty
    if pool.is_left:
        started = time.perf_counter()
        adopted = _adopt(pool, limits, now_ms)
        if not isinstance(adopted, str):
            store, adoption = adopted
            warm = WarmStart(adoption, time.perf_counter() - started)
            _tell(pool, warm)
            return store, warm
        why_cold = adopted
        pool.start_over()
    return _store(pool, limits), WarmStart(why_cold=why_cold)


def _store(pool: Pool, limits: Limits) -> Store:
    return Store(
        pool.pool_bytes,
        pool.slab_bytes,
        limits,
        columns=pool.columns,
        presence=pool.make_presence(),
    )


def _adopt(pool: Pool, limits: Limits, now_ms: int) -> tuple[Store, Adoption] | str:
    """Or why it cannot be adopted."""
    try:
        store = _store(pool, limits)
        adoption = adopt(
            store, pool.filled_bytes // pool.slab_bytes, pool.old_sessions() > 0, now_ms
        )
    except Exception:  # guard: whatever lies there, a server that starts empty is better than none
        log.exception(
            "what is left in %s cannot be adopted, the server starts empty", pool.directory
        )
        return "adopting what was left failed inside; the log has the traceback"
    if adoption.contradiction:
        why = "processes of the old server live, and its index does not say which memory is theirs"
        log.warning(
            "what is left in %s is not adopted, the server starts empty: %s", pool.directory, why
        )
        return why
    return store, adoption


def _tell(pool: Pool, warm: WarmStart) -> None:
    adoption = warm.adoption
    log.info(
        "adopted %d blocks, %s, in %.2f s; dropped %d that could not be proven; %d are held for %d old processes",
        adoption.blocks,
        format_size(adoption.nbytes),
        warm.seconds,
        adoption.dropped,
        adoption.held,
        pool.old_sessions(),
    )
