"""What `kvkeep doctor` looks at without a server: memory, limits, directories, the clock, packages.

Each check takes the settings that a server would have, and returns what it found. A GPU or a vLLM
that is not here is no fault: its check is skipped by name."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points, packages_distributions
from importlib.metadata import version as version_of
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from kvkeep.errors import SettingsError, TierError
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


@dataclass(frozen=True)
class Finding:
    """What one check found. `remedy` is empty where nothing is wrong."""

    check: str
    ok: bool
    found: str
    remedy: str = ""
    skipped: bool = False


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


def shared_memory(settings: Settings) -> Finding:
    check, place = "shared memory", settings.shm_dir
    kind = file_system_of(place)
    if not place.is_dir():
        return Finding(check, False, f"{place} does not exist", "use --shm-dir /dev/shm")
    if kind not in MEMORY_FILE_SYSTEMS:
        return Finding(
            check,
            False,
            f"{place} is on {kind or 'an unknown file system'}: the pool would be on a disk",
            "use /dev/shm, or mount a tmpfs there",
        )
    left = pool_left(place, settings.name)
    room = pool_room(place, left.held_bytes)
    wanted = SMALL_POOL_BYTES if settings.pool_size_is_auto else settings.pool_size
    if room.nbytes < wanted:
        return Finding(
            check,
            False,
            f"a pool of {format_size(wanted)} does not fit: {room.reason}",
            room.remedy,
        )
    return Finding(check, True, f"{place} is {kind}, room for a pool of {format_size(room.nbytes)}")


def pool_directory(settings: Settings) -> Finding:
    return _can_write("pool directory", settings.shm_dir, "--shm-dir")


def state_directory(settings: Settings) -> Finding:
    place = settings.state_dir
    while not place.exists() and place != place.parent:  # a server makes what is missing
        place = place.parent
    return _can_write("state directory", place, "--state-dir")


def _can_write(check: str, place: Path, flag: str) -> Finding:
    try:
        with tempfile.TemporaryDirectory(prefix="kvkeep-doctor-", dir=place):
            return Finding(check, True, f"{place} can be written")
    except OSError as error:
        return Finding(
            check,
            False,
            f"nothing can be made in {place}: {error.strerror}",
            f"let the user {os.geteuid()} write there, or choose another {flag}",
        )


def open_files(settings: Settings) -> Finding:
    """A server raises its limit to the hard one."""
    needed = 4 * settings.max_sessions + _FILES_BESIDE_SESSIONS
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if most != resource.RLIM_INFINITY and most < needed:
        return Finding(
            "open files",
            False,
            f"at most {most:,}; {settings.max_sessions} sessions need {needed:,}",
            f"raise the hard limit (ulimit -Hn {needed}; in Docker: --ulimit nofile={needed}; in "
            f"systemd: LimitNOFILE={needed}), or lower --max-sessions",
        )
    return Finding("open files", True, f"at most {'any number' if most < 0 else f'{most:,}'}")


def memory_limit(settings: Settings, proc: Path = Path("/proc/self")) -> Finding:
    """Limits of control groups. What the last server left counts as free: the next one takes it."""
    limits = [each for each in memory_limits(proc) if each.limit_bytes < _NO_LIMIT_BYTES]
    if not limits:
        return Finding("cgroup memory", True, "no limit")
    held = pool_left(settings.shm_dir, settings.name).held_bytes
    limit = min(limits, key=lambda each: each.free_bytes(held))
    free = limit.free_bytes(held)
    wanted = _SERVER_BYTES + (0 if settings.pool_size_is_auto else settings.pool_size)
    found = f"{format_size(free)} of {format_size(limit.limit_bytes)} are free ({limit.group})"
    if free < wanted:
        return Finding(
            "cgroup memory",
            False,
            f"{found}; the pool and its server need {format_size(wanted)}",
            "raise the limit (in Docker: --memory; in Kubernetes: resources.limits.memory; in "
            "systemd: MemoryMax=), or use a smaller --pool-size",
        )
    return Finding("cgroup memory", True, found)


def hugetlb(settings: Settings, meminfo: Path = Path("/proc/meminfo")) -> Finding:
    """Huge pages are optional. A hugetlbfs without reserved ones is a fault."""
    if file_system_of(settings.shm_dir) == "hugetlbfs":
        free = {"HugePages_Free": 0}
        for line in meminfo.read_text().splitlines():
            name, _, value = line.partition(":")
            if name in free:
                free[name] = int(value)
        if not free["HugePages_Free"]:
            return Finding(
                "huge pages",
                False,
                f"{settings.shm_dir} is a hugetlbfs, and no huge page is free",
                "reserve some: sysctl vm.nr_hugepages=N",
            )
        return Finding("huge pages", True, f"{free['HugePages_Free']:,} are free")
    try:
        said = _HUGE.read_text().split("[")[1].split("]")[0]
    except (OSError, IndexError):
        said = "not supported here"
    return Finding("huge pages", True, f"for shared memory: {said}")


def tier_directories(settings: Settings) -> Finding:
    """Disks and shared directories of the settings."""
    for tier in settings.tier:
        try:
            if tier.is_shared:
                check_installed(tier, encrypted=settings.tier_keys is not None)
                if settings.tier_keys is not None:
                    read_tier_keys(settings.tier_keys)
        except (SettingsError, TierError) as error:
            return Finding("tiers", False, error.message, error.hint)
        if tier.host or tier.scheme not in ("disk", "file"):
            continue
        place = tier.directory
        while not place.exists() and place != place.parent:
            place = place.parent
        said = _can_write("tiers", place, "directory for the tier")
        if not said.ok:
            return said
        held = _held_bytes(tier.directory)
        free = shutil.disk_usage(place).free + held
        if free < tier.size_bytes:
            return Finding(
                "tiers",
                False,
                f"{tier.directory} has {format_size(free)} for a tier of "
                f"{format_size(tier.size_bytes)}",
                "free space there, or use a smaller ?size=",
            )
    names = ", ".join(str(tier) for tier in settings.tier)
    return Finding("tiers", True, names or "none is set")


def _held_bytes(directory: Path) -> int:
    """What the tier's own files take already."""
    found = (
        (each.stat(follow_symlinks=False) for each in directory.rglob("*"))
        if directory.is_dir()
        else ()
    )
    return sum(each.st_blocks * 512 for each in found)


