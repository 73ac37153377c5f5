"""How far failed loads set requests back, and which requests wait, without an engine around."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.engine.models.model import Segment
from kvkeep.engine.models.sampling import SamplingParams
from kvkeep.engine.recovery import Affected, Rebuilding, spread, truncate
from kvkeep.engine.request import Request, Status
from kvkeep.kv.keys import KeyChain

BLOCK_TOKENS = 4


def request_with(blocks: list[int], computed: int | None = None, name: str = "a") -> Request:
    tokens = [1] * (len(blocks) * BLOCK_TOKENS)
    chain = KeyChain(b"r" * 16, BLOCK_TOKENS)
    sampling = SamplingParams(seed=0)
    request = Request(
        request_id=name, tokens=tokens, sampling=sampling, chain=chain, status=Status.RUNNING
    )
    request.block_ids = list(blocks)
    request.num_computed_tokens = len(tokens) if computed is None else computed
    return request


def tokens(blocks: float) -> int:
    return int(blocks * BLOCK_TOKENS)


# -- truncate --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bad", "left"), [({5}, 0), ({6}, 1), ({8}, 3), ({8, 6}, 1), ({5, 6, 7, 8}, 0)]
)
def test_to_just_before_the_first_bad_block(bad: set[int], left: int) -> None:
    request = request_with([5, 6, 7, 8])
    (affected,) = truncate([request], bad, {}, BLOCK_TOKENS)
    assert request.num_computed_tokens == tokens(left)
    assert affected.request is request
    assert affected.first_bad == left and set(affected.rebuilds) == bad


def test_the_first_of_those_that_share_goes_back_and_the_others_keep_their_count() -> None:
    first = request_with([5, 6, 7], name="a")
    second = request_with([5, 6, 7, 8], computed=tokens(3) + 2, name="b")
    affected = truncate([first, second], {6}, {"b": 2}, BLOCK_TOKENS)
    assert (first.num_computed_tokens, second.num_computed_tokens) == (tokens(1), tokens(3))
    assert [each.request for each in affected] == [first, second]
    assert [each.first_bad for each in affected] == [1, 1]
    assert 6 in affected[0].rebuilds and 6 not in affected[1].rebuilds


def test_one_who_shares_goes_back_to_a_bad_block_of_its_own() -> None:
    first, second = request_with([5, 6], name="a"), request_with([5, 6, 7, 8], name="b")
    affected = truncate([first, second], {5, 8}, {}, BLOCK_TOKENS)
    assert first.num_computed_tokens == 0 and second.num_computed_tokens == tokens(3)
    assert affected[1].first_bad == 0 and affected[1].rebuilds == [8]


def test_a_second_failure_further_on_changes_nothing_and_one_before_does() -> None:
    request = request_with([1, 2, 3, 4, 5, 6, 7, 8])
    counts = []
    for bad in (6, 3, 8):
        truncate([request], {bad}, {}, BLOCK_TOKENS)
        counts.append(request.num_computed_tokens)
    assert counts == [tokens(5), tokens(2), tokens(2)]


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[tuple[list[int], int, int]], set[int]]:
    """Requests as (blocks, computed before, scheduled), and bad blocks: of a prefix that was loaded
    and shared, and of what each has loaded for itself. Everything else was to be computed in the
    step."""
    shared = draw(st.permutations(range(1, 8)))
    loaded = draw(st.integers(0, 7))
    fresh = iter(range(8, 99))
    requests, candidates = [], set(shared[:loaded])
    for _ in range(draw(st.integers(0, 4))):
        sharing = draw(st.integers(0, 7))
        blocks = [*shared[:sharing], *(next(fresh) for _ in range(draw(st.integers(0, 4))))]
        before = draw(st.integers(tokens(min(sharing, loaded)), tokens(len(blocks))))
        scheduled = draw(st.integers(0, tokens(len(blocks)) - before))
        requests.append((blocks, before, scheduled))
        candidates.update(blocks[sharing : -(-before // BLOCK_TOKENS)])
    return requests, draw(st.sets(st.sampled_from(sorted(candidates)))) if candidates else set()


@given(steps())
def test_the_rule_token_by_token(step: tuple[list[tuple[list[int], int, int]], set[int]]) -> None:
    """A position is bad if its block is, and is recomputed by the first request that has it."""
    described, bad = step
    requests, counts = [], {}
    for at, (blocks, before, scheduled) in enumerate(described):
        requests.append(request_with(blocks, before + scheduled, str(at)))
        counts[str(at)] = scheduled
    affected = truncate(requests, bad, counts, BLOCK_TOKENS)
    taken: set[int] = set()
    touched = []
    for request, (blocks, before, scheduled) in zip(requests, described, strict=True):
        positions = [at for at in range(before) if blocks[at // BLOCK_TOKENS] in bad]
        own = [at for at in positions if blocks[at // BLOCK_TOKENS] not in taken]
        if not positions:
            assert request.num_computed_tokens == before + scheduled
            continue
        touched.append(request)
        taken.update(blocks[at // BLOCK_TOKENS] for at in own)
        first = own[0] // BLOCK_TOKENS * BLOCK_TOKENS if own else before
        assert request.num_computed_tokens == first
    assert [each.request for each in affected] == touched
    rebuilt = [block for each in affected for block in each.rebuilds if block in bad]
    assert len(rebuilt) == len(set(rebuilt)) and taken <= set(rebuilt)


# -- who waits -------------------------------------------------------------------------------------


def test_those_who_share_wait_until_the_first_is_done() -> None:
    first, second, third = (request_with(blocks) for blocks in ([5, 6, 7], [5, 6, 8], [5, 9]))
    rebuilding = Rebuilding()
    assert rebuilding.idle and not rebuilding.blocks(second, BLOCK_TOKENS)
    rebuilding.add(truncate([first, second, third], {6}, {}, BLOCK_TOKENS))
    waits = [rebuilding.blocks(each, BLOCK_TOKENS) for each in (first, second, third)]
    assert waits == [False, True, False]
    first.num_computed_tokens = tokens(1.75)
    rebuilding.progress(first, BLOCK_TOKENS)
    assert rebuilding.blocks(second, BLOCK_TOKENS), "the block is not full yet"
    second.num_computed_tokens = tokens(3)
    rebuilding.progress(second, BLOCK_TOKENS)
    assert rebuilding.blocks(second, BLOCK_TOKENS), "only who recomputes it can make it good"
    first.num_computed_tokens = tokens(2)
    rebuilding.progress(first, BLOCK_TOKENS)
    assert rebuilding.idle and not rebuilding.blocks(second, BLOCK_TOKENS)


def test_the_next_one_takes_over() -> None:
    first, second, third = (request_with([5, 6, 7], name=name) for name in "abc")
    rebuilding = Rebuilding()
    rebuilding.add(truncate([first, second, third], {6, 7}, {}, BLOCK_TOKENS))
    first.num_computed_tokens = tokens(2)
    rebuilding.progress(first, BLOCK_TOKENS)
    short = request_with([5, 6], name="short")
    assert rebuilding.blocks(second, BLOCK_TOKENS) and not rebuilding.blocks(short, BLOCK_TOKENS)
    rebuilding.leave(first, [first, second, third], BLOCK_TOKENS)
    counts = [each.num_computed_tokens for each in (second, third)]
    assert counts == [tokens(2), tokens(3)], "6 is good, 7 is not"
    assert not rebuilding.blocks(second, BLOCK_TOKENS) and rebuilding.blocks(third, BLOCK_TOKENS)
    rebuilding.leave(second, [second, third], BLOCK_TOKENS)
    rebuilding.leave(third, [third], BLOCK_TOKENS)
    assert rebuilding.idle


def test_leaving_with_nothing_to_recompute_changes_nothing() -> None:
    first, second = request_with([5, 6], name="a"), request_with([5, 6], name="b")
    rebuilding = Rebuilding()
    rebuilding.add([Affected(first, 0, [5])])
    rebuilding.leave(second, [first], BLOCK_TOKENS)
    assert first.num_computed_tokens == tokens(2) and rebuilding.blocks(second, BLOCK_TOKENS)


def test_nobody_waits_for_what_it_writes_itself() -> None:
    """The second has yet to compute block 6, which the first has to compute again."""
    first, second = request_with([5, 6]), request_with([5, 6], computed=tokens(1), name="b")
    rebuilding = Rebuilding()
    rebuilding.add(truncate([first], {6}, {}, BLOCK_TOKENS))
    assert not rebuilding.blocks(second, BLOCK_TOKENS)
    second.num_computed_tokens += 1
    assert rebuilding.blocks(second, BLOCK_TOKENS)


# -- what a void step was to fill ------------------------------------------------------------------


def segment(blocks: list[int], start: int, count: int = 1) -> Segment:
    return Segment("a", None, [1] * (start + count), start, count, blocks)


def test_blocks_to_be_filled_on_bad_ground_are_bad_too() -> None:
    on_bad, beside = segment([5, 6, 7, 8], tokens(2), tokens(2)), segment([9, 10], tokens(1))
    assert spread([on_bad, beside], {6}, BLOCK_TOKENS) == {6, 7, 8}
    assert spread([on_bad, beside], set(), BLOCK_TOKENS) == set()


def test_badness_spreads_from_segment_to_segment() -> None:
    """The second has found block 7 of the first, over another block of the same prefix, and the
    third one of its."""
    first, second = segment([5, 6, 7], tokens(2)), segment([5, 4, 7, 8], tokens(3))
    third = segment([8, 9], tokens(1))
    assert spread([first, second, third], {6}, BLOCK_TOKENS) == {6, 7, 8, 9}


def test_who_counts_on_a_block_of_a_void_step_goes_back() -> None:
    """The first loads 5 and 6 and was to compute 7 and 8, of which the second has found 7."""
    first = request_with([5, 6, 7, 8], computed=tokens(4))
    second = request_with([5, 6, 7, 9], computed=tokens(3) + 1, name="b")
    ends = segment(first.block_ids, tokens(2), tokens(2)), segment(second.block_ids, tokens(3))
    bad = spread(ends, {5}, BLOCK_TOKENS)
    assert bad == {5, 7, 8, 9}
    truncate([first, second], bad, {"a": tokens(2), "b": 1}, BLOCK_TOKENS)
    assert (first.num_computed_tokens, second.num_computed_tokens) == (0, tokens(2))
