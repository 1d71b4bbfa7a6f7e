"""Circuits through a relay, the client's side (circuit relay v2).

A peer keeps a reservation at its relay; another asks the relay (HOP) to connect to it; the relay asks the peer
(STOP); from then on the stream carries the two peers' own Noise and Yamux, of which the relay sees ciphertext.
Specification: https://github.com/libp2p/specs/blob/master/relay/circuit-v2.md
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import trio

from kvasir_peer.errors import LinkError, RefusedError, WireError
from kvasir_peer.net import delimited, maddr, upstream
from kvasir_peer.net.connection import Connection
from kvasir_peer.net.duplex import receive_exactly
from kvasir_peer.net.host import Host
from kvasir_peer.net.yamux import MuxedStream

logger = logging.getLogger(__name__)

HOP = "/libp2p/circuit/relay/0.2.0/hop"
STOP = "/libp2p/circuit/relay/0.2.0/stop"

STEP_S = 10.0  # for each answer of a relay
HANDSHAKE_S = 10.0  # for encryption and multiplexer through the circuit
CHECK_S = 10.0  # for our own bytes to come back to us through the relay
CHECK_BYTES = 16
MAX_HANDSHAKES = 64  # circuits that came and are in their handshake
MAX_HANDSHAKES_PER_PEER = 8  # of one caller, as the relay has proved it
MAX_ADDRESSES = 32  # of a reservation that are looked at
LONGEST_RESERVATION_S = 24 * 3600.0  # a relay's clock may be wrong: refresh at least that often
SHORTEST_RESERVATION_S = 20.0

_HopMessage = upstream.circuit_pb2.HopMessage
_StopMessage = upstream.circuit_pb2.StopMessage

STATUS_NAMES = {
    200: "it refuses reservations",
    201: "its limits are reached",
    202: "it does not allow this",
    203: "it cannot reach the peer",
    204: "the peer has no reservation there",
    400: "it does not understand the request",
    401: "it did not expect the request",
}
OK = 100

#: Field of a HopMessage in which our relays name the limit or rule that a request met (docs/relay.md).
REASON_FIELD = 1000
MAX_REASON_CHARACTERS = 60
DRAINING = "draining"

#: What an owner can do about the reasons that are met most often.
ADVICE = {
    "no_invite": "give one with --relay-invite",
    "invite_revoked": "ask its operator for another invite",
    "invite_ended": "ask its operator for another invite",
    "not_listed": "ask its operator to list this peer",
    "denied_peer": "ask its operator",
    "denied_network": "ask its operator",
    "private_address": "it serves nobody from its own network unless access.private_peers says so",
    "month_bytes": "its traffic of this month is used up",
    DRAINING: "it is shutting down",
}


@dataclass(frozen=True)
class Reservation:
    """A place at a relay.

    Attributes:
        relay: peer id.
        seconds: how long it lasts from now.
        addresses: ours through that relay, as the relay sees itself.
        limit_seconds, limit_bytes: bounds of each circuit, 0 for none.
    """

    relay: str
    seconds: float
    addresses: tuple[str, ...]
    limit_seconds: int
    limit_bytes: int


class RelayRefusedError(RefusedError):
    """A relay answered with a status other than OK.

    Attributes:
        status: the specification's number.
        reason: the limit or rule that was met, by its name in the relay's settings; "" from relays that don't say.
    """

    def __init__(self, relay: str, status: int, reason: str = "") -> None:
        text = f"the relay {relay} says: {STATUS_NAMES.get(status, f'status {status}')}"
        if reason:
            text += f" ({reason})"
        if reason in ADVICE:
            text += f"; {ADVICE[reason]}"
        super().__init__(text, peer=relay)
        self.status = status
        self.reason = reason

    @classmethod
    def of(cls, relay: str, answer: Any) -> RelayRefusedError:
        """The refusal that a HopMessage says."""
        return cls(relay, answer.status, reason_of(answer))


def reason_of(answer: Any) -> str:
    """The word beside a refusing status; "" where there is none, or what is there is not a word."""
    fields: Any = upstream.UnknownFieldSet(answer)
    for item in fields:
        if item.field_number == REASON_FIELD and isinstance(item.data, bytes):
            word = item.data.decode("ascii", "replace")
            if len(word) <= MAX_REASON_CHARACTERS and word.replace("_", "").isalnum() and word.isascii():
                return word
    return ""


async def reserve(connection: Connection, own_peer: str) -> Reservation:
    """Reserve (or refresh) a place at the relay that ``connection`` leads to. Raises LinkError, RefusedError."""
    relay = connection.remote_peer
    with trio.move_on_after(STEP_S):
        stream = await connection.open_stream(HOP)
        try:
            await delimited.write_message(stream, _HopMessage(type=_HopMessage.RESERVE))
            answer = await delimited.read_message(stream, _HopMessage)
        finally:
            stream.close()
        if answer.type != _HopMessage.STATUS:
            raise WireError(
                "unexpected", f"the relay {relay} answers a reservation with something else", peer=relay
            )
        if answer.status != OK:
            raise RelayRefusedError.of(relay, answer)
        seconds = answer.reservation.expire - time.time() if answer.HasField("reservation") else 0.0
        addresses = []
        for raw in answer.reservation.addrs[:MAX_ADDRESSES]:
            text = maddr.from_bytes(raw)
            if text is not None:
                addresses.append(_circuit_address(text, relay, own_peer))
        return Reservation(
            relay,
            min(max(seconds, SHORTEST_RESERVATION_S), LONGEST_RESERVATION_S),
            tuple(addresses),
            answer.limit.duration,
            answer.limit.data,
        )
    raise LinkError(f"the relay {relay} did not answer in time", peer=relay)


def _circuit_address(text: str, relay: str, own_peer: str) -> str:
    """A reservation's address with the parts that relays leave out."""
    direct = text.partition(maddr.CIRCUIT)[0]
    if "/p2p/" not in direct:
        direct = f"{direct}/p2p/{relay}"
    return f"{direct}{maddr.CIRCUIT}/p2p/{own_peer}"


