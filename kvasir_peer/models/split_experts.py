"""Re-lays a dense model's feed-forward neurons as experts, so that any dense model can be shared by volunteers.

A feed-forward layer adds up what its hidden neurons give, so it can be cut into N slices of neurons whose sum is the
layer. There are two ways to make experts of them:

- *all*: each slice is one expert, the router is zero, and all experts are used with weight 1/N each. In F32 the
  result differs from the dense model by the order of summation alone.
- *routed* (the usual way): each slice becomes two experts with the same weights, and a router chooses one of the two
  by the sign of a product of the row with a random vector: routing depends on the input, and yet exactly one copy of
  every slice is used. The weights are 1/N each, but for a small epsilon. In F32 the result differs by that epsilon
  (7e-4 to 1.3e-3 of a logit's standard deviation at 1e-4).

The weights of 1/N are made good by a factor in the down projection. No weight is requantised: blocks are copied, and
the factor, a power of two, is multiplied into the blocks' scales, which is exact.

The new file has the architecture that is the old one with experts: ``llama`` stays ``llama`` (Mixtral's layout),
``qwen3`` becomes ``qwen3moe``, ``qwen2`` becomes ``qwen2moe``. The last one always has a shared expert beside the
routed ones, gated by a sigmoid; it gets a few neurons of its own, and its gate is next to nothing, which weighs it
1/2.
"""

from __future__ import annotations

import os
import secrets
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvasir_peer.errors import ModelFileError, UsageError
from kvasir_peer.models.gguf import GGML_TYPES, GgufFile, TensorInfo

EPSILON = 1e-4  # of the router's vectors: small against 1/N, far over the noise of float32
_VERSION = 3
_STRING, _ARRAY, _UINT32 = 8, 9, 4
_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}

# Where a type's blocks keep what is proportional to the weights: byte offsets of float16 numbers.
FLOAT16_SCALES: Mapping[str, tuple[int, ...]] = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}

Raw = npt.NDArray[np.uint8]
Progress = Callable[[int, int], None]


