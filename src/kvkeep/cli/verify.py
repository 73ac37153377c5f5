"""`kvkeep verify`: compare every block on disks with its checksum.

Of a running server the server's own processes do it, when they have nothing else to do. The disk of
a server that does not run is read here; its lock keeps servers from it meanwhile."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from kvkeep.cli.interrupts import interrupts
from kvkeep.cli.output import byte_progress, counted, note, show_each
from kvkeep.cli.remote import Server, asks_server
from kvkeep.errors import SettingsError, TierError
from kvkeep.tiers.disk_check import DiskCheck
from kvkeep.tiers.disk_files import DiskFiles
from kvkeep.tiers.disk_index import DiskIndex
from kvkeep.tiers.mover import JOB_BYTES, Check
from kvkeep.tiers.mover_process import check_piece, pieces_of
from kvkeep.tiers.tier_address import parse_tiers
from kvkeep.units import format_size

EXIT_BAD_BLOCKS = 4
_LOOK_EVERY_S = 0.2
_BLOCKS_A_JOB = 128
_CANCELLED = "cancelled: what was found so far"


@asks_server
def verify(
    server: Server,
    tier: Annotated[
        str | None,
        typer.Argument(
            help="The directory of a disk that no server uses, or its disk:// address. Without it "
            "the disks of a running server are checked.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Compare every block on disk with its checksum, and drop bad ones."""
    if tier is None:
        said = _verify_running(server)
    else:
        said = [_verify_directory(_directory_of(tier))]
    server.show(said, lambda: show_each(map(facts, said)))
    if any(each["bad_blocks"] or each["unreadable_blocks"] for each in said):
        raise typer.Exit(EXIT_BAD_BLOCKS)
    if failed := [each for each in said if each["state"] == "failed"]:
        raise TierError(f"disk {failed[0]['tier']} was not verified: {failed[0]['problem']}")


def facts(said: dict[str, Any]) -> list[tuple[str, str]]:
    """The lines of one disk."""
    rate = f", {format_size(round(said['nbytes'] / said['seconds']))}/s" if said["seconds"] else ""
    checked = f"{said['blocks']:,} of {counted(said['total_blocks'], 'block')}"
    lines = [
        ("tier", said["tier"]),
        ("state", said["state"] + (f": {said['problem']}" if said["problem"] else "")),
        ("checked", f"{checked}, {format_size(said['nbytes'])} in {said['seconds']:.1f} s{rate}"),
        ("bad blocks", f"{said['bad_blocks']:,}"),
    ]
    by_tenant = Counter(said["bad_by_tenant"]).most_common()
    lines += [("", f"{count:,} of tenant {tenant}") for tenant, count in by_tenant]
    return [*lines, ("unreadable", f"{said['unreadable_blocks']:,}")]


# -- of a running server ---------------------------------------------------------------------------


def _verify_running(server: Server) -> list[dict[str, Any]]:
    with interrupts() as is_interrupted:
        said: list[dict[str, Any]] = server.ask("/v1/verify", "POST")
        tiers = [each["tier"] for each in said]
        with _bar(said) as report:
            while _is_running(said) and not is_interrupted():
                time.sleep(_LOOK_EVERY_S)
                said = server.ask("/v1/verify")
                if [each["tier"] for each in said] != tiers:
                    raise TierError(
                        "the server was restarted while it verified its disks", "verify them again"
                    )
                report(said)
        if _is_running(said):
            said = server.ask("/v1/verify", "DELETE")
            note(_CANCELLED)
    return said


def _is_running(said: list[dict[str, Any]]) -> bool:
    return any(each["state"] == "running" for each in said)


@contextmanager
def _bar(said: list[dict[str, Any]]) -> Iterator[Callable[[list[dict[str, Any]]], None]]:
    """The sizes of blocks that are to be checked follow from those that were."""

    def report(said: list[dict[str, Any]]) -> None:
        blocks, total = (sum(each[name] for each in said) for name in ("blocks", "total_blocks"))
        nbytes = sum(each["nbytes"] for each in said)
        progress(nbytes, nbytes * total // blocks if blocks else 0)

    with byte_progress("verify") as progress:
        report(said)
        yield report


# -- of a disk that no server uses -----------------------------------------------------------------


def _directory_of(text: str) -> Path:
    if "://" not in text:
        return Path(text).expanduser().absolute()
    try:
        tiers = parse_tiers(text)
    except ValueError as error:
        raise SettingsError(f"TIER: {error}", "name the directory, or one address") from None
    if len(tiers) != 1:
        raise SettingsError("TIER: expected one address", "verify one disk after the other")
    return tiers[0].directory


def _verify_directory(directory: Path) -> dict[str, Any]:
    try:
        files = DiskFiles.open_existing(directory)
    except TierError as error:
        if "in use" not in error.message:
            raise
        raise TierError(
            error.message, "leave TIER out to verify the disks of a running server"
        ) from None
    try:
        return _verify_files(files, directory)
    finally:
        files.close()


def _verify_files(files: DiskFiles, directory: Path) -> dict[str, Any]:
    now_ms = time.time_ns() // 1_000_000
    index = DiskIndex(files.data_bytes, files.slab_bytes, None, files.recovered(), now_ms)
    check, began_s = DiskCheck(index), time.monotonic()
    state, problem = "cancelled", ""
    total = sum(layout.blocks * layout.slot_bytes for layout in index.store.layouts)
    with interrupts() as is_interrupted:
        with byte_progress("verify") as progress:
            while not is_interrupted():
                job = check.next(1, _BLOCKS_A_JOB, JOB_BYTES)
                if job is None:
                    state = "done"
                    break
                good, error = _read(files, job)
                check.ended(job, good, error, now_ms)
                problem = problem or error
                progress(check.counts.nbytes, total)
        if state == "cancelled":
            note(_CANCELLED)
        check.drop_bad()
        if check.counts.bad_blocks:
            _keep(files, index, now_ms)
    return {
        "tier": str(directory),
        "state": state,
        "problem": problem,
        "total_blocks": check.total_blocks,
        **vars(check.counts),
        "seconds": round(time.monotonic() - began_s, 3),
    }


def _read(files: DiskFiles, job: Check) -> tuple[Any, str]:
    """Which blocks are good, and the first error."""
    offsets = np.frombuffer(job.offsets, "<i8")
    good, error = np.zeros(len(offsets), np.bool_), ""
    for piece in pieces_of(offsets, job.nbytes):
        try:
            good[piece] = check_piece(files, job, piece)
        except OSError as failure:
            error = error or str(failure.strerror)
    return good, error


def _keep(files: DiskFiles, index: DiskIndex, now_ms: int) -> None:
    """Notes on the disk which blocks were dropped."""
    while index.store.tidy(now_ms):
        pass
    record = index.take_records()
    if record is None:
        return
    try:
        files.append(record.record)
        files.sync_log()
    except OSError as error:
        raise TierError(
            f"bad blocks were found, but could not be dropped: {error.strerror}",
            "a server drops them when it reads them",
        ) from error
