"""The digest of a checkpoint: which weights, and which code, an engine computes KV with.

    of() ──► which files there are, and what stat says of each      milliseconds, in the caller's thread
                │
                ├─ all of them hashed before, or named by hash ──► value
                └─ others ──► one thread hashes them ──► value, or problem
                              pending until then

It covers the whole content of every file of weights and of the configuration, and of the Python
files where the engine may run code from the checkpoint. A copy has the same digest wherever it
lies, in the hub's cache or elsewhere. The engine has read the files by the time it asks, so a file
that changes after `of` makes a problem, not another digest."""

from __future__ import annotations

import json
import os
import stat
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import NamedTuple

from kvkeep.connector.file_hashes import FileChanged, FileHashes, FileIdentity, hashes_of_user
from kvkeep.connector.hub_cache import running_copies, sha256_by_name, snapshot_of
from kvkeep.errors import KVKeepError

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
# Of trainers.
NOT_WEIGHTS = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")
CONFIGS = (
    "config.json",
    "adapter_config.json",
    "params.json",
    "hf_quant_config.json",
    "quantize_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
INDEX = ".index.json"  # says which files of weights are used
NAMES_CODE = (*CONFIGS, "tokenizer_config.json")  # may refer to code in other repositories
MAX_CODE_FILES = 10_000
MAX_CONFIG_BYTES = 16 << 20
MAX_WAITING = 1024  # digests in one process that wait to be hashed


class NoDigest(KVKeepError):
    """The checkpoint has no digest, for the reason that the message gives."""


class _File(NamedTuple):
    name: str  # relative to the checkpoint, the same for every copy
    path: str
    identity: FileIdentity
    # the name of a file that it is meant to be a copy of; it counts only if it is not
    copy_of: str = ""


class CheckpointDigest:
    """The digest of a checkpoint's files: known at once if they were hashed before on this host,
    otherwise once a background thread has hashed them. Only `of` makes one."""

    def __init__(
        self, about: tuple[str, str | None, bool, str | None, str | None], hashes: FileHashes
    ) -> None:
        # hex digits; None while it is pending, and if there is a problem
        self.value: str | None = None
        self.problem = ""  # why there is no digest and will be none
        self._about = about
        self._hashes = hashes
        self._files: list[_File] = []
        self._settled = threading.Event()

    @classmethod
    def of(
        cls,
        model: str,
        revision: str | None,
        *,
        remote_code: bool = False,
        code_revision: str | None = None,
        download_dir: str | None = None,
    ) -> CheckpointDigest:
        """The digest of a directory, of a single file of weights, or of a model in the hub's cache.

        With `remote_code` it covers Python files too: all of the checkpoint, of the repositories
        that its configuration refers to, and of `code_revision`. `download_dir` is where the engine
        keeps models instead of the hub's cache. Never raises, and never reads weights in the
        caller's thread."""
        digest = cls((model, revision, remote_code, code_revision, download_dir), hashes_of_user())
        try:
            digest._files = _files_of(*digest._about)
            digest._settle_if_known()
        except Exception as error:
            # guard: names and files come from anywhere, and an engine asks as it starts
            digest._settle(problem=_words(error))
        if digest.pending and not _hasher.add(digest):
            digest._files = []
            digest._settle(problem=f"{MAX_WAITING} other checkpoints are waiting to be hashed")
        return digest

    @property
    def pending(self) -> bool:
        """Whether the files are being hashed now, or wait for that."""
        return not self._settled.is_set()

    @property
    def found(self) -> bool:
        """Whether there are files that have a digest, or will have one unless something is wrong
        with them. Otherwise asking again later may help: a model may be downloaded meanwhile."""
        return bool(self._files)

    @property
    def total_bytes(self) -> int:
        """The size of all files that the digest covers."""
        return sum(file.identity.size_bytes for file in self._files)

    def wait(self, timeout_s: float | None) -> bool:
        """Blocks until the digest is not pending any more. False if that takes longer than
        `timeout_s`."""
        return self._settled.wait(timeout_s)

    def is_current(self) -> bool:
        """Whether the files are, as far as stat says, still those that `of` found."""
        try:
            return self.found and _files_of(*self._about) == self._files
        except (OSError, ValueError, KVKeepError):
            return False

    def hash_files(self) -> None:
        """Hashes what is not known yet. The background thread calls this; it does not raise."""
        try:
            known = zip(self._files, self._known_hashes(), strict=True)
            hashes = [each or self._hashes.hash(file.path, file.identity) for file, each in known]
            if not self.is_current():  # a file that was hashed first may have changed since
                raise FileChanged("its files have changed since the engine read them")
            self._settle(value=_combined(self._files, hashes))
        except Exception as error:  # guard: a digest that stays pending for ever says nothing
            self._settle(problem=_words(error))

    def _settle_if_known(self) -> None:
        hashes = [each for each in self._known_hashes() if each is not None]
        if len(hashes) == len(self._files):
            self._settle(value=_combined(self._files, hashes))

    def _known_hashes(self) -> list[str | None]:
        remembered = self._hashes.known_of([file.identity for file in self._files])
        return [
            sha256_by_name(file.path) or each
            for file, each in zip(self._files, remembered, strict=True)
        ]

    def _settle(self, *, value: str | None = None, problem: str = "") -> None:
        self.value, self.problem = value, problem
        self._settled.set()


class _Hasher:
    """One thread a process, which hashes one checkpoint after the other and ends when there is
    none."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[CheckpointDigest] = deque()
        self._thread: threading.Thread | None = None

    def add(self, digest: CheckpointDigest) -> bool:
        """False if too many are waiting."""
        with self._lock:
            if len(self._waiting) >= MAX_WAITING:
                return False
            self._waiting.append(digest)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="kvkeep-hasher", daemon=True)
                self._thread.start()
            return True

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._thread = None
                    return
                digest = self._waiting.popleft()
            digest.hash_files()


_hasher = _Hasher()


# --- which files there are ------------------------------------------------------------------------


def _files_of(
    model: str,
    revision: str | None,
    remote_code: bool,
    code_revision: str | None,
    download_dir: str | None,
) -> list[_File]:
    """Sorted by name. NoDigest if there are no weights on this host."""
    path = os.path.expanduser(model)
    if os.path.isfile(path):
        return [_file("", path)]  # a file by itself may be called anything
    directory = path if os.path.isdir(path) else None
    if directory is None and download_dir:
        directory = _in_hub(model, revision, download_dir)
    directory = directory or _in_hub(model, revision)
    if directory is None:
        raise NoDigest(f"no weights of {model} were found on this host")
    with os.scandir(directory) as entries:
        # Links to files are followed: that is how the hub's cache is made.
        names = [entry.name for entry in entries if _is_covered(entry.name) and entry.is_file()]
    if not any(_is_weights(name) for name in names):
        raise NoDigest(f"there are no weights in {directory}")
    files = [_file(name, os.path.join(directory, name)) for name in names]
    if remote_code:
        files += _code_files(directory, model, code_revision or revision, code_revision)
    return sorted(files)


def _in_hub(model: str, revision: str | None, cache: str | None = None) -> str | None:
    # org/name:Q4_K_M names a file of org/name
    return snapshot_of(model.partition(":")[0], revision, cache)


def _is_weights(name: str) -> bool:
    return name.endswith(WEIGHTS) and name not in NOT_WEIGHTS


def _is_covered(name: str) -> bool:
    return _is_weights(name) or name in CONFIGS or name.endswith(INDEX)


def _file(name: str, path: str, copy_of: str = "") -> _File:
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        raise NoDigest(f"{path} is no regular file")
    return _File(name, path, FileIdentity.of(found), copy_of)


def _code_files(
    directory: str, model: str, revision: str | None, code_revision: str | None
) -> list[_File]:
    """All Python files that the engine may run for this checkpoint, from wherever it takes them."""
    places = {"": directory}  # by what precedes the names of files: \0 is in no name
    own = None if os.path.isdir(model) else _in_hub(model, revision)
    if own is not None and os.path.realpath(own) != os.path.realpath(directory):
        # another revision of the code, or the weights alone are in `download_dir`
        places["\0"] = own
    for name in _repositories_of_code(directory):
        # One that is not here was not run either: the engine has another implementation of the
        # model.
        place = name if os.path.isdir(name) else snapshot_of(name, code_revision)
        if place is not None and name != model:
            places[f"{name}\0"] = place
    files = []
    for prefix, place in places.items():
        files += [_file(prefix + name, os.path.join(place, name)) for name in _python_files(place)]
        for number, copy in enumerate(running_copies(place)):
            for name in _python_files(copy):
                running = f"{prefix}\0running {number}\0{name}"
                each = _file(running, os.path.join(copy, name), copy_of=prefix + name)
                if each.identity.size_bytes:  # transformers adds an empty __init__.py
                    files.append(each)
    if len(files) > MAX_CODE_FILES:
        raise NoDigest(
            f"{directory} and what it refers to have {len(files)} Python files, {MAX_CODE_FILES}"
            " at most"
        )
    return files


def _python_files(directory: str) -> Iterator[str]:
    """Relative to the directory."""
    count = 0
    for folder, folders, names in os.walk(directory):
        folders[:] = [
            each for each in folders if not each.startswith(".") and each != "__pycache__"
        ]
        for name in names:
            path = os.path.join(folder, name)
            if name.endswith(".py") and os.path.isfile(path):
                count += 1
                if count > MAX_CODE_FILES:
                    raise NoDigest(f"{directory} has more than {MAX_CODE_FILES} Python files")
                yield os.path.relpath(path, directory)


def _repositories_of_code(directory: str) -> list[str]:
    """What stands before -- in the `auto_map` of the configuration: other/name--module.Class."""
    found: set[str] = set()
    for name in NAMES_CODE:
        try:
            with open(os.path.join(directory, name), "rb") as file:
                config = json.loads(file.read(MAX_CONFIG_BYTES))
        except (OSError, ValueError, RecursionError):
            continue
        classes = config.get("auto_map") if isinstance(config, dict) else None
        for each in classes.values() if isinstance(classes, dict) else ():
            references = each if isinstance(each, list) else [each]
            found |= {
                text.partition("--")[0]
                for text in references
                if isinstance(text, str) and "--" in text
            }
    return sorted(found)


# --- what they come to ----------------------------------------------------------------------------


def _combined(files: Sequence[_File], hashes: Sequence[str]) -> str:
    by_name = {file.name: each for file, each in zip(files, hashes, strict=True)}
    digest = blake2b(digest_size=16, person=b"kvkeep.check")
    for file in files:
        if not file.copy_of or by_name[file.name] != by_name.get(file.copy_of):
            name = os.fsencode(file.name)
            digest.update(b"%d %s " % (len(name), name) + bytes.fromhex(by_name[file.name]))
    return digest.hexdigest()


def _words(error: Exception) -> str:
    if isinstance(error, KVKeepError):
        return error.message
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return repr(error)
