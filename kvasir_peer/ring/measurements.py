"""What peers and the ways between them were measured at, kept from one start of the bridge to the next.

Without it, a bridge that starts again plans its first ring by guesses, and has it loaded again when passes and links
have been measured. What is kept is a beginning only: whatever is measured anew takes its place at once.

:class:`Measurements` is pure; :class:`MeasurementsFile` reads and writes. The file may have been cut short, changed by
hand, or written by another version: what it says is held to the same bounds as what peers say, and a file that makes
no sense is begun anew.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import trio
from msgspec import Meta

from kvasir_peer.errors import WireError
from kvasir_peer.ring.admission import link_time
from kvasir_peer.ring.offers import LinkTime
from kvasir_peer.ring.volunteering import Amount, Count, LinkReport, Measured, Name, Offer

logger = logging.getLogger(__name__)

Clock = Callable[[], float]

VERSION = 1
MAX_FILE_BYTES = 512 << 10
# Of each kind, the newest: far more than one bridge's rings have members.
MAX_PASSES, MAX_WAYS = 512, 1024
KEPT_SECONDS = 30 * 86400.0  # older ones are of another network, or of another machine under the same key


class Passes(msgspec.Struct, frozen=True):
    """What a peer's passes took, with what computed them; ``at`` in seconds since 1970."""

    peer: Name
    engine: Name
    device: Name
    precision: Name
    threads: Count
    measured: Measured
    at: Amount


class Way(msgspec.Struct, frozen=True):
    """What the way between two peers took."""

    peer: Name
    link: LinkReport
    at: Amount


class _Content(msgspec.Struct, frozen=True):
    version: int
    passes: Annotated[tuple[Passes, ...], Meta(max_length=MAX_PASSES)] = ()
    ways: Annotated[tuple[Way, ...], Meta(max_length=MAX_WAYS)] = ()


class Measurements:
    """All that is known.

    Attributes:
        changes: counts whatever was new.
    """

    def __init__(self) -> None:
        self.changes = 0
        self._passes: dict[tuple[str, str], Passes] = {}  # by peer and model
        self._ways: dict[tuple[str, str], Way] = {}  # by peers, the lesser id first

    def completed(self, peer: str, offer: Offer, model: str, now: float) -> Offer:
        """A peer's offer, with what it measured another day where it has measured nothing yet.

        What it has measured is noted. The passes of another engine, device or number of threads do not count.
        """
        how = (offer.engine, offer.device, offer.precision, offer.threads)
        known = self._passes.get((peer, model))
        if offer.measured is not None:
            if offer.measured.model == model and (
                known is None
                or known.measured != offer.measured
                or (known.engine, known.device, known.precision, known.threads) != how
            ):
                self._passes[peer, model] = Passes(peer, *how, offer.measured, now)
                self._bound(self._passes, MAX_PASSES)
            return offer
        if known is None or (known.engine, known.device, known.precision, known.threads) != how:
            return offer
        return msgspec.structs.replace(offer, measured=known.measured)

    def way(self, peer: str, other: str, time: LinkTime, now: float) -> None:
        """Note what the way between two peers took."""
        a, b = sorted((peer, other))
        self._ways[a, b] = Way(a, LinkReport(b, time.seconds, time.rate), now)
        self._bound(self._ways, MAX_WAYS)

    def ways(self) -> dict[tuple[str, str], LinkTime]:
        """All ways, by the two peers."""
        return {pair: link_time(way.link) for pair, way in self._ways.items()}

    def _bound(self, table: dict[tuple[str, str], Any], most: int) -> None:
        self.changes += 1
        if len(table) > most:
            del table[min(table, key=lambda key: table[key].at)]

    def encode(self, now: float) -> bytes:
        """As the file has it; without what is too old."""
        return msgspec.json.encode(
            _Content(
                VERSION,
                tuple(p for p in self._passes.values() if now - p.at < KEPT_SECONDS),
                tuple(w for w in self._ways.values() if now - w.at < KEPT_SECONDS),
            )
        )

    @classmethod
    def decode(cls, data: bytes, now: float) -> Measurements:
        """What a file says.

        Raises:
            WireError: code ``measured``: it is too large, makes no sense, or is of another version.
        """
        if len(data) > MAX_FILE_BYTES:
            raise WireError("measured", f"it has more than {MAX_FILE_BYTES} bytes")
        try:
            content = msgspec.json.decode(data, type=_Content)
        except msgspec.DecodeError as error:
            raise WireError("measured", str(error)) from None
        if content.version != VERSION:
            raise WireError("measured", f"it is of version {content.version}, this is {VERSION}")
        found = cls()
        for passes in content.passes:
            if 0 <= now - passes.at < KEPT_SECONDS:
                found._passes[passes.peer, passes.measured.model] = passes
        for way in content.ways:
            if 0 <= now - way.at < KEPT_SECONDS and way.peer < way.link.peer:
                found._ways[way.peer, way.link.peer] = way
        return found


class MeasurementsFile:
    """The file of one bridge.

    Attributes:
        content: what it says, and what has become known since it was opened.
    """

    def __init__(self, path: Path, content: Measurements, clock: Clock) -> None:
        self._path = path
        self._clock = clock
        self._kept = content.changes
        self.content = content

    @classmethod
    async def open(cls, path: Path, clock: Clock) -> MeasurementsFile:
        """Read it, or begin anew where there is none, or one that makes no sense.

        Args:
            clock: gives seconds since 1970.
        """
        try:
            data = await trio.to_thread.run_sync(_read, path)
            content = Measurements.decode(data, clock()) if data else Measurements()
        except (OSError, WireError) as error:
            logger.warning("%s is begun anew: %s", path, error)
            content = Measurements()
        return cls(path, content, clock)

    async def keep(self) -> None:
        """Write it, if something is new. A disk that takes nothing costs what is kept, and no more."""
        if self.content.changes == self._kept:
            return
        changes, data = self.content.changes, self.content.encode(self._clock())
        try:
            await trio.to_thread.run_sync(_write, self._path, data)
        except OSError as error:
            logger.warning("%s was not written: %s", self._path, error)
        self._kept = changes


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        return b""


def _write(path: Path, data: bytes) -> None:
    """All of it or nothing: whoever reads finds the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
