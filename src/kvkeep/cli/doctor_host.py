"""What `kvkeep doctor` looks at without a server: memory, limits, directories, the clock, packages.

A GPU or a vLLM that is not here is no fault: its check is skipped by name."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from importlib.metadata import entry_points, packages_distributions
from importlib.metadata import version as version_of
from importlib.util import find_spec
from pathlib import Path
from typing import Final, ParamSpec

from kvkeep.errors import KVKeepError, SettingsError
from kvkeep.server.settings import Settings
from kvkeep.tiers.free_memory import (
    MEMORY_FILE_SYSTEMS,
    SMALL_POOL_BYTES,
    file_system_of,
    memory_limits,
    pool_room,
)
from kvkeep.tiers.memory import pool_left
from kvkeep.tiers.opening import check_installed
from kvkeep.tiers.tier_keys import read_tier_keys
from kvkeep.units import MIB, format_size
from kvkeep.vllm.releases import SUPPORTED, refusal

_PLUGINS: Final = "vllm.general_plugins"
_RELEASED_S: Final = 1_763_510_400  # 2025-11-19: no clock is right that is before it
_FILES_BESIDE_SESSIONS: Final = 128
_SERVER_BYTES: Final = 64 * MIB
_HUGE: Final = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_NO_LIMIT_BYTES: Final = 1 << 60  # what version 1 says where there is none
_PORTABLE: Final = 1  # CU_MEMHOSTREGISTER_PORTABLE
_PROBE_BYTES: Final = 2 * MIB

P = ParamSpec("P")


@dataclass(frozen=True)
class Finding:
    """What one check found. `remedy` is empty where nothing is wrong."""

    check: str
    ok: bool
    found: str
    remedy: str = ""
    skipped: bool = False


class Wrong(KVKeepError):
    """A check found a fault; the hint is its remedy."""


class Skipped(Exception):
    """A check has nothing to look at, and why."""


def check(name: str) -> Callable[[Callable[P, str]], Callable[P, Finding]]:
    """Makes a check of a function that says what it found, or raises Wrong, or Skipped. A check that
    fails itself is a finding, too: nothing that is odd on a host ends the command."""

    def make(look: Callable[P, str]) -> Callable[P, Finding]:
        @wraps(look)
        def carried_out(*given: P.args, **named: P.kwargs) -> Finding:
            try:
                return Finding(name, True, look(*given, **named))
            except Skipped as why:
                return Finding(name, True, str(why), skipped=True)
            except KVKeepError as fault:
                return Finding(name, False, fault.message, fault.hint)
            except Exception as error:  # guard: one odd check must not hide what others find
                said = f"the check failed: {type(error).__name__}: {error}"
                remedy = "report this with the output of `kvkeep doctor --json`"
                return Finding(name, False, said, remedy)

        return carried_out

    return make


def settings_of(
    config: Path | None, argv: Sequence[str], environment: Mapping[str, str]
) -> tuple[Settings | None, Finding]:
    """The settings that `kvkeep serve` would have. A pool that does not fit is a finding of another
    check, not of this one."""
    try:
        try:
            settings = Settings.load(config, environment, argv)
        except SettingsError:
            small = ("--pool-size", "1MiB", "--slab-size", "64KiB")
            settings = Settings.load(config, environment, [*argv, *small])
    except SettingsError as error:
        return None, Finding("settings", False, error.message, error.hint)
    return settings, Finding("settings", True, f"server {settings.name}")


@check("shared memory")
def shared_memory(settings: Settings) -> str:
    place, kind = settings.shm_dir, file_system_of(settings.shm_dir)
    if not place.is_dir():
        raise Wrong(f"{place} does not exist", "use --shm-dir /dev/shm")
    if kind not in MEMORY_FILE_SYSTEMS:
        raise Wrong(
            f"{place} is on {kind or 'an unknown file system'}: the pool would be on a disk",
            "use /dev/shm, or mount a tmpfs there",
        )
    left = pool_left(place, settings.name)
    room = pool_room(place, left.held_bytes)
    wanted = SMALL_POOL_BYTES if settings.pool_size_is_auto else settings.pool_size
    if room.nbytes < wanted:
        raise Wrong(f"a pool of {format_size(wanted)} does not fit: {room.reason}", room.remedy)
    return f"{place} is {kind}, room for a pool of {format_size(room.nbytes)}"


@check("pool directory")
def pool_directory(settings: Settings) -> str:
    return _writable(settings.shm_dir, "--shm-dir")


@check("state directory")
def state_directory(settings: Settings) -> str:
    return _writable(_existing(settings.state_dir), "--state-dir")


def _existing(place: Path) -> Path:
    """The directory itself, or the nearest one above it: a server makes what is missing."""
    return next((each for each in (place, *place.parents) if each.exists()), place)


def _writable(place: Path, flag: str) -> str:
    try:
        with tempfile.TemporaryDirectory(prefix="kvkeep-doctor-", dir=place):
            return f"{place} can be written"
    except OSError as error:
        raise Wrong(
            f"nothing can be made in {place}: {error.strerror}",
            f"let the user {os.geteuid()} write there, or choose another {flag}",
        ) from None


@check("open files")
def open_files(settings: Settings) -> str:
    """A server raises its limit to the hard one."""
    needed = 4 * settings.max_sessions + _FILES_BESIDE_SESSIONS
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if most != resource.RLIM_INFINITY and most < needed:
        raise Wrong(
            f"at most {most:,}; {settings.max_sessions} sessions need {needed:,}",
            f"raise the hard limit (ulimit -Hn {needed}; in Docker: --ulimit nofile={needed}; in "
            f"systemd: LimitNOFILE={needed}), or lower --max-sessions",
        )
    return f"at most {'any number' if most < 0 else f'{most:,}'}"


@check("cgroup memory")
def memory_limit(settings: Settings, proc: Path = Path("/proc/self")) -> str:
    """Limits of control groups. What the last server left counts as free: the next one takes it."""
    limits = [each for each in memory_limits(proc) if each.limit_bytes < _NO_LIMIT_BYTES]
    if not limits:
        return "no limit"
    held = pool_left(settings.shm_dir, settings.name).held_bytes
    limit = min(limits, key=lambda each: each.free_bytes(held))
    free = limit.free_bytes(held)
    wanted = _SERVER_BYTES + (0 if settings.pool_size_is_auto else settings.pool_size)
    found = f"{format_size(free)} of {format_size(limit.limit_bytes)} are free ({limit.group})"
    if free < wanted:
        raise Wrong(
            f"{found}; the pool and its server need {format_size(wanted)}",
            "raise the limit (in Docker: --memory; in Kubernetes: resources.limits.memory; in "
            "systemd: MemoryMax=), or use a smaller --pool-size",
        )
    return found


@check("huge pages")
def hugetlb(settings: Settings, meminfo: Path = Path("/proc/meminfo")) -> str:
    """Huge pages are optional. A hugetlbfs without reserved ones is a fault."""
    if file_system_of(settings.shm_dir) == "hugetlbfs":
        free = re.search(r"^HugePages_Free:\s*([1-9][0-9]*)$", meminfo.read_text(), re.MULTILINE)
        if free is None:
            raise Wrong(
                f"{settings.shm_dir} is a hugetlbfs, and no huge page is free",
                "reserve some: sysctl vm.nr_hugepages=N",
            )
        return f"{int(free[1]):,} are free"
    try:
        said = _HUGE.read_text().split("[")[1].split("]")[0]
    except (OSError, IndexError):
        said = "not supported here"
    return f"for shared memory: {said}"


@check("tiers")
def tier_directories(settings: Settings) -> str:
    """Disks and shared directories of the settings."""
    for tier in settings.tier:
        if tier.is_shared:
            check_installed(tier, encrypted=settings.tier_keys is not None)
            if settings.tier_keys is not None:
                read_tier_keys(settings.tier_keys)
        if tier.host or tier.scheme not in ("disk", "file"):
            continue
        place = _existing(tier.directory)
        _writable(place, "directory for the tier")
        free = shutil.disk_usage(place).free + _held_bytes(tier.directory)
        if free < tier.size_bytes:
            raise Wrong(
                f"{tier.directory} has {format_size(free)} for a tier of "
                f"{format_size(tier.size_bytes)}",
                "free space there, or use a smaller ?size=",
            )
    return ", ".join(str(tier) for tier in settings.tier) or "none is set"


def _held_bytes(directory: Path) -> int:
    """What the tier's own files take already."""
    found = (
        (each.stat(follow_symlinks=False) for each in directory.rglob("*"))
        if directory.is_dir()
        else ()
    )
    return sum(each.st_blocks * 512 for each in found)


