"""Another connector to stand beside ours in a MultiConnector: it brings the first tokens of every
prompt, inside the step, and knows what the oracle of engine_parts.py would have computed. Like
many, it does not support HMA."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from engine_parts import BLOCK, prefixes
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)

BAD = -7


@dataclass
class ShelfHandshake(KVConnectorHandshakeMetadata):
    """Means nothing to anybody else."""


@dataclass
class ShelfStep(KVConnectorMetadata):
    loads: list[tuple[list[int], list[int], range]] = field(
        default_factory=list
    )  # a prompt, its table, its places


class Shelf(KVConnectorBase_V1):
    offers: ClassVar[int] = 0  # tokens of every prompt
    fails: ClassVar[bool] = False  # what it brings is garbage, and it says so when the step is over
    shakes_hands: ClassVar[bool] = False

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.heard: list[Any] = []
        self.finished: list[str] = []
        self._loads: list[tuple[list[int], list[int], range]] = []
        self._invalid: set[int] = set()

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return max(0, self.offers - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            places = range(self.offers - num_external_tokens, self.offers)
            self._loads.append(
                (list(request.prompt_token_ids), list(blocks.get_block_ids()[0]), places)
            )

    def build_connector_meta(self, scheduler_output: Any) -> ShelfStep:
        loads, self._loads = self._loads, []
        return ShelfStep(loads)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self.finished.append(request.request_id)
        return False, None

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        assert all(isinstance(each, ShelfHandshake) for each in metadata.values()), (
            "as NixlConnector does"
        )
        self.heard += metadata.values()

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._kv = kv_caches

    def get_handshake_metadata(self) -> ShelfHandshake | None:
        return ShelfHandshake() if self.shakes_hands else None

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        for prompt, table, places in connector_metadata.loads:
            values = prefixes(prompt)
            for place in places:
                for layer in self._kv.values():
                    layer[table[place // BLOCK], place % BLOCK] = (
                        BAD if self.fails else values[place]
                    )
            self._invalid |= {table[place // BLOCK] for place in places} if self.fails else set()

    def get_block_ids_with_load_errors(self) -> set[int]:
        invalid, self._invalid = self._invalid, set()
        return invalid

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None: ...

    def wait_for_save(self) -> None: ...
