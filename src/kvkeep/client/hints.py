"""What a request may say about the cache in its `kv_transfer_params`, and what it hears back.

    in    {"num_kvkeep_extra_cached_tokens": None, "kvkeep_priority": 80}
    out   {"num_kvkeep_extra_cached_tokens": 1280}

Params come from whoever uses the engine's API. What is wrong in them is left out with a warning,
never raised."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

log = logging.getLogger(__name__)

# The name that clients of other servers send already, and ours.
LMCACHE_COUNT = "num_lmcache_extra_cached_tokens"
EXTRA_CACHED_TOKENS = (LMCACHE_COUNT, "num_kvkeep_extra_cached_tokens")

_LONGEST_TTL_MS = 2**53
_NORMAL_PRIORITY = 50


@dataclass(frozen=True)
class Hints:
    """One request's params, checked.

    counts                  names under which to return how many tokens the cache gave; None: it
                            came without params
    priority                0 to 100: blocks of a higher one are kept longer
    ttl_ms                  after this time its blocks are evicted first; 0: no such time
    conversation_finished   no request will continue this conversation: evict its blocks early
    prefetch                requests with this prompt follow: bring its blocks up from the server's
                            tiers; this request does not wait for them
    """

    counts: tuple[str, ...] | None = None
    priority: int = _NORMAL_PRIORITY
    ttl_ms: int = 0
    conversation_finished: bool = False
    prefetch: bool = False

    @classmethod
    def of(cls, params: object) -> Hints:
        """Takes anything and never raises."""
        if params is None:
            return cls()
        if not isinstance(params, Mapping):
            log.warning(
                "kvkeep: kv_transfer_params is a %s, no mapping: ignored", type(params).__name__
            )
            return cls()
        try:
            return cls(
                counts=tuple(name for name in EXTRA_CACHED_TOKENS if name in params),
                priority=_integer(params, "kvkeep_priority", 100, _NORMAL_PRIORITY),
                ttl_ms=_integer(params, "kvkeep_ttl_ms", _LONGEST_TTL_MS, 0),
                conversation_finished=_flag(params, "kvkeep_session_finished"),
                prefetch=_flag(params, "kvkeep_prefetch"),
            )
        except Exception:
            # guard: a mapping can be any class, and none of them may raise into the engine
            log.warning("kvkeep: kv_transfer_params cannot be read: ignored", exc_info=True)
            return cls()

    def reply(self, extra_cached_tokens: int) -> dict[str, int] | None:
        """What comes back: the number under each name that was asked for; nothing to a request
        without params."""
        return None if self.counts is None else dict.fromkeys(self.counts, extra_cached_tokens)


def _integer(params: Mapping[object, object], name: str, most: int, default: int) -> int:
    value = params.get(name, default)
    # a bool is an int to isinstance, and a mistake here
    if type(value) is not int or not 0 <= value <= most:
        log.warning(
            "kvkeep: %s in kv_transfer_params must be an integer from 0 to %d: ignored", name, most
        )
        return default
    return value


def _flag(params: Mapping[object, object], name: str) -> bool:
    value = params.get(name, False)
    if not isinstance(value, bool):
        log.warning("kvkeep: %s in kv_transfer_params must be true or false: ignored", name)
        return False
    return value
