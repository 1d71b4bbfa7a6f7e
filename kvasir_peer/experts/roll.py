"""Who took part in a bridge's market when it was last written down, so that a restart loses nobody.

Written every few seconds. What is read back counts for a short time only: each must be heard of again.
"""

from __future__ import annotations

import time

import msgspec

MAX_AGE = 120.0  # seconds; whoever was last heard of before is not called


class RollWorker(msgspec.Struct, frozen=True, array_like=True):
    """A worker that was wired; ``seen`` in seconds since 1970."""

    peer: str
    ranges: tuple[tuple[int, int, int], ...]
    seen: float
    rate: float = 0.0
    addresses: tuple[str, ...] = ()
    device: str = ""


class RollCoordinator(msgspec.Struct, frozen=True, array_like=True):
    """A coordinator that had joined."""

    peer: str
    addresses: tuple[str, ...] = ()


class Roll(msgspec.Struct, frozen=True, array_like=True):
    """Everybody, of one model (manifest id), at a time (seconds since 1970)."""

    model: str
    written: float
    workers: tuple[RollWorker, ...] = ()
    coordinators: tuple[RollCoordinator, ...] = ()


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Roll)


def encode_roll(roll: Roll) -> bytes:
    """For the ledger."""
    return _encoder.encode(roll)


def decode_roll(data: bytes | None, model: str, now: float | None = None) -> Roll:
    """Who is worth calling again; nobody where there is no roll, or one that is old or of another model.

    Args:
        now: seconds since 1970.
    """
    now = time.time() if now is None else now
    nobody = Roll(model, now)
    if data is None:
        return nobody
    try:
        roll = _decoder.decode(data)
    except msgspec.DecodeError:
        return nobody  # another version has written it: everybody registers again, as without
    if roll.model != model or not 0 <= now - roll.written <= MAX_AGE:
        return nobody
    workers = tuple(worker for worker in roll.workers if now - worker.seen <= MAX_AGE)
    return msgspec.structs.replace(roll, workers=workers)
