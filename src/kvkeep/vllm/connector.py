"""The class that vLLM makes, in its scheduler's process and in each worker's. The half of its role
(SchedulerConnector or WorkerSide) has vLLM's methods by their names; they are called through here.

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
    tracing,
)
from kvkeep.connector.recoveries import log_policy
from kvkeep.connector.request_trace import start_tracing
from kvkeep.errors import SettingsError
from kvkeep.vllm import stand_in, versions
from kvkeep.vllm.messages import Handshake, Reports, Step
from kvkeep.vllm.registration import InactiveScheduler
from kvkeep.vllm.releases import refusal
from kvkeep.vllm.scheduler import SchedulerContext
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


def _of_half(name: str, otherwise: Callable[[], Any]) -> Any:
    """vLLM's method of that name, which the half of the connector's role carries out."""

    def call(self: KVKeepConnector, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.half, name)(*args, **kwargs)

    call.__name__ = name
    return _guarded(otherwise)(call)


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

    half: Any  # InactiveScheduler, then SchedulerConnector; in a worker WorkerSide

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        extra = transfer.kv_connector_extra_config
        problem = refusal(vllm.__version__, allow_untested(extra))
        if problem:
            raise SettingsError(problem)
        options = client_options(extra, f"vllm {vllm.__version__}")
        _log_as_vllm_does()
        self.faults = 0
        if role == KVConnectorRole.SCHEDULER:
            _check_transfer_config(transfer)
            self._context = SchedulerContext(
                vllm_config, kv_cache_config, options, load_when(extra)
            )
            self._context.tracing = start_tracing(tracing(extra))
            self.half = InactiveScheduler(self._context)
        else:
            siblings = siblings_of(vllm_config, type(self), load_failure_policy(extra))
            self.half = WorkerSide(vllm_config, kv_cache_config, options, siblings)

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
            self.half = self.half.register_workers(handshakes)

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        self._context.tables.manager = kv_cache_manager
        self.bind_gpu_block_pool(kv_cache_manager.block_pool)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._context.block_pool = gpu_block_pool

    on_new_request = _of_half("on_new_request", lambda: None)
    get_num_new_matched_tokens = _of_half("get_num_new_matched_tokens", lambda: (0, False))
    update_state_after_alloc = _of_half("update_state_after_alloc", lambda: None)
    build_connector_meta = _of_half("build_connector_meta", lambda: Step(all_withdrawn=True))
    request_finished_all_groups = _of_half("request_finished_all_groups", lambda: (False, None))
    reset_cache = _of_half("reset_cache", lambda: False)
    take_events = _of_half("take_events", tuple)

    @_guarded(lambda: None)
    def update_connector_output(self, connector_output: Any) -> None:
        reports = connector_output.kv_connector_worker_meta
        reports = reports if isinstance(reports, Reports) else Reports()
        if reports.handshakes:
            self.half = self.half.add_handshakes(reports.handshakes)
        self.half.update_connector_output(connector_output, reports)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """What MultiConnector calls if a sibling does not support HMA."""
        finished: tuple[bool, dict[str, Any] | None] = self.request_finished_all_groups(
            request, (block_ids,)
        )
        return finished

    # -- the workers' half

    register_kv_caches = _of_half("register_kv_caches", lambda: None)
    unregister_kv_caches = _of_half("unregister_kv_caches", lambda: None)
    restore_kv_caches = _of_half("restore_kv_caches", lambda: None)
    handle_preemptions = _of_half("handle_preemptions", lambda: None)
    wait_for_save = _of_half("wait_for_save", lambda: None)
    get_finished = _of_half("get_finished", lambda: (None, None))
    get_transfer_results = _of_half(
        "get_transfer_results", lambda: versions.transfer_results(set(), set())
    )
    get_block_ids_with_load_errors = _of_half("get_block_ids_with_load_errors", set)
    build_connector_worker_meta = _of_half("build_connector_worker_meta", lambda: None)
    _begin = _of_half("begin", lambda: None)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """From 0.33 on vLLM asks, and calls `unregister_kv_caches` before it takes the KV's memory
        away and `restore_kv_caches` when it is there again."""
        return True

    def get_handshake_metadata(self) -> Handshake | None:
        handshake: Handshake | None = self.half.first_handshake()
        return handshake

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._begin(connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing: loads began when the step's metadata came."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: no step waits for a load."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing: blocks are stored when they are whole."""

    # -- both

    @_guarded(lambda: None)
    def get_kv_connector_stats(self) -> KVKeepStats | None:
        stats: KVKeepStats | None = self.half.stats()
        faults = self.faults + self.half.faults
        self.faults = self.half.faults = 0
        if faults:
            stats = (stats or KVKeepStats.of()).aggregate(KVKeepStats.of(faults=faults))
        return stats

    shutdown = _of_half("close", lambda: None)

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
