"""The C kernels give the same bits on every kind of processor and by every compiler, and touch no memory of others."""

from pathlib import Path

import numpy as np
import pytest
from kernel_jobs import all_jobs, build, compiler, features, run

from kvasir_peer.engines.kernels import library

GCC = compiler("gcc", "cc", "clang")
CLANG = compiler("clang")
ARM_GCC = compiler("aarch64-linux-gnu-gcc")
ARM = compiler("qemu-aarch64", "qemu-aarch64-static")
# Memory of others, unaligned numbers, overflow. With all checks compiling takes twice as long.
CHECKS = (
    "-fsanitize=address,alignment,signed-integer-overflow,shift,bounds",
    "-fno-sanitize-recover=all",
    "-g",
)
AVX2 = ("-mavx2", "-mfma", "-mf16c")
# What differs between processors with dot products of integers and those without.
DOTS = ("multiply.c", "pack.c")

pytestmark = pytest.mark.skipif(GCC is None, reason="no C compiler is installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(scope="module")
def jobs() -> bytes:
    return all_jobs()


@pytest.fixture(scope="module")
def loops(jobs: bytes, folder: Path) -> np.ndarray:
    """What plain C comes to."""
    path = build(CLANG or GCC, folder / "loops", "-DKVASIR_PORTABLE", "-O1")
    instructions, results = run([path], jobs)
    assert instructions == library._NO_INSTRUCTIONS
    assert np.isfinite(results).mean() > 0.5
    return results


@pytest.fixture(scope="module")
def avx2(folder: Path) -> Path:
    """The driver for AVX2, with checks."""
    if "avx2" not in features():
        pytest.skip("this processor has no AVX2")
    return build(GCC, folder / "avx2", "-O1", *CHECKS, *AVX2)


@pytest.fixture(scope="module")
def arm(folder: Path) -> Path:
    """The driver for ARM with dot products."""
    if ARM_GCC is None or ARM is None:
        pytest.skip("aarch64-linux-gnu-gcc and qemu-aarch64 are not both installed")
    return build(ARM_GCC, folder / "arm", "-O1", "-static", "-march=armv8.2-a+dotprod")


def same(got: np.ndarray, expected: np.ndarray) -> bool:
    """Whether the bits are the same; panels among them are no floats."""
    return bool(np.array_equal(got.view(np.uint32), expected.view(np.uint32)))


def test_this_processor(loops: np.ndarray, jobs: bytes, folder: Path) -> None:
    path = build(GCC, folder / "native", *library._for_this_processor()[0])
    assert same(run([path], jobs)[1], loops)


def test_avx2_with_memory_and_arithmetic_checked(loops: np.ndarray, jobs: bytes, avx2: Path) -> None:
    instructions, got = run([avx2], jobs)
    assert instructions == "AVX2"
    assert same(got, loops)


def test_avx_vnni(loops: np.ndarray, jobs: bytes, folder: Path, avx2: Path) -> None:
    """By the same instruction of AVX-512 on processors that have only that."""
    if "avx_vnni" in features():
        flags = ["-mavxvnni"]
    elif "avx512_vnni" in features():
        flags = [
            "-mavx512vl",
            "-mavx512vnni",
            "-D__AVXVNNI__",
            "-D_mm256_dpbusd_avx_epi32=_mm256_dpbusd_epi32",
        ]
    else:
        pytest.skip("this processor has neither AVX-VNNI nor AVX-512 VNNI")
    path = build(GCC, folder / "vnni", "-O1", *CHECKS, *AVX2, *flags, like=avx2, changed=DOTS)
    instructions, got = run([path], jobs)
    assert instructions == "AVX-VNNI"
    assert same(got, loops)


@pytest.mark.skipif("avx2" in features(), reason="AVX2 is checked")
def test_this_processor_with_memory_and_arithmetic_checked(
    loops: np.ndarray, jobs: bytes, folder: Path
) -> None:
    path = build(GCC, folder / "checked", "-O1", *CHECKS, *library._for_this_processor()[0])
    assert same(run([path], jobs)[1], loops)


@pytest.mark.skipif(CLANG is None, reason="clang is not installed")
def test_clang(loops: np.ndarray, jobs: bytes, folder: Path) -> None:
    path = build(CLANG, folder / "clang", "-O1", *library._for_this_processor()[0])
    assert same(run([path], jobs)[1], loops)


def test_arm(loops: np.ndarray, jobs: bytes, arm: Path) -> None:
    instructions, got = run([ARM, "-cpu", "max", arm], jobs)
    assert instructions == "NEON dot product"
    assert same(got, loops)


def test_older_arm(loops: np.ndarray, jobs: bytes, folder: Path, arm: Path) -> None:
    path = build(ARM_GCC, folder / "older", "-O1", "-static", "-march=armv8-a", like=arm, changed=DOTS)
    instructions, got = run([ARM, "-cpu", "cortex-a53", path], jobs)
    assert instructions == "NEON"
    assert same(got, loops)
