"""The library of C kernels: compiled on the machine that uses it, for the processor that it has.

A C compiler is on most machines that compute, and compiling takes a few seconds once; what comes out stays in the
user's cache, under a name made of everything that it depends on and of what is in it. Where there is none, or where it
fails, the engine computes with onnxruntime's own operators, more slowly and in more memory, and says so.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

_HERE = Path(__file__).resolve().parent
_SOURCES = sorted(_HERE.glob("*.c"))
_HEADERS = sorted(_HERE.glob("*.h"))
_FLAGS = (
    "-std=gnu11",
    "-O3",
    # The same operations in the same order on every processor: only what is written as fused is fused.
    "-ffp-contract=off",
    # Roundings to whole numbers become vector instructions; nobody reads errno or floating-point flags.
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-fvisibility=hidden",
)
_COMPILERS = ("cc", "gcc", "clang")
# Compiling takes 9 s of one core of 2024; ten times that on a small board, and more beside other work.
_DEADLINE = 300.0
# What is left of a compilation that was killed goes after this.
_STALE = 3600.0
# So that a machine's owner can do without.
_OFF = "KVASIR_ENGINE_KERNELS"
# What lanes.h calls plain loops, which take thirty times as long as onnxruntime's operators.
_NO_INSTRUCTIONS = "portable"


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


class _NoLibraryError(Exception):
    """Its text is the reason, and what would help."""


@functools.cache
def find_library() -> Library | Missing:
    """Load the library, and compile it first where that has not been done; once per process."""
    if os.environ.get(_OFF, "").lower() in ("0", "off", "no"):
        return Missing(f"{_OFF} switches them off; unset it to have them")
    try:
        return _load(_compiled(_compilers(), cache_folder()))
    except _NoLibraryError as error:
        return Missing(" ".join(str(error).split()))


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
        OSError: the file could not be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with _scratch(path.parent) as scratch:
        _build(compiler, scratch, flags or _for_this_processor()[0]).replace(path)


def _build(compiler: str, scratch: Path, flags: Sequence[str]) -> Path:
    """Compile within a folder, which takes the compiler's own files too; return the library's path there."""
    end = time.monotonic() + _DEADLINE
    objects = [scratch / f"{source.stem}.o" for source in _SOURCES]

    def compile_one(source: Path, to: Path) -> None:
        _run([compiler, *_FLAGS, *flags, "-c", "-o", str(to), str(source)], scratch, end)

    # One file takes half of the time, so the others go beside it.
    with ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="compile") as pool:
        for _ in pool.map(compile_one, _SOURCES, objects):
            pass
    path = scratch / "library.so"
    _run([compiler, *_FLAGS, *flags, "-shared", "-o", str(path), *map(str, objects), "-lm"], scratch, end)
    path.chmod(0o700)
    return path


def _run(command: list[str], scratch: Path, end: float) -> None:
    """Run a compiler until it ends, or until the time is up that all of them have together."""
    # Errors are looked for by their English names.
    environment = {**os.environ, "TMPDIR": str(scratch), "LC_ALL": "C"}
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=environment,
            start_new_session=True,
        )
    except OSError as error:
        raise subprocess.CalledProcessError(error.errno or 1, command, stderr=str(error)) from error
    with process:
        try:
            _, said = process.communicate(timeout=max(0.1, end - time.monotonic()))
        except BaseException:
            _kill(process)
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, stderr=said)


def _kill(process: subprocess.Popen[str]) -> None:
    """End a compiler and what it has started: the command itself only waits for others."""
    with suppress(ProcessLookupError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()


@contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """A folder beside the library, from which it is moved: nobody ever loads half a file."""
    with tempfile.TemporaryDirectory(prefix="compiling-", dir=folder, ignore_cleanup_errors=True) as name:
        yield Path(name)


def _compilers() -> list[str]:
    """Return the compilers that are installed, the preferred one first.

    Raises:
        _NoLibraryError: there is none.
    """
    names = [os.environ["CC"], *_COMPILERS] if os.environ.get("CC") else _COMPILERS
    found = {str(Path(path).resolve()): path for path in map(shutil.which, names[::-1]) if path}
    if not found:
        raise _NoLibraryError(
            f"no C compiler is installed (looked for {', '.join(names)}); install one, on Debian by "
            "apt install gcc libc6-dev, on Fedora by dnf install gcc, on macOS by xcode-select --install"
        )
    return list(found.values())[::-1]


def _for_this_processor() -> list[tuple[str, ...]]:
    """Flags by which a compiler uses the instructions that this processor has; further ones for compilers and
    assemblers that are older than it."""
    processor = _processor()
    if platform.machine().lower() not in ("aarch64", "arm64"):
        older: list[tuple[str, ...]] = [("-mavx2", "-mfma", "-mf16c")] if " avx2" in processor else []
        return [("-march=native",), *older]
    dot = ("-mcpu=apple-m1",) if sys.platform == "darwin" else ("-march=armv8.2-a+dotprod",)
    older = [dot] if sys.platform == "darwin" or " asimddp" in processor else []
    return [("-mcpu=native",), *older, ("-march=armv8-a",)]


def _processor() -> str:
    """Return what the compiler will see of the processor: a home may be shared by several machines."""
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return f"{platform.processor()} {platform.version()}"
    lines = {
        line
        for line in text.splitlines()
        if line.lower().startswith(("model name", "flags", "features", "cpu p"))
    }
    return "\n".join(sorted(lines))


def _stem(compiler: str) -> str:
    """Return how the file's name begins: what is in it depends on the sources, the compiler and the processor."""
    digest = hashlib.sha256()
    for source in (*_SOURCES, *_HEADERS):
        digest.update(source.read_bytes())
    program = Path(compiler).resolve()
    status = program.stat()
    flags = [*_FLAGS, *(flag for flags in _for_this_processor() for flag in flags)]
    for part in (*flags, str(program), str(status.st_size), str(status.st_mtime_ns)):
        digest.update(part.encode() + b"\0")
    digest.update(f"{sys.platform} {platform.machine()} {_processor()}".encode())
    return f"kernels-{digest.hexdigest()[:20]}"


