"""A ring's plan: who computes which layers, and how much may be in the ring at once.

The bridge makes it, signs it, and gives it to every stage; nothing in a ring happens outside what a plan declares.
Its bytes are canonical: the same plan has one encoding, so one signature covers it for everybody.

A plan has an id, which stays while stages are replaced, and an epoch, which grows each time. Stages refuse frames
of any other epoch, so a stage that slept through its replacement can do no harm when it wakes.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from kvasir_peer.errors import PlanError, WireError
from kvasir_peer.serving.costs import CostModel, Line
from kvasir_peer.serving.widths import Widths
from kvasir_peer.wire import ring
from kvasir_peer.wire.membership import Limits
from kvasir_peer.wire.tensors import tensor_bytes

MAX_STAGES = ring.MAX_STAGES
MAX_LAYERS = 1024
MAX_EMBEDDING = 1 << 17
MAX_VOCAB = 1 << 22
MAX_PEER_ID = 128  # characters; ids of Ed25519 keys have 52
MAX_ADDRESSES = 16  # of one stage
MAX_ADDRESS = 512  # characters of a multiaddress through a relay, generously
MAX_ID = 128
# What a signed plan takes at most; checked before anything is decoded.
MAX_PLAN_BYTES = 4096 + MAX_STAGES * (256 + MAX_ADDRESSES * (MAX_ADDRESS + 8))

KvPlace = tuple[str, int, int]  # peer id, layers [first, end)

_DOMAIN = b"kvasir ring plan 1\0"

ONE_STAGE = (
    "a ring needs two stages or more: with one, a single peer would hold the whole model, which is what a "
    "coordinator does"
)


class PlanStage(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One stage.

    Attributes:
        peer: peer id.
        first, end: layers ``[first, end)``.
        addresses: multiaddresses at which the other stages reach it.
        pass_base, pass_row: expected seconds of a pass, ``pass_base + pass_row × rows``; the head's scheduler
            begins with them and then goes by what it measures.
    """

    peer: str
    first: int
    end: int
    addresses: tuple[str, ...] = ()
    pass_base: float = 0.01
    pass_row: float = 0.005

    @property
    def layers(self) -> int:
        return self.end - self.first

    @property
    def place(self) -> KvPlace:
        """Who holds which layers: a KV cache belongs to that."""
        return self.peer, self.first, self.end


