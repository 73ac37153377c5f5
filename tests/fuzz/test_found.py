"""What fuzzing found, each as a test of its own: the input is in the corpus, the reason is here."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import numpy as np
import pytest

from kvkeep.errors import SettingsError
from kvkeep.kv.checksum import ABSENT
from kvkeep.store.adopt import adopt
from kvkeep.store.store import Store
from kvkeep.store.table import PlainColumns
from kvkeep.wire import messages as m
from kvkeep.wire.tls import client_context, tls_files
from kvkeep_lab.fuzz.service import Held
from kvkeep_lab.simulation.peer import Peer, chain
from kvkeep_lab.simulation.server import SimulatedServer

SLAB = 4 * 4096
POOL = 4 * SLAB


def make_server() -> SimulatedServer:
    return SimulatedServer(POOL, SLAB, make_watch=lambda number: Held())


def peer_of(server: SimulatedServer) -> Peer:
    return Peer(lambda frames: server.service.handle(frames, 0))


@pytest.mark.parametrize(
    "text", ["~nobody-of-this-name/server.pem", "a\0b", "\ud800", "~\0", "~\ud800/server.pem"]
)
def test_a_file_that_can_be_no_path_is_a_setting_that_is_wrong(text: str) -> None:
    given = SimpleNamespace(tls_cert=text, tls_key=text, tls_ca=text)
    with pytest.raises(SettingsError) as refused:
        client_context(tls_files(given))  # type: ignore[arg-type]
    assert refused.value.hint


@pytest.mark.parametrize("plane", [m.NETWORK, m.SHARED_MEMORY])
@pytest.mark.parametrize("nbytes", [1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
def test_a_shard_beyond_all_measure_is_refused_by_name(plane: str, nbytes: int) -> None:
    server = make_server()
    peer = peer_of(server).attach(plane)
    refused = peer.ask(m.Refused, m.OpenLayout(b"f" * 16, [nbytes]))
    assert refused.code in ("shard_too_large", "block_too_large") and refused.field == "shard_bytes"
    assert server.service.counters.internal_errors == 0


def test_a_client_cannot_write_lines_of_its_own_into_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    server = make_server()
    peer = peer_of(server)
    with caplog.at_level(logging.INFO):
        peer.session = peer.ask(
            m.Welcome, m.Hello("good\n2026-01-01 ERROR not ours\x1b[2J", 1)
        ).session
        peer.ask(m.Done, m.Attach(m.NETWORK))
    assert caplog.messages and not [
        text for text in caplog.messages if "\n" in text or "\x1b" in text
    ]
    assert "good?2026-01-01 ERROR not ours?[2J" in caplog.text


def stored(
    store: Store, session: int, write: int, name: str, shards: tuple[int, ...], checks: list[int]
) -> None:
    """A chain of one block for each checksum, all its shards but those that are ABSENT with that
    checksum."""
    layout = store.open_layout(session, b"f" * 16, shards).number
    for shard in range(len(shards)):
        store.prepare_store(
            session, write + shard, "default", layout, shard, b"", chain(name, len(checks)), 1
        )
        sums = np.array(
            [check if shard == 0 or check == ABSENT else check + shard for check in checks],
            np.uint64,
        )
        store.complete_store(session, write + shard, sums, 1)


def test_checksums_that_an_earlier_server_left_do_not_spoil_the_seals_of_new_blocks() -> None:
    """A row of checksums was taken for new although a block of the last server had been there: the
    next restart could not prove what was stored in it."""
    columns = PlainColumns()
    store = Store(POOL, SLAB, columns=columns)
    store.add_slabs(0, 4)
    store.open_session(1)
    stored(store, 1, 1, "old", (64, 64), [11, 12, 13])
    table = store.blocks.table
    table.many.seal[table.live_rows()] ^= np.uint64(1)  # nothing of it can be proven
    for name, checks in (("new", [ABSENT, 21, 22]), ("newer", [31])):
        store = Store(POOL, SLAB, columns=columns)
        adopted = adopt(store, 4, False, 2)
        assert adopted.blocks == (0 if name == "new" else 3)
        store.open_session(1)
        stored(store, 1, 1, name, (64, 64), checks)
    assert adopt(Store(POOL, SLAB, columns=columns), 4, False, 3).blocks == 4


def test_a_layout_under_the_number_of_a_damaged_one_begins_with_no_checksums() -> None:
    columns = PlainColumns()
    store = Store(POOL, SLAB, columns=columns)
    store.add_slabs(0, 4)
    store.open_session(1)
    stored(store, 1, 1, "old", (64, 64), [11, 12, 13])
    columns.grow("layouts", "u1", 0, 0).view(np.uint8)[40] ^= 1
    store = Store(POOL, SLAB, columns=columns)
    assert adopt(store, 4, False, 2).blocks == 0
    store.open_session(1)
    layout = store.open_layout(1, b"g" * 16, (64,))
    assert layout.number == 1 and layout.checks.shape[1] == 1 and not layout.checks.any()