def _content(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:20]


def _trusted(path: Path) -> bool:
    """Whether nobody else can have written it: it will be run."""
    if not hasattr(os, "geteuid"):
        return True
    status = path.stat()
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _kept(folder: Path, stems: Sequence[str]) -> Path | None:
    """Return the library that was compiled earlier; what is left of one that was spoilt does not count."""
    for stem in stems:
        for path in folder.glob(f"{stem}-*.so"):
            with suppress(OSError):
                if _trusted(path) and path.stem == f"{stem}-{_content(path)}":
                    return path
    return None


def _compiled(compilers: Sequence[str], folder: Path) -> Path:
    """Return the path of the compiled library.

    Raises:
        _NoLibraryError: the folder can't be used, or no compiler does it.
    """
    try:
        if not folder.is_absolute():
            raise NotADirectoryError("the user has no home")
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if hasattr(os, "geteuid") and folder.stat().st_uid == os.geteuid():
            folder.chmod(0o700)
        if not _trusted(folder):
            raise PermissionError("others can write there")
        stems = [_stem(compiler) for compiler in compilers]
        path = _kept(folder, stems)
        if path is not None:
            return path
        # Engines of a machine start together: one compiles, the others wait for it.
        with _locked(folder / "lock"):
            return _kept(folder, stems) or _compile(compilers, folder)
    except OSError as error:
        raise _NoLibraryError(
            f"{folder} can't keep them ({error.strerror or error}); set XDG_CACHE_HOME to a folder that you can write"
        ) from error


def _compile(compilers: Sequence[str], folder: Path) -> Path:
    """Compile with the first compiler, and the first flags, that will do."""
    for left in folder.glob("compiling-*"):
        with suppress(OSError):
            if left.stat().st_mtime < time.time() - _STALE:
                shutil.rmtree(left)
    reasons = []
    for compiler in compilers:
        for flags in _for_this_processor():
            begin = time.monotonic()
            try:
                with _scratch(folder) as scratch:
                    made = _build(compiler, scratch, flags)
                    _sync(made)
                    path = folder / f"{_stem(compiler)}-{_content(made)}.so"
                    made.replace(path)
            except subprocess.TimeoutExpired as error:
                raise _NoLibraryError(
                    f"{compiler} had not compiled them after {_DEADLINE:.0f} s; start again when the machine is less "
                    "busy, or name another compiler by CC"
                ) from error
            except subprocess.CalledProcessError as error:
                complaint = _complaint(error)
                reasons.append(f"{compiler} could not compile them: {complaint}; {_remedy(complaint)}")
            else:
                log.info("kernels compiled for this processor in %.1f s: %s", time.monotonic() - begin, path)
                return path
    raise _NoLibraryError(reasons[0])


def _sync(path: Path) -> None:
    """Have it on disk before its name is."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _complaint(error: subprocess.CalledProcessError) -> str:
    """Return the line of what a compiler has said that tells most."""
    lines = [line.strip() for line in (error.stderr or "").splitlines() if line.strip()]
    wanted = ("No space left", "error")
    found = (line for want in wanted for line in lines if want in line)
    return next(found, lines[0] if lines else f"it ended with status {error.returncode}")[:200]


def _remedy(complaint: str) -> str:
    """Return what to do about it."""
    if "No space left" in complaint:
        return "make room there, or set XDG_CACHE_HOME to a folder that has some"
    if ".h: No such file" in complaint:
        return "install the C library's headers, on Debian by apt install libc6-dev"
    return "mend that, or name another compiler by CC"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock; go on without where there are none, or after a while: at worst two compile at once."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    with path.open("a") as file:
        end = time.monotonic() + _DEADLINE
        while time.monotonic() < end:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.05)
            except OSError:  # some network file systems
                break
        yield


def _load(path: Path) -> Library:
    """Load the library.

    Raises:
        _NoLibraryError: it can't be loaded, or is of no use.
    """
    try:
        functions = ctypes.CDLL(str(path))
    except OSError as error:
        raise _NoLibraryError(
            f"{error}; set XDG_CACHE_HOME to a folder from which programs may be run, or remove the file"
        ) from error
    size, address = ctypes.c_size_t, ctypes.c_void_p
    functions.kvasir_instructions.restype = ctypes.c_char_p
    functions.kvasir_panel_bytes.argtypes = [ctypes.c_int, size, size]
    functions.kvasir_panel_bytes.restype = size
    functions.kvasir_pack.argtypes = [ctypes.c_int, address, size, size, size, size, address]
    functions.kvasir_pack.restype = None
    instructions = functions.kvasir_instructions().decode()
    if instructions == _NO_INSTRUCTIONS:
        raise _NoLibraryError("they need a processor with AVX2, or one of ARM with 64 bits")
    return Library(path, instructions, functions)
