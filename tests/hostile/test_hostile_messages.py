"""Messages whose bytes parse and whose values cannot be: refused by name, before anybody computes with them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from kvasir_peer.errors import WireError
from kvasir_peer.ring.volunteering import Report
from kvasir_peer.wire import chunks, coordinator, experts, ring
from kvasir_peer.wire.codec import Codec
from kvasir_peer.wire.membership import Limits
from kvasir_peer.wire.sampling import GREEDY

LIMITS = Limits(rows=4, slots=4, context_length=64, vocab=512, top_logprobs=2, stages=3)
TRACE = ring.StageTrace(0, 1.0, 2.0, 0.0, 0, 5.0, 0.5, 1, 64)
OUTPUT = ring.Output(7, 1, 3, 5, -0.1, ((5, -0.1), (6, -2.0)), 1)
RESULT = ring.Result("plan", 1, 0, bytes(32), (OUTPUT,), (TRACE, TRACE, TRACE))
BATCH = ring.Batch("plan", 1, 0, b"", bytes(32), bytes(64), (TRACE,))
SUBMIT = ring.Submit(7, (1, 2, 3), 8, GREEDY, (0,))
COMPOSED = ring.Composed("plan", 1, 0, bytes(32), ((7, 3, False), (8, 1, True)))
ENDED = ring.Ended(7, "busy", "the queue is full", 2.0)
TAINTED = ring.Tainted("plan", 1, 2, 0, ((7, 1, 3), (8, 1, 0)), bytes(64))

change = msgspec.structs.replace


def through(message: msgspec.Struct, limits: Limits = LIMITS) -> Any:
    """What the other side of a link makes of a message."""
    codec = ring.codec(limits)
    return codec.decode(b"".join(bytes(piece) for piece in codec.encode(message)))[0]


@pytest.mark.parametrize(
    "message", [RESULT, BATCH, SUBMIT, COMPOSED, ENDED, TAINTED], ids=lambda m: type(m).__name__
)
def test_what_rings_say_passes(message: msgspec.Struct) -> None:
    assert through(message) == message


def _outputs(**fields: Any) -> ring.Result:
    return change(RESULT, outputs=(change(OUTPUT, **fields),))


def _traced(**fields: Any) -> ring.Result:
    return change(RESULT, trace=(change(TRACE, **fields),))


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (_outputs(token=512), "token"),
        (_outputs(token=-1), "token"),
        (_outputs(token=1 << 40), "token"),  # would not fit into a membership's row
        (_outputs(top=((1 << 40, 0.0),)), "token"),
        (_outputs(top=((1, 0.0),) * 3), "outputs"),
        (_outputs(slot=4), "slot"),
        (_outputs(slot=-1), "slot"),
        (_outputs(request=-1), "value"),
        (_outputs(position=64), "value"),
        (_outputs(position=-5), "value"),
        (change(RESULT, outputs=(OUTPUT,) * 5), "outputs"),
        (change(RESULT, sequence=-1), "value"),
        (_traced(held_ms=math.nan), "value"),
        (_traced(waited_ms=math.inf), "value"),
        (_traced(arrived=-1e300), "value"),
        (_traced(queue=-1), "value"),
        (_traced(stage=64), "value"),
        (change(BATCH, trace=(change(TRACE, blocked_ms=math.nan),)), "value"),
        (change(COMPOSED, runs=((7, 0, False),)), "value"),
        (change(COMPOSED, runs=((7, 1 << 62, False),)), "value"),
        (change(COMPOSED, runs=((7, 1, True),) * 5), "value"),
        (change(SUBMIT, tokens=(1, -2)), "token"),
        (change(SUBMIT, tokens=(1, 512)), "token"),
        (change(SUBMIT, slot=4), "slot"),
        (change(SUBMIT, computed=(3, 4, 3)), "value"),
        (change(SUBMIT, computed=(3, -1, 3)), "value"),
        (change(SUBMIT, computed=(3, 3)), "value"),
        (change(SUBMIT, max_tokens=-1), "value"),
        (change(SUBMIT, seconds_left=math.nan), "value"),
        (change(SUBMIT, stop_tokens=(1,) * 65), "value"),
        (change(ENDED, retry_after=math.nan), "value"),
        (change(ENDED, retry_after=-1.0), "value"),
        (change(TAINTED, stage=3), "value"),
        (change(TAINTED, stage=-1), "value"),
        (change(TAINTED, number=-1), "value"),
        (change(TAINTED, rewinds=()), "value"),
        (change(TAINTED, rewinds=((7, 1, 3),) * 65), "value"),
        (change(TAINTED, rewinds=((-1, 1, 3),)), "value"),
        (change(TAINTED, rewinds=((7, 1 << 32, 3),)), "value"),
        (change(TAINTED, rewinds=((7, 1, 64),)), "value"),
        (change(TAINTED, rewinds=((7, 1, -1),)), "value"),
    ],
)
def test_values_that_no_ring_has_are_refused(message: msgspec.Struct, code: str) -> None:
    with pytest.raises(WireError) as caught:
        through(message)
    assert caught.value.code == code


def test_the_bounds_are_those_of_the_plan() -> None:
    assert through(_outputs(token=600), replace(LIMITS, vocab=1024))


WELCOME = coordinator.Welcome(4, 64, 512, 2)
SLOTS = coordinator.Slots(
    9, 2, 4, 1, 77, "load", 5, 6, ((0, 3),), (coordinator.WorkerRows("w", 10, 2),), (("liar", "zeros"),)
)


def frame_of(message: msgspec.Struct, codec: Codec) -> bytes:
    return b"".join(bytes(piece) for piece in codec.encode(message))


@pytest.mark.parametrize(
    "message",
    [
        SLOTS,
        coordinator.Tokens((OUTPUT,)),
        coordinator.SlotsWanted(1),
        SUBMIT,
        ring.Cancel(7),
        ENDED,
    ],
    ids=lambda m: type(m).__name__,
)
def test_what_coordinators_and_their_bridge_say_passes(message: msgspec.Struct) -> None:
    codec = WELCOME.codec()
    assert codec.decode(frame_of(message, codec))[0] == message


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (change(SUBMIT, tokens=(512,)), "token"),
        (change(SUBMIT, tokens=(-1,)), "token"),
        (change(SUBMIT, sampling=change(GREEDY, temperature=math.nan)), "sampling"),
        (change(SUBMIT, sampling=change(GREEDY, top_logprobs=3)), "sampling"),
        (change(SUBMIT, seconds_left=math.nan), "value"),
        (change(SUBMIT, request=-1), "value"),
        (ring.Cancel(-1), "value"),
        (change(ENDED, retry_after=math.nan), "value"),
        (coordinator.Tokens((OUTPUT,) * 5), "outputs"),
        (coordinator.Tokens((change(OUTPUT, token=512),)), "token"),
        (coordinator.Tokens((change(OUTPUT, position=-1),)), "value"),
        (coordinator.Tokens((change(OUTPUT, slot=4),)), "slot"),
        (coordinator.Tokens((change(OUTPUT, top=((1, 0.0),) * 3),)), "outputs"),
        (coordinator.SlotsWanted(-1), "value"),
        (change(SLOTS, busy=-1), "value"),
        (change(SLOTS, total=1 << 40), "value"),
        (change(SLOTS, queue=-5), "value"),
        (change(SLOTS, run=-1), "value"),
        (change(SLOTS, run=1 << 63), "value"),  # the ledger could not keep it
        (change(SLOTS, heat=((-1, 1),)), "value"),
        (change(SLOTS, heat=((0, -1),)), "value"),
        (change(SLOTS, heat=((0, 1),) * 1025), "oversize"),
        (change(SLOTS, workers=(coordinator.WorkerRows("w" * 129, 1, 1),)), "oversize"),
        (change(SLOTS, workers=(coordinator.WorkerRows("w", 1, 1),) * 1025), "oversize"),
        (change(SLOTS, workers=(coordinator.WorkerRows("w", -1, 1),)), "malformed"),
        (change(SLOTS, workers=(coordinator.WorkerRows("w", 1 << 49, 1),)), "malformed"),
        (change(SLOTS, workers=(coordinator.WorkerRows("w", 1, 1 << 62),)), "malformed"),
        (change(SLOTS, caught=(("w", "y"),) * 257), "oversize"),
        (change(SLOTS, caught=(("w", "y" * 301),)), "oversize"),
        (change(SLOTS, mode="x" * 129), "oversize"),
    ],
)
def test_values_that_no_coordinator_has_are_refused(message: msgspec.Struct, code: str) -> None:
    codec = WELCOME.codec()
    with pytest.raises(WireError) as caught:
        codec.decode(frame_of(message, codec))
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (experts.Sums(-1, 1), "value"),
        (experts.Sums(1, 1, math.nan), "value"),  # would make all that is known of its speed no number
        (experts.Sums(1, 1, math.inf), "value"),
        (experts.Sums(1, 1, -1.0), "value"),
        (experts.Failed(-1, ""), "value"),
        (experts.Rows(-1, 0, 1, 1), "value"),
        (experts.Hello("m", -1), "value"),
        (experts.Welcome(((0, 4, 4),)), "value"),
        (experts.Welcome(((-1, 0, 4),)), "value"),
        (experts.Welcome(((0, 0, 1 << 16),)), "value"),
        (experts.Welcome((), 0), "value"),
    ],
)
def test_values_that_no_worker_or_dispatcher_has_are_refused(message: msgspec.Struct, code: str) -> None:
    with pytest.raises(WireError) as caught:
        experts.CODEC.decode(frame_of(message, experts.CODEC))
    assert caught.value.code == code


@pytest.mark.parametrize("size", [0, 31, 33, 4000])
def test_only_a_hash_passes_for_a_hash(size: int) -> None:
    """A store makes a file's name of it."""
    for message in (chunks.Want((bytes(size),)), chunks.Have(bytes(size)), chunks.Lack(bytes(size), "no")):
        frame = msgspec.msgpack.encode(message)
        kind = {chunks.Want: 1, chunks.Have: 2, chunks.Lack: 3}[type(message)]
        with pytest.raises(WireError):
            chunks.CODEC.decode(bytes([kind]) + len(frame).to_bytes(4, "little") + frame)


@pytest.mark.parametrize(
    "fields",
    [
        {"offer": {"memory": -1}},
        {"offer": {"memory": 10**400}},
        {"offer": {"read_bytes_per_second": -1.0}},
        {"offer": {"engine": "x" * 200}},
        {"offer": {"addresses": ["/ip4/127.0.0.1/tcp/1"] * 10_000}},
        {"offer": {"on_disk": [[0, -1]]}},
        {"epoch": -1},
        {"epoch": 1 << 40},
        {"plan": "p" * 200},
        {"lost": "p" * 200},
        {"standby": [0, 1 << 40]},
        {"transfer": {"done": -(10**30), "total": 1}},
        {"figures": {"batches": 10**400}},
        {"figures": {"held_ms": -1.0}},
        {"figures": {"path": "x" * 200}},
        {"state": "kaput"},
    ],
)
def test_reports_that_nobody_could_add_up_are_refused(fields: dict[str, Any]) -> None:
    offer = {"memory": 1, "disk": 1, "engine": "onnx", **fields.get("offer", {})}
    body = msgspec.json.encode({**fields, "offer": offer}, order=None)
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(body, type=Report)
