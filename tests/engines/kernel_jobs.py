"""Jobs for the C kernels outside of onnxruntime (kernels_driver.c), on any processor that can be had."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from kernel_operators import KINDS, Experts, all_blocks
from random_blocks import random_blocks

from kvasir_peer.engines.kernels import library

DRIVER = Path(__file__).with_name("kernels_driver.c")
FOLDER = Path(library.__file__).parent
FLAGS = tuple(flag for flag in library._FLAGS if flag not in ("-fPIC", "-shared", "-fvisibility=hidden"))

_WARNINGS = ("-Wall", "-Wextra", "-Werror")


def build(
    compiler: str, folder: Path, *flags: str, like: Path | None = None, changed: tuple[str, ...] = ()
) -> Path:
    """Compile the driver, with no warning.

    Args:
        compiler: C compiler.
        folder: for the program and its parts.
        flags: further ones, which win over the library's own.
        like: a program that was built already, and is the same but for some parts.
        changed: those parts.
    """
    folder.mkdir()
    sources = [file for file in sorted(FOLDER.glob("*.c")) if not file.name.startswith("onnx_")]
    objects = []
    for source in (*sources, DRIVER):
        if like is not None and source.name not in changed:
            objects.append(like.parent / f"{source.stem}.o")
            continue
        objects.append(folder / f"{source.stem}.o")
        _compile(compiler, *FLAGS, *_WARNINGS, *flags, f"-I{FOLDER}", "-c", source, "-o", objects[-1])
    program = folder / "driver"
    _compile(compiler, *flags, *objects, "-lm", "-o", program)
    return program


def _compile(*command: str | Path) -> None:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def run(command: list[str | Path], jobs: bytes) -> tuple[str, np.ndarray]:
    """Return the instructions that a program uses, and all that it gives, as float32."""
    done = subprocess.run([*map(str, command)], input=jobs, capture_output=True, check=False, timeout=100)
    assert done.returncode == 0, (done.returncode, done.stderr.decode())
    lines = done.stderr.decode().splitlines()
    assert len(lines) == 1, lines
    return lines[0], np.frombuffer(done.stdout, np.float32)


def all_jobs() -> bytes:
    """Everything that the kernels do: each type, each number of rows, each activation, each kind of attention."""
    return b"".join([*_linears(), *_experts(), *_attentions()])


def _numbers(*values: int) -> bytes:
    return np.array(values, np.int32).tobytes()


def _linears() -> Iterator[bytes]:
    for kind in KINDS:
        rng = np.random.default_rng(kind.id)
        columns = 512 if kind.block == 256 else 5 * 32
        # 8, 4, 3, 2 and 1 rows at a time, or as many as registers hold; and weights for several shares.
        for rows, n, biased, blocks in (
            (21, 15, 1, random_blocks),
            (200, 14, 0, random_blocks),
            (21, 5, 0, all_blocks),
        ):
            x = rng.standard_normal((n, columns)).astype(np.float32)
            x[1] *= np.float32(1e-37)
            x[2, :64], x[3] = 0, -0.0
            raw = blocks(kind, (rows, columns), rng)
            bias = rng.standard_normal(rows).astype(np.float32) if biased else np.zeros(0, np.float32)
            for exact in (0, 1):
                header = _numbers(kind.id, rows, columns, n, biased, exact)
                yield b"L" + header + raw.tobytes() + bias.tobytes() + x.tobytes()


def _experts() -> Iterator[bytes]:
    for kind in KINDS:
        rng = np.random.default_rng(kind.id + 1)
        width, columns, count, n, k = (256, 256, 3, 9, 2) if kind.block == 256 else (96, 64, 3, 9, 2)
        experts = Experts([kind] * 3, columns, width, count, "", kind.id % 2 > 0, rng, random_blocks)
        arrays = [*experts.raw, *(bias for bias in experts.biases if bias is not None)]
        arrays += [(3 * rng.standard_normal((n, columns))).astype(np.float32)]
        arrays += [rng.integers(-1, count + 1, (n, k), dtype=np.int32), rng.random((n, k)).astype(np.float32)]
        for exact in (0, 1):
            biased, activation = experts.biases[0] is not None, (kind.id + exact) % 3
            header = _numbers(*[kind.id] * 3, columns, width, count, activation, biased, n, k, exact)
            yield b"E" + header + b"".join(array.tobytes() for array in arrays)


# heads, kv_heads, key, value, slots, context, rotated, from, adjacent, latent, window, sinks; cap
_ATTENTIONS = (
    ((6, 2, 32, 48, 3, 64, 32, 0, 0, 0, 0, 0), 0.0),
    ((4, 4, 20, 20, 3, 64, 16, 2, 1, 0, 5, 1), 0.0),
    ((9, 1, 40, 33, 2, 64, 8, 32, 0, 0, 0, 1), 30.0),
    ((5, 1, 48, 32, 3, 64, 16, 32, 1, 1, 0, 0), 0.0),
)
# Slots of rows, and where they stand.
_PASSES = (
    ((0, 1), (40, 17)),
    ((1, 1, 1, 1, 0, 0), (14, 15, 16, 17, 3, 4)),
    ((0,) * 56, tuple(range(8, 64))),
    # Not what is asked for; nothing is to be read or written where there is nothing.
    ((0, 0, 0, 0, 1, 1), (2, 63, 1, 62, 60, 60)),
)


def _attentions() -> Iterator[bytes]:
    for index, (shape, cap) in enumerate(_ATTENTIONS):
        heads, kv_heads, key, value, slots, context, rotated, *_, latent, _window, sinks = shape
        for which, positions in _PASSES:
            rng = np.random.default_rng(index)
            n = len(which)
            angles = np.arange(context)[:, None] * 0.1 ** np.arange(rotated // 2)
            wide = 0 if latent else -(-value // 16) * 16
            sizes = (n * heads * key, n * kv_heads * key, 0 if latent else n * kv_heads * value)
            arrays = [rng.standard_normal(size) for size in sizes]
            arrays += [np.cos(angles), np.sin(angles), rng.standard_normal(heads if sinks else 0)]
            cache = [rng.standard_normal(slots * kv_heads * context * w) for w in (key, wide)]
            yield b"A" + _numbers(*shape, n) + np.array([key**-0.5, cap], np.float32).tobytes()
            yield from (array.astype(np.float32).tobytes() for array in arrays)
            yield _numbers(*which) + _numbers(*positions)
            yield from (array.astype(np.float32).tobytes() for array in cache)


def compiler(*names: str) -> str | None:
    """The first of these that is installed."""
    return next((found for found in map(shutil.which, names) if found), None)


def features() -> set[str]:
    """What this processor can do, as Linux names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return set(next((line for line in lines if line.startswith(("flags", "Features"))), "").split())
