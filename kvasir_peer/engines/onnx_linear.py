"""Weight matrices in onnxruntime: which container each quant type takes, and the nodes that multiply by it.

``MatMulNBits`` multiplies by 4-bit or 8-bit codes with a scale per 16 or 32 weights. That is every GGUF type but
the floats, if the asymmetric types' offsets are added apart::

    y = x @ (scale * (code - zero) + offset)^T = MatMulNBits(x, codes) + blocksum(x) @ offset^T

where ``blocksum`` adds up the input over each group of weights that shares an offset. Codes are centred first, by a
zero point for each group, so that the second term stays small beside the first (see :func:`centred`).

At accuracy level 4 activations are rounded to int8 per group, which costs about one per cent of the result, as in
llama.cpp. At level 0 they stay float32; 8-bit codes have no quick kernel there, so they are dequantised then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvasir_peer.engines import quants
from kvasir_peer.engines.base import Precision
from kvasir_peer.engines.onnx_graph import Graph

F32 = NDArray[np.float32]
Container = Literal["codes4", "codes8", "float"]


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
    """

    codes4: bool = True
    codes8: bool = True
    experts: bool = True


def container(type_id: int, precision: Precision, kernels: Kernels) -> Container:
    """Say how weights of a type are kept."""
    bits = quants.quant_type(type_id).bits
    if bits == 4 and kernels.codes4:
        return "codes4"
    if bits == 8 and kernels.codes8 and precision == "fast":
        return "codes8"
    return "float"


def packed_bytes(type_id: int, rows: int, columns: int, precision: Precision, kernels: Kernels) -> int:
    """Return the bytes that a matrix takes once loaded."""
    kind = container(type_id, precision, kernels)
    n = rows * columns
    if kind == "float":
        return 4 * n
    t = quants.quant_type(type_id)
    # A scale of float32 per group; at level 4 the kernel keeps the scales as given too, and its sums over groups.
    per_group = 12.0 if precision == "fast" else 4.0
    if t.asymmetric:
        # An offset, and with 4 bits a zero point.
        per_group += 4 if t.bits == 8 else 4.5
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


class Linears:
    """Adds matrix products to a graph.

    Args:
        graph: where the nodes go.
        precision: ``exact`` keeps activations in float32.
        kernels: what onnxruntime can do here.
        threads: that take weights apart; 0 for all cores.
    """

    def __init__(self, graph: Graph, precision: Precision, kernels: Kernels, threads: int = 0) -> None:
        self._graph = graph
        self._threads = threads
        self._precision = precision
        self._kernels = kernels
        self._sums: dict[tuple[str, int], str] = {}

    def one(self, x: str, matrix: Matrix, bias: F32 | None = None) -> str:
        """Add ``x @ matrix^T + bias``; x is [n, columns], the result [n, rows]."""
        return self._product(x, [matrix], bias)

    def fusible(self, matrices: Sequence[Matrix]) -> bool:
        """Whether the matrices can be one product."""
        return len({(m.type, m.columns) for m in matrices}) == 1

    def packed(self, x: str, matrices: Sequence[Matrix], biases: Sequence[F32 | None]) -> str:
        """Add the products as one, side by side: [n, sum of rows]. They must be fusible."""
        bias = None
        if any(b is not None for b in biases):
            bias = np.concatenate(
                [
                    np.zeros(m.rows, np.float32) if b is None else b
                    for m, b in zip(matrices, biases, strict=True)
                ]
            )
        return self._product(x, matrices, bias)

    def each(self, x: str, matrices: Sequence[Matrix], biases: Sequence[F32 | None]) -> list[str]:
        """Add the products, fused where they can be; return them one by one."""
        if len(matrices) > 1 and self.fusible(matrices):
            fused = self.packed(x, matrices, biases)
            sizes = self._graph.constant([m.rows for m in matrices], np.int64)
            return self._graph.ops("Split", len(matrices), fused, sizes, axis=1)
        return [self.one(x, m, b) for m, b in zip(matrices, biases, strict=True)]

    def _product(self, x: str, matrices: Sequence[Matrix], bias: F32 | None) -> str:
        g = self._graph
        type_id, columns = matrices[0].type, matrices[0].columns
        rows = sum(m.rows for m in matrices)
        raw = matrices[0].raw if len(matrices) == 1 else np.concatenate([m.raw.reshape(-1) for m in matrices])
        if container(type_id, self._precision, self._kernels) == "float":
            weights = quants.dequantize(raw, type_id, (rows, columns), threads=self._threads)
            inputs = [x, g.weight(weights)]
            if bias is not None:
                inputs.append(g.weight(bias))
            return g.op("Gemm", *inputs, transB=1)
        codes = quants.unpack(raw, type_id, (rows, columns), threads=self._threads)
        c = centred(codes)
        groups = columns // codes.group
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
            K=columns,
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

    def _group_sums(self, x: str, groups: int, group: int) -> str:
        """Add up x over groups, once for all products of the same x: [n, groups]."""
        if (x, group) not in self._sums:
            g = self._graph
            split = g.op("Reshape", x, g.constant([0, groups, group], np.int64))
            self._sums[x, group] = g.op("ReduceSum", split, g.constant([2], np.int64), keepdims=0)
        return self._sums[x, group]
