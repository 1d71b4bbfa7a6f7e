"""The C kernels give the same bits on every kind of processor and by every compiler, and touch no memory of others."""

import platform
from pathlib import Path

import numpy as np
import pytest
from kernel_jobs import all_jobs, build, compiler, features, run

from kvasir_peer.engines.kernels import library

INTEL = platform.machine().lower() in ("x86_64", "amd64")
GCC = compiler("gcc", "cc", "clang")
CLANG = compiler("clang")
ARM_GCC = compiler("aarch64-linux-gnu-gcc")
ARM = compiler("qemu-aarch64", "qemu-aarch64-static")


@pytest.fixture(scope="module")
def jobs() -> bytes:
    return all_jobs()


@pytest.fixture(scope="module")
def loops(jobs: bytes, tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    """What plain C comes to."""
    if GCC is None:
        pytest.skip("no C compiler is installed")
    path = build(GCC, tmp_path_factory.mktemp("loops") / "loops", "-DKVASIR_PORTABLE", "-O1")
    instructions, results = run([str(path)], jobs)
    assert instructions == library._NO_INSTRUCTIONS
    assert np.isfinite(results).mean() > 0.5
    return results


def same(got: np.ndarray, expected: np.ndarray) -> bool:
    """Whether the bits are the same; panels among them are no floats."""
    return bool(np.array_equal(got.view(np.uint32), expected.view(np.uint32)))


def needs(condition: object, what: str) -> None:
    """Leave a test out where something is missing."""
    if not condition:
        pytest.skip(what)


def test_this_processor(loops: np.ndarray, jobs: bytes, tmp_path: Path) -> None:
    path = build(GCC, tmp_path / "native", *library._for_this_processor()[0])
    assert same(run([str(path)], jobs)[1], loops)


@pytest.mark.skipif(not INTEL, reason="for x86-64")
def test_avx2(loops: np.ndarray, jobs: bytes, tmp_path: Path) -> None:
    needs("avx2" in features(), "this processor has no AVX2")
    path = build(GCC, tmp_path / "avx2", "-mavx2", "-mfma", "-mf16c", "-O1")
    instructions, got = run([str(path)], jobs)
    assert instructions == "AVX2"
    assert same(got, loops)


@pytest.mark.skipif(not INTEL, reason="for x86-64")
def test_avx_vnni(loops: np.ndarray, jobs: bytes, tmp_path: Path) -> None:
    """By the same instruction of AVX-512 on processors that have only that."""
    has = features()
    needs({"avx_vnni", "avx512_vnni"} & has, "this processor has neither AVX-VNNI nor AVX-512 VNNI")
    flags = ["-mavx2", "-mfma", "-mf16c", "-O1"]
    if "avx_vnni" in has:
        flags += ["-mavxvnni"]
    else:
        flags += [
            "-mavx512vl",
            "-mavx512vnni",
            "-D__AVXVNNI__",
            "-D_mm256_dpbusd_avx_epi32=_mm256_dpbusd_epi32",
        ]
    instructions, got = run([str(build(GCC, tmp_path / "vnni", *flags))], jobs)
    assert instructions == "AVX-VNNI"
    assert same(got, loops)


def test_clang(loops: np.ndarray, jobs: bytes, tmp_path: Path) -> None:
    needs(CLANG, "clang is not installed")
    path = build(CLANG, tmp_path / "clang", *library._for_this_processor()[0])
    assert same(run([str(path)], jobs)[1], loops)


@pytest.mark.parametrize(
    ("flags", "instructions"),
    [
        pytest.param("-march=armv8.2-a+dotprod", "NEON dot product", id="dotprod"),
        pytest.param("-march=armv8-a", "NEON", id="older"),
    ],
)
def test_arm(loops: np.ndarray, jobs: bytes, tmp_path: Path, flags: str, instructions: str) -> None:
    needs(ARM_GCC and ARM, "aarch64-linux-gnu-gcc and qemu-aarch64 are not both installed")
    path = build(ARM_GCC, tmp_path / "arm", flags, "-static", "-O1")
    used, got = run([ARM, "-cpu", "max", str(path)], jobs)
    assert used == instructions
    assert same(got, loops)


def test_nothing_undefined_is_done(loops: np.ndarray, jobs: bytes, tmp_path: Path) -> None:
    """No memory of others, no overflow, no unaligned number."""
    checks = "address,alignment,signed-integer-overflow,shift,bounds"
    flags = ("-O1", "-g", f"-fsanitize={checks}", "-fno-sanitize-recover=all")
    path = build(GCC, tmp_path / "checked", *library._for_this_processor()[0], *flags)
    assert same(run([str(path)], jobs)[1], loops)
