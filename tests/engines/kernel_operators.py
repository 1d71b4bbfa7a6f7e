"""The C kernels as operators of onnxruntime, one at a time, and weights for them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvasir_peer.engines import panels, quants
from kvasir_peer.engines.base import Precision
from kvasir_peer.engines.onnx_graph import Graph, Runtime, Session
from kvasir_peer.engines.onnx_linear import Matrix, forward_node
from kvasir_peer.models.split_experts import FLOAT16_SCALES

KINDS = [quants.TYPES[type_id] for type_id in panels.TYPES]
NAMES = [kind.name for kind in KINDS]


def all_blocks(kind: quants.QuantType, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Blocks of any bytes that stand for numbers: all codes and scales, float16 of every size and sign."""
    blocks = rng.integers(0, 256, (int(np.prod(shape)) // kind.block, kind.block_bytes), dtype=np.uint8)
    for at in FLOAT16_SCALES.get(kind.name, ()):
        bits = rng.integers(0, 0x7C00, len(blocks)) | rng.integers(0, 2, len(blocks)) << 15
        blocks[:, at : at + 2] = bits.astype("<u2").view(np.uint8).reshape(-1, 2)
    if kind.name == "MXFP4":
        # Below are no normal floats, and far above nothing that could be summed up.
        blocks[:, 0] = rng.integers(2, 200, len(blocks))
    return blocks.reshape(*shape[:-1], -1)


def linear(
    library: Path,
    kind: quants.QuantType,
    raw: np.ndarray,
    rows: int,
    columns: int,
    bias: np.ndarray | None = None,
    threads: int = 1,
    precision: Precision = "fast",
) -> Session:
    """A product: x [n, columns] to y [n, rows]."""
    g = Graph()
    inputs = [g.input("x", ["n", columns]), g.resident(panels.pack(raw, kind.id, rows, columns))]
    if bias is not None:
        inputs.append(g.resident(bias))
    exact = int(precision == "exact")
    y = g.own(library, "Linear", *inputs, type=kind.id, rows=rows, columns=columns, exact=exact)
    g.output(y, "y", ["n", rows])
    return g.session(Runtime(threads))


class Experts:
    """Feed-forward parts.

    Args:
        kinds: of gate, up and down.
        columns: width of x.
        width: of the hidden layer.
        count: of experts.
        activation: between.
        biased: whether there are biases.
        rng: where weights come from.
        blocks: makes weights.
    """

    def __init__(
        self,
        kinds: Sequence[quants.QuantType],
        columns: int,
        width: int,
        count: int,
        activation: str,
        biased: bool,
        rng: np.random.Generator,
        blocks,
    ) -> None:
        self.kinds = kinds
        self.columns, self.width, self.count, self.activation = columns, width, count, activation
        self.shapes = [(count, width, columns), (count, width, columns), (count, columns, width)]
        self.raw = [blocks(kind, shape, rng) for kind, shape in zip(kinds, self.shapes, strict=True)]
        self.weights = [
            quants.dequantize(raw, kind.id, shape)
            for raw, kind, shape in zip(self.raw, kinds, self.shapes, strict=True)
        ]
        sizes = [(count, rows) for _, rows, _ in self.shapes]
        self.biases = [rng.standard_normal(s).astype(np.float32) if biased else None for s in sizes]

    def session(
        self,
        library: Path,
        threads: int = 1,
        routed: bool = True,
        precision: Precision = "fast",
        first: bool = False,
    ) -> Session:
        """x [n, columns], places [n, k], mix [n, k] to y [n, columns] and done [1, 2]."""
        g = Graph()
        inputs = [g.input("x", ["n", self.columns])]
        for raw, kind, (_, rows, columns) in zip(self.raw, self.kinds, self.shapes, strict=True):
            laid = [panels.pack(expert, kind.id, rows, columns) for expert in raw]
            inputs.append(g.resident(np.concatenate(laid)))
        inputs += (
            [g.input("places", ["n", "k"], np.int32), g.input("mix", ["n", "k"])] if routed else ["", ""]
        )
        inputs += ["" if bias is None else g.resident(bias) for bias in self.biases]
        infos = [Matrix("", np.empty(0, np.uint8), kind.id, 0, 0) for kind in self.kinds]
        y, done = forward_node(
            g,
            library,
            inputs,
            infos,
            self.columns,
            self.width,
            self.count,
            self.activation,
            precision,
            first=first,
        )
        g.output(y, "y", ["n", self.columns])
        g.output(done, "done", [1, 2], np.int32)
        return g.session(Runtime(threads))

    def reference(
        self, x: np.ndarray, places: np.ndarray, mix: np.ndarray, precision: Precision = "fast"
    ) -> np.ndarray:
        """The same by its definition, with activations rounded as kernels round them in that precision."""
        seen = rounded if precision == "fast" else lambda values: values.astype(np.float64)
        y = np.zeros((len(x), self.columns))
        for row, column in np.argwhere((places >= 0) & (places < self.count)):
            e = places[row, column]
            gate, up = (
                seen(x[row : row + 1]) @ w[e].astype(np.float64).T + (0.0 if bias is None else bias[e])
                for w, bias in zip(self.weights[:2], self.biases[:2], strict=True)
            )
            hidden = seen(activate(self.activation, gate, up).astype(np.float32))
            out = hidden @ self.weights[2][e].astype(np.float64).T
            bias = self.biases[2]
            y[row] += mix[row, column] * (out[0] + (0.0 if bias is None else bias[e]))
        return y


def activate(activation: str, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """The activation by its definition."""
    with np.errstate(over="ignore"):
        if activation == "silu":
            return gate / (1 + np.exp(-gate)) * up
        if activation == "gelu_tanh":
            return gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) / 2 * up
        gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
        return gate / (1 + np.exp(-1.702 * gate)) * (up + 1)


def rounded(x: np.ndarray) -> np.ndarray:
    """Activations as the kernels see them: float64 [n, columns], 8 bits and a float32 step for each 32."""
    blocks = x.astype(np.float32).reshape(len(x), -1, 32)
    most = np.abs(blocks).max(-1, keepdims=True)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.minimum(np.float32(127) / most, np.float32(2.0**126))
        steps = np.maximum(most / np.float32(127), np.float32(2.0**-126))
    codes = np.rint(blocks * inverse)
    assert np.abs(codes).max() <= 127
    return (codes.astype(np.float64) * steps).reshape(x.shape)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether floats are the same, the signs of zeros too."""
    return a.shape == b.shape and bool(np.array_equal(a.view(np.uint32), b.view(np.uint32)))
