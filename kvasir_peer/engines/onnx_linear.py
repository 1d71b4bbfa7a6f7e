"""Weight matrices in onnxruntime: which container each quant type takes, and the nodes that multiply by it.

``MatMulNBits`` multiplies by 4-bit or 8-bit codes with a scale per 16 or 32 weights. That is every GGUF type but
the floats, if the asymmetric types' offsets are added apart::

    y = x @ (scale * (code - zero) + offset)^T = MatMulNBits(x, codes) + blocksum(x) @ offset^T

where ``blocksum`` adds up the input over each group of weights that shares an offset. Codes are centred first, by a
zero point for each group, so that the second term stays small beside the first (see :func:`centred`). In ``exact`` it
is a product of its own; in ``fast`` the sums and the offsets become further columns of the same product (see
:func:`widened`).

At accuracy level 4 activations are rounded to int8 per group, which costs about one per cent of the result, as in
llama.cpp. At level 0 they stay float32; 8-bit codes have no quick kernel there, so they are dequantised then.

Where the C kernels are at hand (:mod:`kvasir_peer.engines.kernels`), they do all that instead, in either precision,
from panels, which take as much memory as the file.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvasir_peer.engines import panels, quants
from kvasir_peer.engines.base import Precision
from kvasir_peer.engines.onnx_graph import Graph

if TYPE_CHECKING:
    from kvasir_peer.models.gguf import TensorInfo

F32 = NDArray[np.float32]
Container = Literal["panels", "codes4", "codes8", "float"]

# As in kernels/work.h.
_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "swiglu_oai": 2}


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


@dataclass(frozen=True)
class Kernels:
    """What onnxruntime can do here; found by trying (see :mod:`kvasir_peer.engines.onnx_probe`).

    Attributes:
        codes4: ``MatMulNBits`` with 4-bit codes works.
        codes8: ``MatMulNBits`` with 8-bit codes works.
        experts: ``QMoE`` with given router weights works.
        panels: library of C kernels, which are used for all block-quantised types then; None where there is none.
    """

    codes4: bool = True
    codes8: bool = True
    experts: bool = True
    panels: Path | None = None


def container(type_id: int, precision: Precision, kernels: Kernels) -> Container:
    """Say how weights of a type are kept."""
    bits = quants.quant_type(type_id).bits
    if bits and kernels.panels is not None:
        return "panels"
    if bits == 4 and kernels.codes4:
        return "codes4"
    if bits == 8 and kernels.codes8 and precision == "fast":
        return "codes8"
    return "float"


def packed_bytes(type_id: int, rows: int, columns: int, precision: Precision, kernels: Kernels) -> int:
    """Return the bytes that a matrix takes once loaded."""
    kind = container(type_id, precision, kernels)
    if kind == "panels":
        return panels.panel_bytes(type_id, rows, columns)
    n = rows * columns
    if kind == "float":
        return 4 * n
    t = quants.quant_type(type_id)
    # A scale of float32 per group; at level 4 the kernel keeps the scales as given too, and its sums over groups.
    per_group = 12.0 if precision == "fast" else 4.0
    if t.asymmetric and t.bits == 4:
        per_group += 0.5  # a zero point
    if t.asymmetric and precision == "fast":
        n += rows * extra_columns(type_id, columns)
    elif t.asymmetric:
        per_group += 4  # an offset
    return n * t.bits // 8 + int(n // t.group * per_group)


@dataclass(frozen=True, eq=False)
class Centred:
    """Codes as ``MatMulNBits`` takes them: ``weight = scale * (code - zero) + offset``.

    Attributes:
        packed: uint8 [rows, columns * bits / 8].
        scales: float32 [rows, groups].
        zeros: uint8 [rows, ceil(groups / 2)], two 4-bit zero points a byte; None for the operator's own, which is
            8 for 4 bits and 128 for 8 bits.
        offsets: float32 [rows, groups], at most half a scale where the codes can be centred so; None for none.
    """

    packed: NDArray[np.uint8]
    scales: F32
    zeros: NDArray[np.uint8] | None
    offsets: F32 | None


def centred(codes: quants.Codes) -> Centred:
    """Take from each offset the whole number of scales that makes it smallest.

    Rounding activations to int8 is multiplied by ``scale * (code - zero)``, while offsets see them unrounded; so
    the error is least when ``code - zero`` stands for nearly the whole weight.
    """
    if codes.offsets is None:
        return Centred(codes.packed, codes.scales, None, None)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        zeros = np.rint(-codes.offsets / codes.scales)
    largest = 15 if codes.bits == 4 else 31
    zeros = np.clip(np.nan_to_num(zeros), 0, largest).astype(np.uint8)
    offsets = codes.offsets + zeros * codes.scales
    if codes.bits == 4:
        rows, groups = zeros.shape
        pairs = np.zeros((rows, groups + groups % 2), np.uint8)
        pairs[:, :groups] = zeros
        return Centred(codes.packed, codes.scales, pairs[:, 0::2] | (pairs[:, 1::2] << 4), offsets)
    # Five bits leave room in a byte: the zero point goes into the codes.
    grouped = codes.packed.reshape(*zeros.shape, codes.group) + (np.uint8(128) - zeros)[..., None]
    return Centred(grouped.reshape(codes.packed.shape), codes.scales, None, offsets)


def widened(codes: quants.Codes) -> Centred:
    """Turn what offsets are left after centring into further columns of codes, for an input that :func:`widen` made.

    One operator does then what else takes a product, a sum and a second product. Each group's offset is multiplied by
    the group's sum, which stands in the input as a column of its own; with 4 bits in two, the second of which holds
    what the first has rounded away. What is left after that is at most 1/240 of half a scale (1/254 with 8 bits),
    far below the int8 rounding of ``fast``, and so is the rounding of the sums.

    Args:
        codes: of an asymmetric type.

    Returns:
        Codes of ``columns + extra_columns(...)`` columns, without offsets.
    """
    c = centred(codes)
    assert c.offsets is not None
    rows, groups = c.offsets.shape
    padded = -(-groups // codes.group) * codes.group
    left = np.zeros((rows, padded), np.float32)
    left[:, :groups] = c.offsets
    half = 7 if codes.bits == 4 else 127
    more_codes, more_scales = [], []
    for _ in range(_COPIES[codes.bits]):
        parts = left.reshape(rows, -1, codes.group)
        scales = np.abs(parts).max(-1) / np.float32(half)
        with np.errstate(divide="ignore", invalid="ignore"):
            steps = np.nan_to_num(np.rint(parts / scales[..., None])).clip(-half, half)
        left = (parts - steps * scales[..., None]).reshape(rows, padded)
        middle = 8 if codes.bits == 4 else 128
        more_codes.append((steps + middle).astype(np.uint8).reshape(rows, padded))
        more_scales.append(scales)
    extra = np.concatenate(more_codes, axis=1)
    if codes.bits == 4:
        extra = extra[:, 0::2] | (extra[:, 1::2] << 4)
    zeros = None
    if c.zeros is not None:
        nibbles = np.stack([c.zeros & 15, c.zeros >> 4], axis=-1).reshape(rows, -1)[:, :groups]
        n_extra = sum(scales.shape[1] for scales in more_scales)
        total = groups + n_extra
        all_zeros = np.full((rows, total + total % 2), 8, np.uint8)
        all_zeros[:, :groups] = nibbles
        zeros = all_zeros[:, 0::2] | (all_zeros[:, 1::2] << 4)
    return Centred(
        np.concatenate([c.packed, extra], axis=1),
        np.concatenate([c.scales, *more_scales], axis=1).astype(np.float32),
        zeros,
        None,
    )


# Columns that the sum of a group takes in a widened input.
_COPIES = {4: 2, 8: 1}


def extra_columns(type_id: int, columns: int) -> int:
    """Return how many columns :func:`widen` adds; 0 for symmetric types."""
    t = quants.quant_type(type_id)
    if not t.asymmetric:
        return 0
    groups = columns // t.group
    return _COPIES[t.bits] * (-(-groups // t.group) * t.group)


def widen(x: F32, type_id: int) -> F32:
    """Add the sums of groups to an input: float32 [n, columns] to [n, columns + extra_columns(...)]."""
    t = quants.quant_type(type_id)
    n, columns = x.shape
    groups = columns // t.group
    wide = np.zeros((n, columns + extra_columns(type_id, columns)), np.float32)
    wide[:, :columns] = x
    sums = x.reshape(n, groups, t.group).sum(-1)
    padded = (wide.shape[1] - columns) // _COPIES[t.bits]
    for copy in range(_COPIES[t.bits]):
        begin = columns + copy * padded
        wide[:, begin : begin + groups] = sums
    return wide


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
) -> list[str]:
    """Add a ``FeedForward`` node (see kernels/onnx_operators.c).

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
    )