async def _open(relay: Connection, peer: str) -> MuxedStream:
    """The stream that the relay joins to ``peer``. Raises LinkError, RefusedError, WireError."""
    with trio.move_on_after(2 * STEP_S):
        stream = await relay.open_stream(HOP)
        try:
            request = _HopMessage(type=_HopMessage.CONNECT)
            request.peer.id = upstream.PeerID.from_base58(peer).to_bytes()
            await delimited.write_message(stream, request)
            answer = await delimited.read_message(stream, _HopMessage)
            if answer.type != _HopMessage.STATUS:
                raise WireError("unexpected", f"the relay {relay.remote_peer} answers with something else")
            if answer.status != OK:
                raise RelayRefusedError.of(relay.remote_peer, answer)
        except BaseException:
            stream.reset("given up")
            raise
        return stream
    raise LinkError(f"the relay {relay.remote_peer} did not answer in time", peer=relay.remote_peer)


async def connect(host: Host, relay: Connection, peer: str) -> Connection:
    """A connection to ``peer`` through ``relay``. Raises LinkError, RefusedError."""
    stream = await _open(relay, peer)
    try:
        with trio.fail_after(HANDSHAKE_S):
            secured = await host.identity.secure_outbound(stream, peer)
            connection = host.carry_over_stream(secured, stream, relay)
            await connection.ready.wait()
    except trio.TooSlowError:
        stream.reset("no answer in time")
        raise LinkError(
            f"{peer} did not answer through the relay {relay.remote_peer} in time", peer=peer
        ) from None
    except BaseException:
        stream.reset("given up")
        raise
    if connection.closed.is_set():
        raise LinkError(f"the circuit to {peer} broke: {connection.reason}", peer=peer)
    return connection


