"""Trap 12: server and client must be of one version, and nothing tells them when they are not."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from engines import KEY, counting, engine, eventually, oracle, prompt, serve, without_cache

from kvkeep.client.transport import StreamTransport
from kvkeep.testing.process import ServerProcess
from kvkeep.wire import messages as m
from kvkeep.wire.frames import Header, decode_header, decode_reply, encode
from kvkeep_lab.simulation.strange import server_of_version

OTHER = m.PROTOCOL_VERSION + 1


def test_a_client_of_another_version_is_told_which_one_is_spoken_here(
    server: ServerProcess,
) -> None:
    transport = StreamTransport(server.address)
    try:
        # What a later release says in its message is unknown here: any bytes.
        for body in (m.Hello("from the future", 1), m.Ping()):
            assert eventually(
                lambda body=body: transport.send(encode(Header(0, 7, version=OTHER), body))
            )  # type: ignore[misc]
            transport.wait(60_000)
            frames = transport.receive()
            assert frames is not None, "silence is the trap"
            header = decode_header(frames)
            refused = decode_reply(header, frames)
            assert isinstance(refused, m.Refused) and refused.code == "protocol_version"
            assert (
                str(m.PROTOCOL_VERSION) in refused.message
                and str(OTHER) in refused.message
                and refused.hint
            )
            assert (header.number, header.version) == (7, m.PROTOCOL_VERSION)
    finally:
        transport.close()


@pytest.fixture
def future_server() -> Iterator[str]:
    """A server that speaks the next version, and answers everything in it."""
    with server_of_version(OTHER) as address:
        yield address


def test_an_engine_with_a_server_of_another_version_says_so_and_serves(
    future_server: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, tokens = oracle(), prompt(22)
    with caplog.at_level(logging.WARNING), engine(future_server, model) as llm:
        [answer] = serve(llm, [counting(tokens)])
        assert eventually(
            lambda: any(f"protocol version {OTHER}" in text for text in caplog.messages)
        )
    assert [answer.token_ids] == without_cache(model, [tokens])
    assert answer.kv_transfer_params == {KEY: 0}
    said = [text for text in caplog.messages if "protocol version" in text]
    assert f"this client {m.PROTOCOL_VERSION}" in said[0] and len(said) == 1, (
        "once, with both versions"
    )