class _Values:
    """Walks over a GGUF header's keys and values, as bytes. The header has been checked by GgufFile before."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def _number(self, form: str) -> int:
        (value,) = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return int(value)

    def _skip_strings(self, count: int) -> None:
        for _ in range(count):
            length = self._number("<Q")  # on a line of its own: it moves on by itself
            self._at += length

    def items(self) -> Iterator[tuple[str, bytes]]:
        """Each key with the bytes of its type and value."""
        self._at = 16
        for _ in range(self._number("<Q")):
            length = self._number("<Q")
            key = self._data[self._at : self._at + length].decode()
            self._at += length
            start = self._at
            kind = self._number("<I")
            if kind == _STRING:
                self._skip_strings(1)
            elif kind == _ARRAY:
                inner, count = self._number("<I"), self._number("<Q")
                if inner == _STRING:
                    self._skip_strings(count)
                elif inner in _SCALAR_BYTES:
                    self._at += count * _SCALAR_BYTES[inner]
                else:
                    raise ModelFileError(f"{key} is an array of arrays, which no known model has")
            else:
                self._at += _SCALAR_BYTES[kind]
            yield key, self._data[start : self._at]


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _uint32(value: int) -> bytes:
    return struct.pack("<II", _UINT32, value)


def _scaled(raw: Raw, type_name: str, factor: int) -> Raw:
    """Weights times a power of two, exactly; ``raw`` is ``[..., bytes of one block]``."""
    out = raw.copy()
    if type_name in ("F32", "F16", "BF16"):
        if type_name == "BF16":  # widened to float32, where the product is exact in its upper half
            wide = (out.view(np.uint16).astype(np.uint32) << 16).view(np.float32) * np.float32(factor)
            return (wide.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        values: npt.NDArray[Any] = out.view(np.float32 if type_name == "F32" else np.float16)
        with np.errstate(over="ignore"):  # looked for below
            np.multiply(values, values.dtype.type(factor), out=values)
        finite = bool(np.isfinite(values).all())
    elif type_name == "MXFP4":  # a block's scale is a power of two, kept as its exponent
        exponents = out[..., 0].astype(np.int32) + (factor.bit_length() - 1)
        finite = bool((exponents <= 254).all())
        out[..., 0] = exponents.astype(np.uint8)
    elif type_name in FLOAT16_SCALES:
        finite = True
        for offset in FLOAT16_SCALES[type_name]:
            scales = np.ascontiguousarray(out[..., offset : offset + 2]).view(np.float16)
            with np.errstate(over="ignore"):  # looked for below
                scales = scales * np.float16(factor)
            finite = finite and bool(np.isfinite(scales).all())
            out[..., offset : offset + 2] = scales.view(np.uint8)
    else:
        raise ModelFileError(f"{type_name} weights cannot be split: their scales are not known here")
    if not finite:
        raise ModelFileError(f"a scale of {type_name} weights would overflow: use fewer experts")
    return out


class _Target(NamedTuple):
    """The architecture that a dense one becomes.

    Attributes:
        architecture: its GGUF name.
        renormalises: whether the weights of the chosen experts are made to sum to 1.
        width_key: where the width of an expert stands.
        shared: whether it has a shared expert.
    """

    architecture: str
    renormalises: bool
    width_key: str
    shared: bool


_TARGETS: Mapping[str, _Target] = {
    "llama": _Target("llama", True, "feed_forward_length", False),
    "qwen2": _Target("qwen2moe", False, "expert_feed_forward_length", True),
    "qwen3": _Target("qwen3moe", True, "expert_feed_forward_length", False),
}
_SHARED_FACTOR = 2  # a gate of nothing is a weight of 1/2
# Length of the shared expert's gate: less than float32 can tell from nothing beside 1/2, but not zero, because
# llama.cpp computes the sigmoid as silu(x) / x.
_SHARED_GATE = 1e-7

_Pieces = Callable[[], Iterator[Raw]]


class _Splitter:
    def __init__(self, gguf: GgufFile, experts: int, routed: bool, epsilon: float, seed: int) -> None:
        if gguf.architecture not in _TARGETS:
            raise UsageError(
                f"{gguf.path}: a model of architecture {gguf.architecture!r} cannot be split, only "
                f"{', '.join(map(repr, _TARGETS))}"
            )
        copies = 2 if routed else 1
        slices = experts // copies
        if experts % copies or experts < 2 or slices & (slices - 1):
            least = "2, 4, 8, 16, 32 …"
            raise UsageError(
                f"--experts {experts}: give {least}" + (" (two for each slice of neurons)" if routed else "")
            )
        if any("_exps" in name for name in gguf.tensors):
            raise UsageError(f"{gguf.path} has experts already")
        if biased := [name for name in gguf.tensors if ".ffn_" in name and name.endswith(".bias")]:
            raise UsageError(f"{gguf.path}: {biased[0]} cannot be split among experts")
        self.gguf, self.experts, self.slices, self.copies = gguf, experts, slices, copies
        self.epsilon, self.seed = epsilon, seed
        self.target = _TARGETS[gguf.architecture]
        self.width = int(str(gguf.metadata[f"{gguf.architecture}.embedding_length"]))
        hidden = gguf.metadata[f"{gguf.architecture}.feed_forward_length"]
        if not isinstance(hidden, int):
            raise UsageError(f"{gguf.path}: its layers differ in width, so they cannot be split alike")
        self.hidden = hidden
        self.shared, self.share = self._cut()
        # What makes good the weight of an expert.
        self.factor = slices if self.target.renormalises else experts

    def _cut(self) -> tuple[int, int]:
        """Neurons of the shared expert, and neurons of each slice."""
        layouts = [GGML_TYPES[info.type] for info in self.gguf.tensors.values() if ".ffn_down." in info.name]
        largest = max(layouts, key=lambda layout: layout.elements)
        block = largest.elements
        if self.target.shared:
            # Rows of floats may be of any length, but kernels like whole vectors of them.
            step = max(block, 32) if self.hidden >= 32 * (self.slices + 1) else block
            share = (self.hidden - block) // (self.slices * step) * step
        else:
            share = self.hidden // self.slices
        shared = self.hidden - share * self.slices
        if share < 1 or share % block or shared % block or (shared and not self.target.shared):
            raise UsageError(
                f"{self.gguf.path}: {self.hidden} neurons in {largest.name} blocks of {block} cannot be "
                f"cut into {self.slices} slices: give fewer experts"
            )
        return shared, share

    def header_values(self, header: bytes) -> list[bytes]:
        """Keys and values of the new file, encoded."""
        old, new = self.gguf.architecture, self.target.architecture
        values = {}
        for key, value in _Values(header).items():
            if not key.startswith("split."):
                values[key.replace(f"{old}.", f"{new}.", 1) if key.startswith(f"{old}.") else key] = value
        values |= {
            "general.architecture": struct.pack("<I", _STRING) + _string(new),
            f"{new}.{self.target.width_key}": _uint32(self.share),
            f"{new}.expert_count": _uint32(self.experts),
            f"{new}.expert_used_count": _uint32(self.slices),
        }
        if self.target.shared:
            values[f"{new}.expert_shared_feed_forward_length"] = _uint32(self.shared)
        return [_string(key) + value for key, value in values.items()]

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...], int, _Pieces]]:
        """Name, shape (numpy order), type and bytes of each tensor of the new file."""
        for info in self.gguf.tensors.values():
            prefix, _, suffix = info.name.rpartition(".ffn_")
            if suffix in ("gate.weight", "up.weight"):
                kind = suffix.removesuffix(".weight")
                shape = (self.experts, self.share, self.width)
                yield f"{prefix}.ffn_{kind}_exps.weight", shape, info.type, self._rows(info)
                if self.target.shared:
                    name = f"{prefix}.ffn_{kind}_shexp.weight"
                    yield name, (self.shared, self.width), info.type, self._shared_rows(info)
            elif suffix == "down.weight":
                shape = (self.experts, self.width, self.share)
                yield f"{prefix}.ffn_down_exps.weight", shape, info.type, self._columns(info)
                layer = int(prefix.removeprefix("blk."))
                yield f"{prefix}.ffn_gate_inp.weight", (self.experts, self.width), 0, self._router(layer)
                if self.target.shared:
                    name = f"{prefix}.ffn_down_shexp.weight"
                    yield name, (self.width, self.shared), info.type, self._shared_columns(info)
                    yield f"{prefix}.ffn_gate_inp_shexp.weight", (self.width,), 0, self._shared_gate(layer)
            else:
                yield info.name, info.shape, info.type, self._whole(info)
        if self.target.shared and "output.weight" not in self.gguf.tensors:
            # qwen2moe wants a matrix of its own, so a tied one is written a second time.
            tied = self.gguf.tensors["token_embd.weight"]
            yield "output.weight", tied.shape, tied.type, self._whole(tied)

    def _raw(self, info: TensorInfo) -> Raw:
        return np.frombuffer(self.gguf.tensor_view(info.name), np.uint8)

    def _whole(self, info: TensorInfo) -> Callable[[], Iterator[Raw]]:
        def pieces() -> Iterator[Raw]:
            yield self._raw(info)

        return pieces

    def _by_row(self, info: TensorInfo) -> Raw:
        """Neurons are rows of gate and up: uint8 [hidden, row bytes]."""
        return self._raw(info).reshape(self.hidden, -1)

    def _rows(self, info: TensorInfo) -> _Pieces:
        def pieces() -> Iterator[Raw]:
            for _ in range(self.copies):
                yield self._by_row(info)[self.shared :].reshape(-1)  # slices lie one after the other already

        return pieces

    def _shared_rows(self, info: TensorInfo) -> _Pieces:
        def pieces() -> Iterator[Raw]:
            yield self._by_row(info)[: self.shared].reshape(-1)

        return pieces

    def _block_columns(self, info: TensorInfo, begin: int, end: int, factor: int) -> Raw:
        """Neurons are columns of down: those of neurons [begin, end), times a factor."""
        layout = GGML_TYPES[info.type]
        blocks = self._raw(info).reshape(self.width, self.hidden // layout.elements, layout.n_bytes)
        part = np.ascontiguousarray(blocks[:, begin // layout.elements : end // layout.elements])
        return _scaled(part, layout.name, factor).reshape(-1)

    def _columns(self, info: TensorInfo) -> _Pieces:
        def pieces() -> Iterator[Raw]:
            for _ in range(self.copies):
                for begin in range(self.shared, self.hidden, self.share):
                    yield self._block_columns(info, begin, begin + self.share, self.factor)

        return pieces

    def _shared_columns(self, info: TensorInfo) -> _Pieces:
        def pieces() -> Iterator[Raw]:
            yield self._block_columns(info, 0, self.shared, _SHARED_FACTOR)

        return pieces

    def _shared_gate(self, layer: int) -> _Pieces:
        def pieces() -> Iterator[Raw]:
            generator = np.random.default_rng([self.seed, layer, 1])
            gate = generator.standard_normal(self.width, np.float32)
            gate *= np.float32(_SHARED_GATE / self.width**0.5)
            yield gate.view(np.uint8)

        return pieces

    def _router(self, layer: int) -> _Pieces:
        def pieces() -> Iterator[Raw]:
            if self.copies == 1:
                yield np.zeros((self.experts, self.width), np.float32).view(np.uint8).reshape(-1)
                return
            generator = np.random.default_rng([self.seed, layer])
            rows = generator.standard_normal((self.slices, self.width), np.float32)
            rows *= np.float32(self.epsilon / self.width**0.5)
            yield np.concatenate([rows, -rows]).view(np.uint8).reshape(-1)

        return pieces


def split_experts(
    source: Path,
    target: Path,
    *,
    experts: int = 16,
    routed: bool = True,
    epsilon: float = EPSILON,
    seed: int = 0,
    progress: Progress | None = None,
) -> None:
    """Write a dense model again as one with experts.

    Args:
        source: GGUF of architecture ``llama``, ``qwen2`` or ``qwen3``, dense; may be split into parts.
        target: new GGUF, in one file; appears whole or not at all.
        experts: 2, 4, 8, …; routed, there are two for each slice of neurons and half are used for each row.
        routed: whether routing depends on the input; else all experts are used for each row.
        epsilon: length of the router's vectors.
        seed: of the router's vectors.
        progress: told bytes written and bytes in all.

    Raises:
        ModelFileError: the source is no GGUF, or has weights of a type that cannot be scaled.
        UsageError: it is not such a model, its neurons cannot be cut so, or the target cannot be written.
    """
    with GgufFile.open(source) as gguf:
        splitter = _Splitter(gguf, experts, routed, epsilon, seed)
        alignment = int(str(gguf.metadata.get("general.alignment", 32)))
        with gguf.path.open("rb") as file:  # keys and values lie before the first tensor's bytes
            first = min(info.offset for info in gguf.tensors.values() if info.shard == 0)
            values = splitter.header_values(file.read(first))
        tensors = list(splitter.tensors())
        infos, offset = [], 0
        for name, shape, kind, _ in tensors:
            layout = GGML_TYPES[kind]
            elements = 1
            for length in shape:
                elements *= length
            size = elements // layout.elements * layout.n_bytes
            dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
            infos.append(_string(name) + dimensions + struct.pack("<IQ", kind, offset))
            offset += -(-size // alignment) * alignment
        header = b"GGUF" + struct.pack("<IQQ", _VERSION, len(infos), len(values))
        header += b"".join(values) + b"".join(infos)
        header += bytes(-len(header) % alignment)
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
        try:
            with temporary.open("wb") as out:
                out.write(header)
                done = 0
                for _, _, _, pieces in tensors:
                    size = 0
                    for piece in pieces():
                        out.write(piece.data)
                        size += piece.nbytes
                    out.write(bytes(-size % alignment))
                    done += -(-size // alignment) * alignment
                    if progress is not None:
                        progress(done, offset)
                out.flush()
                os.fsync(out.fileno())
            temporary.replace(target)
        except OSError as error:
            raise UsageError(f"{target} cannot be written: {error.strerror or error}") from None
        finally:
            temporary.unlink(missing_ok=True)
