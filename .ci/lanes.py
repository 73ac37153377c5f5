"""Runs several targets of the Makefile that run pytest, two at a time, and failed tests once more.

    python .ci/lanes.py TARGET... [VARIABLE=VALUE...]

Each target is a lane. Lanes start in the order given, so name the longest first. The output of a
lane is in build/lanes/TARGET.log and is printed when the lane has ended.

On a small machine two lanes take all of the processor, and a test may miss a deadline only because
of its neighbour. So the failed tests run once more when all lanes have ended, one lane at a time. A
test that fails again fails the run. A test that passes is listed at the end, for someone to mend.
The last lines say what was not tested, by the reasons of skipped tests: they are hard to find in
the output of the lanes.

Exit code 0: every test passed, at the second try if not at the first. 1: some did not."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

AT_A_TIME = 2
MOST_FAILURES = 10  # of a lane; more are no accident
FOLDER = Path("build") / "lanes"
SKIPPED = re.compile(r"^SKIPPED \[(\d+)\] \S+: (.*)$", re.MULTILINE)  # as `pytest -rs` says it


class Lane(NamedTuple):
    target: str
    variables: list[str]

    @property
    def log(self) -> Path:
        return FOLDER / f"{self.target}.log"

    @property
    def cache(self) -> Path:
        """A cache of pytest for this lane only: lanes that share one overwrite its failed tests."""
        return (FOLDER / f"{self.target}.cache").absolute()

    def run(self, options: str = "") -> bool:
        """Runs the lane and prints its output at the end. Returns whether all tests passed."""
        print(f"lanes: {self.target} begins", flush=True)
        began = time.monotonic()
        variables = os.environ | {"PYTEST_ADDOPTS": f"-o cache_dir={self.cache} {options}"}
        with self.log.open("w") as log:
            done = subprocess.run(
                ["make", "--no-print-directory", self.target, *self.variables],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=variables,
                check=False,
            )
        took_s = time.monotonic() - began
        result = "passed" if done.returncode == 0 else "FAILED"
        text = self.log.read_text(errors="replace")
        print(f"{text}lanes: {self.target} {result} after {took_s:.0f} s", flush=True)
        return done.returncode == 0

    def failed_tests(self) -> list[str]:
        try:
            return sorted(json.loads((self.cache / "v" / "cache" / "lastfailed").read_text()))
        except FileNotFoundError:
            return []

    def skipped(self) -> Counter[str]:
        """How many tests were skipped in the last run, by reason."""
        skips: Counter[str] = Counter()
        for count, reason in SKIPPED.findall(self.log.read_text(errors="replace")):
            skips[reason] += int(count)
        return skips


def main(words: list[str]) -> int:
    variables = [word for word in words if "=" in word]
    lanes = [Lane(word, variables) for word in words if "=" not in word]
    FOLDER.mkdir(parents=True, exist_ok=True)
    for lane in lanes:
        (lane.cache / "v" / "cache" / "lastfailed").unlink(missing_ok=True)
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        passed = list(pool.map(Lane.run, lanes))
    skips = sum((lane.skipped() for lane in lanes), Counter[str]())
    failed = [lane for lane, good in zip(lanes, passed, strict=True) if not good]
    lost: list[str] = []
    flaky: list[str] = []
    for lane in failed:
        tests = lane.failed_tests()
        if not 0 < len(tests) <= MOST_FAILURES:
            lost.append(f"{lane.target}: {len(tests)} failed tests, see its output above")
        elif lane.run("--last-failed"):
            flaky += tests
        else:
            lost += lane.failed_tests()
    for test in flaky:
        print(f"lanes: PASSED AT THE SECOND TRY ONLY: {test}")
    for test in lost:
        print(f"lanes: FAILED: {test}")
    print(f"lanes: {len(lanes) - len(failed)} of {len(lanes)} lanes passed at the first try")
    if skips:
        print("lanes: NOT TESTED HERE:")
    for reason, count in skips.most_common():
        print(f"lanes: {count:5} skipped: {reason}")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
