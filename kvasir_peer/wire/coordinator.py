"""Messages of ``/kvasir/coordinator/1``: the bridge hands requests to a coordinator and gets tokens back.

The bridge opens the link with :class:`Hello`; the coordinator answers :class:`Welcome` with what it can take, or
:class:`~kvasir_peer.wire.ring.Refusal`. :class:`~kvasir_peer.wire.ring.Submit` and
:class:`~kvasir_peer.wire.ring.Cancel` go to the coordinator, :class:`Tokens` and
:class:`~kvasir_peer.wire.ring.Ended` come back. :class:`SlotsWanted` is answered with :class:`Slots` at once, from a
task of its own, however busy the coordinator is.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec

from kvasir_peer.errors import WireError
from kvasir_peer.wire.codec import PREFIX_BYTES, Codec
from kvasir_peer.wire.dispatching import Count, DispatchFigures
from kvasir_peer.wire.membership import Limits
from kvasir_peer.wire.ring import (
    MAX_SUBMIT_STOP_TOKENS,
    RESULT_ROW_BYTES,
    TOP_LOGPROB_BYTES,
    Cancel,
    Ended,
    Output,
    Refusal,
    Submit,
    check_message,
    check_number,
    check_output,
)

PROTOCOL = "/kvasir/coordinator/1"

MAX_SLOTS = 4096
MAX_CONTEXT = 1 << 22
MAX_TOP_LOGPROBS = 20
MAX_WORKERS = 1024  # in one answer to SlotsWanted, and as many layers
MAX_CAUGHT = 256  # workers found to lie, in one answer
MAX_COUNT = 1 << 48  # of rows: a thousand of them every microsecond for three days
_MAX_NAME, _MAX_REASON = 128, 300  # characters
_U63, _U64 = (1 << 63) - 1, (1 << 64) - 1
_MAX_HELLO = 1024
_SLACK = 8192


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """First frame: for which model (manifest id)."""

    model: str


class Welcome(msgspec.Struct, frozen=True, array_like=True):
    """What the coordinator can take.

    Attributes:
        slots: requests that are computed at once.
        context_length: positions of each.
        vocab: tokens of the model.
        top_logprobs: most alternatives of a token.
    """

    slots: int
    context_length: int
    vocab: int
    top_logprobs: int

    def check(self) -> None:
        """Refuse absurd sizes. Raises WireError: code ``oversize``."""
        limits = (
            ("slots", self.slots, MAX_SLOTS),
            ("context_length", self.context_length, MAX_CONTEXT),
            ("vocab", self.vocab, MAX_CONTEXT),
        )
        for name, value, most in limits:
            if not 1 <= value <= most:
                raise WireError("oversize", f"a coordinator with {name} {value}, 1 to {most} are allowed")
        if not 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS:
            raise WireError("oversize", f"a coordinator with top_logprobs {self.top_logprobs}")

    @property
    def submit_frame(self) -> int:
        """Most bytes of a frame from the bridge."""
        return PREFIX_BYTES + self.header

    @property
    def header(self) -> int:
        """Most bytes of any header."""
        prompt = 5 * (self.context_length + MAX_SUBMIT_STOP_TOKENS) + 8192
        tokens = self.slots * (RESULT_ROW_BYTES + self.top_logprobs * TOP_LOGPROB_BYTES)
        return max(prompt, tokens, 512 * MAX_WORKERS) + _SLACK

    def codec(self) -> Codec:
        """The codec of a link with such a coordinator."""
        limits = Limits(self.slots, self.slots, self.context_length, self.vocab, self.top_logprobs, 1)
        return Codec(_KINDS, max_header=self.header, check=partial(_check, limits))


class Tokens(msgspec.Struct, frozen=True, array_like=True):
    """Tokens of one pass."""

    outputs: tuple[Output, ...]


class SlotsWanted(msgspec.Struct, frozen=True, array_like=True):
    nonce: int


class WorkerRows(msgspec.Struct, frozen=True, array_like=True):
    """What one worker has computed for this coordinator since both started: rows used, and found right."""

    peer: str
    rows: Count
    checked: Count


class Slots(msgspec.Struct, frozen=True, array_like=True):
    """How busy the coordinator is.

    Attributes:
        busy, total, queue: slots, and requests that wait for one.
        run: random number of this start, since which the counters below count.
        mode: of its dispatch: ``local``, ``load`` or ``cooling``.
        local_pairs, remote_pairs: row-expert pairs computed here, by workers.
        heat: (layer, rows routed).
        workers: what they have done.
        caught: (peer, why) of workers found to lie.
        figures: of its dispatch.
    """

    nonce: int
    busy: int
    total: int
    queue: int
    run: int = 0
    mode: str = "local"
    local_pairs: Count = 0
    remote_pairs: Count = 0
    heat: tuple[tuple[int, int], ...] = ()
    workers: tuple[WorkerRows, ...] = ()
    caught: tuple[tuple[str, str], ...] = ()
    figures: DispatchFigures = DispatchFigures()


def _check(limits: Limits, message: Any) -> None:
    """Refuse values that no coordinator of this size, and no bridge of it, can mean.

    Raises:
        WireError: codes ``value``, ``token``, ``slot``, ``outputs``, ``oversize`` or ``sampling``.
    """
    match message:
        case Submit():
            message.sampling.check(top_logprobs=limits.top_logprobs)
            check_message(limits, message)
        case Ended():
            check_message(limits, message)
        case Cancel():
            check_number("request", message.request, 0, _U64)
        case Tokens():
            if len(message.outputs) > limits.slots:
                raise WireError("outputs", f"{len(message.outputs)} tokens of {limits.slots} slots")
            for output in message.outputs:
                check_output(limits, output)
        case SlotsWanted():
            check_number("nonce", message.nonce, 0, _U64)
        case Slots():
            _check_slots(message)


def _check_slots(message: Slots) -> None:
    check_number("nonce", message.nonce, 0, _U64)
    check_number("run", message.run, 0, _U63)
    for name, count in (("busy", message.busy), ("total", message.total), ("queue", message.queue)):
        check_number(name, count, 0, 1 << 20)
    for name, count in (("local_pairs", message.local_pairs), ("remote_pairs", message.remote_pairs)):
        check_number(name, count, 0, _U63)
    for name, items, most in (
        ("layers", message.heat, MAX_WORKERS),
        ("workers", message.workers, MAX_WORKERS),
        ("workers that lied", message.caught, MAX_CAUGHT),
    ):
        if len(items) > most:
            raise WireError("oversize", f"{len(items)} {name} in one answer, at most {most}")
    for layer, rows in message.heat:
        check_number("layer", layer, 0, 1 << 16)
        check_number("rows of a layer", rows, 0, _U63)
    for worker in message.workers:
        _check_text("peer", worker.peer, _MAX_NAME)
        check_number("rows of a worker", worker.rows, 0, MAX_COUNT)
        check_number("checked rows of a worker", worker.checked, 0, MAX_COUNT)
    for peer, why in message.caught:
        _check_text("peer", peer, _MAX_NAME)
        _check_text("reason", why, _MAX_REASON)
    _check_text("mode", message.mode, _MAX_NAME)


def _check_text(name: str, text: str, most: int) -> None:
    if len(text) > most:
        raise WireError("oversize", f"a {name} of {len(text)} characters, at most {most}")


_KINDS: dict[int, type[msgspec.Struct]] = {
    1: Hello,
    2: Welcome,
    3: Refusal,
    4: Submit,
    5: Cancel,
    6: Tokens,
    7: Ended,
    8: SlotsWanted,
    9: Slots,
}
OPENING = Codec({1: Hello, 2: Welcome, 3: Refusal}, max_header=_MAX_HELLO)
MAX_OPENING_FRAME = PREFIX_BYTES + _MAX_HELLO
