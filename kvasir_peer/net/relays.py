"""One supervisor for each relay: connected, reserved, checked, for as long as the peer runs.

It connects, reserves, and refreshes at half-time. When the connection ends, or the relay refuses, it tries again after
a delay that grows with jitter to a cap. About every minute it dials itself through the relay, unless somebody else has
just come that way; only addresses for which that worked are advertised. A relay that says it is shutting down is left
at once, before it closes, and asked again afterwards.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import trio

from kvasir_peer.errors import KvasirError, LinkError, RefusedError, WireError
from kvasir_peer.net import circuit, maddr, relay_invite
from kvasir_peer.net.backoff import Backoff
from kvasir_peer.net.connection import Connection
from kvasir_peer.net.host import Host

logger = logging.getLogger(__name__)

FIRST_RETRY_S = 0.25  # a relay that restarts is back within seconds, and ten seconds are all there is to heal
RETRY_CAP_S = 6.0  # with jitter: a thousand peers of a dead relay knock 220 times a second at most
CHECK_S = 60.0  # between dials to ourselves
CHECK_JITTER = 0.2  # of it, either way: the peers of a relay that was restarted must not dial in step
NO_RESERVATION, CONNECTION_FAILED = 204, 203
REFRESH_PART = 0.5  # of a reservation's time


@dataclass(frozen=True)
class RelayStatistics:
    """State of one relay, as its supervisor sees it.

    Attributes:
        relay: peer id.
        address: the address it is dialled at.
        state: ``connecting``, ``reserving``, ``checking``, ``reserved``, ``waiting``; ``draining`` while it shuts
            down.
        reserved_until: on trio's clock, None without a reservation.
        checked: whether we were reached through it within the last minute or so, by ourselves or by others; None when
            nobody has tried, or the relay forbids dialling oneself.
        connects, reservations, failures: counts since the start.
        last_error: of the last failure, or "".
    """

    relay: str
    address: str
    state: str
    reserved_until: float | None
    checked: bool | None
    connects: int
    reservations: int
    failures: int
    last_error: str


class RelaySupervisor:
    """Holds a place at one relay.

    Args:
        host: ours.
        listener: takes the circuits that come.
        address: of the relay.
        on_change: called when the advertised addresses may have changed, or there is something new to say.
        invites: shown on each connection; those that are for other relays are refused there, and no harm.

    Attributes:
        reserved: set while a reservation is held.
    """

    def __init__(
        self,
        host: Host,
        listener: circuit.CircuitListener,
        address: maddr.Address,
        on_change: Callable[[], None],
        invites: Sequence[str] = (),
    ) -> None:
        self._host = host
        self._listener = listener
        self.address = address
        self.relay = address.peer
        self.reserved = trio.Event()
        self._on_change = on_change
        self._invites = tuple(invites)
        self._backoff = Backoff(first=FIRST_RETRY_S, cap=RETRY_CAP_S)
        self._state = "connecting"
        self._until: float | None = None
        self._checked: bool | None = None
        self._reservation: circuit.Reservation | None = None
        self._counts = {"connects": 0, "reservations": 0, "failures": 0}
        self._last_error = ""
        self._hurry = trio.Event()
        self._dialling: trio.CancelScope | None = None
        self._draining: Connection | None = None  # that the relay will close

    @property
    def addresses(self) -> list[str]:
        """Our addresses through this relay that are worth telling others: none before a dial to ourselves worked."""
        if not self.reserved.is_set():
            return []
        return [f"{self.address.first_hop}{maddr.CIRCUIT}/p2p/{self._host.peer_id}"]

    @property
    def asking(self) -> bool:
        """Whether circuits from this relay are to be taken."""
        return self._reservation is not None

    @property
    def draining(self) -> bool:
        """Whether the relay has said that it is shutting down, and has not closed yet."""
        return self._draining is not None and not self._draining.closed.is_set()

    @property
    def trouble(self) -> str:
        """Why no place is held, in one line; "" while one is, or while nothing has gone wrong yet."""
        return "" if self.reserved.is_set() else self._last_error

    def told(self, connection: Connection, serves: bool) -> bool:
        """The relay says on ``connection`` whether it takes requests; True when it is to be left now."""
        if serves:
            if self._draining is connection:
                self._draining = None
                self.hurry()
            return False
        if self._draining is connection:
            return False
        self._draining = connection
        self._state = "draining"
        self._last_error = f"the relay {self.relay} is shutting down"
        logger.info("%s: it is left", self._last_error)
        self._drop()
        self._on_change()
        self.hurry()
        return True

    def hurry(self) -> None:
        """Something changed (a network address): look at once instead of waiting."""
        self._hurry.set()
        if self._dialling is not None:
            self._dialling.cancel()

    async def run(self) -> None:
        """Run for ever."""
        while True:
            try:
                connection = await self._connect()
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._hold, connection)
                    await connection.closed.wait()
                    nursery.cancel_scope.cancel()
                raise LinkError(f"the connection to the relay {self.relay} ended: {connection.reason}")
            except* (LinkError, WireError, RefusedError) as group:
                self._failed(_first(group))
            self._state = "waiting"
            delay = self._backoff.failed()
            with trio.move_on_after(delay):
                await self._hurry.wait()
            self._hurry = trio.Event()

    def _failed(self, error: BaseException) -> None:
        new = str(error) != self._last_error
        if new:
            logger.info("relay %s: %s", self.relay, error)
        self._last_error = str(error)
        self._counts["failures"] += 1
        self._drop()
        if new:
            self._on_change()

    def _drop(self) -> None:
        self._reservation = self._until = None
        self._checked = None if self._checked is None else False
        if self.reserved.is_set():
            self.reserved = trio.Event()
            self._on_change()

    async def _connect(self) -> Connection:
        self._state = "connecting"
        for connection in self._host.connections(self.relay):
            if connection.path == "direct":
                return connection
        with trio.CancelScope() as self._dialling:
            connection = await self._host.dial(self.address)
            self._counts["connects"] += 1
            return connection
        raise LinkError(f"the dial to the relay {self.relay} was begun anew: our network changed")

    async def _hold(self, connection: Connection) -> None:
        """Hold a place until something fails. Raises LinkError, RefusedError, WireError."""
        await self._show_invites(connection)
        while True:
            try:
                while self._draining is not connection:
                    await self._reserve(connection)
            except circuit.RelayRefusedError as error:
                if error.reason != circuit.DRAINING:
                    raise
                self.told(connection, serves=False)
            # It closes the connection when it is done; then this task is cancelled.
            await self._hurry.wait()
            self._hurry = trio.Event()

    async def _reserve(self, connection: Connection) -> None:
        """Reserve, and look now and then whether we can be reached, until the reservation has to be refreshed."""
        self._state = "reserving"
        reservation = await circuit.reserve(connection, self._host.peer_id)
        self._counts["reservations"] += 1
        expires = trio.current_time() + reservation.seconds
        refresh_at = trio.current_time() + reservation.seconds * REFRESH_PART
        while self._draining is not connection:
            self._state = "checking"
            self._reservation, self._until = reservation, expires
            await self._check(connection)
            if self._draining is connection:
                return
            self._state = "reserved"
            self._backoff.succeeded()
            self._last_error = ""
            if not self.reserved.is_set():
                logger.info("reachable through the relay %s", self.relay)
                self.reserved.set()
                self._on_change()
            pause = CHECK_S * random.uniform(1 - CHECK_JITTER, 1 + CHECK_JITTER)
            with trio.move_on_at(min(refresh_at, trio.current_time() + pause)):
                await self._hurry.wait()
                self._hurry = trio.Event()
            if trio.current_time() >= refresh_at:
                return

    async def _show_invites(self, connection: Connection) -> None:
        """Show what we have until one is taken. A relay may do without: the reservation shows whether it does."""
        for text in self._invites:
            try:
                await relay_invite.show(connection, text)
            except (LinkError, RefusedError, WireError) as error:
                logger.info("%s", error)
            else:
                return

    async def _check(self, connection: Connection) -> None:
        """Dial ourselves through the relay. Raises LinkError, RefusedError when others could not reach us either."""
        if self._listener.reached_at(connection) > trio.current_time() - CHECK_S:
            self._checked = True  # somebody else has just come that way
            return
        try:
            await self._listener.check(connection)
        except circuit.RelayRefusedError as error:
            if error.status in (NO_RESERVATION, CONNECTION_FAILED) or error.reason == circuit.DRAINING:
                raise
            # A relay that connects nobody to himself, or is full: that says nothing about our address.
            logger.debug("relay %s: our address could not be checked: %s", self.relay, error)
            self._checked = None
        else:
            self._checked = True

    def statistics(self) -> RelayStatistics:
        """A snapshot."""
        return RelayStatistics(
            self.relay,
            str(self.address.first_hop),
            self._state,
            self._until,
            self._checked,
            self._counts["connects"],
            self._counts["reservations"],
            self._counts["failures"],
            self._last_error,
        )


def _first(group: BaseExceptionGroup[KvasirError]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
