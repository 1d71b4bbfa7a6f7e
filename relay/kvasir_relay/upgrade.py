"""From a raw connection to an authenticated, multiplexed one: Noise and Yamux, and nothing else."""

from __future__ import annotations

from libp2p.abc import IMuxedConn, IRawConnection
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
from libp2p.security.noise.transport import Transport as NoiseTransport
from libp2p.stream_muxer.yamux.yamux import Yamux

from kvasir_peer.identity import Identity
from kvasir_relay import multistream

NOISE_PROTOCOL = "/noise"
YAMUX_PROTOCOL = "/yamux/1.0.0"


class Upgrader:
    """Answers the handshakes of inbound connections with the relay's key."""

    def __init__(self, identity: Identity) -> None:
        self._noise = NoiseTransport(
            create_new_key_pair(identity.private_key), noise_privkey=create_noise_key_pair().private_key
        )

    async def upgrade(self, raw: IRawConnection) -> IMuxedConn:
        """Handshake, authenticate, multiplex. The caller sets the deadline and closes ``raw`` on failure."""
        await multistream.answer(raw, (NOISE_PROTOCOL,))
        secured = await self._noise.secure_inbound(raw)
        await multistream.answer(secured, (YAMUX_PROTOCOL,))
        return Yamux(secured, secured.get_remote_peer(), is_initiator=False)
