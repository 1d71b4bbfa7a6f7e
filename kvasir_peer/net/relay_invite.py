"""Showing an invite to a relay that does not serve everyone.

Protocol ``/kvasir/relay/invite/1`` (``docs/relay.md``): a varint length and the text; the relay answers with a varint
length and ``ok``, or a word that says why not. It holds for the connection.
"""

from __future__ import annotations

import trio

from kvasir_peer.errors import LinkError, RefusedError
from kvasir_peer.net import multistream
from kvasir_peer.net.connection import Connection
from kvasir_peer.net.duplex import receive_exactly

PROTOCOL = "/kvasir/relay/invite/1"
MAX_ANSWER_BYTES = 256  # one word
ANSWER_SECONDS = 15.0  # a busy relay at the other end of a slow line


async def show(connection: Connection, text: str) -> None:
    """Show an invite.

    Raises:
        RefusedError: the relay's reason.
        LinkError: no answer, or a relay that knows no invites.
    """
    relay = connection.remote_peer
    with trio.move_on_after(ANSWER_SECONDS):
        stream = await connection.open_stream(PROTOCOL)
        try:
            await stream.send_all(multistream.encode_varint(len(text)) + text.encode())
            length = await multistream.read_varint(stream, MAX_ANSWER_BYTES)
            answer = (await receive_exactly(stream, length)).decode("utf-8", "replace")
        finally:
            stream.close()
        if answer != "ok":
            raise RefusedError(f"the relay {relay} does not take the invite: {answer}", peer=relay)
        return
    raise LinkError(f"the relay {relay} did not answer to an invite in {ANSWER_SECONDS:.0f} s", peer=relay)
