"""What planning a ring begins with: the model's sizes, what peers offer, how far they are apart, what is wished."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvasir_peer.engines.footprint import DEFAULT_EXPANSION, NO_FLOATS, RESERVE, Floats, process_bytes
from kvasir_peer.ring.plan import MAX_STAGES, Plan
from kvasir_peer.serving.costs import Line, RingCosts
from kvasir_peer.serving.pacing import chunk_rows, decode_shape, decode_throughput
from kvasir_peer.serving.widths import Widths

# Measured on quantised layers: of a pass over one row, this share is reading weights, paid once per pass, and the
# rest is paid again for each further row (4-bit weights: 204 microseconds for one row, 459 for four).
BASE_SHARE = 0.6
# A pass has a fixed cost beside the weights: handing over, kernels, sampling.
PASS_SECONDS = 0.001
# Read rate assumed of a peer that has not measured itself (bytes per second): two old cores.
UNKNOWN_READ_RATE = 4e9
# One request alone weighs twice as much as all together: it is what a person at a chat feels.
ALONE_WEIGHT, TOGETHER_WEIGHT = 2.0, 1.0
FORECAST_PROMPT = 512  # tokens of the prompt whose first token is forecast


@dataclass(frozen=True, slots=True)
class ModelNeeds:
    """Sizes of a model.

    Attributes:
        model: manifest id.
        n_embd, vocab: as in the plan.
        layer_bytes: bytes of each layer's weights in the file.
        head_bytes: of the embedding, at the head.
        tail_bytes: of norm and output (and of the embedding, where it serves as output), at the tail.
        kv_bytes: KV cache bytes of one layer and one position.
        layer_floats, head_floats, tail_floats: of these bytes, those that no engine keeps in blocks.
    """

    model: str
    n_embd: int
    vocab: int
    layer_bytes: tuple[int, ...]
    head_bytes: int
    tail_bytes: int
    kv_bytes: int
    layer_floats: tuple[Floats, ...] = ()
    head_floats: Floats = NO_FLOATS
    tail_floats: Floats = NO_FLOATS

    @property
    def n_layer(self) -> int:
        return len(self.layer_bytes)

    def layers_of(self, first: int, end: int) -> float:
        """Layers of a slice, the tail's output counted as so many layers as it has bytes of them."""
        tail = self.tail_bytes if end == self.n_layer else 0
        return end - first + tail / max(1.0, sum(self.layer_bytes) / self.n_layer)

    def file_bytes(self, first: int, end: int) -> int:
        """Bytes of the stage slice in the file."""
        total = sum(self.layer_bytes[first:end])
        total += self.head_bytes if first == 0 else 0
        return total + (self.tail_bytes if end == self.n_layer else 0)

    def loaded_bytes(self, first: int, end: int, expansion: float) -> float:
        """Bytes of the stage slice in memory, where block-quantised weights take so many times what the file has."""
        floats = list(self.layer_floats[first:end])
        floats += [self.head_floats] if first == 0 else []
        floats += [self.tail_floats] if end == self.n_layer else []
        blocks = self.file_bytes(first, end) - sum([part.file for part in floats])
        return blocks * expansion + RESERVE * sum([part.loaded for part in floats])


@dataclass(frozen=True, slots=True)
class StageOffer:
    """A peer that would be a stage.

    Attributes:
        peer: peer id.
        memory, disk: bytes that its owner gives.
        engine: name, for the memory estimate.
        read_rate: measured bytes of weights per second of a one-row pass; 0 where it has not been measured.
        pass_base, pass_row: measured seconds per layer and pass, and per layer and row; they take precedence over
            ``read_rate`` where they are set.
        addresses: where other peers reach it.
        on_disk: slices ``(first, end)`` whose chunks it has.
        loaded: slice that its engine holds at present.
        bridge: runs on the bridge's own machine.
        expansion: bytes of memory that its engine makes of each byte of block-quantised weights, its reserve included.
    """

    peer: str
    memory: int
    disk: int
    engine: str = "onnx"
    read_rate: float = 0.0
    pass_base: float = 0.0
    pass_row: float = 0.0
    addresses: tuple[str, ...] = ()
    on_disk: frozenset[tuple[int, int]] = frozenset()
    loaded: tuple[int, int] | None = None
    bridge: bool = False
    expansion: float = DEFAULT_EXPANSION

    def line(self, needs: ModelNeeds, first: int, end: int) -> Line:
        """Expected seconds of a pass over the slice."""
        tail = needs.tail_bytes if end == needs.n_layer else 0
        if self.pass_base > 0 or self.pass_row > 0:
            layers = needs.layers_of(first, end)
            return Line(PASS_SECONDS + layers * self.pass_base, layers * self.pass_row)
        seconds = (sum(needs.layer_bytes[first:end]) + tail) / (self.read_rate or UNKNOWN_READ_RATE)
        return Line(PASS_SECONDS + BASE_SHARE * seconds, (1 - BASE_SHARE) * seconds)


