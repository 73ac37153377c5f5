"""The class that vLLM makes, in its scheduler's process and in each worker's: vLLM's method names,
passed on to the scheduler's or the worker's half.

    scheduler  on_new_request ─► get_num_new_matched_tokens ─► update_state_after_alloc
               ─► build_connector_meta ─► (every worker runs the step) ─► update_connector_output
               request_finished_all_groups · reset_cache
    workers    handle_preemptions ─► bind_connector_metadata ─► (forward) ─► wait_for_save
               ─► get_finished ─► build_connector_worker_meta

No call raises into vLLM: a fault inside is counted and logged, and is a miss."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)

import vllm
from kvkeep.connector.options import (
    allow_untested,
    client_options,
    load_failure_policy,
    load_mode,
    load_when,
)
from kvkeep.connector.recoveries import log_policy
from kvkeep.errors import SettingsError
from kvkeep.vllm import stand_in, versions
from kvkeep.vllm.messages import Handshake, Reports, Step
from kvkeep.vllm.registration import InactiveScheduler
from kvkeep.vllm.scheduler import SchedulerConnector, SchedulerContext
from kvkeep.vllm.siblings import siblings_of
from kvkeep.vllm.stats import KVKeepPromMetrics, KVKeepStats
from kvkeep.vllm.worker import WorkerSide

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


def _log_as_vllm_does() -> None:
    """Sends kvkeep's log messages where vLLM's go, unless logging is configured otherwise."""
    ours, theirs = logging.getLogger("kvkeep"), logging.getLogger("vllm")
    if not ours.hasHandlers():
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = False


def _guarded(otherwise: Callable[[], Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a method answer `otherwise()` where it would raise."""

    def decorate(method: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(method)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return method(*args, **kwargs)
            except Exception:  # guard: nothing that goes wrong with the cache may end the engine
                log.exception("kvkeep: %s failed; the engine serves on", method.__name__)
                connector: Any = args[0]
                connector.faults += 1
                return otherwise()  # type: ignore[no-any-return]

        return call

    return decorate


def _check_transfer_config(transfer: Any) -> None:
    """Sets the policy for failed loads, which vLLM's scheduler reads after the connector is made,
    and logs what is not taken as it is written."""
    extra = transfer.kv_connector_extra_config
    transfer.kv_load_failure_policy = load_failure_policy(extra)  # vLLM's own ends the request
    if transfer.kv_connector == stand_in.NAME and not transfer.kv_connector_module_path:
        log.info("kvkeep: stands in for %s (%s)", stand_in.NAME, stand_in.reason())
    is_set = "kvkeep.load_failure_policy" in extra
    source = "set by kvkeep.load_failure_policy" if is_set else "kvkeep's default; vLLM's is fail"
    log_policy(transfer.kv_load_failure_policy, source)
    if load_mode(extra) == "sync":
        log.warning("kvkeep: kvkeep.load = sync is not for vLLM: loads are asynchronous here")
    if transfer.kv_role != "kv_both":
        log.warning(
            "kvkeep: kv_role = %s is taken for kv_both: this engine stores and loads",
            transfer.kv_role,
        )


class KVKeepConnector(KVConnectorBase_V1, SupportsHMA):
    """`kv_connector` of a KV-transfer config. Settings are in its `kv_connector_extra_config`; a
    bad one is refused at start-up with a SettingsError."""

    # Of the two halves, vLLM calls only the one of this object's role; the other is not set.
    _scheduler: InactiveScheduler | SchedulerConnector
    _worker: WorkerSide

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        extra = transfer.kv_connector_extra_config
        problem = versions.refusal(vllm.__version__, allow_untested(extra))
        if problem:
            raise SettingsError(problem)
        options = client_options(extra)
        _log_as_vllm_does()
        self.faults = 0
        if role == KVConnectorRole.SCHEDULER:
            _check_transfer_config(transfer)
            self._context = SchedulerContext(
                vllm_config, kv_cache_config, options, load_when(extra)
            )
            self._scheduler = InactiveScheduler(self._context)
        else:
            siblings = siblings_of(vllm_config, type(self), load_failure_policy(extra))
            self._worker = WorkerSide(vllm_config, kv_cache_config, options, siblings)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a store that is dropped is only a later miss."""
        return False

    # -- the scheduler's half

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        self._register_workers(metadata.values())

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        self._register_workers(metadata.values())

    @_guarded(lambda: None)
    def _register_workers(self, metadata: Iterable[Any]) -> None:
        handshakes = [each for each in metadata if isinstance(each, Handshake)]
        if handshakes:  # otherwise they are a sibling's, and ours come with the first reports
            self._scheduler = self._scheduler.register_workers(handshakes)

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        self._context.tables.manager = kv_cache_manager
        self.bind_gpu_block_pool(kv_cache_manager.block_pool)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._context.block_pool = gpu_block_pool

    @_guarded(lambda: None)
    def on_new_request(self, request: Any) -> None:
        self._scheduler.arrive(request)

    @_guarded(lambda: (0, False))
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        found = self._scheduler.lookup(request, num_computed_tokens)
        return found, bool(found) and not self._scheduler.loads_in_step(request)

    @_guarded(lambda: None)
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    @_guarded(lambda: Step(all_withdrawn=True))
    def build_connector_meta(self, scheduler_output: Any) -> Step:
        return self._scheduler.build_step(scheduler_output)

    @_guarded(lambda: None)
    def update_connector_output(self, connector_output: Any) -> None:
        reports = connector_output.kv_connector_worker_meta
        reports = reports if isinstance(reports, Reports) else Reports()
        if reports.handshakes:
            self._scheduler = self._scheduler.add_handshakes(reports.handshakes)
        self._scheduler.end_step(connector_output, reports)

    @_guarded(lambda: (False, None))
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Never asks vLLM to hold blocks: it may have them back at once, stored or not."""
        reply = self._scheduler.finish_request(request)
        taken = self._scheduler.keys_of_siblings
        return False, reply and {key: count for key, count in reply.items() if key not in taken}

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """What MultiConnector calls if a sibling does not support HMA."""
        return self.request_finished_all_groups(request, (block_ids,))

    @_guarded(lambda: False)
    def reset_cache(self) -> bool | None:
        return self._scheduler.reset()

    @_guarded(tuple)
    def take_events(self) -> Iterable[Any]:
        return self._scheduler.take_events()

    # -- the workers' half

    @_guarded(lambda: None)
    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._worker.register(kv_caches)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """From 0.33 on vLLM asks, and calls `unregister_kv_caches` before it takes the KV's memory
        away and `restore_kv_caches` when it is there again."""
        return True

    @_guarded(lambda: None)
    def unregister_kv_caches(self) -> None:
        self._worker.unregister()

    @_guarded(lambda: None)
    def restore_kv_caches(self) -> None:
        self._worker.restore()

    def get_handshake_metadata(self) -> Handshake | None:
        return self._worker.first_handshake()

    @_guarded(lambda: None)
    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """The first that a worker hears of a step, before vLLM zeroes or copies any block for
        it."""
        self._worker.save(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._begin(connector_metadata)

    @_guarded(lambda: None)
    def _begin(self, step: Step) -> None:
        self._worker.begin(step)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing: loads began when the step's metadata came."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: no step waits for a load."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing: blocks are stored when they are whole."""

    @_guarded(lambda: None)
    def wait_for_save(self) -> None:
        """The step is computed: begins what stores it, and waits for nothing."""
        self._worker.finish()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        received, _ = self._received()
        return None, received or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        return versions.transfer_results(*self._received())

    @_guarded(lambda: (set(), set()))
    def _received(self) -> tuple[set[str], set[str]]:
        self._worker.collect()
        return self._worker.take_received()

    @_guarded(set)
    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_invalid()

    @_guarded(lambda: None)
    def build_connector_worker_meta(self) -> Reports | None:
        return self._worker.take_reports()

    # -- both

    @property
    def _half(self) -> InactiveScheduler | SchedulerConnector | WorkerSide:
        return self._scheduler if self.role == KVConnectorRole.SCHEDULER else self._worker

    @_guarded(lambda: None)
    def get_kv_connector_stats(self) -> KVKeepStats | None:
        half = self._half
        stats = half.stats()
        faults = self.faults + half.faults
        self.faults = half.faults = 0
        if faults:
            stats = (stats or KVKeepStats.of()).aggregate(KVKeepStats.of(faults=faults))
        return stats

    @_guarded(lambda: None)
    def shutdown(self) -> None:
        self._half.close()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVKeepStats:
        return KVKeepStats(data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVKeepPromMetrics:
        return KVKeepPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
