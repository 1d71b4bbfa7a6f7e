"""What makes a plan valid, and what both ends derive from it."""

from __future__ import annotations

import hashlib
import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_peer.errors import PlanError
from kvasir_peer.ring.plan import MAX_PLAN_BYTES, Plan, PlanStage, decode_plan, encode_plan, sign_plan
from kvasir_peer.serving.widths import Widths

BRIDGE = "12D3KooWBridge"
WIDTHS = Widths(
    batch_rows=64, micro_batch_rows=16, max_in_flight=4, max_requests=8, context_length=512, top_logprobs=5
)


def signer(peer: str):  # type: ignore[no-untyped-def]
    return lambda message: hashlib.sha256(peer.encode() + message).digest()


def verify(peer: str, signature: bytes, message: bytes) -> bool:
    return signer(peer)(message) == signature


def a_plan(*borders: int, n_layer: int = 12, **changes: object) -> Plan:
    borders = borders or (0, 5, 12)
    stages = tuple(
        PlanStage(f"12D3KooWStage{i}", first, end, (f"/ip4/127.0.0.1/tcp/{4000 + i}",))
        for i, (first, end) in enumerate(itertools.pairwise(borders))
    )
    plan = Plan("ring-1", 1, BRIDGE, "m" * 64, n_layer, 64, 100, stages, WIDTHS)
    return msgspec.structs.replace(plan, **changes)


def test_a_signed_plan_comes_back_as_it_was() -> None:
    plan = a_plan(0, 3, 7, 12, hop_seconds=0.01, link_rate=1e7, fresh=("12D3KooWStage1",))
    assert decode_plan(sign_plan(plan, signer(BRIDGE)), BRIDGE, verify) == plan


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (a_plan(0, 12), "two stages or more"),
        (a_plan(stages=()), "no stages"),
        (a_plan(0, 5, 11), "layers 11 to 11 are in no stage"),
        (a_plan(1, 5, 12), "layers 0 to 0 are in no stage"),
        (a_plan(0, 5, 13), "up to 12, the model has 12"),
        (a_plan(0, 5, 5, 12), "has no layers"),
        (
            a_plan(stages=(PlanStage("a", 0, 6), PlanStage("b", 5, 12))),
            "layers 5 to 5 are in two stages",
        ),
        (
            a_plan(stages=(PlanStage("a", 0, 5), PlanStage("b", 6, 12))),
            "layers 5 to 5 are in no stage",
        ),
        (
            a_plan(stages=(PlanStage("a", 0, 6), PlanStage("a", 6, 12))),
            "two places",
        ),
        (a_plan(dtype="f8"), "f8"),
        (a_plan(epoch=0), "epoch is 0"),
        (a_plan(n_embd=1 << 30), "n_embd"),
        (a_plan(fresh=("somebody",)), "fresh"),
        (a_plan(hop_seconds=float("nan")), "hop_seconds"),
        (a_plan(link_rate=-1.0), "link_rate"),
        (
            a_plan(stages=(PlanStage("a", 0, 6), PlanStage("b", 6, 12, pass_row=float("inf")))),
            "passes of inf",
        ),
        (a_plan(stages=(PlanStage("a", 0, 6), PlanStage("b", 6, 12, ("x" * 600,)))), "addresses"),
        (a_plan(widths=Widths(8, 16, 1, 1, 8)), "batch_rows"),
        (a_plan(widths=Widths(4096, 4096, 1, 4096, 8)), "take fewer rows or requests"),
        (a_plan(n_layer=70, stages=tuple(PlanStage(str(i), i, i + 1) for i in range(70))), "at most 64"),
    ],
)
def test_what_cannot_be_is_refused_with_its_reason(plan: Plan, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        plan.check()
    with pytest.raises(PlanError, match=words):
        sign_plan(plan, signer(BRIDGE))
    # nor does a bridge's signature make it right
    data = msgspec.msgpack.encode(plan)
    signed = msgspec.msgpack.encode([data, signer(BRIDGE)(b"kvasir ring plan 1\0" + data)])
    with pytest.raises(PlanError, match=words):
        decode_plan(signed, BRIDGE, verify)


def test_only_the_bridges_own_plan_counts() -> None:
    plan = a_plan()
    with pytest.raises(PlanError, match="not signed"):
        decode_plan(sign_plan(plan, signer("12D3KooWOther")), BRIDGE, verify)
    with pytest.raises(PlanError, match="names"):
        decode_plan(sign_plan(a_plan(bridge="12D3KooWOther"), signer(BRIDGE)), BRIDGE, verify)


def test_one_bit_breaks_the_signature() -> None:
    data = bytearray(sign_plan(a_plan(), signer(BRIDGE)))
    for place in range(0, len(data), 7):
        data[place] ^= 1
        with pytest.raises(PlanError):
            decode_plan(bytes(data), BRIDGE, verify)
        data[place] ^= 1


def test_the_same_plan_in_other_bytes_is_refused() -> None:
    plan = a_plan()
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(plan))
    fields[10] = 0  # created, as an integer in place of a float
    data = msgspec.msgpack.encode(fields)
    assert msgspec.msgpack.decode(data, type=Plan) == plan
    signed = msgspec.msgpack.encode([data, signer(BRIDGE)(b"kvasir ring plan 1\0" + data)])
    with pytest.raises(PlanError, match="canonical"):
        decode_plan(signed, BRIDGE, verify)


