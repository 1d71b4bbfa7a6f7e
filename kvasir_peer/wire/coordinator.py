"""Messages of ``/kvasir/coordinator/1``: the bridge hands requests to a coordinator and gets tokens back.

The bridge opens the link with :class:`Hello`; the coordinator answers :class:`Welcome` with what it can take, or
:class:`~kvasir_peer.wire.ring.Refusal`. :class:`~kvasir_peer.wire.ring.Submit` and
:class:`~kvasir_peer.wire.ring.Cancel` go to the coordinator, :class:`Tokens` and
:class:`~kvasir_peer.wire.ring.Ended` come back. :class:`SlotsWanted` is answered with :class:`Slots` at once, from a
task of its own, however busy the coordinator is.
"""

from __future__ import annotations

import msgspec

from kvasir_peer.errors import WireError
from kvasir_peer.wire.codec import PREFIX_BYTES, Codec
from kvasir_peer.wire.dispatching import Count, DispatchFigures
from kvasir_peer.wire.ring import (
    MAX_SUBMIT_STOP_TOKENS,
    RESULT_ROW_BYTES,
    TOP_LOGPROB_BYTES,
    Cancel,
    Ended,
    Output,
    Refusal,
    Submit,
)

PROTOCOL = "/kvasir/coordinator/1"

MAX_SLOTS = 4096
MAX_CONTEXT = 1 << 22
MAX_TOP_LOGPROBS = 20
MAX_WORKERS = 1024  # in one answer to SlotsWanted
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
        return Codec(_KINDS, max_header=self.header)


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
