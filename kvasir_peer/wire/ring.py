"""Messages of ``/kvasir/ring/1``: what the bridge, the head, the stages and the tail say to each other.

A link carries one purpose, named by the :class:`Hello` that opens it:

``batches``   stage i to stage i+1: :class:`Batch` with a boundary as payload, :class:`Tainted`
``results``   tail to head: :class:`Result`, :class:`Tainted`
``tokens``    tail to bridge: :class:`Result`, :class:`Tainted`; head to bridge: :class:`Composed`, :class:`Ended`
``requests``  bridge to head: :class:`Submit`, :class:`Resumed`, :class:`Cancel`
``probe``     between peers that the bridge has named to each other: :class:`Ping` with a payload, to measure the way

:class:`Ping` may be sent on any of them and is answered by the other side's agent with :class:`Pong`.
A side that refuses says why with :class:`Refusal` and closes the link.
"""

from __future__ import annotations

import hashlib
import math
from functools import partial
from typing import Any, Literal

import msgspec

from kvasir_peer.errors import WireError
from kvasir_peer.wire.codec import PREFIX_BYTES, Codec
from kvasir_peer.wire.membership import Limits
from kvasir_peer.wire.sampling import Sampling
from kvasir_peer.wire.tensors import tensor_bytes

PROTOCOL = "/kvasir/ring/1"

Purpose = Literal["batches", "results", "tokens", "requests", "probe"]

# A header is bounded by what the plan's widths allow, plus this: ids, digests, signature, and one trace entry
# for each stage (a ring has at most 64 stages, an entry takes at most 64 bytes: 5 doubles and four integers).
HEADER_SLACK = 1024 + 64 * 64
MAX_STAGES = 64
MAX_REWINDS = 64  # of one message: with msgpack's tags they take 1.6 KB, which the slack of a header holds
MAX_SUBMIT_STOP_TOKENS = 64
RESULT_ROW_BYTES = 64  # request, incarnation, position, token, log-probability, with msgpack's tags
TOP_LOGPROB_BYTES = 16  # one id and one float with msgpack's tags
MAX_TIME = 1e12  # milliseconds or seconds, whichever a field has: a larger one was not measured
_U32, _U64 = (1 << 32) - 1, (1 << 64) - 1
_TAINT_DOMAIN = b"kvasir taints 1\0"
_encoder = msgspec.msgpack.Encoder()


class StageTrace(msgspec.Struct, frozen=True, array_like=True):
    """What one stage adds to a batch as it passes; times in milliseconds.

    Attributes:
        stage: index in the ring.
        held_ms: the engine had the batch.
        starved_ms: the engine had had nothing to do before it.
        blocked_ms: how long the batch before it had waited for the next stage's link.
        queue: batches that were before it in the stage.
        arrived: seconds, on that stage's own monotonic clock, for the timeline.
        waited_ms: between its arrival and its departure, without ``held_ms``.
        rows: rows that the stage computed; the batch may hold more, see ``through`` in the membership.
        boundary_bytes: hidden states that the stage handed on; 0 at the tail.
    """

    stage: int
    held_ms: float
    starved_ms: float
    blocked_ms: float
    queue: int
    arrived: float = 0.0
    waited_ms: float = 0.0
    rows: int = 0
    boundary_bytes: int = 0


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """First frame of a link."""

    purpose: Purpose
    plan: str
    epoch: int


class Welcome(msgspec.Struct, frozen=True, array_like=True):
    """The other side takes the link."""

    epoch: int


class Refusal(msgspec.Struct, frozen=True, array_like=True):
    """Why a link or a frame is refused; the link is closed after it."""

    code: str
    reason: str


class Ping(msgspec.Struct, frozen=True, array_like=True):
    nonce: int


class Pong(msgspec.Struct, frozen=True, array_like=True):
    nonce: int


class Batch(msgspec.Struct, frozen=True, array_like=True):
    """One batch on its way; the payload is the boundary ``[rows, n_embd]`` in the plan's dtype."""

    plan: str
    epoch: int
    sequence: int
    membership: bytes
    digest: bytes
    signature: bytes
    trace: tuple[StageTrace, ...]


class Output(msgspec.Struct, frozen=True, array_like=True):
    """The token sampled from one row: it belongs at ``position + 1`` of its request."""

    request: int
    incarnation: int
    position: int
    token: int
    logprob: float = 0.0
    top: tuple[tuple[int, float], ...] = ()
    slot: int = 0
    """Where the KV entries of this request lie, at every stage, up to ``position``."""
    void: bool = False
    """The tail keeps this token back: it was computed from what a :class:`Tainted` has named. It is made again."""


