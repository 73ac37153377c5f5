"""The image, built from a root file system that Debian's own tools make here, since an image registry
may be out of reach. It takes minutes: `make nightly` runs it."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvkeep.tiers.tier_address import SCHEMES

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"
TOOLS = ("buildah", "debootstrap")
MISSING = [tool for tool in TOOLS if shutil.which(tool) is None]
pytestmark = [
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
    pytest.mark.skipif(os.geteuid() != 0, reason="debootstrap needs root"),
]
_SERVE = """
kvkeep --version
kvkeep serve --pool-size 64MiB --shm-dir /tmp --json > /tmp/ready & server=$!
for turn in $(seq 300); do test -s /tmp/ready && break; sleep 0.2; done
python -c "import cryptography, libvalkey, mooncake.store, obstore, valkey"
kvkeep status --json && id -u && kill -TERM $server && wait $server
"""


def run(*command: str | Path, timeout_s: int = 900) -> str:
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_image_serves(tmp_path: Path) -> None:
    store = ["--storage-driver", "vfs", "--root", tmp_path / "store", "--runroot", tmp_path / "run"]
    base = tmp_path / "base"
    packages = ",".join(["python3", "python3-venv", *SCHEMES["mooncake"].libraries])
    run("debootstrap", "--variant=minbase", f"--include={packages}", "bookworm", base)
    container = run("buildah", *store, "from", "scratch").strip()
    run("buildah", *store, "add", container, base, "/")
    run("buildah", *store, "commit", "--rm", container, "base")
    context = tmp_path / "context"
    run(sys.executable, ROOT / ".ci" / "dist.py", context / "dist")
    pip = [sys.executable, "-m", "pip", "--quiet", "download", "--dest", context / "dist"]
    [wheel] = (context / "dist").glob(f"kvkeep-*_{platform.machine()}.whl")
    [extras] = re.findall("^ARG EXTRAS=(.*)$", DOCKERFILE.read_text(), re.MULTILINE)
    run(*pip, f"{wheel}[{extras}]", "async-timeout")  # Debian's Python 3.11.2 needs that too
    build = ("BASE=base", "PIP_NO_INDEX=1", "LIBRARIES=")
    arguments = [f"--build-arg={each}" for each in build]
    bud = ["buildah", *store, "bud", "--isolation", "chroot", "--pull-never", *arguments]
    run(*bud, "-f", DOCKERFILE, "-t", "kvkeep", context)
    container = run("buildah", *store, "from", "--pull-never", "kvkeep").strip()
    said = run(
        "buildah", *store, "run", "--isolation", "chroot", container, "--", "sh", "-ec", _SERVE
    )
    assert said.startswith("kvkeep 0.") and '"pool"' in said and "\n1000\n" in said
