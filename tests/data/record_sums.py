"""Record what the onnxruntime engine computes for fixed rows on this kind of CPU, for tests/experts/test_other_cpus.py.

On another CPU, emulated or real::

    python tests/data/record_sums.py FOLDER OUT.npz

``FOLDER`` has the files that ``test_other_cpus.write_banks`` makes. Each array is ``[rows, n_embd]``, f32, by the name
of file and precision.

``arm_sums_cortex-a72.npz`` and ``arm_sums_neoverse-n1.npz`` were made on x86-64 with Debian's qemu-user-static 7.2
(``QEMU_CPU=cortex-a72 qemu-aarch64-static -L ROOT ROOT/usr/bin/python3.11 ...``), an aarch64 Python 3.11 unpacked from
Debian's packages, and the wheels onnxruntime 1.23.2 and numpy 2.4.6; a newer onnxruntime (1.32) ends with a
segmentation fault there. The first core has no instruction for products of bytes, the second has.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

ROWS, USED = 12, 2


def routed(width: int, experts: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Fixed rows, expert numbers and router weights."""
    rng = np.random.default_rng(20)
    x = rng.standard_normal((ROWS, width)).astype(np.float32)
    ids = np.stack([rng.permutation(experts)[:USED] for _ in range(ROWS)]).astype(np.int32)
    return x, ids, rng.uniform(0.1, 0.9, (ROWS, USED)).astype(np.float32)


def sums_of(file: Path, precision: str, engine: str = "onnx") -> np.ndarray:
    """What the engine makes of them, with the experts of layer 0."""
    from kvasir_peer.engines.architectures import parse
    from kvasir_peer.engines.base import BankSpec, create_bank
    from kvasir_peer.models.sources import GgufSource

    source = GgufSource(file)
    shape = parse(source.metadata, source.tensors)
    moe = shape.layers[0].moe
    assert moe is not None
    bank = create_bank(
        engine,
        source,
        BankSpec(((0, 0, moe.n_expert),), ROWS, threads=1, precision=precision),  # type: ignore[arg-type]
    )
    x, ids, weights = routed(shape.n_embd, moe.n_expert)
    return np.array(bank.compute(0, x, ids, weights), np.float32)


if __name__ == "__main__":
    folder, out = Path(sys.argv[1]), Path(sys.argv[2])
    found = {
        f"{file.stem} {precision}": sums_of(file, precision)
        for file in sorted(folder.glob("*.gguf"))
        for precision in ("exact", "fast")
    }
    np.savez_compressed(out, **found)
    for name, sums in found.items():
        print(name, sums.shape, float(np.abs(sums).max()))
