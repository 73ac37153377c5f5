"""What the guides show is run as it stands, against a real server."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvkeep.testing.process import ServerProcess

DOCS = Path(__file__).parent.parent / "docs"
PROGRAMS = [
    program
    for guide in ("getting-started.md", "engine.md")
    for program in re.findall(r"```python\n(.*?)```", (DOCS / guide).read_text(), re.DOTALL)
]
PRINTS = [
    r"4\n\(4, 2, 16, 8, 64\)\n\(0, 2, 16, 8, 64\)\n",
    r"(\[\d+, \d+, \d+, \d+\]) \{'num_kvkeep_extra_cached_tokens': 0\}\n"
    r"\1 \{'num_kvkeep_extra_cached_tokens': 192\}\n",
    r"5 blocks found\nfailed blocks: \[\]\nfailed blocks: \[\]\nTrue\n",
    r"\[(\d+, ){3}\d+\] 0\n\[(\d+, ){3}\d+\] 32\n",
]


@pytest.mark.parametrize(("program", "printed"), list(zip(PROGRAMS, PRINTS, strict=True)))
def test_a_program_prints_what_is_promised(program: str, printed: str) -> None:
    with ServerProcess("--pool-size", "64MiB") as server:
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"KVKEEP_ADDRESS": server.address},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        assert re.fullmatch(printed, done.stdout), done.stdout
        assert "gone" not in server.log(), "every session ended in order"
