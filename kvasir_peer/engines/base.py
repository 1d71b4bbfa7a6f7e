"""What every engine offers: layers over a batch of rows, and sets of experts.

An engine is used from one thread of the engine process: no network, no event loop, no locks. All arrays that
cross this border are numpy, C-contiguous, float32 or int32.

Two engines implement it, chosen by name in :func:`create_stack` and :func:`create_bank`; each is imported
only when it is asked for, so that a machine needs just the libraries of the engine that it uses.
"""

from __future__ import annotations

import abc
import importlib
import itertools
import logging
import math
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from kvasir_peer.engines import quants
from kvasir_peer.errors import EngineError, UsageError

if TYPE_CHECKING:
    from kvasir_peer.engines.architectures import ModelShape
    from kvasir_peer.models.gguf import TensorInfo
    from kvasir_peer.models.sources import TensorSource

_log = logging.getLogger(__name__)

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]

EngineName = Literal["onnx", "torch"]
Precision = Literal["exact", "fast"]

# Module of each engine. Each has the functions of `_Engine`.
_ENGINE_MODULES: Mapping[str, str] = {
    "onnx": "kvasir_peer.engines.onnx_engine",
    "torch": "kvasir_peer.engines.torch_engine",
    "synthetic": "kvasir_peer.engines.synthetic",
}

ENGINE_NAMES: tuple[str, ...] = ("onnx", "torch")  # those that compute; the synthetic one is for measurements

ExpertRange = tuple[int, int, int]  # layer, first expert, end of experts


@dataclass(frozen=True)
class StackSpec:
    """What a stack of layers is made for.

    Attributes:
        first: first layer; 0 means that the stack also holds the embedding.
        end: one past the last layer; the model's layer count means that it also holds the final norm and the
            output.
        n_slots: requests whose KV entries can be held at once.
        context_length: positions per slot.
        max_rows: most rows of one :meth:`LayerStack.forward`.
        precision: ``exact`` computes linears with float32 activations; ``fast`` lets the engine take what is
            native to it (int8 activations in onnxruntime, float16 or bfloat16 on a GPU).
        threads: threads of computation; 0 takes all cores.
        device: ``cpu``, ``cuda``, ``cuda:1``, ``mps``, or the name of an onnxruntime execution provider.
    """

    first: int
    end: int
    n_slots: int
    context_length: int
    max_rows: int
    precision: Precision = "fast"
    threads: int = 0
    device: str = "cpu"

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.end:
            raise EngineError(
                f"layers [{self.first}, {self.end}) are no run of layers; give 0 <= first < end"
            )
        for name in ("n_slots", "context_length", "max_rows"):
            if getattr(self, name) < 1:
                raise EngineError(f"{name} is {getattr(self, name)}; it must be at least 1")


