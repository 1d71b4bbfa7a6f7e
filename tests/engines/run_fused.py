"""Run as a program: the fused kernel beside unpacking first. Prints "same" at the end.

Usage: run_fused.py kernel|stack|compile cpu|cuda

On ``cpu`` Triton interprets the kernel, which TRITON_INTERPRET=1 in the environment tells it; ``compile`` wants a 0
there.
"""

import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np
import tiny_models
import torch

from kvasir_peer.engines import quants, torch_fused
from kvasir_peer.engines.base import Rows, StackSpec
from kvasir_peer.engines.torch_dequantize import dequantize
from kvasir_peer.engines.torch_engine import make_stack
from kvasir_peer.engines.torch_weights import TorchOptions, _fused_works
from kvasir_peer.models.sources import GgufSource

# Where the float16 scales of a block stand.
SCALES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q8_0": (0,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "MXFP4": (),
}


def kernel(device: torch.device) -> None:
    """All types, with outputs and units that do not fill a program."""
    generator = np.random.default_rng(0)
    assert {quants.TYPES[type_id].name for type_id in torch_fused.TYPES} == set(SCALES)
    for type_id in torch_fused.TYPES:
        kind = quants.TYPES[type_id]
        blocks = generator.integers(0, 256, (3, 11, 768 // kind.block, kind.block_bytes), dtype=np.uint8)
        for at in SCALES[kind.name]:
            values = generator.uniform(-0.01, 0.01, blocks.shape[:3]).astype(np.float16)
            blocks[..., at : at + 2] = values[..., None].view(np.uint8)
        if kind.name == "MXFP4":
            blocks[..., 0] = generator.integers(0, 130, blocks.shape[:3])
        raw = torch.from_numpy(blocks.reshape(3, 11, -1)).to(device)
        x = torch.from_numpy(generator.standard_normal((4, 768)).astype(np.float32)).to(device)
        matrices = torch.tensor([2, 0, 1, 1, 2, 2, 0, 1], device=device)
        found = torch_fused.matvec(raw, type_id, x, matrices, 2)
        weights = dequantize(raw, type_id, torch.float32)
        expected = torch.stack([weights[m] @ x[i // 2] for i, m in enumerate(matrices)])
        assert (found - expected).abs().max() < 1e-5 * expected.std(), kind.name
        assert _fused_works(type_id, device), kind.name


def stack(device: torch.device) -> None:
    """A mixture with biases, dense parts and experts by the kernel, as a GPU decodes it."""
    model = tiny_models.BY_NAME["gpt-oss"]
    tensors = {}
    for i, (name, values) in enumerate(tiny_models.tensors_of(model).items()):
        matrix = values.ndim > 1 and values.shape[-1] % 32 == 0 and "gate_inp" not in name
        kind = gguf.GGMLQuantizationType[("Q8_0", "Q4_0", "Q4_1")[i % 3] if matrix else "F32"]
        tensors[name] = (gguf.quants.quantize(values, kind), kind)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        tiny_models.write_gguf(path, tiny_models.metadata_of(model), tensors)
        results = []
        for fused in (False, True):
            options = TorchOptions(
                device,
                torch.float32,
                keep_bytes=True,
                batched_attention=True,
                gather_pairs=64,
                fused=fused,
                graphs=True,
            )
            with GgufSource(path) as source:
                made = make_stack(source, StackSpec(0, 3, 2, 64, 16, threads=1), options=options)
                made.forward(Rows.of([0] * 5, range(5), range(5), [True] * 5), None)
                results.append(made.forward(Rows.of([0, 1], [5, 0], [7, 8], [True] * 2), None))
        assert np.abs(results[0] - results[1]).max() < 1e-5 * results[0].std()


def compiled(device: torch.device) -> None:
    """Machine code for cards that need not be there, of all types and of inputs in half precision."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    sizes = ("n_out", "n_units", "row_bytes", "matrix_bytes", "x_stride", "per_row")
    constants = ("KIND", "BLOCK_OUT", "UNITS")
    signature = {"raw": "*u8", "x": "*bf16", "y": "*fp32", "matrices": "*i64"}
    signature |= dict.fromkeys(sizes, "i32") | dict.fromkeys(constants, "constexpr")
    for type_id in torch_fused.TYPES:
        values = (type_id, torch_fused._BLOCK_OUT, torch_fused._UNITS)
        source = ASTSource(torch_fused._kernel, signature, dict(zip(constants, values, strict=True)))
        for capability in (75, 80, 90):
            assert compile(source, target=GPUTarget("cuda", capability, 32)).asm["cubin"]


if __name__ == "__main__":
    parts = {"kernel": kernel, "stack": stack, "compile": compiled}
    parts[sys.argv[1]](torch.device(sys.argv[2]))
    print("same")
