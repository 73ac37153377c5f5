"""`kvkeep plan` reads the log of requests as vLLM itself writes it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvkeep.bench.traces import read_trace

NO_LOGGER = 75
# As vLLM's API server calls it, with vLLM's own logging.
PROGRAM = f"""
import sys
try:
    from vllm.entrypoints.serve.utils.request_logger import RequestLogger
except ImportError:
    try:
        from vllm.entrypoints.logger import RequestLogger  # in older releases
    except ImportError:
        sys.exit({NO_LOGGER})
try:
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging
except ImportError:
    pass  # older releases configure it when they are imported
else:
    configure_logging(LoggingConfig())
logger = RequestLogger(max_log_len=None)
for request, prompt, tokens in (
    ("a", "one\\n[line] 'and' \\"another\\"", [*range(32), *range(100, 120)]),
    ("b", "prompt_token_ids: [1, 2], prompt_embeds shape: None.", [*range(32), 7]),
    ("c", None, []),
):
    logger.log_inputs(request, prompt, tokens, None, None, None)
"""


def test_a_log_that_vllm_writes_is_read(tmp_path: Path) -> None:
    path = tmp_path / "vllm.log"
    with path.open("w") as log:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env=os.environ | {"VLLM_LOGGING_LEVEL": "DEBUG", "VLLM_CONFIGURE_LOGGING": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if done.returncode == NO_LOGGER:
        pytest.skip("the logger of requests cannot be imported from this vLLM")
    assert done.returncode == 0, path.read_text()
    trace = read_trace(str(path))
    assert [list(blocks) for _, blocks in trace] == [[0, 1, 2], [0, 1], []]
    assert trace.block_tokens == 16