@dataclass(frozen=True)
class BankSpec:
    """What a bank of experts is made for.

    Attributes:
        ranges: (layer, lo, hi) of each run of experts held.
        max_rows: most rows of one :meth:`ExpertBank.compute`.
        precision: as in :class:`StackSpec`.
        threads: as in :class:`StackSpec`.
        device: as in :class:`StackSpec`.
    """

    ranges: tuple[ExpertRange, ...]
    max_rows: int
    precision: Precision = "fast"
    threads: int = 0
    device: str = "cpu"


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of one pass.

    Rows of one slot are consecutive, with ascending consecutive positions (a *run*: a chunk of a prompt, or
    one decode row). The KV entry of (slot, position) is written, or overwritten, by its row; attention sees the
    positions of the slot up to and including the row's own. To rewind a slot, write again from an earlier
    position.

    Attributes:
        slots: int32 [n].
        positions: int32 [n].
        tokens: int32 [n]; read by the head only.
        wants_output: bool [n]; read by the tail only.
    """

    slots: I32
    positions: I32
    tokens: I32
    wants_output: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.slots)

    @classmethod
    def of(
        cls,
        slots: Sequence[int] | I32,
        positions: Sequence[int] | I32,
        tokens: Sequence[int] | I32,
        wants_output: Sequence[bool] | NDArray[np.bool_],
    ) -> Rows:
        """Make rows from plain sequences."""
        return cls(
            np.asarray(slots, np.int32),
            np.asarray(positions, np.int32),
            np.asarray(tokens, np.int32),
            np.asarray(wants_output, np.bool_),
        )

    def runs(self) -> list[tuple[int, int]]:
        """Return (begin, end) row indices of each run, in row order."""
        n = len(self.slots)
        if n == 0:
            return []
        cuts = np.flatnonzero(self.slots[1:] != self.slots[:-1]) + 1
        edges = [0, *cuts.tolist(), n]
        return list(itertools.pairwise(edges))

    def check(self, spec: StackSpec, n_vocab: int = 0) -> None:
        """Refuse rows that the stack has no room for, or that break the order above.

        Args:
            spec: what the stack was made for.
            n_vocab: size of the vocabulary, or 0 where tokens are not read.

        Raises:
            EngineError: names the first thing that is wrong.
        """
        n = len(self.slots)
        if not 1 <= n <= spec.max_rows:
            raise EngineError(f"a pass of {n} rows; this stack takes 1 to {spec.max_rows}")
        for name in ("positions", "tokens", "wants_output"):
            if getattr(self, name).shape != (n,):
                raise EngineError(f"rows have {n} slots but {getattr(self, name).shape} {name}")
        if self.slots.min() < 0 or self.slots.max() >= spec.n_slots:
            raise EngineError(
                f"slot {self.slots.max()} or {self.slots.min()} outside the {spec.n_slots} slots"
            )
        if self.positions.min() < 0 or self.positions.max() >= spec.context_length:
            raise EngineError(
                f"position {self.positions.max()} or {self.positions.min()} outside a context of "
                f"{spec.context_length}"
            )
        same = self.slots[1:] == self.slots[:-1]
        if np.any(self.positions[1:][same] != self.positions[:-1][same] + 1):
            raise EngineError("positions of one slot are not ascending and consecutive")
        if len(np.unique(self.slots)) != 1 + int(np.count_nonzero(~same)):
            raise EngineError("rows of one slot are not consecutive")
        if n_vocab and (self.tokens.min() < 0 or self.tokens.max() >= n_vocab):
            raise EngineError(f"token {self.tokens.max()} or {self.tokens.min()} outside {n_vocab} tokens")


@dataclass(frozen=True)
class MemoryEstimate:
    """What a stack or bank takes while it runs, in bytes.

    Attributes:
        weights: weights in the engine's own container (more than in the file where the container is wider).
        kv: key and value cache of all slots.
        workspace: the largest scratch space of one pass.
    """

    weights: int
    kv: int
    workspace: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.kv + self.workspace


@dataclass(frozen=True, eq=False)
class ExpertWork:
    """Routed rows of one layer, to be computed by whoever holds the experts.

    Attributes:
        layer: index of the layer in the model.
        x: float32 [n, n_embd], normed input of the experts.
        ids: int32 [n, k], chosen experts.
        weights: float32 [n, k], router weights; the answer is the sum of ``weights * expert(x)`` over k.
    """

    layer: int
    x: F32
    ids: I32
    weights: F32


Steps = Generator[ExpertWork, F32, F32]


class LayerStack(abc.ABC):
    """Layers [first, end) of a model, with KV slots.

    Attributes:
        spec: what the stack was made for.
        shape: the whole model's shape.
    """

    spec: StackSpec
    shape: ModelShape

    @abc.abstractmethod
    def memory(self) -> MemoryEstimate:
        """Return what this stack takes, as computed before loading."""

    @abc.abstractmethod
    def forward(self, rows: Rows, hidden: F32 | None) -> F32:
        """Run all layers over the rows.

        Args:
            rows: n rows.
            hidden: float32 [n, n_embd] from the stage before, or None at the head, which embeds the tokens.

        Returns:
            float32 [n, n_embd]; at the tail float32 logits [m, n_vocab] of the m rows that want an output.

        Raises:
            EngineError: rows that do not fit the stack; nothing was written.
        """

    def check(self, rows: Rows, hidden: F32 | None) -> None:
        """Refuse what :meth:`forward` cannot run.

        Raises:
            EngineError: names the first thing that is wrong.
        """
        head = self.spec.first == 0
        rows.check(self.spec, self.shape.n_vocab if head else 0)
        if head != (hidden is None):
            raise EngineError(
                "the head embeds tokens and takes no hidden state; every other stage takes a hidden state"
            )
        expected = (len(rows), self.shape.n_embd)
        if hidden is not None and (hidden.shape != expected or hidden.dtype != np.float32):
            raise EngineError(
                f"the hidden state is {hidden.dtype} {hidden.shape}; expected float32 {expected}"
            )

    @abc.abstractmethod
    def steps(self, rows: Rows, hidden: F32 | None) -> Steps:
        """Run as :meth:`forward`, but leave routed experts to the caller.

        Yields:
            One :class:`ExpertWork` per layer that has routed experts; send back the routed sum, float32
            [n, n_embd] (shared experts are computed here and are not part of it).

        Returns:
            What :meth:`forward` returns.
        """

    @abc.abstractmethod
    def local_bank(self) -> ExpertBank | None:
        """Return a bank over the routed experts of the stack's own layers, or None where it has none.

        It shares the stack's weights, so that whoever drives :meth:`steps` can compute here what no other
        machine answers, without holding weights twice. It lives as long as the stack.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Give all memory back; the stack can't be used afterwards."""


