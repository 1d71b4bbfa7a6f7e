"""The hop protocol: reservations and circuits.

What differs from py-libp2p's service, which breaks under load (its faults are listed in ``docs/relay.md``): a circuit
is a thing of its own, not an entry of its peers, so that the end of one leaves the others alone; a reservation is the
authenticated peer's, whatever id the message names; a limit of 0 means none; whoever is refused is told which limit
it was, before any data flows, and nothing is ever written into a circuit; a source that dies is seen by the target
at once, and gives its place back.

The relay never dials. The addresses that a CONNECT message may carry are not looked at, so nobody can make the relay
reach into the network it stands in; and it reserves nowhere itself, so that no connection ever comes to it over a
second relay.
"""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING, Any

import trio

from kvasir_peer.errors import LinkError, WireError
from kvasir_peer.net.yamux import MuxedStream
from kvasir_relay import messages
from kvasir_relay.circuits import Buffers, Circuit
from kvasir_relay.limits import LimitError
from kvasir_relay.members import Member, Reservation
from kvasir_relay.messages import Status

if TYPE_CHECKING:
    from kvasir_relay.server import Relay

log = logging.getLogger("kvasir_relay")

REQUEST_SECONDS = 10.0  # for a request to come after its stream was opened
STOP_SECONDS = 10.0  # for the target's answer; a live one needs a round trip or two