class CircuitListener:
    """Answers STOP: takes circuits from relays at which we have a reservation.

    Args:
        host: where the circuits become connections.
        is_relay: whether we hold, or are asking for, a reservation at that peer.
        admit: called with the peer id that the relay names; a text is a refusal.
    """

    def __init__(
        self, host: Host, is_relay: Callable[[str], bool], admit: Callable[[str], str] = lambda peer: ""
    ) -> None:
        self._host = host
        self._is_relay = is_relay
        self._admit = admit
        self._handshakes: Counter[str] = Counter()
        self._checks: dict[bytes, trio.Event] = {}
        self.refused: Counter[str] = Counter()
        host.handle(STOP, self._stop)

    @staticmethod
    def reached_at(relay: Connection) -> float:
        """When a circuit of somebody else last came over this connection to a relay, on trio's clock; or long ago."""
        return relay.circuit_at

    async def check(self, relay: Connection) -> None:
        """Dial ourselves through ``relay``: who can do that can be reached there.

        Some random bytes go the way that others' circuits take, without a handshake, which would show nothing more and
        cost the relay twice as much (``bench/relay.py``).

        Raises:
            LinkError, WireError: our bytes did not come back.
            RelayRefusedError: the relay does not let them through.
        """
        sent = secrets.token_bytes(CHECK_BYTES)
        came = self._checks[sent] = trio.Event()
        try:
            stream = await _open(relay, self._host.peer_id)
            try:
                with trio.fail_after(CHECK_S):
                    await stream.send_all(sent)
                    await came.wait()
            finally:
                stream.reset("checked")
        except trio.TooSlowError:
            raise LinkError(f"our own address at the relay {relay.remote_peer} does not answer") from None
        finally:
            del self._checks[sent]

    async def _stop(self, stream: MuxedStream) -> None:
        relay = stream.remote_peer
        with trio.fail_after(HANDSHAKE_S):
            request = await delimited.read_message(stream, _StopMessage)
            if request.type != _StopMessage.CONNECT or not request.HasField("peer"):
                await self._answer(stream, 400)
                return
            try:
                peer = upstream.PeerID(request.peer.id).to_base58()
            except ValueError:
                await self._answer(stream, 400)
                return
            if not self._is_relay(relay) or self._admit(peer):
                await self._answer(stream, 202)
                return
            if (
                self._handshakes[peer] >= MAX_HANDSHAKES_PER_PEER
                or self._handshakes.total() >= MAX_HANDSHAKES
            ):
                # One caller must not take all the streams that the relay may open, nor our processor's time.
                self.refused["handshakes"] += 1
                await self._answer(stream, 201)
                return
            self._handshakes[peer] += 1
            try:
                await self._answer(stream, OK)
                if peer == self._host.peer_id:
                    await self._checked(stream)
                else:
                    await self._take(stream, peer)
            finally:
                self._handshakes[peer] -= 1
                if not self._handshakes[peer]:
                    del self._handshakes[peer]

    async def _checked(self, stream: MuxedStream) -> None:
        """Our own bytes, if they are the ones that were sent just now. Raises LinkError."""
        came = self._checks.get(await receive_exactly(stream, CHECK_BYTES))
        if came is not None:
            came.set()

    async def _take(self, stream: MuxedStream, peer: str) -> None:
        """A circuit of somebody else becomes a connection. Raises LinkError, WireError."""
        relay = stream.connection
        assert isinstance(relay, Connection)
        secured = await self._host.identity.secure_inbound(stream)
        if secured.remote_peer != peer:
            raise WireError(
                "unexpected",
                f"the relay named {peer}, and {secured.remote_peer} came",
                peer=relay.remote_peer,
            )
        relay.circuit_at = trio.current_time()
        self._host.carry_over_stream(secured, stream, relay)
        stream.handed_over = True

    @staticmethod
    async def _answer(stream: MuxedStream, status: int) -> None:
        message = _StopMessage(type=_StopMessage.STATUS, status=status)  # type: ignore[arg-type]
        await delimited.write_message(stream, message)
