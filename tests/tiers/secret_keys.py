"""Files of secrets for tests. Each word stands for one secret."""

from __future__ import annotations

import hashlib
from pathlib import Path


def secret(word: str) -> str:
    return hashlib.sha256(word.encode()).hexdigest()


def key_text(*keys: str, log: str = "log") -> str:
    return "".join([f"log {secret(log)}\n", *(f"key {secret(key)}\n" for key in keys)])


def key_file(path: Path, *keys: str, log: str = "log") -> Path:
    path.write_text(key_text(*keys, log=log))
    path.chmod(0o600)
    return path