@check("clock")
def clock() -> str:
    now = time.gmtime(time.time())
    if time.time() < _RELEASED_S:
        shown = time.strftime("%Y-%m-%d", now)
        raise Wrong(
            f"it is {shown} here: certificates and times to live are judged wrongly",
            "set the clock (timedatectl set-ntp true)",
        )
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", now)


@check("vLLM plugin")
def vllm_plugin() -> str:
    """Whether a vLLM of this environment finds the connector by its name."""
    if find_spec("vllm") is None:
        raise Skipped("vLLM is not installed in this environment")
    if not [each for each in entry_points(group=_PLUGINS) if each.value == "kvkeep.vllm:register"]:
        raise Wrong(
            f"no entry point of {_PLUGINS} is kvkeep's",
            f"{sys.executable} -m pip install --force-reinstall --no-deps kvkeep",
        )
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "kvkeep" not in allowed.split(","):
        raise Wrong(
            f"VLLM_PLUGINS = {allowed!r} keeps vLLM from loading kvkeep's plugin",
            "add kvkeep to VLLM_PLUGINS, or unset it",
        )
    return "vLLM finds KVKeepConnector by name"


@check("vLLM version")
def vllm_version() -> str:
    """By the metadata of its package: importing vLLM takes seconds."""
    packages = packages_distributions().get("vllm")
    if not packages:
        raise Skipped("no package here has vLLM")
    installed = version_of(packages[0])
    if problem := refusal(installed, allow_untested=False):
        raise Wrong(problem, f"install vLLM {SUPPORTED}")
    return f"vLLM {installed}; kvkeep serves {SUPPORTED}"


