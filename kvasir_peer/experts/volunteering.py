"""Bodies of the market's routes: what volunteers, dispatchers and the bridge say to each other over HTTP (JSON)."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import Meta

from kvasir_peer.engines.footprint import DEFAULT_EXPANSION, MAX_EXPANSION
from kvasir_peer.errors import UsageError, WireError
from kvasir_peer.net import maddr
from kvasir_peer.wire.dispatching import DispatchFigures

MAX_WAIT = 50.0  # seconds that a poll is held at most
MAX_BODY_BYTES = 256 << 10
MAX_RANGES = 4096
CLAIM_SECONDS = 120.0  # how far a claim's time may be from the bridge's: clocks of people's machines are off

MAX_ADDRESSES = 16
MAX_ADDRESS = 512  # characters; a dispatch map holds no longer one

# Bounds far beyond what any machine says, so that whatever was taken can be added up and shown.
Range = tuple[
    Annotated[int, Meta(ge=0, le=1 << 16)],
    Annotated[int, Meta(ge=0, le=0xFFFF)],
    Annotated[int, Meta(ge=0, le=0xFFFF)],
]
Ranges = Annotated[tuple[Range, ...], Meta(max_length=MAX_RANGES)]
Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Tally = Annotated[int, Meta(ge=0, le=1 << 48)]  # of rows: a thousand every microsecond for three days
Amount = Annotated[float, Meta(ge=0, le=1e15)]
Expansion = Annotated[float, Meta(ge=1, le=MAX_EXPANSION)]
Name = Annotated[str, Meta(max_length=256)]
Addresses = Annotated[tuple[Annotated[str, Meta(max_length=1024)], ...], Meta(max_length=256)]
_DOMAIN = b"kvasir expert coverage 1\0"


class Ask(msgspec.Struct, frozen=True):
    """``POST /api/expert-volunteer``: an idle peer offers itself, or says how far its lease is.

    Attributes:
        secret: of the ticket, in hexadecimal; needed until the bridge has let the peer in.
        memory, disk: bytes that it gives for experts.
        expansion: bytes of memory for each byte of block-quantised weights, with its engine.
        rate: row-expert pairs per second that it computes, as measured; 0 where it was not.
        addresses: where it is reached.
        device: for people, such as ``onnx cpu``.
        model: only this model (name); empty for any.
        held: ranges that are on its disk already, of the model with this ``manifest`` (its id).
        wait: seconds to hold the request while nobody is wanted.
        lease, progress: of the lease that it works on: bytes fetched and loaded so far.
        give_back: it can't do what the lease says.
    """

    secret: Name = ""
    memory: Count = 0
    disk: Count = 0
    expansion: Expansion = DEFAULT_EXPANSION
    rate: Amount = 0.0
    addresses: Addresses = ()
    device: Name = ""
    model: Name = ""
    held: Ranges = ()
    manifest: Name = ""
    wait: float = 0.0
    lease: Count = 0
    progress: Count = 0
    give_back: bool = False


class LeasedRange(msgspec.Struct, frozen=True):
    """Experts ``[lo, hi)`` of a layer, and how scarce they were."""

    layer: int
    experts: tuple[int, int]
    scarcity: float = 0.0


class Source(msgspec.Struct, frozen=True):
    """Who has chunks of the model: a peer, or a web server that has the file at ``url``."""

    peer: str
    addresses: tuple[str, ...] = ()
    url: str = ""


class Given(msgspec.Struct, frozen=True):
    """The answer: a lease, or why there is none.

    Attributes:
        expires_in: seconds until the lease ends without progress.
        sources: where to fetch chunks, best first.
        permit: the bridge's word for other peers that this one may fetch chunks from them, in base64: what was signed,
            and the signature.
    """

    assigned: bool
    why: str = ""
    lease: int = 0
    model: str = ""
    manifest: str = ""
    ranges: tuple[LeasedRange, ...] = ()
    expires_in: float = 0.0
    sources: tuple[Source, ...] = ()
    permit: tuple[str, str] | None = None

    @property
    def triples(self) -> tuple[Range, ...]:
        """The ranges as ``(layer, lo, hi)``, sorted."""
        return tuple(sorted((r.layer, r.experts[0], r.experts[1]) for r in self.ranges))


class Claim(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a worker signs: that it serves these experts, now.

    Attributes:
        bridge: whom it is for, so that it can't be shown elsewhere.
        time: seconds since 1970.
        leaving: it serves no more.
    """

    peer: str
    bridge: str
    time: float
    model: str
    lease: Count
    ranges: Ranges
    addresses: tuple[str, ...] = ()
    device: str = ""
    rate: Amount = 0.0
    leaving: bool = False


