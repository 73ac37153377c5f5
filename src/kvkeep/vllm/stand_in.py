"""When kvkeep answers to LMCache's name, so that `--kv-offloading-backend lmcache` reaches our
server.

vLLM makes that option to the connector LMCacheMPConnector, without any extra config: the size is
not passed on, and the server is at tcp://localhost:5555. vLLM has an entry of that name, which
works where LMCache is installed.

    KVKEEP_AS_LMCACHE    LMCache installed    LMCache not installed
    1                    kvkeep               kvkeep
    not set              LMCache              kvkeep
    0                    LMCache              an ImportError, as without kvkeep
"""

from __future__ import annotations

import importlib.util
import logging
import os

log = logging.getLogger(__name__)

NAME = "LMCacheMPConnector"
VARIABLE = "KVKEEP_AS_LMCACHE"


def reason() -> str:
    """Why vLLM's entry is replaced by ours, or "" if it is not."""
    said = os.environ.get(VARIABLE, "")
    if said == "1":
        return f"{VARIABLE} is 1"
    if said not in ("", "0"):
        log.warning("kvkeep: %s = %r is ignored: expected 1 or 0", VARIABLE, said)
        said = ""
    return "lmcache is not installed" if not said and not _has_lmcache() else ""


def _has_lmcache() -> bool:
    try:
        return importlib.util.find_spec("lmcache") is not None
    except ValueError:  # it is imported, and in some odd way
        return True
