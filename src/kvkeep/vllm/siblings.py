"""kvkeep as one of several connectors in vLLM's MultiConnector, from vLLM 0.26 on.

what MultiConnector does                                   what kvkeep does about it
gives each child a copy of the KV-transfer config;         refuses to start unless the outer config has the policy
the scheduler reads the policy for failed loads from       that kvkeep wants
the outer one
hands the first handshake that any child returns to        returns none, and sends its own with the first step's
all children                                               reports, which MultiConnector keeps apart
calls `request_finished` on every child as soon as one     has both forms of that call
child lacks `SupportsHMA`
raises if two children return the same key in              leaves LMCache's key to LMCache; one kvkeep connector
`kv_transfer_params`                                       only
lets a child load inside the step, and learns of a         stores nothing until the results of such a step are in
failure after it                                           (`SiblingLoads`)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set
from typing import Any

from vllm.config import KVTransferConfig, get_current_vllm_config_or_none
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from kvkeep.client.hints import LMCACHE_COUNT
from kvkeep.errors import SettingsError


def siblings_of(vllm_config: Any, own: type, policy: str) -> tuple[str, ...]:
    """The names of the connectors beside this worker's own; none if vLLM calls it itself.

    SettingsError if kvkeep cannot be right there. vLLM shows the outer config to its workers
    only."""
    current = get_current_vllm_config_or_none()
    outer = current.kv_transfer_config if current is not None else None
    if outer is None or outer is vllm_config.kv_transfer_config:
        return ()
    children = outer.kv_connector_extra_config.get("connectors", ())
    classes = [
        KVConnectorFactory.get_connector_class(KVTransferConfig(**each)) for each in children
    ]
    if classes.count(own) > 1:
        raise SettingsError(
            f"{outer.kv_connector} has {classes.count(own)} kvkeep connectors: each would store"
            " the same blocks",
            'leave one of them in "connectors"',
        )
    if outer.kv_load_failure_policy != policy:
        raise SettingsError(
            f"{outer.kv_connector} has kv_load_failure_policy = {outer.kv_load_failure_policy!r},"
            " and its connector"
            f" kvkeep wants {policy!r}: vLLM reads the outer one",
            f'write "kv_load_failure_policy": "{policy}" beside "kv_connector":'
            f' "{outer.kv_connector}"',
        )
    return tuple(each.__name__ for each in classes if each is not own)


def is_child(worker: object) -> bool:
    """Whether another connector stands between vLLM and that worker's side."""
    return has_kv_transfer_group() and getattr(get_kv_transfer_group(), "half", None) is not worker


def keys_of_siblings(siblings: Collection[str]) -> set[str]:
    """What a sibling returns in `kv_transfer_params`. A key that two children return raises into
    the engine."""
    return {LMCACHE_COUNT} if any(name.startswith("LMCache") for name in siblings) else set()


class SiblingLoads:
    """What siblings load inside a step. Whether such a load went well is known when the step's
    results are in; until then any block may hold what a failed load left in it, and so may every
    block that was computed from it."""

    def __init__(self) -> None:
        self._built = self._ended = 0  # steps
        self._unsure = 0  # the last step in which a sibling loaded something

    @property
    def step(self) -> int:
        """The number of the step that vLLM is scheduling, from 1 on."""
        return self._built + 1

    @property
    def may_have_failed(self) -> bool:
        return self._unsure > self._ended

    def load_in_step(self) -> None:
        """A sibling loads something in the step that is being scheduled."""
        self._unsure = self.step

    def build_step(self) -> None:
        """That step is built."""
        self._built += 1

    def end_step(self) -> None:
        """Steps end in the order in which they were built."""
        self._ended = min(self._ended + 1, self._built)


def holds_one_of(tables: Sequence[Sequence[int]], block_ids: Set[int]) -> bool:
    return any(not block_ids.isdisjoint(table) for table in tables)