@dataclass(frozen=True, slots=True)
class LinkTime:
    """``seconds`` one way for an empty frame, ``rate`` in bytes per second (0: not known)."""

    seconds: float
    rate: float = 0.0


@dataclass(frozen=True, slots=True)
class Links:
    """Times between peers, measured where they were.

    Attributes:
        default: for pairs that nobody has measured.
        pairs: ``(peer, peer)`` in either order.
    """

    default: LinkTime = LinkTime(0.005)
    pairs: Mapping[tuple[str, str], LinkTime] = field(default_factory=dict)

    def between(self, a: str, b: str) -> LinkTime:
        if a == b:
            return LinkTime(0.0)
        return self.pairs.get((a, b)) or self.pairs.get((b, a)) or self.default

    def measured(self, a: str, b: str) -> bool:
        """Whether somebody has measured this pair."""
        return (a, b) in self.pairs or (b, a) in self.pairs


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the person at the bridge has asked for.

    Attributes:
        widths: of the ring.
        stages: exactly so many; None takes as many as are good.
        dtype: of boundaries.
        max_stages: with ``stages`` None, no more than these.
    """

    widths: Widths
    stages: int | None = None
    dtype: str = "f16"
    max_stages: int = MAX_STAGES


@dataclass(frozen=True, slots=True)
class Ground:
    """What all planning of one ring goes by.

    Attributes:
        offers: one per peer that may have a place.
        needs: the model.
        links: measured times.
        wishes: widths and number of stages.
        memory: ``(offer, first, end) -> bytes`` of a slice, if an engine can tell better than the sizes.
    """

    offers: Sequence[StageOffer]
    needs: ModelNeeds
    links: Links
    wishes: Wishes
    memory: Memory | None = None


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a ring should do.

    Attributes:
        alone: tokens per second of one request that has the ring for itself.
        together: tokens per second of all ``requests`` slots together.
        requests: slots.
        first_token: seconds until the first token of a prompt of 512 tokens (or as many as the context
            holds), alone.
        slowest: index of the stage that is busiest.
        by_link: whether the slowest link, not a stage, sets the pace of all together.
    """

    alone: float
    together: float
    requests: int
    first_token: float
    slowest: int
    by_link: bool = False

    @property
    def score(self) -> float:
        """Geometric mean of the two speeds, by their weights."""
        weight = ALONE_WEIGHT + TOGETHER_WEIGHT
        return float(self.alone ** (ALONE_WEIGHT / weight) * self.together ** (TOGETHER_WEIGHT / weight))


@dataclass(frozen=True, slots=True)
class Place:
    """What became of an offer, in words for its owner."""

    peer: str
    role: Literal["stage", "standby", "none"]
    why: str
    slice: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Planned:
    """Either a plan with its forecast, or what is missing (one line)."""

    plan: Plan | None
    missing: str
    places: tuple[Place, ...]
    forecast: Forecast | None = None


Memory = Callable[[StageOffer, int, int], int]
Slice = tuple[int, int]


def memory_needed(needs: ModelNeeds, widths: Widths, offer: StageOffer, first: int, end: int) -> int:
    """Bytes that a stage takes: weights, KV cache of all slots, boundaries, the engine's reserve, and its process."""
    weights = needs.loaded_bytes(first, end, offer.expansion)
    kv = needs.kv_bytes * (end - first) * widths.context_length * widths.max_requests
    rows = 4 * widths.micro_batch_rows * needs.n_embd * (2 * widths.max_in_flight + 8)
    logits = 4 * widths.micro_batch_rows * needs.vocab if end == needs.n_layer else 0
    return int(weights + RESERVE * (kv + rows + logits)) + process_bytes(offer.engine)


def gigabytes(count: float) -> str:
    if count < 1e6:
        return f"{count / 1e3:.0f} kB"
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def layers_text(part: Slice) -> str:
    first, end = part
    return f"layer {first}" if end == first + 1 else f"layers {first} to {end - 1}"


def forecast_of(costs: RingCosts, widths: Widths) -> Forecast:
    """What the scheduler will make of these costs."""
    requests = widths.max_requests
    shape = decode_shape(costs, requests, widths)
    together = decode_throughput(costs, requests, shape.in_flight, shape.decode_rows)
    prompt = max(1, min(FORECAST_PROMPT, widths.context_length - 1))
    rows = chunk_rows(costs, prompt, widths)
    slowest = costs.slowest(rows)
    first = (math.ceil(prompt / rows) - 1) * slowest + costs.round_trip(rows)
    busiest = max(range(len(costs.stages)), key=lambda i: costs.stages[i].seconds(shape.rows))
    by_link = costs.hop_per_row * shape.rows > costs.stages[busiest].seconds(shape.rows)
    return Forecast(1.0 / costs.round_trip(1), together, requests, first, busiest, by_link)