class ExpertBank(abc.ABC):
    """A set of (layer, expert) slices.

    Attributes:
        ranges: (layer, lo, hi) of each run of experts held.
        shape: the whole model's shape.
    """

    ranges: tuple[ExpertRange, ...]
    shape: ModelShape

    def check(self, held: Collection[int], max_rows: int, layer: int, x: F32, ids: I32, weights: F32) -> None:
        """Refuse what :meth:`compute` cannot take.

        Args:
            held: layers of which experts are held.
            max_rows: most rows.
            layer, x, ids, weights: as for :meth:`compute`.

        Raises:
            EngineError: names the first thing that is wrong.
        """
        if layer not in held:
            raise EngineError(f"no experts of layer {layer} are held here, only of {sorted(held)}")
        moe = self.shape.layers[layer].moe
        assert moe is not None
        n = len(x)
        if not 1 <= n <= max_rows or x.shape != (n, self.shape.n_embd) or x.dtype != np.float32:
            raise EngineError(
                f"rows of shape {x.shape}, {x.dtype}; need 1 to {max_rows} of {self.shape.n_embd}, float32"
            )
        if ids.ndim != 2 or ids.shape != weights.shape or len(ids) != n or not ids.shape[1]:
            raise EngineError(f"expert ids {ids.shape} and weights {weights.shape} do not fit {n} rows")
        if ids.min() < 0 or ids.max() >= moe.n_expert:
            raise EngineError(f"expert {ids.max()} or {ids.min()} outside {moe.n_expert} experts")
        if ids.shape[1] > moe.n_used:
            raise EngineError(f"{ids.shape[1]} experts a row; the model uses {moe.n_used}")

    @abc.abstractmethod
    def memory(self) -> MemoryEstimate:
        """Return what this bank takes, as computed before loading."""

    @abc.abstractmethod
    def compute(self, layer: int, x: F32, ids: I32, weights: F32) -> F32:
        """Sum over those chosen experts that the bank holds; the others contribute nothing.

        Args:
            layer: index of the layer in the model.
            x: float32 [n, n_embd].
            ids: int32 [n, k].
            weights: float32 [n, k].

        Returns:
            float32 [n, n_embd].

        Raises:
            EngineError: a layer of which the bank holds nothing, or arrays whose shapes do not fit.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Give all memory back; the bank can't be used afterwards."""


Progress = Callable[[int, int], None]  # bytes of weights loaded so far, bytes in all


