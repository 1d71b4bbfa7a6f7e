"""The ways engines compute that have to agree, and stacks of each of them: what tests that hold for all take."""

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tiny_models
import torch

from kvasir_peer.engines import torch_engine
from kvasir_peer.engines.base import BankSpec, ExpertBank, LayerStack, StackSpec, create_bank, create_stack
from kvasir_peer.engines.torch_weights import TorchOptions
from kvasir_peer.models.sources import GgufSource, TensorSource

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Kind:
    """An engine, and how it computes.

    Attributes:
        name: for the names of tests.
        engine: ``onnx`` or ``torch``.
        options: of torch; None leaves them to the engine.
    """

    name: str
    engine: str
    options: TorchOptions | None = None

    def __str__(self) -> str:
        return self.name

    def stack(self, source: TensorSource, spec: StackSpec) -> LayerStack:
        """Load layers."""
        if self.options is None:
            return create_stack(self.engine, source, spec)
        return torch_engine.make_stack(source, spec, options=self.options)

    def bank(self, source: TensorSource, spec: BankSpec) -> ExpertBank:
        """Load experts."""
        if self.options is None:
            return create_bank(self.engine, source, spec)
        return torch_engine.make_bank(source, spec, options=self.options)


ONNX = Kind("onnx", "onnx")
TORCH = Kind("torch", "torch")
# What a GPU uses, on the CPU and in float32: batched attention, experts gathered without asking for their ids,
# decode passes with fixed buffers.
LIKE_GPU = Kind(
    "like-gpu",
    "torch",
    TorchOptions(
        CPU,
        torch.float32,
        keep_bytes=True,
        batched_attention=True,
        gather_pairs=64,
        grouped=True,
        graphs=True,
    ),
)
# Weights as the file's bytes, and each way of computing experts.
SORTS = Kind("sorted", "torch", TorchOptions(CPU, torch.float32, keep_bytes=True))
GATHERS = Kind("gathered", "torch", TorchOptions(CPU, torch.float32, keep_bytes=True, gather_pairs=1000))
GROUPS = Kind("grouped", "torch", TorchOptions(CPU, torch.float32, keep_bytes=True, grouped=True))


def ids(kinds: list[Kind]) -> list[str]:
    """Names for pytest."""
    return [kind.name for kind in kinds]


@contextmanager
def stages(kind: Kind, path: Path, borders: list[int], **changes: Any) -> Iterator[list[LayerStack]]:
    """Exact stacks between the given layer borders; the last border may be -1 for the model's end."""
    with GgufSource(path) as source, ExitStack() as closing:
        blocks = int(source.metadata[f"{source.metadata['general.architecture']}.block_count"])
        borders = [blocks if border < 0 else border for border in borders]
        stacks = []
        for first, end in itertools.pairwise(borders):
            spec = StackSpec(first, end, 4, tiny_models.CONTEXT, 128, precision="exact", threads=1)
            stack = kind.stack(source, replace(spec, **changes))
            closing.callback(stack.close)
            stacks.append(stack)
        yield stacks
