"""Which releases of vLLM are served. Importing this imports no vLLM."""

from __future__ import annotations

import re

OLDEST, NEWEST = (0, 26), (0, 33)
SUPPORTED = "0.26 to 0.33"


def release_of(version: str) -> tuple[int, int] | None:
    """None for a build without a number."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else None


def refusal(version: str, allow_untested: bool) -> str:
    """Why this release is not served, or "". Development builds have odd versions: what has no
    number is untested."""
    release = release_of(version)
    if release and OLDEST <= release <= NEWEST:
        return ""
    if release and release < OLDEST:
        return f"vLLM {version} keeps KV in another way: kvkeep serves {SUPPORTED}"
    if allow_untested:
        return ""
    return (
        f"vLLM {version} is untested: kvkeep serves {SUPPORTED}"
        " (set kvkeep.allow_untested_vllm to true in kv_connector_extra_config to try)"
    )