def experts_by_layer(shape: ModelShape, ranges: Sequence[ExpertRange]) -> dict[int, list[tuple[int, int]]]:
    """Sort ranges of experts by layer, ascending; overlapping and neighbouring ones are joined.

    Raises:
        EngineError: no range, or one that is not within its layer's experts.
        ModelFileError: a layer without experts, or one of which the source lacks a tensor.
    """
    if not ranges:
        raise EngineError("a bank needs at least one range of experts")
    layers: dict[int, list[tuple[int, int]]] = {}
    for index, lo, hi in sorted(ranges):
        shape.expert_tensors(index)
        moe = shape.layers[index].moe
        assert moe is not None
        if not 0 <= lo < hi <= moe.n_expert:
            raise EngineError(f"experts [{lo}, {hi}) are not within the {moe.n_expert} of layer {index}")
        held = layers.setdefault(index, [])
        if held and lo <= held[-1][1]:
            held[-1] = (held[-1][0], max(hi, held[-1][1]))
        else:
            held.append((lo, hi))
    return layers


def say_dequantised(infos: Iterable[TensorInfo], float_bytes: int = 4) -> None:
    """Log a line for each type of matrices that are held as floats, whatever the file has.

    Warnings, because they explain why a model takes several times the file's memory.

    Args:
        infos: tensors held as floats; vectors and the embedding, whose rows are taken apart one by one, count not.
        float_bytes: bytes of such a float.
    """
    found: dict[str, list[int]] = {}
    for info in infos:
        name = quants.quant_type(info.type, info.name).name
        if len(info.shape) < 2 or name == "F32" or info.name == "token_embd.weight":
            continue
        sums = found.setdefault(name, [0, 0, 0])
        sums[0] += 1
        sums[1] += info.n_bytes
        sums[2] += float_bytes * math.prod(info.shape)
    for name, (count, before, after) in found.items():
        _log.warning(
            "%d tensors of type %s are dequantised to float%d: %.1f MB instead of %.1f MB",
            count,
            name,
            8 * float_bytes,
            after / 1e6,
            before / 1e6,
        )


class _Engine(Protocol):
    """What the module of an engine has."""

    def make_stack(self, source: TensorSource, spec: StackSpec, progress: Progress | None) -> LayerStack: ...

    def make_bank(self, source: TensorSource, spec: BankSpec) -> ExpertBank: ...

    def estimate_stack(
        self, metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo], spec: StackSpec
    ) -> MemoryEstimate: ...

    def estimate_bank(
        self, metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo], spec: BankSpec
    ) -> MemoryEstimate: ...


def _engine(name: str) -> _Engine:
    if name not in _ENGINE_MODULES:
        raise UsageError(f"no engine is called {name!r}; take one of {', '.join(ENGINE_NAMES)}")
    try:
        module = importlib.import_module(_ENGINE_MODULES[name])
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("kvasir_peer"):
            raise
        raise UsageError(
            f"engine {name} needs the Python package {error.name}; install kvasir-peer[{name}]"
        ) from error
    return cast(_Engine, module)


def create_stack(
    engine: str, source: TensorSource, spec: StackSpec, progress: Progress | None = None
) -> LayerStack:
    """Load layers.

    Args:
        engine: ``onnx`` or ``torch``.
        source: has every tensor of the layers (and of head and tail, where the spec reaches them).
        spec: which layers, how many slots.
        progress: called with bytes loaded and bytes in all.

    Raises:
        UsageError: no such engine, or its package is not installed.
        ModelFileError: the model has an architecture or tensor that is not known, or lacks one.
    """
    return _engine(engine).make_stack(source, spec, progress)


def create_bank(engine: str, source: TensorSource, spec: BankSpec) -> ExpertBank:
    """Load experts.

    Args:
        engine: as for :func:`create_stack`.
        source: has the tensors of the experts.
        spec: which experts.

    Raises:
        UsageError: as for :func:`create_stack`.
        EngineError: no range, or one that is not within its layer's experts.
        ModelFileError: as for :func:`create_stack`, or a layer without experts.
    """
    return _engine(engine).make_bank(source, spec)


def estimate_stack(
    engine: str, metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo], spec: StackSpec
) -> MemoryEstimate:
    """Say what :func:`create_stack` would take, from the file's header alone; right within 10 %."""
    return _engine(engine).estimate_stack(metadata, tensors, spec)


def estimate_bank(
    engine: str, metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo], spec: BankSpec
) -> MemoryEstimate:
    """Say what :func:`create_bank` would take, from the file's header alone; right within 10 %."""
    return _engine(engine).estimate_bank(metadata, tensors, spec)