class Result(msgspec.Struct, frozen=True, array_like=True):
    """What the tail made of a batch; ``digest`` is the membership's as the tail saw it."""

    plan: str
    epoch: int
    sequence: int
    digest: bytes
    outputs: tuple[Output, ...]
    trace: tuple[StageTrace, ...]


class Composed(msgspec.Struct, frozen=True, array_like=True):
    """Head to bridge: the digest of a batch as it left, to be compared with the tail's.

    ``runs`` says whose rows it holds, for the timeline: ``(request, rows, whether it is a decode row)`` for each run,
    in the membership's order.
    """

    plan: str
    epoch: int
    sequence: int
    digest: bytes
    runs: tuple[tuple[int, int, bool], ...] = ()


class Tainted(msgspec.Struct, frozen=True, array_like=True):
    """A stage to those after it, and the tail to head and bridge: values that came from a worker that lied.

    Attributes:
        stage: index of the stage whose worker it was.
        number: of this stage's messages in this epoch, from 0 on.
        rewinds: (request, incarnation, position): KV entries of the request at this position and later ones are void
            at all stages, for incarnations up to this one.
        signature: of that stage, over :func:`taint_digest`.
    """

    plan: str
    epoch: int
    stage: int
    number: int
    rewinds: tuple[tuple[int, int, int], ...]
    signature: bytes


class Submit(msgspec.Struct, frozen=True, array_like=True):
    """Bridge to head: a request.

    ``tokens`` holds the prompt and, when a request goes on after its ring was mended, the tokens already
    made; ``sampling.prompt_length`` tells where the prompt ends.
    """

    request: int
    tokens: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    stop_tokens: tuple[int, ...]
    priority: int = 0
    seconds_left: float = 0.0
    """Time left until the deadline; 0 means none."""
    slot: int = 0
    computed: tuple[int, ...] = ()
    """Positions whose KV entries lie in ``slot``, for each stage of the plan; empty where none do. A head that does not
    know the request goes by it."""

    @property
    def begun(self) -> bool:
        """Whether tokens have been made already."""
        return len(self.tokens) > self.sampling.prompt_length


class Resumed(msgspec.Struct, frozen=True, array_like=True):
    """Bridge to head, once in each epoch: all that is under way has been submitted, and what was not is over.

    The head composes nothing before it, so that what it goes on with is what the bridge has handed out.
    """


class Cancel(msgspec.Struct, frozen=True, array_like=True):
    request: int


class Ended(msgspec.Struct, frozen=True, array_like=True):
    """Head to bridge: a request is over. ``reason`` is stop, length, cancelled, deadline, busy or error."""

    request: int
    reason: str
    message: str = ""
    retry_after: float = 0.0


def codec(limits: Limits) -> Codec:
    """The codec of a ring link for a plan with these limits."""
    return Codec(
        {
            1: Hello,
            2: Welcome,
            3: Refusal,
            4: Ping,
            5: Pong,
            6: Batch,
            7: Result,
            8: Composed,
            9: Submit,
            10: Cancel,
            11: Ended,
            12: Resumed,
            13: Tainted,
        },
        max_header=max_header(limits),
        check=partial(check_message, limits),
    )


def check_message(limits: Limits, message: Any) -> None:
    """Refuse a message whose values no ring of this plan can have.

    What passes may be put into arrays of the types that they are meant for, shown, and sent on.

    Raises:
        WireError: codes ``value``, ``token``, ``slot`` or ``outputs``.
    """
    match message:
        case Batch():
            check_number("sequence", message.sequence, 0, _U64)
            _traces(message.trace)
        case Result():
            check_number("sequence", message.sequence, 0, _U64)
            if len(message.outputs) > limits.rows:
                raise WireError("outputs", f"{len(message.outputs)} tokens, a batch has {limits.rows} rows")
            for output in message.outputs:
                check_output(limits, output)
            _traces(message.trace)
        case Composed():
            check_number("sequence", message.sequence, 0, _U64)
            if len(message.runs) > limits.rows:
                raise WireError("value", f"{len(message.runs)} runs, a batch has {limits.rows} rows")
            for request, rows, _ in message.runs:
                check_number("request", request, 0, _U64)
                check_number("rows", rows, 1, limits.rows)
        case Submit():
            check_number("request", message.request, 0, _U64)
            _tokens(limits, message.tokens)
            check_number("max_tokens", message.max_tokens, 0, _U32)
            check_number("priority", message.priority, -_U32, _U32)
            check_number("seconds_left", message.seconds_left, 0, MAX_TIME)
            _slot(limits, message.slot)
            if message.computed and len(message.computed) != limits.stages:
                raise WireError(
                    "value", f"{len(message.computed)} caches, the plan has {limits.stages} stages"
                )
            for held in message.computed:
                check_number("computed", held, 0, len(message.tokens))
            check_number("stop tokens", len(message.stop_tokens), 0, MAX_SUBMIT_STOP_TOKENS)
        case Ended():
            check_number("retry_after", message.retry_after, 0, MAX_TIME)
        case Tainted():
            check_number("stage", message.stage, 0, limits.stages - 1)
            check_number("number", message.number, 0, _U32)
            check_number("rewinds", len(message.rewinds), 1, MAX_REWINDS)
            for request, incarnation, position in message.rewinds:
                check_number("request", request, 0, _U64)
                check_number("incarnation", incarnation, 0, _U32)
                check_number("position", position, 0, limits.context_length - 1)


