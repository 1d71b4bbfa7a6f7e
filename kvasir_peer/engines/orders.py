"""What an agent and its engine process say to each other over their socketpair.

Every message is a frame (u32 length, little endian, then :mod:`kvasir_peer.wire.codec`'s layout without payload).
Tensors never cross the socket: they lie in the *arena*, memory that both processes map, cut into equal buffers.
An order names the buffer that it reads, and its answer is written into the same buffer.
"""

from __future__ import annotations

import struct
from typing import Literal

import msgspec

from kvasir_peer.wire.codec import Codec
from kvasir_peer.wire.membership import MAX_MEMBERSHIP_BYTES
from kvasir_peer.wire.ring import Output

LENGTH = struct.Struct("<I")
# A membership at the widest plan that passes its check, and what is said with it; the notes of a load take less.
MAX_ORDER_BYTES = MAX_MEMBERSHIP_BYTES + (64 << 10)


class ArenaShape(msgspec.Struct, frozen=True, array_like=True):
    """Equal buffers in shared memory."""

    buffers: int
    buffer_bytes: int

    @property
    def total(self) -> int:
        """Bytes of the whole arena."""
        return self.buffers * self.buffer_bytes


class StoreWeights(msgspec.Struct, frozen=True, tag="store"):
    """Weights from the chunks of a store: only the slice's are there."""

    store: str
    manifest: str
    """Path of a file with the encoded manifest (root and pages of the slice)."""


class GgufWeights(msgspec.Struct, frozen=True, tag="gguf"):
    """Weights straight from a GGUF file."""

    path: str


class NoWeights(msgspec.Struct, frozen=True, tag="none"):
    """No weights at all: for the synthetic engine."""


class LoadStage(msgspec.Struct, frozen=True):
    """Load layers [first, end) and be ready for passes; replaces what was loaded before."""

    job: int
    weights: StoreWeights | GgufWeights | NoWeights
    engine: str
    stage: int
    """Index of the stage in its ring of ``stages``."""
    stages: int
    first: int
    end: int
    n_layer: int
    n_embd: int
    vocab: int
    n_slots: int
    context_length: int
    max_rows: int
    dtype: str
    top_logprobs: int
    precision: str
    threads: int
    device: str
    arena: ArenaShape
    memory_limit: int = 0
    """Bytes that the stage may take by its own estimate; 0 is what the machine has free."""
    measure: bool = False
    """Whether to make a few passes and say what they took."""
    expert_floor_ms: float = 0.0
    """Least time of the routed experts for each row-expert pair, so that slow machines can be measured on fast ones."""


class Loaded(msgspec.Struct, frozen=True):
    """The stage is loaded. Bytes as estimated before loading, and as measured afterwards."""

    job: int
    seconds: float
    weights_bytes: int
    kv_bytes: int
    workspace_bytes: int
    resident_bytes: int
    notes: tuple[str, ...] = ()
    passes: tuple[tuple[int, float], ...] = ()
    """Rows and seconds of the passes that were measured."""


class Progress(msgspec.Struct, frozen=True):
    job: int
    done: int
    total: int


class Pass(msgspec.Struct, frozen=True, array_like=True):
    """One batch: the boundary lies in ``buffer`` (nothing at the head)."""

    job: int
    stage: int
    """Job of the :class:`LoadStage` or :class:`Retarget` that the batch is for; a batch for an earlier one fails."""
    buffer: int
    membership: bytes
    boundary_bytes: int
    layers: tuple[int, ...] = ()
    """Layers at which the routed rows are handed out (:class:`Routed`); experts of the others are computed here."""


class Routed(msgspec.Struct, frozen=True, array_like=True):
    """A pass stands at a layer: its routed rows lie in its buffer (:mod:`kvasir_peer.wire.experts`, f32).

    It goes on when :class:`Resume` says that the sums, f32 ``[rows, n_embd]``, lie there instead. Other passes are
    computed meanwhile.
    """

    job: int
    layer: int
    rows: int
    experts: int