@given(st.binary(max_size=200))
@settings(max_examples=100, deadline=None)
def test_noise_is_refused_in_one_line(data: bytes) -> None:
    with pytest.raises(PlanError) as caught:
        decode_plan(data, BRIDGE, verify)
    assert "\n" not in str(caught.value)


def test_a_plan_over_the_bound_is_not_even_decoded() -> None:
    with pytest.raises(PlanError, match="bytes, at most"):
        decode_plan(bytes(MAX_PLAN_BYTES + 1), BRIDGE, verify)


def test_the_largest_plan_fits_its_bound() -> None:
    stages = tuple(PlanStage("p" * 120 + f"{i:08d}", i, i + 1, ("/" + "a" * 511,) * 16) for i in range(64))
    plan = a_plan(n_layer=64, stages=stages, fresh=tuple(s.peer for s in stages[:8]))
    assert len(encode_plan(plan)) < MAX_PLAN_BYTES
    assert decode_plan(sign_plan(plan, signer(BRIDGE)), BRIDGE, verify) == plan


@pytest.mark.parametrize(("dtype", "row"), [("f32", 256), ("f16", 128), ("bf16", 128), ("int8", 72)])
def test_bounds_follow_from_the_widths(dtype: str, row: int) -> None:
    plan = a_plan(dtype=dtype)
    assert plan.row_bytes == row
    assert plan.boundary_bytes == 16 * row
    wider = msgspec.structs.replace(plan, n_embd=128)
    assert wider.max_batch_frame - plan.max_batch_frame == wider.boundary_bytes - plan.boundary_bytes
    assert wider.max_result_frame == plan.max_result_frame
    assert plan.limits().stages == 2 and plan.limits().rows == 16


def test_the_scheduler_begins_with_what_the_plan_expects() -> None:
    stages = (PlanStage("a", 0, 6, pass_base=0.02, pass_row=0.001), PlanStage("b", 6, 12))
    costs = a_plan(stages=stages, hop_seconds=0.03, link_rate=128_000.0).cost_model().costs
    assert costs.stages[0].seconds(3) == pytest.approx(0.023)
    assert costs.hop_per_row == pytest.approx(0.001)
    assert costs.transit.base == pytest.approx(0.06)


def test_caches_are_kept_by_the_same_peer_with_the_same_layers() -> None:
    before = a_plan(0, 4, 8, 12)
    s = before.stages
    after = msgspec.structs.replace(
        before, epoch=2, stages=(s[0], PlanStage("12D3KooWNew", 4, 8), s[2]), fresh=(s[2].peer,)
    )
    assert after.kept_from(before) == [0, None, None]
    other = msgspec.structs.replace(after, id="ring-2")
    assert other.kept_from(before) == [None, None, None]


def test_addresses_of_members_only() -> None:
    plan = a_plan(bridge_addresses=("/ip4/127.0.0.1/tcp/1",))
    assert plan.addresses(BRIDGE) == ("/ip4/127.0.0.1/tcp/1",)
    assert plan.addresses("12D3KooWStage1") == ("/ip4/127.0.0.1/tcp/4001",)
    assert plan.addresses("stranger") == ()
    assert plan.index_of("12D3KooWStage1") == 1 and plan.index_of("stranger") is None
