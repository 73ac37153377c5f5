"""Which LoRA adapter a request is computed with: its name, its path and the digest of its files.

vLLM reads an adapter when a request first uses its number, and again if a request says
`load_inplace`. Between the two it keeps what it has, whatever becomes of the files. A request is
not cached while the digest of its adapter is unknown, nor once the files differ from those that
were first seen: vLLM may have either."""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import Any

from kvkeep.connector.checkpoint import CheckpointDigest

MAX_ADAPTERS = 4096  # far more than vLLM keeps, so it reads one again that is forgotten here

log = logging.getLogger(__name__)


class Adapters:
    """The adapters that requests have used in this engine, by vLLM's numbers."""

    def __init__(self) -> None:
        self._seen: OrderedDict[int, tuple[str, CheckpointDigest]] = OrderedDict()
        self._warned: OrderedDict[int, None] = OrderedDict()

    def name_of(self, lora: Any) -> str | None:
        """What stands for the adapter in keys. None, without waiting, if the request cannot be
        cached. Asking again for a later request may help: the digest of new files is taken in the
        background."""
        number, path = lora.lora_int_id, lora.lora_path
        seen = self._seen.get(number)
        if seen is None or not seen[1].found or self._is_read_again(lora, *seen):
            seen = path, CheckpointDigest.of(path, None)
            _put(self._seen, number, seen)
        self._seen.move_to_end(number)
        first_path, digest = seen
        if digest.pending:
            return None
        problem = digest.problem
        if first_path != path:
            problem = "another path had its number before, and vLLM may still use that"
        elif not problem and not digest.is_current():
            problem = (
                "its files have changed since it was first used, and vLLM may have read either"
            )
        if problem:
            self._warn(lora, problem)
            return None
        return repr((lora.lora_name, path, digest.value))

    @staticmethod
    def _is_read_again(lora: Any, path: str, digest: CheckpointDigest) -> bool:
        return getattr(lora, "load_inplace", False) and (
            lora.lora_path != path or not digest.is_current()
        )

    def _warn(self, lora: Any, problem: str) -> None:
        """Once an adapter."""
        if lora.lora_int_id not in self._warned:
            _put(self._warned, lora.lora_int_id, None)
            log.warning(
                "kvkeep: requests with the adapter %s are served without the cache: %s",
                lora.lora_name,
                problem,
            )


def _put(table: OrderedDict[int, Any], number: int, value: Any) -> None:
    table[number] = value
    while len(table) > MAX_ADAPTERS:
        table.popitem(last=False)
