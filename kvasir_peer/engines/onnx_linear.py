"""Products with weight matrices, as nodes of a graph.

How weights are kept, and so which nodes multiply by them: :mod:`kvasir_peer.engines.onnx_containers`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvasir_peer.engines import panels, quants
from kvasir_peer.engines.base import F32, Precision
from kvasir_peer.engines.onnx_containers import SUM_COLUMNS, Kernels, centred, container, widened
from kvasir_peer.engines.onnx_graph import Graph

if TYPE_CHECKING:
    from kvasir_peer.models.gguf import TensorInfo

# As in kernels/work.h.
_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "swiglu_oai": 2}


class Laid:
    """Panels by the names of their tensors, which graphs share; and where more of them go."""

    def __init__(self) -> None:
        self.by_names: dict[tuple[str, ...], NDArray[np.uint8]] = {}
        self.shelf = panels.Shelf()


@dataclass(frozen=True, eq=False)
class Matrix:
    """A weight matrix as the file has it.

    Attributes:
        name: of its tensor.
        raw: uint8, its bytes.
        type: ggml type.
        rows: outputs.
        columns: inputs.
    """

    name: str
    raw: NDArray[Any]
    type: int
    rows: int
    columns: int


def forward_node(
    g: Graph,
    library: Path,
    inputs: Sequence[str],
    matrices: Sequence[Matrix | TensorInfo],
    columns: int,
    width: int,
    experts: int,
    activation: str,
    precision: Precision,
    *,
    counted: bool = True,
    first: bool = False,
) -> list[str]:
    """Add a ``FeedForward`` node (see kernels/onnx_feed_forward.c).

    Args:
        g: the graph.
        library: of C kernels.
        inputs: as the operator takes them.
        matrices: gate, up and down, for their types.
        columns: of x.
        width: of the hidden layer.
        experts: how many there are.
        activation: of the layer.
        precision: ``exact`` keeps activations in float32.
        counted: whether there is a second result.
        first: whether it is the first of a run to use other threads; it finds out then whether waking them pays.

    Returns:
        The sum, [n, columns]; how many experts were computed and how many rows of all of them, int32 [1, 2].
    """
    kept = list(inputs)
    while not kept[-1]:
        kept.pop()
    gate, up, down = (m.type for m in matrices)
    return g.owns(
        library,
        "FeedForward",
        2 if counted else 1,
        *kept,
        gate_type=gate,
        up_type=up,
        down_type=down,
        columns=columns,
        width=width,
        experts=experts,
        activation=_ACTIVATIONS[activation],
        exact=int(precision == "exact"),
        first=int(first),
    )


def _panels(matrices: Sequence[Matrix], threads: int, shelf: panels.Shelf) -> NDArray[np.uint8]:
    """Lay matrices of one type below each other as panels."""
    first = matrices[0]
    cores = threads or os.cpu_count() or 1
    rows = sum(m.rows for m in matrices)
    if any(m.rows % panels.ROWS for m in matrices[:-1]):
        raw = np.concatenate([m.raw.reshape(-1) for m in matrices])
        matrices = [Matrix(first.name, raw, first.type, rows, first.columns)]
    out = shelf.take(panels.panel_bytes(first.type, rows, first.columns))
    begin = 0
    for m in matrices:
        end = begin + panels.panel_bytes(m.type, m.rows, m.columns)
        panels.pack(m.raw, m.type, m.rows, m.columns, cores, out[begin:end])
        begin = end
    return out


def _side_by_side(matrices: Sequence[Matrix], biases: Sequence[F32 | None]) -> F32 | None:
    """Join biases of matrices that are one product; zeros where one has none."""
    if all(bias is None for bias in biases):
        return None
    return np.concatenate(
        [np.zeros(m.rows, np.float32) if b is None else b for m, b in zip(matrices, biases, strict=True)]
    )


class Linears:
    """Adds matrix products to a graph.

    Args:
        graph: where the nodes go.
        precision: ``exact`` keeps activations in float32.
        kernels: what onnxruntime can do here.
        threads: that take weights apart; 0 for all cores.
        laid: panels that graphs share; more are noted there.
    """

    def __init__(
        self,
        graph: Graph,
        precision: Precision,
        kernels: Kernels,
        threads: int = 0,
        laid: Laid | None = None,
    ) -> None:
        self._graph = graph
        self._laid = Laid() if laid is None else laid
        self._threads = threads
        self._precision = precision
        self._kernels = kernels
        self._sums: dict[tuple[str, int], str] = {}
        self._wide: dict[tuple[str, int], str] = {}

    def one(self, x: str, matrix: Matrix, bias: F32 | None = None) -> str:
        """Add ``x @ matrix^T + bias``; x is [n, columns], the result [n, rows]."""
        return self._product(x, [matrix], bias)

    def fusible(self, matrices: Sequence[Matrix]) -> bool:
        """Whether the matrices can be one product."""
        return len({(m.type, m.columns) for m in matrices}) == 1

    def packed(self, x: str, matrices: Sequence[Matrix], biases: Sequence[F32 | None]) -> str:
        """Add the products as one, side by side: [n, sum of rows]. They must be fusible."""
        return self._product(x, matrices, _side_by_side(matrices, biases))

    def each(self, x: str, matrices: Sequence[Matrix], biases: Sequence[F32 | None]) -> list[str]:
        """Add the products, fused where they can be; return them one by one."""
        if len(matrices) > 1 and self.fusible(matrices):
            fused = self.packed(x, matrices, biases)
            sizes = self._graph.constant([m.rows for m in matrices], np.int64)
            return self._graph.ops("Split", len(matrices), fused, sizes, axis=1)
        return [self.one(x, m, b) for m, b in zip(matrices, biases, strict=True)]

    def look_up(self, tokens: str, matrix: Matrix, scale: float) -> str:
        """Add rows of a matrix that is kept as panels, times a scale: tokens int32 [n, 1] to [n, columns]."""
        assert self._kernels.panels is not None
        return self._graph.own(
            self._kernels.panels,
            "Embedding",
            tokens,
            self._graph.resident(self._panels([matrix])),
            type=matrix.type,
            rows=matrix.rows,
            columns=matrix.columns,
            scale=float(scale),
        )

    def feed_forward(
        self, x: str, matrices: Sequence[Matrix], biases: Sequence[F32 | None], activation: str
    ) -> str | None:
        """Add gate, up, activation and down as one node; None where that can't be done."""
        library = self._kernels.panels
        if library is None or any(
            container(m.type, self._precision, self._kernels) != "panels" for m in matrices
        ):
            return None
        g = self._graph
        inputs = [x, *(g.resident(self._panels([m])) for m in matrices), "", ""]
        inputs += ["" if bias is None else g.resident(bias) for bias in biases]
        gate = matrices[0]
        whole = forward_node(
            g,
            library,
            inputs,
            matrices,
            gate.columns,
            gate.rows,
            1,
            activation,
            self._precision,
            counted=False,
        )
        return whole[0]

    def _panels(self, matrices: Sequence[Matrix]) -> NDArray[np.uint8]:
        """Lay matrices of one type below each other as panels, once for all graphs."""
        names = tuple(m.name for m in matrices)
        found = self._laid.by_names.get(names)
        if found is None:
            found = self._laid.by_names[names] = _panels(matrices, self._threads, self._laid.shelf)
        return found

    def wide(self, x: str, matrices: Sequence[Matrix], biases: Sequence[F32 | None]) -> list[str]:
        """Add products of an asymmetric type with an input that ``widen`` made; return them one by one."""
        fused = self._product(x, matrices, _side_by_side(matrices, biases), wide=True)
        sizes = self._graph.constant([m.rows for m in matrices], np.int64)
        return self._graph.ops("Split", len(matrices), fused, sizes, axis=1)

    def _product(self, x: str, matrices: Sequence[Matrix], bias: F32 | None, wide: bool = False) -> str:
        g = self._graph
        type_id, columns = matrices[0].type, matrices[0].columns
        rows = sum(m.rows for m in matrices)
        kind = container(type_id, self._precision, self._kernels)
        if kind == "panels":
            assert self._kernels.panels is not None
            inputs = [x, g.resident(self._panels(matrices))]
            if bias is not None:
                inputs.append(g.resident(bias))
            exact = int(self._precision == "exact")
            return g.own(
                self._kernels.panels, "Linear", *inputs, type=type_id, rows=rows, columns=columns, exact=exact
            )
        raw = matrices[0].raw if len(matrices) == 1 else np.concatenate([m.raw.reshape(-1) for m in matrices])
        if kind == "float":
            weights = quants.dequantize(raw, type_id, (rows, columns), threads=self._threads)
            inputs = [x, g.weight(weights)]
            if bias is not None:
                inputs.append(g.weight(bias))
            return g.op("Gemm", *inputs, transB=1)
        codes = quants.unpack(raw, type_id, (rows, columns), threads=self._threads)
        if codes.offsets is not None and self._precision == "fast":
            c = widened(codes)
            x = x if wide else self._widened(x, type_id, columns)
        else:
            c = centred(codes)
        groups = c.scales.shape[1]
        inputs = [
            x,
            g.weight(c.packed.reshape(rows, groups, codes.group * codes.bits // 8)),
            g.weight(c.scales),
        ]
        if c.zeros is not None:
            inputs.append(g.weight(c.zeros))
        product = g.op(
            "MatMulNBits",
            *inputs,
            microsoft=True,
            K=groups * codes.group,
            N=rows,
            bits=codes.bits,
            block_size=codes.group,
            accuracy_level=4 if self._precision == "fast" else 0,
        )
        if c.offsets is not None:
            sums = self._group_sums(x, groups, codes.group)
            product = g.op("Gemm", sums, g.weight(c.offsets), product, transB=1)
        if bias is not None:
            product = g.op("Add", product, g.weight(bias))
        return product

    def _widened(self, x: str, type_id: int, columns: int) -> str:
        """Do in the graph what ``widen`` does, once for all products of the same x."""
        t = quants.quant_type(type_id)
        key = (x, t.group * 10 + t.bits)
        if key not in self._wide:
            g = self._graph
            groups = columns // t.group
            sums = self._group_sums(x, groups, t.group)
            if groups % t.group:
                sums = g.op("Pad", sums, g.constant([0, 0, 0, -groups % t.group], np.int64))
            self._wide[key] = g.op("Concat", x, *[sums] * SUM_COLUMNS[t.bits], axis=1)
        return self._wide[key]

    def _group_sums(self, x: str, groups: int, group: int) -> str:
        """Add up x over groups, once for all products of the same x: [n, groups]."""
        if (x, group) not in self._sums:
            g = self._graph
            split = g.op("Reshape", x, g.constant([0, groups, group], np.int64))
            self._sums[x, group] = g.op("ReduceSum", split, g.constant([2], np.int64), keepdims=0)
        return self._sums[x, group]
