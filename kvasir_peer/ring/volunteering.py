"""Bodies of ``POST /api/stage-volunteer``: what a stage peer says of itself, and what the bridge answers.

One request is kept open (``wait``): it is the heartbeat, and the answer comes at once when there is news for the
peer. A peer whose stream to the bridge closes is gone.

Numbers and names have bounds here, far beyond what any machine says, so that whatever was taken can be added up, drawn
and shown; what the market then believes of it is decided in :mod:`kvasir_peer.ring.admission`.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvasir_peer.engines.footprint import DEFAULT_EXPANSION, MAX_EXPANSION

StageState = Literal["idle", "fetching", "loading", "loaded", "serving", "broken"]

MAX_WAIT = 50.0  # seconds that a poll is held at most: under the minute after which proxies give up
MAX_BODY_BYTES = 64 << 10

Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]  # bytes, rows, batches
Amount = Annotated[float, Meta(ge=0, le=1e15)]  # milliseconds, or a rate
Expansion = Annotated[float, Meta(ge=1, le=MAX_EXPANSION)]
Name = Annotated[str, Meta(max_length=128)]  # of an engine, a peer, a plan
Epoch = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
Layer = Annotated[int, Meta(ge=0, le=1 << 16)]
Address = Annotated[str, Meta(max_length=1024)]
Addresses = Annotated[tuple[Address, ...], Meta(max_length=256)]
Slices = Annotated[tuple[tuple[Layer, Layer], ...], Meta(max_length=1024)]


class Measured(msgspec.Struct, frozen=True):
    """What passes over layers ``[first, end)`` of a model took: ``base + row × rows`` seconds."""

    model: Name
    first: Layer
    end: Layer
    base: Amount
    row: Amount


class Offer(msgspec.Struct, frozen=True):
    """What a peer's owner gives.

    Attributes:
        memory: bytes for weights, KV cache and workspace.
        disk: bytes for chunks.
        engine, device, precision: what computes, and how.
        threads: of computation.
        addresses: multiaddresses at which other peers reach this one.
        read_bytes_per_second: measured rate at which the engine goes through quantised weights; 0 if unknown.
        on_disk: slices (first, end) whose chunks are in the store.
        loaded: slice (first, end) that the engine holds.
        measured: what passes took when layers were loaded last.
        expansion: bytes of memory that the engine makes of each byte of block-quantised weights.
    """

    memory: Count
    disk: Count
    engine: Name
    device: Name = "cpu"
    precision: Name = "fast"
    threads: Count = 0
    addresses: Addresses = ()
    read_bytes_per_second: Amount = 0.0
    on_disk: Slices = ()
    loaded: tuple[Layer, Layer] | None = None
    measured: Measured | None = None
    expansion: Expansion = DEFAULT_EXPANSION


class Transfer(msgspec.Struct, frozen=True):
    """Progress of a download or a load, in bytes."""

    done: Count
    total: Count
    per_second: Amount = 0.0


class StageFigures(msgspec.Struct, frozen=True):
    """Counters of a serving stage and of its process; see :class:`~kvasir_peer.ring.stage.StageStatistics`."""

    batches: Count = 0
    rows: Count = 0
    held_ms: Amount = 0.0
    starved_ms: Amount = 0.0
    blocked_ms: Amount = 0.0
    queue: Count = 0
    bytes_in: Count = 0
    bytes_out: Count = 0
    lag_p99_ms: Amount = 0.0
    agent_bytes: Count = 0
    engine_bytes: Count = 0
    engine_restarts: Count = 0
    path: Name = ""
    round_trip_ms: Amount = 0.0


class LinkReport(msgspec.Struct, frozen=True):
    """The way to another peer: seconds one way for an empty frame, bytes per second (0: too quick to tell)."""

    peer: Name
    seconds: Amount
    rate: Amount = 0.0


class Report(msgspec.Struct, frozen=True):
    """One poll.

    Attributes:
        offer: may change from poll to poll.
        secret: the ticket's credential, in hexadecimal; needed until the bridge has let the peer in.
        state: where the peer stands with the epoch below.
        epoch: newest plan epoch that the peer knows; 0 for none.
        plan: its plan id.
        running: whether the state is one in which the epoch has been started (``go`` was seen).
        reason: why the epoch broke, or why loading failed.
        lost: peer id of the neighbour that was lost, or empty.
        kept: whether the KV cache of the slice is still there.
        leaving: the owner wants the machine back; the place should be given to somebody else.
        standby: slice (first, end) that the peer gets or keeps ready as a standby, and whether it loads it.
        links: ways to other peers that were measured since the last report.
        wait: seconds to hold the request when there is no news.
    """

    offer: Offer
    secret: Name = ""
    state: StageState = "idle"
    plan: Name = ""
    epoch: Epoch = 0
    running: bool = False
    reason: str = ""
    lost: Name = ""
    kept: bool = False
    leaving: bool = False
    standby: tuple[Layer, Layer] | None = None
    preload: bool = False
    transfer: Transfer | None = None
    figures: StageFigures | None = None
    links: Annotated[tuple[LinkReport, ...], Meta(max_length=64)] = ()
    wait: float = 0.0


class Source(msgspec.Struct, frozen=True):
    """A peer that has chunks."""

    peer: str
    addresses: tuple[str, ...] = ()


class Orders(msgspec.Struct, frozen=True):
    """The answer.

    Attributes:
        assigned: ``stage`` with a plan; ``standby`` to hold a slice ready; ``wait`` for nothing yet; ``retire`` to
            give everything back.
        why: in words, for the owner.
        plan: the signed plan (its encoding in base64), whenever its epoch is not the one that the peer named.
        go: all stages of this epoch are loaded: open the links and serve.
        model: manifest id.
        slice: (first, end) to hold as standby; ``plan`` is then the present plan, for its widths.
        preload: load the slice too, do not just keep it on disk.
        sources: where to fetch chunks, best first.
        measure: peers whose distance the bridge wants to know.
        neighbours: peers that may measure the way to this one.
    """

    assigned: Literal["stage", "standby", "wait", "retire"]
    why: str = ""
    plan: str = ""
    epoch: int = 0
    go: bool = False
    model: str = ""
    slice: tuple[int, int] | None = None
    preload: bool = False
    sources: tuple[Source, ...] = ()
    measure: tuple[Source, ...] = ()
    neighbours: tuple[str, ...] = ()
