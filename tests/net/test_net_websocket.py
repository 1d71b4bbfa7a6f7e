"""The WebSocket below a connection loses nothing, however its bytes fall into reads."""

from __future__ import annotations

import pytest
import trio
import trio.testing
import wsproto
from wsproto.events import AcceptConnection, BytesMessage, Request

from kvasir_peer.net.websocket import WebSocketDuplex


@pytest.mark.parametrize("together", [True, False], ids=["one read", "byte by byte"])
async def test_what_a_server_sends_right_after_its_answer_is_not_lost(together: bool) -> None:
    ours, theirs = trio.testing.memory_stream_pair()
    server = wsproto.WSConnection(wsproto.ConnectionType.SERVER)
    got = b""

    async def serve() -> None:
        while not any(isinstance(event, Request) for event in server.events()):
            server.receive_data(await theirs.receive_some(4096))
        answer = server.send(AcceptConnection())
        answer += server.send(BytesMessage(b"first")) + server.send(BytesMessage(b"second"))
        for part in [answer] if together else [answer[i : i + 1] for i in range(len(answer))]:
            await theirs.send_all(part)

    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve)
            duplex = await WebSocketDuplex.connect(ours, "example.org")
            while len(got) < len(b"firstsecond"):
                got += await duplex.receive_some(4)
    assert got == b"firstsecond"
