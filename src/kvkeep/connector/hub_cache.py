"""The cache directory of Hugging Face's hub, read without its package: a checkpoint by its name,
and the hashes that its layout holds.

    HF_HUB_CACHE/models--org--name/
      refs/main                                a commit
      snapshots/<commit>/config.json         ─► ../../blobs/<40 digits>   git's hash, small files
      snapshots/<commit>/model.safetensors   ─► ../../blobs/<64 digits>   the sha256, large files
    HF_MODULES_CACHE/transformers_modules/org/name/<commit>/*.py   copies of remote code, which run
"""

from __future__ import annotations

import os
import re
import stat
from glob import escape, glob

_REPOSITORY = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
_SNAPSHOT = re.compile(r".*/snapshots/[0-9a-f]{40}", re.DOTALL)
_BLOB = re.compile(r"(.*/models--[^/]+)/blobs/([0-9a-f]{64})", re.DOTALL)


def snapshot_of(name: str, revision: str | None, cache: str | None = None) -> str | None:
    """The directory of a repository at a revision (a branch, a tag, a commit) in the cache, if it
    is there."""
    if not _REPOSITORY.fullmatch(name) or ".." in name or ".." in (revision or ""):
        return None
    repository = os.path.join(cache or _hub_directory(), "models--" + name.replace("/", "--"))
    commit = revision or "main"
    try:
        with open(os.path.join(repository, "refs", commit), encoding="ascii") as ref:
            commit = ref.read(256).strip()
    except (OSError, ValueError):
        pass  # it may be a commit
    snapshot = os.path.join(repository, "snapshots", commit)
    return snapshot if commit and os.path.isdir(snapshot) else None


def sha256_by_name(path: str) -> str | None:
    """The hash of a file that is a link to a blob of the hub's cache, from the name of the blob.

    The cache is believed as far as its user's own tools write it. A blob that was written to after
    the link to it was made does not hold what its name says (a checkpoint that is saved into a
    snapshot writes through the links), so None is returned for it and the caller reads the file. An
    edit that also sets the blob's mtime back is not seen: as with all files of that cache, its
    owner answers for it."""
    try:
        folder = os.path.realpath(os.path.dirname(path))
        blob = os.path.normpath(os.path.join(folder, os.readlink(path)))
        found = _BLOB.fullmatch(blob)
        if found is None or not folder.startswith(f"{found[1]}/snapshots/"):
            return None
        link, content = os.lstat(path), os.lstat(blob)
    except (OSError, ValueError):
        return None
    is_whole = (
        stat.S_ISREG(content.st_mode)
        and content.st_size > 0
        and content.st_mtime_ns <= link.st_mtime_ns
    )
    return found[2] if is_whole else None


def running_copies(snapshot: str) -> list[str]:
    """The directories that hold copies of a snapshot's Python files. Transformers imports those."""
    if not _SNAPSHOT.fullmatch(snapshot):
        return []
    modules = os.environ.get("HF_MODULES_CACHE") or os.path.join(_home(), "modules")
    at = os.path.join(escape(modules), "transformers_modules")
    commit = escape(os.path.basename(snapshot))
    return sorted(glob(os.path.join(at, "*", "*", commit)) + glob(os.path.join(at, "*", commit)))


def _hub_directory() -> str:
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if path := os.environ.get(variable):
            return os.path.expandvars(os.path.expanduser(path))
    return os.path.join(_home(), "hub")


def _home() -> str:
    default = os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return os.path.expandvars(os.path.expanduser(os.environ.get("HF_HOME") or default))
