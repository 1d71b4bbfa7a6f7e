"""The library of C kernels: compiled on the machine that uses it, for the processor that it has.

A C compiler is on most machines that compute, and compiling takes a few seconds once; what comes out stays in the
user's cache, under a name made of everything that it depends on. Where there is none, or where it fails, the engine
computes with onnxruntime's own operators, more slowly and in more memory, and says so.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

_FLAGS = (
    "-std=gnu11",
    "-O3",
    # The same operations in the same order on every processor: only what is written as fused is fused.
    "-ffp-contract=off",
    # Roundings to whole numbers become vector instructions; nobody reads errno or floating-point flags.
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
)
_COMPILERS = ("cc", "gcc", "clang")
# Compiling takes 4 s on one core of 2024; ten times that on a small board, and more beside other work.
_DEADLINE = 300.0
# So that a machine's owner can do without.
_OFF = "KVASIR_ENGINE_KERNELS"


@dataclass(frozen=True, eq=False)
class Library:
    """The loaded library.

    Attributes:
        path: of the file, which onnxruntime loads too.
        instructions: the vector instructions that it uses.
        functions: its functions.
    """

    path: Path
    instructions: str
    functions: ctypes.CDLL


@dataclass(frozen=True)
class Missing:
    """Why there is no library.

    Attributes:
        reason: for people, with what would help.
    """

    reason: str


@functools.cache
def find_library() -> Library | Missing:
    """Load the library, and compile it first where that has not been done; once per process."""
    if os.environ.get(_OFF, "").lower() in ("0", "off", "no"):
        return Missing(f"{_OFF} is off")
    compiler = _compiler()
    if compiler is None:
        return Missing(f"no C compiler is installed (looked for {', '.join(_COMPILERS)})")
    try:
        path = _compiled(compiler, cache_folder())
        return _load(path)
    except (OSError, subprocess.SubprocessError) as error:
        lines = [line for line in str(getattr(error, "stderr", "") or error).splitlines() if line.strip()]
        first = next((line for line in lines if "error" in line), lines[0] if lines else type(error).__name__)
        return Missing(f"{compiler} could not compile them: {first.strip()[:200]}")


def cache_folder() -> Path:
    """Where compiled libraries are kept."""
    from platformdirs import user_cache_path

    return user_cache_path("kvasir-peer", appauthor=False) / "kernels"


def compile_library(compiler: str, path: Path, flags: tuple[str, ...] = ()) -> None:
    """Compile the library.

    Args:
        compiler: C compiler.
        path: of the file to write.
        flags: instead of those for this machine's processor.

    Raises:
        subprocess.SubprocessError: the compiler failed, or took too long.
        OSError: it could not be started, or the file not be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Written beside and moved, so that nobody ever loads half a file.
    descriptor, name = tempfile.mkstemp(prefix=path.stem, suffix=".part", dir=path.parent)
    os.close(descriptor)
    part = Path(name)
    try:
        sources = map(str, _sources("*.c"))
        command = [compiler, *_FLAGS, *(flags or _for_this_processor()), "-o", str(part), *sources, "-lm"]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_DEADLINE)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _sources(pattern: str) -> list[Path]:
    """Return the files that the library is made of."""
    return sorted(Path(__file__).resolve().parent.glob(pattern))


def _compiler() -> str | None:
    names = [os.environ["CC"], *_COMPILERS] if os.environ.get("CC") else _COMPILERS
    return next((found for found in map(shutil.which, names) if found), None)


def _for_this_processor() -> tuple[str, ...]:
    """Flags by which the compiler uses all instructions that this processor has."""
    arm = platform.machine().lower() in ("aarch64", "arm64")
    return ("-mcpu=native",) if arm else ("-march=native",)


def _processor() -> str:
    """Return what the compiler will see of the processor: a home may be shared by several machines."""
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return platform.processor()
    lines = {
        line
        for line in text.splitlines()
        if line.lower().startswith(("model name", "flags", "features", "cpu p"))
    }
    return "\n".join(sorted(lines))


def _name(compiler: str) -> str:
    """Return the file's name: what is in it depends on the sources, the compiler and the processor."""
    digest = hashlib.sha256()
    for source in _sources("*.[ch]"):
        digest.update(source.read_bytes())
    program = Path(compiler).resolve()
    status = program.stat()
    for part in (*_FLAGS, *_for_this_processor(), str(program), str(status.st_size), str(status.st_mtime_ns)):
        digest.update(part.encode() + b"\0")
    digest.update(f"{sys.platform} {platform.machine()} {_processor()}".encode())
    return f"kernels-{digest.hexdigest()[:20]}.so"


def _compiled(compiler: str, folder: Path) -> Path:
    """Return the path of the compiled library."""
    path = folder / _name(compiler)
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    # Engines of a machine start together: one compiles, the others wait for it.
    with _locked(folder / "lock"):
        if not path.exists():
            begin = time.monotonic()
            compile_library(compiler, path)
            log.info("kernels compiled for this processor in %.1f s: %s", time.monotonic() - begin, path)
    return path


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    try:
        import fcntl
    except ImportError:  # not on Windows: at worst two compile at once
        yield
        return
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _load(path: Path) -> Library:
    functions = ctypes.CDLL(str(path))
    size, address = ctypes.c_size_t, ctypes.c_void_p
    functions.kvasir_instructions.restype = ctypes.c_char_p
    functions.kvasir_panel_bytes.argtypes = [ctypes.c_int, size, size]
    functions.kvasir_panel_bytes.restype = size
    functions.kvasir_pack.argtypes = [ctypes.c_int, address, size, size, size, size, address]
    functions.kvasir_pack.restype = None
    return Library(path, functions.kvasir_instructions().decode(), functions)
