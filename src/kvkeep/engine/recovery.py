"""What happens when a load failed: which requests go back, and how far.

    blocks of a request   |0|1|2|3|4|5|6|     0 to 5 were loaded or found, and 3 has failed;
    counts as computed     ─────►             6 was computed in this step: 3 * block_tokens are left

What was really computed before this step is `num_computed_tokens -
num_scheduled_tokens.get(request_id, 0)`, whether the load was synchronous (the request ran in this
step, on bad blocks) or asynchronous (it did not run). A bad block that several requests share is
computed again by the first of them. The others keep their own count, less what this step computed
on bad ground; until the block is good again, they do not run (see `Rebuilding`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvkeep.engine.models.model import Segment
from kvkeep.engine.request import Request


@dataclass
class Affected:
    """A request that uses a bad block. `first_bad` is the index in its blocks; `rebuilds` those it
    has to compute again, by id, none if others do."""

    request: Request
    first_bad: int
    rebuilds: list[int] = field(default_factory=list)


def spread(segments: Sequence[Segment], bad_blocks: set[int], block_tokens: int) -> set[int]:
    """The bad blocks, and those that this step was to fill on top of them. Another request may have
    found one of those, without a bad block of its own: it has the same prefix in other blocks.
    Segments come in the order in which they can have found each other's blocks."""
    spoilt = set(bad_blocks)
    for segment in segments:
        if spoilt and not spoilt.isdisjoint(segment.block_ids):
            spoilt.update(segment.block_ids[segment.start // block_tokens :])
    return spoilt


def truncate(
    requests: Iterable[Request],
    invalid_block_ids: set[int],
    num_scheduled_tokens: Mapping[str, int],
    block_tokens: int,
) -> list[Affected]:
    """Sets back `num_computed_tokens` of every request that uses an invalid block. Returns those,
    in the same order."""
    affected: list[Affected] = []
    marked: set[int] = set()  # bad blocks that a request before will compute again
    for request in requests:
        computed = request.num_computed_tokens - num_scheduled_tokens.get(request.request_id, 0)
        used = request.block_ids[: -(-computed // block_tokens)]
        bad = [index for index, block in enumerate(used) if block in invalid_block_ids]
        if not bad:
            continue
        own = [index for index in bad if request.block_ids[index] not in marked]
        marked.update(request.block_ids[index] for index in own)
        request.num_computed_tokens = own[0] * block_tokens if own else computed
        affected.append(Affected(request, bad[0], [request.block_ids[index] for index in own]))
    return affected


class Rebuilding:
    """Shared blocks that are bad until the request that recomputes them has done so. Those who
    share them wait."""

    def __init__(self) -> None:
        self._owner: dict[int, Request] = {}

    def add(self, affected: Iterable[Affected]) -> None:
        for each in affected:
            self._owner.update(dict.fromkeys(each.rebuilds, each.request))

    def blocks(self, request: Request, block_tokens: int) -> bool:
        """Whether this request counts as computed what another one has yet to compute again. What
        it will write itself it need not wait for, and so nobody waits in a circle."""
        if not self._owner:
            return False
        used = request.block_ids[: -(-request.num_computed_tokens // block_tokens)]
        return any(self._owner.get(block, request) is not request for block in used)

    def progress(self, request: Request, block_tokens: int) -> None:
        """The request has come further: blocks that it has filled again are good."""
        for block in (
            request.block_ids[: request.num_computed_tokens // block_tokens] if self._owner else ()
        ):
            if self._owner.get(block) is request:
                del self._owner[block]

    def leave(self, request: Request, others: Sequence[Request], block_tokens: int) -> None:
        """The request goes before it is done, and drops its blocks. The next one that shares a bad
        block takes over."""
        left = {block for block, owner in self._owner.items() if owner is request}
        for block in left:
            del self._owner[block]
        if left:
            self.add(
                truncate([each for each in others if each is not request], left, {}, block_tokens)
            )

    @property
    def idle(self) -> bool:
        return not self._owner
