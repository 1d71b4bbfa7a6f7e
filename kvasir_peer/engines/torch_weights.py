"""Weights in torch: as floats, or as the file's bytes that are taken apart at each use.

Floats are quickest where they fit (the CPU reference). A GPU keeps the bytes, because its memory is what limits
which models it can serve, and takes apart just what a pass needs.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kvasir_peer.engines import quants
from kvasir_peer.engines.base import Precision
from kvasir_peer.engines.torch_dequantize import dequantize
from kvasir_peer.errors import EngineError
from kvasir_peer.models.gguf import TensorInfo
from kvasir_peer.models.sources import TensorSource

_log = logging.getLogger(__name__)

# Compute capability of the first cards that have bfloat16 (Ampere).
_BF16_CAPABILITY = (8, 0)
# Up to so many rows the fused kernel reads the matrix once for each; beyond, one unpacking serves all.
FUSED_ROWS = 4
# Weights that are taken apart at a time: bounds the scratch space (256 MiB in float32) while a piece is still
# large enough to keep a GPU busy.
PIECE_WEIGHTS = 1 << 26


@dataclass(frozen=True)
class TorchOptions:
    """How the engine uses a device.

    Attributes:
        device: where everything lies.
        dtype: of activations in linears, of weights once they are floats, and of the KV cache.
        keep_bytes: whether matrices stay as the file's bytes.
        batched_attention: whether single rows of all slots attend in one call, padded to the longest; a GPU
            wants few calls, a CPU wants no copies.
        gather_pairs: up to so many (row, expert) pairs each pair gets a copy of its expert's weights, without
            asking the device which experts they are; beyond, pairs are sorted by expert.
        grouped: whether sorted rows go through torch's grouped matrix product instead of one product each.
        fused: whether few rows are multiplied with a matrix's bytes by a kernel that takes them apart on the way
            (where there is one for the type; see :mod:`kvasir_peer.engines.torch_fused`).
        graphs: whether decode passes are captured into CUDA graphs.
    """

    device: torch.device
    dtype: torch.dtype
    keep_bytes: bool = False
    batched_attention: bool = False
    gather_pairs: int = 0
    grouped: bool = False
    fused: bool = False
    graphs: bool = False


def options_for(device: str, precision: Precision) -> TorchOptions:
    """Return how a device is used best.

    Args:
        device: torch's name of it.
        precision: ``exact`` computes in float32 everywhere; ``fast`` in what the device is quick in.

    Raises:
        EngineError: the device is not there.
    """
    try:
        where = torch.device(device)
        torch.empty(1, device=where)
    except (RuntimeError, AssertionError) as error:
        raise EngineError(f"torch can't use device {device!r}: {str(error).splitlines()[0]}") from error
    if where.type == "cpu":
        return TorchOptions(where, torch.float32)
    if where.type == "cuda":
        # Graphs are recorded and Triton's kernels started on the current device, whatever device the tensors are on.
        if where.index is not None:
            torch.cuda.set_device(where)
        # Not is_bf16_supported(), which also counts cards that only emulate it.
        half = (
            torch.bfloat16 if torch.cuda.get_device_capability(where) >= _BF16_CAPABILITY else torch.float16
        )
        dtype = torch.float32 if precision == "exact" else half
        return TorchOptions(
            where,
            dtype,
            keep_bytes=True,
            batched_attention=True,
            gather_pairs=128,
            grouped=dtype == torch.bfloat16 and _grouped_works(where),
            fused=True,
            graphs=True,
        )
    return TorchOptions(where, torch.float32 if precision == "exact" else torch.float16)


@functools.cache
def _grouped_works(device: torch.device) -> bool:
    """Whether torch's grouped product is there and computes on the device what it should.

    Versions of torch differ in which cards it runs on.
    """
    if not hasattr(F, "grouped_mm"):
        return False
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn((5, 64), generator=generator).to(device, torch.bfloat16)
    matrices = torch.randn((2, 32, 64), generator=generator).to(device, torch.bfloat16)
    ends = torch.tensor([2, 5], dtype=torch.int32, device=device)
    expected = torch.cat([F.linear(rows[:2], matrices[0]), F.linear(rows[2:], matrices[1])])
    try:
        found = F.grouped_mm(rows, matrices.transpose(1, 2), offs=ends)
        return bool((found - expected).abs().max() <= 0.05 * expected.abs().max())
    except (RuntimeError, NotImplementedError) as error:
        _log.info("experts of many rows are computed one by one: %s", str(error).splitlines()[0])
        return False


class Weight:
    """A matrix [out, in], or a stack of them [experts, out, in].

    Args:
        data: floats of the shape, or bytes uint8 [..., out, row_bytes].
        type_id: ggml type of the bytes; None for floats.
        columns: weights of a row.
        dtype: of what the methods return.
        fused: whether :meth:`products` works.

    Attributes:
        matrix_size: weights of one matrix.
        fused: whether :meth:`products` works.
    """

    def __init__(
        self,
        data: Tensor,
        type_id: int | None,
        columns: int,
        dtype: torch.dtype,
        *,
        fused: bool = False,
    ) -> None:
        self._data = data
        self._type = type_id
        self._dtype = dtype
        self.matrix_size = data.shape[-2] * columns
        self.fused = fused

    @property
    def n_bytes(self) -> int:
        """Bytes that it takes."""
        return self._data.numel() * self._data.element_size()

    @property
    def is_float(self) -> bool:
        """Whether it is held as floats, so that :meth:`at` with a plain index is a view."""
        return self._type is None

    def at(self, index: int | slice | Tensor) -> Tensor:
        """Return the floats of some of the outermost index: rows of a matrix, experts of a stack."""
        chosen = self._data[index]
        return chosen if self._type is None else dequantize(chosen, self._type, self._dtype)

    def linear(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply by the matrix.

        Args:
            x: [n, in].
            bias: [out] or None.

        Returns:
            [n, out].
        """
        x = x.to(self._dtype)
        if self._type is None:
            return F.linear(x, self._data, bias)
        if self.fused and len(x) <= FUSED_ROWS:
            y = self.products(x, torch.zeros(len(x), dtype=torch.int64, device=x.device)).to(self._dtype)
            return y if bias is None else y + bias
        out, columns = self._data.shape[0], x.shape[1]
        rows = max(1, PIECE_WEIGHTS // columns)
        if out <= rows:
            return F.linear(x, self.at(slice(None)), bias)
        y = torch.cat([F.linear(x, self.at(slice(a, a + rows))) for a in range(0, out, rows)], dim=1)
        return y if bias is None else y + bias

    def products(self, x: Tensor, matrices: Tensor, per_row: int = 1) -> Tensor:
        """Multiply rows by matrices of the stack, one each, without taking the matrices apart first.

        Args:
            x: [rows, in].
            matrices: int64 [p], the matrix of each result.
            per_row: results of each row of ``x``.

        Returns:
            Float32 [p, out].
        """
        from kvasir_peer.engines import torch_fused

        assert self._type is not None
        raw = self._data if self._data.ndim == 3 else self._data[None]
        return torch_fused.matvec(raw, self._type, x, matrices, per_row)


@functools.cache
def _fused_works(type_id: int, device: torch.device) -> bool:
    """Whether the fused kernel is there for a type and computes on the device what it should."""
    try:
        from kvasir_peer.engines import torch_fused
    except ImportError:
        return False  # no Triton: a build of torch for CPUs
    if type_id not in torch_fused.TYPES:
        return False
    kind = quants.quant_type(type_id)
    generator = np.random.default_rng(0)
    # Small random bytes: all scales are small numbers, in every type.
    raw = generator.integers(0, 60, (2, 16, 512 // kind.block * kind.block_bytes), dtype=np.uint8)
    data = torch.from_numpy(raw).to(device)
    x = torch.from_numpy(generator.standard_normal((3, 512)).astype(np.float32)).to(device)
    matrices = torch.tensor([1, 0, 1], device=device)
    expected = torch.bmm(dequantize(data[matrices], type_id, torch.float32), x[:, :, None])[:, :, 0]
    try:
        found = torch_fused.matvec(data, type_id, x, matrices)
    except torch_fused.FAILURES as error:
        _log.warning("%s weights are taken apart before use: %s", kind.name, str(error).splitlines()[0])
        return False
    if not bool((found - expected).abs().max() <= 1e-3 * expected.abs().max()):
        _log.warning("%s weights are taken apart before use: the fused kernel is wrong here", kind.name)
        return False
    return True


def float_bytes(info: TensorInfo, dtype: torch.dtype) -> int:
    """Bytes of a tensor as floats."""
    return int(np.prod(info.shape, dtype=np.int64)) * dtype.itemsize


def stays_bytes(info: TensorInfo, options: TorchOptions) -> bool:
    """Whether a matrix is kept as the file's bytes: quantised, and the options say so."""
    return options.keep_bytes and quants.quant_type(info.type, info.name).bits > 0


def matrix_bytes(info: TensorInfo, options: TorchOptions) -> int:
    """Bytes that :meth:`Loader.matrix` will take for a tensor."""
    return info.n_bytes if stays_bytes(info, options) else float_bytes(info, options.dtype)


class Loader:
    """Takes tensors from a source to the device, one at a time.

    Args:
        source: of the bytes.
        options: how the device is used.
        total: bytes of the source that will be read, for the progress.
        progress: called with bytes read and ``total``, or None.
    """

    def __init__(
        self,
        source: TensorSource,
        options: TorchOptions,
        total: int,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._source = source
        self._tensors: Mapping[str, TensorInfo] = source.tensors
        self.options = options
        self._total = total
        self._done = 0
        self._progress = progress

    def vector(self, name: str) -> Tensor:
        """Return a norm, bias or other small tensor as float32 on the device."""
        info = self._tensors[name]
        values = quants.dequantize(self._source.read(name), info.type, info.shape)
        self._report(info.n_bytes)
        return torch.from_numpy(values).to(self.options.device)

    def matrix(self, name: str) -> Weight:
        """Return a matrix [out, in]."""
        info = self._tensors[name]
        return self._weight(self._source.read(name), info, info.shape)

    def rows(self, name: str) -> int:
        """Rows of a matrix: how many outputs it has."""
        return self._tensors[name].shape[0]

    def zeros(self, size: int) -> Tensor:
        """Float32 zeros on the device, in place of a bias that is not there."""
        return torch.zeros(size, device=self.options.device)

    def stacked(self, names: Sequence[str]) -> Weight | None:
        """Return matrices with the same input as one, rows below rows; None where their bytes differ in type."""
        infos = [self._tensors[name] for name in names]
        if len({info.type for info in infos}) > 1:
            return None
        parts = [self._source.read(name).reshape(-1) for name in names]
        raw = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return self._weight(raw, infos[0], (sum(info.shape[0] for info in infos), infos[0].shape[1]))

    def latent_pair(self, name: str, n_head: int, nope: int) -> tuple[Weight, Weight]:
        """Cut ``attn_kv_b`` [n_head * (nope + value), kv_rank] into the key and value parts of each head.

        Returns:
            Floats [n_head, kv_rank, nope] and [n_head, value, kv_rank].
        """
        info = self._tensors[name]
        values = quants.dequantize(self._source.read(name), info.type, info.shape)
        self._report(info.n_bytes)
        both = torch.from_numpy(values).to(self.options.device, self.options.dtype)
        both = both.view(n_head, -1, info.shape[1])  # [n_head, nope + value, kv_rank]
        key = both[:, :nope].transpose(1, 2).contiguous()
        value = both[:, nope:].contiguous()
        return (
            Weight(key, None, key.shape[-1], self.options.dtype),
            Weight(value, None, value.shape[-1], self.options.dtype),
        )

    def experts(self, name: str, ranges: Sequence[tuple[int, int]]) -> Weight:
        """Return some experts of a stack, [experts, out, in] in the order of the ranges (lo, hi)."""
        info = self._tensors[name]
        parts = [self._source.read_experts(name, lo, hi) for lo, hi in ranges]
        raw = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return self._weight(raw, info, (sum(hi - lo for lo, hi in ranges), *info.shape[1:]))

    def table(self, name: str) -> Weight:
        """Return a matrix of which only some rows are ever used (the embedding), always as bytes."""
        info = self._tensors[name]
        raw = self._source.read(name)
        self._report(info.n_bytes)
        return self._bytes(raw, info, info.shape)

    def _weight(self, raw: np.ndarray, info: TensorInfo, shape: tuple[int, ...]) -> Weight:
        self._report(raw.nbytes)
        if stays_bytes(info, self.options):
            return self._bytes(raw, info, shape)
        return self._floats(raw, info, shape)

    def _bytes(self, raw: np.ndarray, info: TensorInfo, shape: tuple[int, ...]) -> Weight:
        row = quants.row_bytes(info.type, shape[-1], info.name)
        # A copy: what the source gives may be a view of a file.
        data = torch.from_numpy(np.array(raw)).reshape(*shape[:-1], row)
        device = self.options.device
        fused = self.options.fused and _fused_works(info.type, device)
        return Weight(data.to(device), info.type, shape[-1], self.options.dtype, fused=fused)

    def _floats(self, raw: np.ndarray, info: TensorInfo, shape: tuple[int, ...]) -> Weight:
        values = torch.from_numpy(quants.dequantize(raw, info.type, shape))
        values = values.to(self.options.device, self.options.dtype)
        return Weight(values, None, shape[-1], self.options.dtype)

    def _report(self, n_bytes: int) -> None:
        self._done += n_bytes
        if self._progress is not None:
            self._progress(self._done, self._total)