class Coverage(msgspec.Struct, frozen=True):
    """``POST /api/expert-coverage``: claim and signature in base64, and how long to hold the request."""

    claim: str
    signature: str
    wait: float = 0.0
    secret: str = ""


class Wiring(msgspec.Struct, frozen=True):
    """The answer: wired, or why not; ``retire``: free the memory and be idle."""

    wired: bool
    why: str = ""
    retire: bool = False
    expires_in: float = 0.0


class MapAnswer(msgspec.Struct, frozen=True):
    """``GET /api/dispatch-map``: the signed map in base64, and its version."""

    version: int
    map: str


class Join(msgspec.Struct, frozen=True):
    """``POST /api/coordinator``: a coordinator is there, or still there.

    Attributes:
        model: name; empty for the bridge's only one.
        manifest: id of the model that it has loaded.
        wait: seconds to hold the request; it is the heartbeat.
    """

    secret: Name = ""
    model: Name = ""
    manifest: Name = ""
    addresses: Addresses = ()
    wait: float = 0.0


class Work(msgspec.Struct, frozen=True, array_like=True):
    """What one worker has computed for a dispatcher since this one started: rows used, rows found right."""

    peer: Name
    rows: Tally
    checked: Tally


class DispatchReport(msgspec.Struct, frozen=True):
    """``POST /api/dispatcher``: what a dispatching ring stage has seen of workers.

    Attributes:
        model: manifest id.
        run: random number of this start, since which the counters count.
        mode: ``local``, ``load`` or ``cooling``.
        local_pairs, remote_pairs: row-expert pairs computed there, by workers.
        heat: (layer, rows routed).
        workers: what they have done.
        caught: (peer, why) of workers that lied.
        figures: more of its counters.
    """

    model: Name
    run: Count
    mode: Name = "local"
    local_pairs: Count = 0
    remote_pairs: Count = 0
    heat: Annotated[tuple[tuple[Tally, Tally], ...], Meta(max_length=1024)] = ()
    workers: Annotated[tuple[Work, ...], Meta(max_length=1024)] = ()
    caught: Annotated[tuple[tuple[Name, Name], ...], Meta(max_length=256)] = ()
    figures: DispatchFigures = DispatchFigures()
    wait: float = 0.0


class Heard(msgspec.Struct, frozen=True):
    """The answer: nothing but that it was taken."""


class Joined(msgspec.Struct, frozen=True):
    """What the bridge serves, for a coordinator that has not loaded anything yet."""

    model: str
    manifest: str
    n_layer: int
    sources: tuple[Source, ...] = ()


_encoder = msgspec.msgpack.Encoder()
_claims = msgspec.msgpack.Decoder(Claim)


def sign_claim(
    claim: Claim, sign: Callable[[bytes], bytes], *, wait: float = 0.0, secret: str = ""
) -> Coverage:
    """A claim ready to be posted."""
    data = _encoder.encode(claim)
    signature = sign(_DOMAIN + data)
    return Coverage(base64.b64encode(data).decode(), base64.b64encode(signature).decode(), wait, secret)


def check_claim(
    coverage: Coverage, bridge: str, now: float, verify: Callable[[str, bytes, bytes], bool]
) -> Claim:
    """The claim that was signed by the peer it names, for this bridge, lately.

    Raises:
        WireError: ``malformed``, ``oversize``, ``signature``, ``stranger`` (for another bridge), ``stale``, or
            ``address`` where one makes no sense: dispatchers would dial it.
    """
    try:
        data = base64.b64decode(coverage.claim, validate=True)
        signature = base64.b64decode(coverage.signature, validate=True)
        claim = _claims.decode(data)
    except (binascii.Error, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError("malformed", f"the coverage claim does not parse: {error}") from None
    texts = (claim.model, claim.device, *claim.addresses)
    if len(claim.addresses) > MAX_ADDRESSES or any(len(text) > MAX_ADDRESS for text in texts):
        raise WireError("oversize", "the coverage claim is too large")
    if not verify(claim.peer, signature, _DOMAIN + data):
        raise WireError("signature", f"the coverage claim is not signed by {claim.peer[:80]}")
    if claim.bridge != bridge:
        raise WireError("stranger", "the coverage claim is for another bridge")
    if not abs(claim.time - now) <= CLAIM_SECONDS:
        raise WireError("stale", "the coverage claim is of another time; is a clock wrong?")
    for text in claim.addresses:
        _check_address(text, claim.peer)
    return claim


def _check_address(text: str, peer: str) -> None:
    try:
        address = maddr.parse(text)
    except UsageError as error:
        raise WireError("address", f"the coverage claim has a bad address: {error}") from None
    if (address.through or address.peer) != peer:
        raise WireError("address", f"the address {text} in the coverage claim does not lead to {peer}")