def _panels(matrices: Sequence[Matrix], threads: int) -> NDArray[np.uint8]:
    """Lay matrices of one type below each other as panels."""
    first = matrices[0]
    cores = threads or os.cpu_count() or 1
    rows = sum(m.rows for m in matrices)
    if any(m.rows % panels.ROWS for m in matrices[:-1]):
        raw = np.concatenate([m.raw.reshape(-1) for m in matrices])
        return panels.pack(raw, first.type, rows, first.columns, cores)
    out = np.empty(panels.panel_bytes(first.type, rows, first.columns), np.uint8)
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
        laid: panels by the names of their tensors, where graphs share weights; more are noted there.
    """

    def __init__(
        self,
        graph: Graph,
        precision: Precision,
        kernels: Kernels,
        threads: int = 0,
        laid: dict[tuple[str, ...], NDArray[np.uint8]] | None = None,
    ) -> None:
        self._graph = graph
        self._laid = {} if laid is None else laid
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
        if names not in self._laid:
            self._laid[names] = _panels(matrices, self._threads)
        return self._laid[names]

    def wide(self, x: str, matrices: Sequence[Matrix], biases: Sequence[F32 | None]) -> list[str]:
        """Add products of an asymmetric type with an input that :func:`widen` made; return them one by one."""
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
        """Do in the graph what :func:`widen` does, once for all products of the same x."""
        t = quants.quant_type(type_id)
        key = (x, t.group * 10 + t.bits)
        if key not in self._wide:
            g = self._graph
            groups = columns // t.group
            sums = self._group_sums(x, groups, t.group)
            if groups % t.group:
                sums = g.op("Pad", sums, g.constant([0, 0, 0, -groups % t.group], np.int64))
            self._wide[key] = g.op("Concat", x, *[sums] * _COPIES[t.bits], axis=1)
        return self._wide[key]

    def _group_sums(self, x: str, groups: int, group: int) -> str:
        """Add up x over groups, once for all products of the same x: [n, groups]."""
        if (x, group) not in self._sums:
            g = self._graph
            split = g.op("Reshape", x, g.constant([0, groups, group], np.int64))
            self._sums[x, group] = g.op("ReduceSum", split, g.constant([2], np.int64), keepdims=0)
        return self._sums[x, group]