class HopService:
    """Answers hop streams.

    Args:
        relay: gives the books, the rules and the members.
    """

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self.reservations: dict[bytes, Reservation] = {}
        self.circuits: set[Circuit] = set()
        self.buffers = Buffers(self.circuits, relay.config.limits.buffer_bytes)

    async def handle(self, member: Member, stream: MuxedStream) -> None:
        """One request. Raises LinkError when the stream is lost."""
        try:
            with trio.fail_after(REQUEST_SECONDS):
                message = await messages.read_hop(stream)
        except WireError as error:
            self._relay.counters.refused("request", error.code)
            _answer(stream, Status.MALFORMED_MESSAGE, error.code)
            return
        if message.type == messages.RESERVE:
            self._reserve(member, stream)
        elif message.type == messages.CONNECT:
            await self._connect(member, stream, message)
        else:
            self._relay.counters.refused("request", "unexpected")
            _answer(stream, Status.UNEXPECTED_MESSAGE, "unexpected")

    # --- reservations ------------------------------------------------------------------------------------------

    def _reserve(self, member: Member, stream: MuxedStream) -> None:
        relay = self._relay
        limits = relay.config.limits
        now = trio.current_time()
        if self._refused(member, stream, "reservation", Status.RESERVATION_REFUSED, now):
            return
        held = self.reservations.get(member.peer)
        try:
            taken = held.taken if held else relay.ledger.take_reservation(member.address)
        except LimitError as error:
            relay.counters.refused("reservation", error.limit)
            _answer(stream, Status.RESERVATION_REFUSED, error.limit)
            return
        # A renewal, or the same peer on a new connection, whose old one may be dead without the relay knowing yet.
        self.reservations[member.peer] = Reservation(member, now + limits.reservation_time, taken)
        relay.counters.reservations += 1
        expire = math.floor(time.time() + limits.reservation_time)
        stream.send_nowait(
            messages.reserved_message(
                expire=expire,
                addresses=relay.full_address_bytes,
                voucher=messages.sign_voucher(relay.identity, relay.peer, member.peer, expire),
                seconds=limits.circuit_time,
                data=limits.circuit_bytes,
            )
        )
        stream.close()
        log.debug("reservation for %s", member.peer_id)

    def reservation_of(self, peer: bytes, now: float) -> Reservation | None:
        """The live reservation of a peer."""
        held = self.reservations.get(peer)
        if held is not None and (held.expires <= now or held.member.connection.closed.is_set()):
            self.drop_reservation(held)
            return None
        return held

    def drop_reservation(self, held: Reservation) -> None:
        """Forget a reservation; a second time does nothing."""
        if self.reservations.get(held.member.peer) is held:
            del self.reservations[held.member.peer]
            held.taken.give_back()

    def drop_expired(self, now: float) -> None:
        """Forget those whose time is over."""
        for held in [held for held in self.reservations.values() if held.expires <= now]:
            self.drop_reservation(held)

    # --- circuits ----------------------------------------------------------------------------------------------

    async def _connect(self, member: Member, source: MuxedStream, message: Any) -> None:
        relay = self._relay
        now = trio.current_time()
        if self._refused(member, source, "circuit", Status.RESOURCE_LIMIT_EXCEEDED, now):
            return
        held = self.reservation_of(message.peer.id, now)
        if held is None:
            relay.counters.refused("circuit", "no_reservation")
            _answer(source, Status.NO_RESERVATION, "no_reservation")
            return
        target = held.member
        peers = (member.peer, target.peer) if member.peer != target.peer else (member.peer,)
        try:
            taken = relay.ledger.take_circuit(peers, (member.address, target.address), now)
        except LimitError as error:
            relay.counters.refused("circuit", error.limit)
            _answer(source, Status.RESOURCE_LIMIT_EXCEEDED, error.limit)
            return
        with taken:
            await self._open(member, source, target, peers)

    async def _open(
        self, member: Member, source: MuxedStream, target: Member, peers: tuple[bytes, ...]
    ) -> None:
        relay = self._relay
        limits = relay.config.limits
        stream: MuxedStream | None = None
        circuit: Circuit | None = None
        try:
            reason = "target_silent"
            with trio.CancelScope(deadline=trio.current_time() + STOP_SECONDS) as asking:
                member.asking.add(asking)
                try:
                    stream = await target.connection.open_stream(messages.STOP_PROTOCOL)
                    stream.send_nowait(
                        messages.stop_connect_message(
                            member.peer, seconds=limits.circuit_time, data=limits.circuit_bytes
                        )
                    )
                    await messages.read_stop_status(stream)
                    reason = ""
                except (LinkError, WireError) as error:
                    log.debug("circuit to %s: %s", target.peer_id, error)
                    reason = "target_refused"
                finally:
                    member.asking.discard(asking)
            if reason or stream is None:
                if not source.closed:
                    relay.counters.refused("circuit", reason)
                    _answer(source, Status.CONNECTION_FAILED, reason)
                return
            source.send_nowait(
                messages.status_message(Status.OK, seconds=limits.circuit_time, data=limits.circuit_bytes)
            )
            circuit = Circuit(
                peers,
                source,
                stream,
                ledger=relay.ledger,
                shaper=relay.shaper,
                counters=relay.counters,
                buffers=self.buffers,
                max_bytes=limits.circuit_bytes,
                on_end=lambda ended: self._ended(ended, member, target),
            )
            self._began(circuit, member, target)
            circuit.join()
            await _live(circuit, limits.circuit_time, limits.circuit_idle_time)
        finally:
            if circuit is not None:
                circuit.end("relay_stopped")  # does nothing when it has ended already
            elif stream is not None:
                stream.reset("no circuit")

    def _began(self, circuit: Circuit, member: Member, target: Member) -> None:
        self._relay.counters.circuits += 1
        self.circuits.add(circuit)
        for end in {member, target}:
            end.circuits.add(circuit)
            end.connection.busy += 1  # its heartbeat is quicker: a peer that froze is seen in time

    def _ended(self, circuit: Circuit, member: Member, target: Member) -> None:
        self._relay.counters.circuits_ended[circuit.reason] += 1
        self.circuits.discard(circuit)
        now = trio.current_time()
        for end in {member, target}:
            end.circuits.discard(circuit)
            end.connection.busy -= 1
            end.used_at = now
        log.debug(
            "circuit ended",
            extra={
                "reason": circuit.reason,
                "bytes_to_target": circuit.flows[0].carried,
                "bytes_to_source": circuit.flows[1].carried,
            },
        )

    def end_circuits(self, member: Member, reason: str) -> None:
        """The connection is gone, or may not be used any more."""
        for asking in member.asking:
            asking.cancel()
        for circuit in list(member.circuits):
            circuit.end(reason)

    # --- refusals ----------------------------------------------------------------------------------------------

    def _refused(self, member: Member, stream: MuxedStream, what: str, status: Status, now: float) -> bool:
        """Whether the request is refused before anything is looked up; then it has been answered."""
        relay = self._relay
        member.used_at = now
        try:
            relay.ledger.take_request(member.peer, member.address, now)
        except LimitError as error:
            reason = error.limit
        else:
            denial = relay.gatekeeper.use(member.address, member.peer_id, member.invite, time.time())
            if denial is not None:
                reason, status = denial.reason, Status.PERMISSION_DENIED
                relay.notices.warn(denial.reason, "refused a %s: %s", what, denial.text)
            elif relay.draining:
                reason = "draining"
            else:
                return False
        relay.counters.refused(what, reason)
        _answer(stream, status, reason)
        return True


def _answer(stream: MuxedStream, status: Status, reason: str) -> None:
    """A refusing status, then the end of the stream: whoever asked reads it, then sees the end."""
    stream.send_nowait(messages.status_message(status, reason))
    stream.close()


async def _live(circuit: Circuit, seconds: float, idle_seconds: float) -> None:
    """Wait until the circuit has ended, or end it when its time is over."""
    over = trio.current_time() + seconds if seconds else math.inf
    while not circuit.reason:
        deadline = min(over, circuit.active_at + idle_seconds) if idle_seconds else over
        with trio.CancelScope(deadline=deadline):
            await circuit.ended.wait()
        now = trio.current_time()
        if now >= over:
            circuit.end("circuit_time")
        elif idle_seconds and now >= circuit.active_at + idle_seconds:
            circuit.end("circuit_idle_time")
