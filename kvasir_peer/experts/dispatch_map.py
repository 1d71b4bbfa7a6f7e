"""The dispatch map: who serves which experts, and who may send rows to them; signed by the bridge.

A dispatcher takes workers from it, a worker takes rows from nobody who is not in it. Its bytes are canonical, and its
version grows with every change, across restarts of the bridge too (it is a time).
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from kvasir_peer.errors import PlanError, WireError
from kvasir_peer.wire.experts import MAX_RANGES, Bounds

MAX_WORKERS = 4096
MAX_DISPATCHERS = 256
MAX_MAP_BYTES = 8 << 20
_MAX_TEXT = 512
_MAX_SECONDS = 1e11  # three thousand years
_DOMAIN = b"kvasir dispatch map 1\0"

Verify = Callable[[str, bytes, bytes], bool]


class MapWorker(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A worker.

    Attributes:
        peer: peer id.
        ranges: ``(layer, lo, hi)`` that it serves.
        addresses: where it is reached.
        expires_in: seconds after ``DispatchMap.issued`` at which its coverage ends, unless renewed.
    """

    peer: str
    ranges: tuple[tuple[int, int, int], ...]
    addresses: tuple[str, ...] = ()
    expires_in: float = 0.0


class MapDispatcher(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A coordinator or ring stage that may send rows."""

    peer: str


class DispatchMap(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Who computes what for whom, of one model.

    Attributes:
        model: manifest id.
        version: grows with each change.
        bridge: peer id whose signature makes it valid.
        issued: seconds since 1970 on the bridge's clock.
        n_layer, n_embd: of the model.
        experts: most experts chosen for one row.
        dtype: of rows and sums.
        max_rows: most rows of one frame.
    """

    model: str
    version: int
    bridge: str
    issued: float
    n_layer: int
    n_embd: int
    experts: int
    dtype: str
    max_rows: int
    workers: tuple[MapWorker, ...] = ()
    dispatchers: tuple[MapDispatcher, ...] = ()

    def bounds(self) -> Bounds:
        """What links under this map may carry."""
        return Bounds(self.n_embd, self.dtype, self.max_rows, self.experts)

    def may_dispatch(self, peer: str) -> bool:
        """Whether the peer may send rows to workers of this map."""
        return any(dispatcher.peer == peer for dispatcher in self.dispatchers)

    def worker(self, peer: str) -> MapWorker | None:
        """The worker with this peer id."""
        return next((worker for worker in self.workers if worker.peer == peer), None)

    def check(self) -> None:
        """Refuse a map that cannot be. Raises PlanError."""
        try:
            self.bounds().check()
        except WireError as error:
            raise PlanError(f"dispatch map: {error}") from None
        if not 1 <= self.n_embd <= 1 << 17 or not 1 <= self.n_layer <= 1024:
            raise PlanError(f"dispatch map of {self.n_layer} layers of width {self.n_embd}")
        if len(self.workers) > MAX_WORKERS or len(self.dispatchers) > MAX_DISPATCHERS:
            raise PlanError(
                f"dispatch map of {len(self.workers)} workers, {len(self.dispatchers)} dispatchers"
            )
        if not (0 <= self.version <= 1 << 63 and 0 <= self.issued <= _MAX_SECONDS):
            raise PlanError(f"dispatch map: version {self.version}, issued {self.issued}")
        if any(len(dispatcher.peer) > 128 for dispatcher in self.dispatchers):
            raise PlanError("dispatch map: a dispatcher's peer id is too long")
        if len({worker.peer for worker in self.workers}) < len(self.workers):
            raise PlanError("dispatch map: a worker is named twice")
        for worker in self.workers:
            if len(worker.ranges) > MAX_RANGES or len(worker.addresses) > 16:
                raise PlanError(f"dispatch map: {worker.peer[:80]} has too many ranges or addresses")
            if any(len(address) > _MAX_TEXT for address in worker.addresses) or len(worker.peer) > 128:
                raise PlanError("dispatch map: an address or peer id is too long")
            if not 0 <= worker.expires_in <= _MAX_SECONDS:
                raise PlanError(f"dispatch map: the coverage of {worker.peer} ends in {worker.expires_in} s")
            if any(
                not (0 <= layer < self.n_layer and 0 <= lo < hi < 0xFFFF) for layer, lo, hi in worker.ranges
            ):
                raise PlanError(f"dispatch map: {worker.peer} has ranges that are not of this model")


class _Signed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    map: bytes
    signature: bytes


_encoder = msgspec.msgpack.Encoder()
_maps = msgspec.msgpack.Decoder(DispatchMap)
_signed = msgspec.msgpack.Decoder(_Signed)


def sign_map(value: DispatchMap, sign: Callable[[bytes], bytes]) -> bytes:
    """A map with its bridge's signature."""
    value.check()
    data = _encoder.encode(value)
    return _encoder.encode(_Signed(data, sign(_DOMAIN + data)))


def decode_map(data: bytes, bridge: str, verify: Verify) -> DispatchMap:
    """Take a signed map in.

    Raises:
        PlanError: too large, malformed, not signed by the bridge, or a map that cannot be.
    """
    if len(data) > MAX_MAP_BYTES:
        raise PlanError(f"a dispatch map of {len(data)} bytes, at most {MAX_MAP_BYTES}")
    try:
        signed = _signed.decode(data)
        if not verify(bridge, signed.signature, _DOMAIN + signed.map):
            raise PlanError(f"the dispatch map is not signed by the bridge {bridge}", peer=bridge)
        value = _maps.decode(signed.map)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PlanError(f"the dispatch map does not parse: {error}", peer=bridge) from None
    if value.bridge != bridge:
        raise PlanError(f"the dispatch map names {value.bridge} as bridge, {bridge} has signed it")
    value.check()
    return value
