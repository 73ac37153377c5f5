"""What goes from the scheduler to the workers, and what comes back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvkeep.client.requests import Finished
from kvkeep.connector.step import StepMetadata
from kvkeep.engine.models.model import Segment
from kvkeep.engine.request import Request


@dataclass(frozen=True)
class Step:
    """What the workers do next. `segments` may be empty: jobs go out all the same."""

    segments: Sequence[Segment]
    requests: Sequence[Request]  # whose segments these are, in the same order
    num_scheduled_tokens: Mapping[str, int]
    metadata: StepMetadata = field(default_factory=StepMetadata)


@dataclass(frozen=True)
class StepOutput:
    """What came of a step: a token for each segment, and one report of finished jobs from each
    worker."""

    tokens: Sequence[int]
    reports: Sequence[Finished] = ()
