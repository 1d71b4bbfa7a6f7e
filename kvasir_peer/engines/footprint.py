"""How much memory an engine makes of weights, for whoever plans without it.

Factors are bytes of memory for each byte of block-quantised weights in a file, with the tenth that an engine keeps in
reserve before it loads (:data:`RESERVE`): what is planned to the brim should not be refused then.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Protocol

from kvasir_peer.models.gguf import GGML_TYPES

# Estimates are right within a tenth; a cap has to hold.
RESERVE = 1.1
DEFAULT_EXPANSION = 2.0  # of a peer that says nothing
# Panels of the C kernels take at most 1.04, and torch on a GPU keeps the file's bytes; the rest is for what comes with
# each layer or expert, such as sessions.
AS_IN_THE_FILE = 1.2
# onnxruntime's own containers take 1.3 to 1.7 for 4 and 8 bits, 2.1 for 6; files of 4 bits have some of these.
CONTAINERS = 2.2
# Floats made of types of 4 bits; of those with fewer they take more.
FLOAT32, FLOAT16 = 8.4, 4.2
# Enough for float32 made of types of 2 bits.
MAX_EXPANSION = 16.0
# An engine that has refused to load what it was given takes so many times more than it has said.
REFUSED_GROWTH = 1.1


class _Tensor(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def type(self) -> int: ...

    @property
    def n_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Floats:
    """Weights that are floats in the file already: bytes there, and as float32, as which engines keep them."""

    file: int = 0
    loaded: int = 0

    def __add__(self, other: Floats) -> Floats:
        return Floats(self.file + other.file, self.loaded + other.loaded)


NO_FLOATS = Floats()


def floats_of(tensors: Iterable[_Tensor]) -> Floats:
    """What is no block of a quantised type."""
    plain = [tensor for tensor in tensors if GGML_TYPES[tensor.type].elements == 1]
    return Floats(sum(tensor.n_bytes for tensor in plain), sum(4 * prod(tensor.shape) for tensor in plain))


def expansion(engine: str, device: str, precision: str) -> float:
    """The factor of an engine on this machine.

    For ``onnx`` its kernels are tried, which imports onnxruntime and may compile for some seconds: ask in the engine's
    process (:meth:`kvasir_peer.agent.engine.Engine.expansion`).
    """
    if engine == "onnx":
        from kvasir_peer.engines.onnx_probe import probe

        return AS_IN_THE_FILE if probe(device).kernels.panels is not None else CONTAINERS
    return expansion_untried(engine, device, precision)


def expansion_untried(engine: str, device: str, precision: str) -> float:
    """The same by the names alone: what to go by where kernels could not be tried."""
    if engine != "torch":
        return CONTAINERS
    if device.startswith("cuda"):
        return AS_IN_THE_FILE
    return FLOAT32 if device == "cpu" or precision == "exact" else FLOAT16


def process_bytes(engine: str) -> int:
    """Bytes of Python, the engine's libraries and the arena, beside weights and KV cache.

    With torch on a GPU, which counts no process, of what it takes apart at a time.
    """
    return (640 if engine == "torch" else 200) << 20