class Resume(msgspec.Struct, frozen=True, array_like=True):
    """The routed sums of a pass lie in its buffer."""

    job: int


class LoadBank(msgspec.Struct, frozen=True):
    """Load experts and be ready for :class:`ExpertPass`; replaces what was loaded before. Answer: :class:`Loaded`."""

    job: int
    weights: StoreWeights | GgufWeights
    engine: str
    ranges: tuple[tuple[int, int, int], ...]
    max_rows: int
    precision: str
    threads: int
    device: str
    arena: ArenaShape
    memory_limit: int = 0
    expert_floor_ms: float = 0.0


Urgency = Literal["ring", "shared", "experts", "checks"]


class ExpertPass(msgspec.Struct, frozen=True, array_like=True):
    """Routed rows for the loaded bank, or for the loaded stage's own experts; the sums go into the same buffer.

    Attributes:
        loaded: job of the load that it is for.
        urgency: ``ring`` where a pass waits for it, ``shared`` where it waits for workers' sums too, ``experts`` for
            other peers' rows, ``checks`` for the rest.
    """

    job: int
    loaded: int
    buffer: int
    layer: int
    rows: int
    experts: int
    dtype: str
    urgency: Urgency = "experts"


class ExpertsDone(msgspec.Struct, frozen=True, array_like=True):
    """The sums of an :class:`ExpertPass` lie in its buffer."""

    job: int
    size: int
    held_ms: float


class PassDone(msgspec.Struct, frozen=True, array_like=True):
    """The batch is computed: ``boundary_bytes`` lie in its buffer, or, at the tail, ``outputs`` are sampled."""

    job: int
    boundary_bytes: int
    outputs: tuple[Output, ...]
    held_ms: float
    starved_ms: float


class Failed(msgspec.Struct, frozen=True):
    """An order could not be carried out; ``error`` names a class of :mod:`kvasir_peer.errors`."""

    job: int
    error: str
    message: str


class Ready(msgspec.Struct, frozen=True):
    """The process is up."""

    pid: int


class Retarget(msgspec.Struct, frozen=True):
    """The loaded stage has another index from now on, in a ring of ``stages``; its weights and KV cache stay.

    Batches that were sent before and have not begun fail: nobody waits for them. Its answer also says that no buffer is
    in use.
    """

    job: int
    stage: int
    stages: int


class Retargeted(msgspec.Struct, frozen=True):
    job: int


class Forget(msgspec.Struct, frozen=True):
    """Give back all weights and memory, and answer :class:`Forgotten`."""

    job: int


class Forgotten(msgspec.Struct, frozen=True):
    job: int
    resident_bytes: int


class Try(msgspec.Struct, frozen=True):
    """Try an engine's kernels, which may compile for some seconds. Answer: :class:`Tried`."""

    job: int
    engine: str
    device: str
    precision: str


class Tried(msgspec.Struct, frozen=True):
    """Bytes of memory for each byte of block-quantised weights (:mod:`kvasir_peer.engines.footprint`)."""

    job: int
    expansion: float


class Quit(msgspec.Struct, frozen=True):
    """End the process; there is no answer."""


CODEC = Codec(
    {
        1: Ready,
        2: LoadStage,
        3: Loaded,
        4: Progress,
        5: Pass,
        6: PassDone,
        7: Failed,
        8: Forget,
        9: Forgotten,
        10: Quit,
        11: Retarget,
        12: Retargeted,
        13: Routed,
        14: Resume,
        15: LoadBank,
        16: ExpertPass,
        17: ExpertsDone,
        18: Try,
        19: Tried,
    },
    max_header=MAX_ORDER_BYTES,
)


def pack(message: msgspec.Struct) -> bytes:
    """One frame with its length in front."""
    frame = b"".join(bytes(piece) for piece in CODEC.encode(message))
    return LENGTH.pack(len(frame)) + frame