@check("CUDA registration")
def cuda_registration(settings: Settings) -> str:
    """Registers some shared memory with CUDA, as workers do with the pool."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise Skipped("no CUDA driver on this host") from None
    device, context, count = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        raise Skipped("no GPU on this host")
    with tempfile.TemporaryFile(dir=settings.shm_dir) as file:
        file.truncate(_PROBE_BYTES)
        with mmap.mmap(file.fileno(), _PROBE_BYTES) as memory:
            held = (ctypes.c_char * _PROBE_BYTES).from_buffer(memory)
            address = ctypes.c_void_p(ctypes.addressof(held))
            code = driver.cuDeviceGet(ctypes.byref(device), 0)
            code = code or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
            code = code or driver.cuCtxSetCurrent(context)
            code = code or driver.cuMemHostRegister_v2(
                address, ctypes.c_size_t(_PROBE_BYTES), _PORTABLE
            )
            if not code:
                driver.cuMemHostUnregister(address)
            if context:
                driver.cuDevicePrimaryCtxRelease_v2(device)
            del held
    if code:
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        shown = "none" if limit < 0 else format_size(limit)
        raise Wrong(
            f"host memory cannot be registered with CUDA: error {code} (memlock limit: {shown})",
            "raise memlock (in Docker: --ulimit memlock=-1); without it loads are slower",
        )
    return f"{count.value} GPU(s); shared memory can be registered"


@check("memlock")
def locked_memory(settings: Settings) -> str:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    shown = "no limit" if limit < 0 else f"limit of {format_size(limit)}"
    return f"{shown}; only registration with CUDA may count"


OF_SETTINGS: Sequence[Callable[[Settings], Finding]] = (
    shared_memory,
    pool_directory,
    state_directory,
    open_files,
    locked_memory,
    memory_limit,
    hugetlb,
    tier_directories,
    cuda_registration,
)
OF_ENVIRONMENT: Sequence[Callable[[], Finding]] = (clock, vllm_plugin, vllm_version)