class Plan(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The declared shape of a ring.

    Attributes:
        id: stays through all epochs.
        epoch: from 1, grows with each change.
        bridge: peer id of the bridge, whose signature makes a plan valid.
        model: manifest id.
        n_layer, n_embd, vocab: of the model.
        stages: head first, tail last.
        widths: bounds of everything that crosses.
        dtype: of boundaries; see :data:`kvasir_peer.wire.tensors.DTYPES`.
        created: seconds on the bridge's clock, which begins anywhere.
        fresh: peers whose KV cache is not known to be there: they are new at their layers, or have lost it.
        bridge_addresses: multiaddresses at which head and tail reach the bridge.
        hop_seconds: expected one-way time of an empty frame between neighbours, on average.
        link_rate: expected bytes per second of the slowest link; 0 where it is not known.
    """

    id: str
    epoch: int
    bridge: str
    model: str
    n_layer: int
    n_embd: int
    vocab: int
    stages: tuple[PlanStage, ...]
    widths: Widths
    dtype: str = "f16"
    created: float = 0.0
    fresh: tuple[str, ...] = ()
    bridge_addresses: tuple[str, ...] = ()
    hop_seconds: float = 0.0
    link_rate: float = 0.0

    # --- what it allows ------------------------------------------------------------------------------------

    def check(self) -> None:
        """Refuse a plan that cannot be.

        Raises:
            PlanError: names what is wrong.
        """
        for name, text in (("id", self.id), ("model", self.model)):
            if not 1 <= len(text) <= MAX_ID:
                self._refuse(f"its {name} has {len(text)} characters, must be 1 to {MAX_ID}")
        numbers = (
            ("epoch", self.epoch, 1, (1 << 32) - 1),
            ("n_layer", self.n_layer, 1, MAX_LAYERS),
            ("n_embd", self.n_embd, 1, MAX_EMBEDDING),
            ("vocab", self.vocab, 1, MAX_VOCAB),
        )
        for name, value, low, high in numbers:
            if not low <= value <= high:
                self._refuse(f"{name} is {value}, must be {low} to {high}")
        for name, seconds in (
            ("hop_seconds", self.hop_seconds),
            ("link_rate", self.link_rate),
            ("created", self.created),
        ):
            if not 0 <= seconds < math.inf:
                self._refuse(f"{name} is {seconds}")
        try:
            tensor_bytes(self.dtype, 1, self.n_embd)
        except WireError as error:
            self._refuse(str(error))
        self.widths.check()
        self._check_place(self.bridge, self.bridge_addresses)
        self._check_stages()
        peers = {stage.peer for stage in self.stages}
        if not set(self.fresh) <= peers or len(set(self.fresh)) != len(self.fresh):
            self._refuse("it names peers as fresh that are not its stages")

    def _check_stages(self) -> None:
        if not self.stages:
            self._refuse("it has no stages")
        if len(self.stages) < 2:
            self._refuse(ONE_STAGE)
        if len(self.stages) > MAX_STAGES:
            self._refuse(f"it has {len(self.stages)} stages, at most {MAX_STAGES} can be")
        peers: set[str] = set()
        covered = 0
        for stage in self.stages:
            self._check_place(stage.peer, stage.addresses)
            if stage.peer in peers:
                self._refuse(f"peer {stage.peer} has two places; each stage is a peer of its own")
            peers.add(stage.peer)
            if stage.first > covered:
                self._refuse(f"layers {covered} to {stage.first - 1} are in no stage")
            if stage.first < covered:
                self._refuse(f"layers {stage.first} to {min(covered, stage.end) - 1} are in two stages")
            if stage.end <= stage.first:
                self._refuse(f"stage {stage.peer} has no layers")
            for seconds in (stage.pass_base, stage.pass_row):
                if not 0 <= seconds < math.inf:
                    self._refuse(f"stage {stage.peer} expects passes of {seconds} s")
            covered = stage.end
        if covered < self.n_layer:
            self._refuse(f"layers {covered} to {self.n_layer - 1} are in no stage")
        if covered > self.n_layer:
            self._refuse(f"it has layers up to {covered - 1}, the model has {self.n_layer}")

    def _check_place(self, peer: str, addresses: tuple[str, ...]) -> None:
        if not 1 <= len(peer) <= MAX_PEER_ID:
            self._refuse(f"a peer id has {len(peer)} characters, must be 1 to {MAX_PEER_ID}")
        if len(addresses) > MAX_ADDRESSES or any(len(a) > MAX_ADDRESS for a in addresses):
            self._refuse(f"peer {peer} has too many or too long addresses")

    def _refuse(self, why: str) -> None:
        raise PlanError(f"plan {self.id[:12]!r} cannot be: {why}", plan=self.id[:MAX_ID])

    # --- what follows from it ------------------------------------------------------------------------------

    def limits(self) -> Limits:
        """What a membership of this plan may hold."""
        return Limits(
            rows=self.widths.micro_batch_rows,
            slots=self.widths.max_requests,
            context_length=self.widths.context_length,
            vocab=self.vocab,
            top_logprobs=self.widths.top_logprobs,
            stages=len(self.stages),
        )

    @property
    def boundary_bytes(self) -> int:
        """Most bytes of the hidden states of one micro-batch."""
        return tensor_bytes(self.dtype, self.widths.micro_batch_rows, self.n_embd)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row's hidden states on a link."""
        return tensor_bytes(self.dtype, 1, self.n_embd)

    @property
    def max_batch_frame(self) -> int:
        """Most bytes of a frame between neighbours."""
        return ring.max_batch_frame(self.limits(), self.dtype, self.n_embd)

    @property
    def max_result_frame(self) -> int:
        """Most bytes of a frame from the tail."""
        return ring.max_result_frame(self.limits())

    def addresses(self, peer: str) -> tuple[str, ...]:
        """Where a member of the ring, or the bridge, is reached; empty for a stranger."""
        if peer == self.bridge and self.bridge_addresses:
            return self.bridge_addresses
        return next((stage.addresses for stage in self.stages if stage.peer == peer), ())

    def index_of(self, peer: str) -> int | None:
        """Place of a peer; None when it has none."""
        return next((i for i, stage in enumerate(self.stages) if stage.peer == peer), None)

    def cost_model(self) -> CostModel:
        """What the scheduler expects of this ring until it has measured."""
        per_row = self.row_bytes / self.link_rate if self.link_rate > 0 else 0.0
        n = len(self.stages)
        return CostModel(
            [Line(stage.pass_base, stage.pass_row) for stage in self.stages],
            hop_per_row=per_row,
            transit=Line(self.hop_seconds * n, per_row * n),
        )

    def kept_from(self, before: Plan) -> list[int | None]:
        """For each stage that still has the KV cache that it had under ``before``, its index there; else None."""
        if before.id != self.id or before.widths != self.widths:
            return [None] * len(self.stages)
        indices = {stage.place: index for index, stage in enumerate(before.stages)}
        return [None if stage.peer in self.fresh else indices.get(stage.place) for stage in self.stages]

    @property
    def kept(self) -> frozenset[KvPlace]:
        """Places that have kept their KV cache since they served last."""
        return frozenset(stage.place for stage in self.stages if stage.peer not in self.fresh)


class _Signed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    plan: bytes
    signature: bytes


_encoder = msgspec.msgpack.Encoder()
_plans = msgspec.msgpack.Decoder(Plan)
_signed = msgspec.msgpack.Decoder(_Signed)


def encode_plan(plan: Plan) -> bytes:
    """The canonical bytes of a plan that passes its check."""
    plan.check()
    return _encoder.encode(plan)


def sign_plan(plan: Plan, sign: Callable[[bytes], bytes]) -> bytes:
    """A plan with its bridge's signature, ready for the wire."""
    data = encode_plan(plan)
    signed = _encoder.encode(_Signed(data, sign(_DOMAIN + data)))
    if len(signed) > MAX_PLAN_BYTES:
        raise PlanError(
            f"plan {plan.id[:12]!r} takes {len(signed)} bytes, at most {MAX_PLAN_BYTES}", plan=plan.id
        )
    return signed


def decode_plan(data: bytes, bridge: str, verify: Callable[[str, bytes, bytes], bool]) -> Plan:
    """Take a signed plan in.

    Args:
        data: from :func:`sign_plan`, by way of anybody.
        bridge: peer id that must have signed it, and that it must name.
        verify: ``(peer id, signature, message) -> whether it is good``.

    Raises:
        PlanError: too large, malformed, not canonical, not signed by the bridge, or a plan that cannot be.
    """
    if len(data) > MAX_PLAN_BYTES:
        raise PlanError(f"a plan of {len(data)} bytes, at most {MAX_PLAN_BYTES}")
    try:
        signed = _signed.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PlanError(f"the plan does not parse: {error}") from None
    if not verify(bridge, signed.signature, _DOMAIN + signed.plan):
        raise PlanError(f"the plan is not signed by the bridge {bridge}", peer=bridge)
    try:
        plan = _plans.decode(signed.plan)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PlanError(f"the plan does not parse: {error}", peer=bridge) from None
    if plan.bridge != bridge:
        raise PlanError(f"the plan names {plan.bridge} as bridge, {bridge} has signed it", plan=plan.id)
    plan.check()
    if encode_plan(plan) != signed.plan:
        raise PlanError("the plan's bytes are not canonical", plan=plan.id)
    return plan