def clock() -> Finding:
    now = time.gmtime(time.time())
    if time.time() < _RELEASED_S:
        shown = time.strftime("%Y-%m-%d", now)
        return Finding(
            "clock",
            False,
            f"it is {shown} here: certificates and times to live are judged wrongly",
            "set the clock (timedatectl set-ntp true)",
        )
    return Finding("clock", True, time.strftime("%Y-%m-%d %H:%M:%S UTC", now))


def vllm_plugin() -> Finding:
    """Whether a vLLM of this environment finds the connector by its name."""
    check = "vLLM plugin"
    if find_spec("vllm") is None:
        return Finding(check, True, "vLLM is not installed in this environment", skipped=True)
    if not [each for each in entry_points(group=_PLUGINS) if each.value == "kvkeep.vllm:register"]:
        return Finding(
            check,
            False,
            f"no entry point of {_PLUGINS} is kvkeep's",
            f"{sys.executable} -m pip install --force-reinstall --no-deps kvkeep",
        )
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "kvkeep" not in allowed.split(","):
        return Finding(
            check,
            False,
            f"VLLM_PLUGINS = {allowed!r} keeps vLLM from loading kvkeep's plugin",
            "add kvkeep to VLLM_PLUGINS, or unset it",
        )
    return Finding(check, True, "vLLM finds KVKeepConnector by name")


def vllm_version() -> Finding:
    """By the metadata of its package: importing vLLM takes seconds."""
    check = "vLLM version"
    packages = packages_distributions().get("vllm")
    if not packages:
        return Finding(check, True, "no package here has vLLM", skipped=True)
    installed = version_of(packages[0])
    if problem := refusal(installed, allow_untested=False):
        return Finding(check, False, problem, f"install vLLM {SUPPORTED}")
    return Finding(check, True, f"vLLM {installed}; kvkeep serves {SUPPORTED}")


def cuda_registration(settings: Settings) -> Finding:
    """Registers some shared memory with CUDA, as workers do with the pool."""
    check = "CUDA registration"
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Finding(check, True, "no CUDA driver on this host", skipped=True)
    device, context, count = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return Finding(check, True, "no GPU on this host", skipped=True)
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
        return Finding(
            check,
            False,
            f"host memory cannot be registered with CUDA: error {code} (memlock limit: {shown})",
            "raise memlock (in Docker: --ulimit memlock=-1); without it loads are slower",
        )
    return Finding(check, True, f"{count.value} GPU(s); shared memory can be registered")


def locked_memory(settings: Settings) -> Finding:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    shown = "no limit" if limit < 0 else f"limit of {format_size(limit)}"
    return Finding("memlock", True, f"{shown}; only registration with CUDA may count")


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
