"""Why engines of one model do not share blocks: which parts of their identities differ.

Every session brings the parts of its engine's identity by name. Sessions with the same digest share
blocks; sessions of one model with different digests are compared part by part, so that an operator
reads the reason instead of guessing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvkeep.kv.identity import differing_parts
from kvkeep.server.sessions import ServerSession

MOST_PAIRS = 16  # a status shows so many at most
_SHOWN_CHARS = 120


@dataclass(frozen=True)
class NotShared:
    """Two groups of sessions that serve one model under two identities. `differs` has each part
    that differs, with the value of the first group and of the second."""

    model: str
    identities: tuple[str, str]
    sessions: tuple[list[int], list[int]]
    differs: dict[str, tuple[str, str]] = field(default_factory=dict)


def nearest_difference(session: ServerSession, others: Iterable[ServerSession]) -> list[str]:
    """The parts in which a session differs from the one of its model that is nearest to it. Empty
    if none differs."""
    model = session.parts.get("model")
    apart = {
        other.identity: differing_parts(session.parts, other.parts)
        for other in others
        if model and other.parts.get("model") == model and other.identity != session.identity
    }
    return min(apart.values(), key=len, default=[])


def not_shared(sessions: Iterable[ServerSession]) -> list[NotShared]:
    """For each model, the identities that differ from the one that connected first. At most
    MOST_PAIRS."""
    models: dict[str, dict[str, list[ServerSession]]] = {}
    for session in sessions:
        if session.parts.get("model"):
            models.setdefault(session.parts["model"], {}).setdefault(session.identity, []).append(
                session
            )
    pairs = []
    for model, groups in models.items():
        (first, here), *rest = groups.items()
        for second, there in rest:
            pairs.append(_compared(model, (first, second), here, there))
    return pairs[:MOST_PAIRS]


def _compared(
    model: str, identities: tuple[str, str], here: list[ServerSession], there: list[ServerSession]
) -> NotShared:
    one, other = here[0].parts, there[0].parts
    return NotShared(
        model,
        identities,
        ([session.number for session in here], [session.number for session in there]),
        {
            name: (_shown(one.get(name)), _shown(other.get(name)))
            for name in differing_parts(one, other)
        },
    )


def _shown(text: str | None) -> str:
    if text is None:
        return "not said"
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"
