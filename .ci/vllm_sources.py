"""Puts a vLLM release's Python sources into a folder, without anything that is compiled.

    python .ci/vllm_sources.py 0.33.0 .vllm/0.33.0-sources

A new release of vLLM is there for CUDA first, and may never have a build for CPUs. Its scheduler is
plain Python: with the dependencies of an older build it can be imported and tested on any machine.
The wheel (330 MB) is deleted afterwards.

Exit code 0: the sources are there. 75: they cannot be had here, because no package index has
answered; this is said loudly, and is no reason to stop work."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

TIMEOUT_S = 600
CANNOT_BE_HAD = 75


def main(version: str, folder: str) -> int:
    target = Path(folder)
    if target.exists():
        return 0
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        problem = download(version, Path(scratch))
        if problem:
            print("\n".join(unavailable(version, problem)))
            return CANNOT_BE_HAD
        (wheel,) = Path(scratch).glob("vllm-*.whl")
        sources = Path(scratch) / "sources"
        extract(wheel, sources)
        shutil.move(sources, target)  # all of them, or none
    print(f"vllm-sources: the Python sources of vLLM {version} are in {folder}")
    return 0


def download(version: str, folder: Path) -> str:
    """Puts the wheel there. Why it could not, or ""."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
    ]
    command += ["--only-binary", ":all:", "--dest", str(folder), f"vllm=={version}"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"pip did not end within {TIMEOUT_S} s"
    return (done.stderr.strip().splitlines() or ["pip said nothing"])[-1] if done.returncode else ""


def extract(wheel: Path, folder: Path) -> None:
    """Modules, and the metadata that tells the version."""
    with zipfile.ZipFile(wheel) as archive:
        wanted = [
            name for name in archive.namelist() if name.endswith(".py") or ".dist-info/" in name
        ]
        archive.extractall(folder, wanted)


def unavailable(version: str, why: str) -> list[str]:
    bar = "!" * 100
    remedy = "run `make test-vllm-contract` where a package index can be reached, before a release"
    return [
        bar,
        f"vllm-sources: vLLM {version} NOT TESTED: {why}",
        f"vllm-sources: hint: {remedy}",
        bar,
    ]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