def taint_digest(message: Tainted) -> bytes:
    """The 32 bytes that a stage signs: its message without the signature."""
    digest = hashlib.sha256(_TAINT_DOMAIN)
    digest.update(_encoder.encode(msgspec.structs.replace(message, signature=b"")))
    return digest.digest()


def check_number(name: str, value: float, low: float, high: float) -> None:
    """Refuse a number outside its bounds, and what is none. Raises WireError: code ``value``."""
    if not low <= value <= high:  # also false for NaN
        raise WireError("value", f"{name} is {value}, outside {low} to {high}")


def _slot(limits: Limits, slot: int) -> None:
    if not 0 <= slot < limits.slots:
        raise WireError("slot", f"slot {slot} is not in the plan")


def _tokens(limits: Limits, tokens: tuple[int, ...]) -> None:
    if tokens and not (min(tokens) >= 0 and max(tokens) < limits.vocab):
        raise WireError("token", "a token is outside the vocabulary")


def check_output(limits: Limits, output: Output) -> None:
    """Refuse a token that nobody can have sampled. Raises WireError: ``value``, ``slot``, ``outputs``, ``token``."""
    check_number("request", output.request, 0, _U64)
    check_number("incarnation", output.incarnation, 0, _U32)
    check_number("position", output.position, 0, limits.context_length - 1)
    _slot(limits, output.slot)
    if len(output.top) > limits.top_logprobs:
        raise WireError("outputs", f"{len(output.top)} best tokens, the plan allows {limits.top_logprobs}")
    _tokens(limits, (output.token, *(token for token, _ in output.top)))


def _traces(traces: tuple[StageTrace, ...]) -> None:
    check_number("stages in a trace", len(traces), 0, MAX_STAGES)
    for trace in traces:
        check_number("stage", trace.stage, 0, MAX_STAGES - 1)
        for value in (trace.held_ms, trace.starved_ms, trace.blocked_ms, trace.arrived, trace.waited_ms):
            if not math.fabs(value) <= MAX_TIME:
                raise WireError("value", f"a time of {value} in a trace")
        for count in (trace.queue, trace.rows, trace.boundary_bytes):
            check_number("a count in a trace", count, 0, _U64)


def max_header(limits: Limits) -> int:
    """Most bytes of a header: a batch's membership, a result's rows, or a submitted prompt."""
    result = limits.rows * (RESULT_ROW_BYTES + limits.top_logprobs * TOP_LOGPROB_BYTES)
    submit = 5 * (limits.context_length + MAX_SUBMIT_STOP_TOKENS) + limits.bytes
    return max(limits.bytes, result, submit) + HEADER_SLACK


def max_batch_frame(limits: Limits, dtype: str, n_embd: int) -> int:
    """Most bytes of a frame on a ``batches`` link: both ends derive it from the plan."""
    return PREFIX_BYTES + limits.bytes + HEADER_SLACK + tensor_bytes(dtype, limits.rows, n_embd)


def max_result_frame(limits: Limits) -> int:
    """Most bytes of a frame on a ``results`` or ``tokens`` link."""
    rows = limits.rows * (RESULT_ROW_BYTES + limits.top_logprobs * TOP_LOGPROB_BYTES)
    return PREFIX_BYTES + rows + HEADER_SLACK


def max_request_frame(limits: Limits) -> int:
    """Most bytes of a frame on a ``requests`` link."""
    return PREFIX_BYTES + max_header(limits)


# What a Hello may take before any plan is looked up.
OPENING = Codec({1: Hello, 2: Welcome, 3: Refusal, 4: Ping, 5: Pong}, max_header=1024)
MAX_OPENING_FRAME = PREFIX_BYTES + 1024
