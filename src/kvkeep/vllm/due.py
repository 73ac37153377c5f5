"""Which requests may have something to store after a step.

A step that decodes adds a token to each of its requests, and only every so many tokens is there anything to store. So
whoever has looked at all of them knows for how many such steps nobody need look again:

    tokens until a store   a 7  b 3  c 90      a 6  b 2  c 89      a 5  b 1  c 88      a 4  b 0  c 87
                           looked at           as before: none     as before: none     looked at: b
"""

from __future__ import annotations

from collections.abc import Mapping

from kvkeep.vllm.arrivals import Known


class Due:
    """Of one engine's requests, which are `known` until they are over."""

    def __init__(self, known: Mapping[str, Known]) -> None:
        self._known = known
        self._looked_at: set[str] = set()
        self._quiet_steps = 0  # that may follow, with one token of each of those

    def after(self, work: Mapping[str, int], *, is_new: bool) -> list[tuple[Known, int]]:
        """Those of a step that computes so many tokens of each request, with what is computed of them then. `is_new`:
        for some it is the first step, or the first after a pause."""
        is_quiet = self._quiet_steps and not is_new and sum(work.values()) == len(work)
        if is_quiet and work.keys() == self._looked_at:
            self._quiet_steps -= 1
            return []
        found = [
            (known, known.request.num_computed_tokens + count)
            for request_id, count in work.items()
            if (known := self._known.get(request_id))
        ]
        left = min((known.next_store - computed for known, computed in found), default=1)
        self._looked_at, self._quiet_steps = set(work), max(0, left - 1)
        return [(known, computed) for known, computed in found if computed >= known.next_store]
