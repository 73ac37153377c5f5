"""Are there known vulnerabilities in what is installed? Asks pip-audit, and tells "none" from
"nobody could say".

    python .ci/audit.py     exit code 1 for a known vulnerability, 0 otherwise

Without a network, without its database or without pip-audit itself nothing can be known. That is no
reason to stop work, and none to be silent: it is said loudly, with what to do."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

TIMEOUT_S = 120
OURS = ("kvkeep", "kvkeep-lab")


def main() -> int:
    command = [
        sys.executable,
        "-m",
        "pip_audit",
        "--local",
        "--progress-spinner",
        "off",
        "--format",
        "json",
    ]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        code, lines = verdict(done.stdout, done.stderr)
    except subprocess.TimeoutExpired:
        code, lines = unknown(f"pip-audit did not end within {TIMEOUT_S} s")
    print("\n".join(lines))
    return code


def verdict(stdout: str, stderr: str) -> tuple[int, list[str]]:
    """What pip-audit's JSON comes to: an exit code, and lines for people."""
    try:
        packages: list[dict[str, Any]] = json.loads(stdout)["dependencies"]
    except (ValueError, KeyError, TypeError):
        return unknown((stderr.strip().splitlines() or ["pip-audit said nothing"])[-1])
    packages = [each for each in packages if each["name"] not in OURS]
    found = [
        f"audit: {each['name']} {each['version']}: {flaw['id']}, mended in {', '.join(flaw['fix_versions']) or '?'}"
        for each in packages
        for flaw in each.get("vulns", [])
    ]
    skipped = [each["name"] for each in packages if "skip_reason" in each]
    if found:
        return 1, [
            *found,
            "audit: raise the lower bound in pyproject.toml above what is vulnerable",
        ]
    if skipped or not packages:
        return unknown(
            f"{len(skipped)} of {len(packages)} packages are not in its database: {', '.join(skipped[:5])} ..."
        )
    return 0, [f"audit: {len(packages)} packages, no known vulnerability"]


def unknown(why: str) -> tuple[int, list[str]]:
    bar = "!" * 100
    remedy = "run `make audit` where the vulnerability database can be reached, before a release"
    return 0, [bar, f"audit: NOT AUDITED: {why}", f"audit: hint: {remedy}", bar]


if __name__ == "__main__":
    sys.exit(main())
