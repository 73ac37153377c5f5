"""How many tokens the cache gave each request, worked out from what the workers did.

An engine's own count (`kvkeep.connector.request_state`) comes from its scheduler's side. This one watches
the other end: the blocks that loads filled, and the tokens that steps computed. Random lives of
both engines compare the two.

    blocks of a prompt   0 1 2 3 4 5 6 7        a load filled 2 to 4, a step began at token 5 * block_tokens
    had from             l l S S S c c          l: found locally, S: from the server, c: computed
"""

from __future__ import annotations

from collections import defaultdict


class Given:
    """The requests of one engine, by name. Each block of a prompt belongs to the source that the
    request had it from first; only those of the server count."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._had: defaultdict[str, set[int]] = defaultdict(set)
        self._from_server: defaultdict[str, set[int]] = defaultdict(set)

    def loaded(self, name: str, first_block: int, good_blocks: int) -> None:
        """A load has ended: the request had what comes before `first_block`, and these blocks came
        from the server."""
        self._had[name].update(range(first_block))
        new = set(range(first_block, first_block + good_blocks)) - self._had[name]
        self._from_server[name] |= new
        self._had[name] |= new

    def computed(self, name: str, tokens: int) -> None:
        """The request has the KV of its first `tokens` tokens, wherever it is from."""
        self._had[name].update(range(tokens // self._block_tokens))

    def tokens(self, name: str, prompt_tokens: int) -> int:
        """What the request should be told."""
        # the last token is always computed
        prompt = range((prompt_tokens - 1) // self._block_tokens)
        return len(self._from_server[name].intersection(prompt)) * self._block_tokens
