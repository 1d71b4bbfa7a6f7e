"""What is planned for an engine holds what it estimates before it loads."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from kvasir_peer.commands import plan
from kvasir_peer.engines import footprint, panels, quants
from kvasir_peer.engines.architectures import parse
from kvasir_peer.engines.base import StackSpec, estimate_stack
from kvasir_peer.engines.footprint import RESERVE, Floats, expansion_untried, floats_of
from kvasir_peer.engines.onnx_containers import Kernels, packed_bytes
from kvasir_peer.models.gguf import GGML_TYPES, GgufFile, TensorInfo, tensor_bytes
from kvasir_peer.models.manifest import build_manifest
from kvasir_peer.ring import manager
from kvasir_peer.ring.offers import StageOffer, memory_needed
from kvasir_peer.serving.widths import Widths

ROWS, COLUMNS = 512, 1024
PANELS, NO_PANELS = Kernels(panels=Path("library")), Kernels()


def tensor(type_id: int) -> TensorInfo:
    return TensorInfo(
        "blk.0.ffn_up.weight", (ROWS, COLUMNS), type_id, tensor_bytes((ROWS, COLUMNS), type_id), 0
    )


def loaded(name: str, kernels: Kernels) -> float:
    """Bytes with the reserve, for each byte of the file."""
    info = tensor(quants.BY_NAME[name].id)
    return RESERVE * packed_bytes(info.type, ROWS, COLUMNS, "fast", kernels) / info.n_bytes


def test_panels_of_every_type_take_what_is_said_and_leave_something_for_sessions() -> None:
    for type_id in panels.TYPES:
        assert 1.1 <= loaded(quants.quant_type(type_id).name, PANELS) < footprint.AS_IN_THE_FILE - 0.05


def test_containers_take_what_is_said() -> None:
    for name in ("Q4_0", "Q4_1", "Q8_0", "Q4_K"):
        assert footprint.AS_IN_THE_FILE < loaded(name, NO_PANELS) < footprint.CONTAINERS
    # As in files of 4 bits, where every fourth matrix has 6.
    sizes = {
        name: tensor(quants.BY_NAME[name].id).n_bytes * share for name, share in (("Q4_K", 3), ("Q6_K", 1))
    }
    mixed = sum(loaded(name, NO_PANELS) * size for name, size in sizes.items()) / sum(sizes.values())
    assert 2.0 < mixed < footprint.CONTAINERS


@pytest.mark.parametrize("name", ["Q4_0", "Q5_K", "Q8_0", "IQ4_XS", "MXFP4"])
def test_floats_of_torch_take_what_is_said(name: str) -> None:
    torch_engine = pytest.importorskip("kvasir_peer.engines.torch_engine")
    torch_weights = pytest.importorskip("kvasir_peer.engines.torch_weights")
    options = torch_weights.options_for("cpu", "fast")
    info = tensor(quants.BY_NAME[name].id)
    assert torch_engine.matrix_bytes(info, options) == 4 * ROWS * COLUMNS
    assert RESERVE * 4 * ROWS * COLUMNS / info.n_bytes < expansion_untried("torch", "cpu", "fast")
    assert RESERVE * 4 * ROWS * COLUMNS / info.n_bytes < expansion_untried("torch", "mps", "exact")
    assert RESERVE * 2 * ROWS * COLUMNS / info.n_bytes < expansion_untried("torch", "mps", "fast")


def test_torch_keeps_the_bytes_of_the_file_on_a_gpu() -> None:
    torch = pytest.importorskip("torch")
    from kvasir_peer.engines.torch_weights import TorchOptions, matrix_bytes

    options = TorchOptions(torch.device("cpu"), torch.float32, keep_bytes=True)
    info = tensor(quants.BY_NAME["Q4_K"].id)
    assert RESERVE * matrix_bytes(info, options) / info.n_bytes < expansion_untried(
        "torch", "cuda:1", "exact"
    )


def test_float32_of_the_fewest_bits_can_be_said() -> None:
    fewest = min(tensor(type_id).n_bytes for type_id in panels.TYPES)
    assert footprint.FLOAT32 < RESERVE * 4 * ROWS * COLUMNS / fewest < footprint.MAX_EXPANSION


def test_what_is_float_in_the_file_is_told_from_blocks() -> None:
    ids = {layout.name: type_id for type_id, layout in GGML_TYPES.items()}
    count = math.prod((ROWS, COLUMNS))
    assert floats_of([tensor(ids[name]) for name in ("F32", "F16", "BF16", "Q4_0", "Q6_K")]) == Floats(
        8 * count, 12 * count
    )
    assert floats_of([tensor(ids["Q8_0"])]) == footprint.NO_FLOATS


@pytest.mark.parametrize("engine", ["onnx", "torch"])
def test_layers_planned_to_the_brim_are_not_refused(smollm2_path: Path, engine: str) -> None:
    pytest.importorskip({"onnx": "onnxruntime"}.get(engine, engine))
    file = GgufFile.open(smollm2_path)
    needs = plan.needs_of(file, parse(file.metadata, file.tensors))
    widths = Widths(256, 64, 6, 4, 512)
    peer = StageOffer("peer", 0, 0, engine=engine, expansion=footprint.expansion(engine, "cpu", "fast"))
    for first, end in ((0, 10), (10, 20), (20, 30), (5, 6)):
        spec = StackSpec(first, end, 4, 512, 64, precision="fast", threads=1)
        asked = RESERVE * estimate_stack(engine, file.metadata, file.tensors, spec).total
        left = memory_needed(needs, widths, peer, first, end) - asked
        assert left > 180 << 20, "what the process takes before it loads"


def test_a_manifest_tells_floats_as_its_file_does() -> None:
    for name in ("stories260K.gguf", "stories260K-moe8x2.gguf"):
        file = GgufFile.open(Path(__file__).parent.parent / "data" / name)
        shape = parse(file.metadata, file.tensors)
        ours, files = manager.needs_of(build_manifest(file, name="m"), shape), plan.needs_of(file, shape)
        n = shape.n_layer
        for part in ((0, 2), (1, n), (0, n)):
            found = ours.loaded_bytes(*part, 1.2)
            assert found == pytest.approx(files.loaded_bytes(*part, 1.2))
            # One is all float32, experts of the other are float16.
            assert RESERVE <= found / ours.file_bytes(*part) + 1e-9 <= 2 * RESERVE
            assert (found / ours.file_bytes(*part) > 1.5) == ("moe" in name)
