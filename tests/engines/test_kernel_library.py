"""Compiling the C kernels where they are used: what can go wrong there, and what is said then."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvasir_peer.engines.kernels import library
from kvasir_peer.engines.kernels.library import Library, Missing
from kvasir_peer.engines.onnx_graph import Graph, Runtime
from kvasir_peer.errors import EngineError

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="compilers here are shell scripts")

# A compiler that takes no time: it counts its runs and "compiles" by copying.
COPY = """
echo "$@" >> {folder}/runs
while [ $# -gt 0 ]; do if [ "$1" = -o ]; then out=$2; fi; shift; done
/bin/cp {source} "$out"
"""
FAIL = """
echo "$@" >> {folder}/runs
echo "lanes.h:3:1: warning: never mind" >&2
echo "lanes.h:7:10: error: this is not C" >&2
exit 1
"""


class Machine:
    """A machine with compilers of ours only, and a cache folder."""

    def __init__(self, folder: Path, source: Path) -> None:
        self.folder = folder
        self.source = source
        self.programs = folder / "bin"
        self.programs.mkdir()
        self.cache = folder / "cache" / "kernels"

    def compiler(self, name: str = "cc", does: str = COPY) -> Path:
        """Install a compiler."""
        path = self.programs / name
        path.write_text("#!/bin/sh" + does.format(folder=self.folder, source=self.source))
        path.chmod(0o755)
        return path

    def runs(self) -> list[str]:
        """Command lines with which compilers were called, one for each time: that of a file which is always there."""
        file = self.folder / "runs"
        lines = file.read_text().splitlines() if file.exists() else []
        return [line for line in lines if line.endswith("/multiply.c")]

    def kept(self) -> list[Path]:
        """Compiled libraries."""
        return sorted(self.cache.glob("*.so"))


def find() -> Library | Missing:
    """As a new process would."""
    return library.find_library.__wrapped__()


def reason() -> str:
    """Why there is no library; one line."""
    found = find()
    assert isinstance(found, Missing)
    assert "\n" not in found.reason
    return found.reason


@pytest.fixture
def machine(tmp_path: Path, kernels: Library, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path, kernels.path)
    monkeypatch.setenv("PATH", str(made.programs))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("KVASIR_ENGINE_KERNELS", raising=False)
    monkeypatch.setattr(library, "cache_folder", lambda: made.cache)
    return made


def test_it_is_compiled_once_and_kept(machine: Machine) -> None:
    machine.compiler()
    found = find()
    assert isinstance(found, Library)
    assert machine.kept() == [found.path]
    assert found.path.read_bytes() == machine.source.read_bytes()
    assert find().path == found.path
    assert len(machine.runs()) == 1
    # Others can neither write nor replace it.
    assert machine.cache.stat().st_mode & 0o777 == 0o700
    assert found.path.stat().st_mode & 0o077 == 0
    assert sorted(path.name for path in machine.cache.iterdir()) == [found.path.name, "lock"]


def test_what_is_kept_is_read_without_writing(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.compiler()
    find()

    def read_only(path: Path) -> None:
        raise PermissionError(f"{path} is on a read-only file system")

    monkeypatch.setattr(library, "_locked", read_only)
    assert isinstance(find(), Library)


def test_without_a_compiler_it_is_said_how_to_get_one(machine: Machine) -> None:
    assert reason().startswith(
        "no C compiler is installed (looked for cc, gcc, clang); install one, on Debian by"
    )
    assert not machine.cache.exists()


def test_a_compiler_that_fails_is_quoted(machine: Machine) -> None:
    cc = machine.compiler(does=FAIL)
    said = reason()
    assert f"{cc} could not compile them: lanes.h:7:10: error: this is not C" in said
    assert "name another compiler by CC" in said
    assert [path.name for path in machine.cache.iterdir()] == ["lock"]


def test_a_compiler_that_says_nothing_and_one_that_is_no_program(machine: Machine) -> None:
    machine.compiler(does="\nexit 3\n")
    assert "it ended with status 3" in reason()
    (machine.programs / "cc").write_bytes(b"\0\0\0\0")
    assert "could not compile them: [Errno 8] Exec format error" in reason()


def test_another_compiler_is_tried_after_one_that_fails(machine: Machine) -> None:
    machine.compiler("cc", FAIL)
    machine.compiler("clang")
    assert isinstance(find(), Library)
    before = len(machine.runs())
    assert isinstance(find(), Library)
    assert len(machine.runs()) == before


def test_one_compiler_under_several_names_is_tried_once(machine: Machine) -> None:
    gcc = machine.compiler("gcc", FAIL)
    (machine.programs / "cc").symlink_to(gcc)
    reason()
    assert len(machine.runs()) == len(library._for_this_processor())


def test_cc_comes_first(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.compiler("cc", FAIL)
    mine = machine.compiler("mine")
    monkeypatch.setenv("CC", str(mine))
    assert isinstance(find(), Library)
    assert len(machine.runs()) == 1


def test_a_compiler_older_than_the_processor_gets_what_it_may_know(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.compiler(does='\ncase "$*" in *=native*) echo "error: native" >&2; exit 1;; esac' + COPY)
    for arch, features, flag in (
        ("x86_64", "flags : sse2 avx2 fma", "-mavx2"),
        ("aarch64", "Features : fp asimd asimddp", "-march=armv8.2-a+dotprod"),
        ("aarch64", "Features : fp asimd", "-march=armv8-a"),
    ):
        monkeypatch.setattr(library.platform, "machine", lambda arch=arch: arch)
        monkeypatch.setattr(library, "_processor", lambda features=features: features)
        assert isinstance(find(), Library)
        assert f" {flag} " in machine.runs()[-1]


def test_a_compiler_that_hangs_is_ended_with_all_it_has_started(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "_DEADLINE", 0.5)
    machine.compiler(does="\n/bin/sleep 600 & echo $! > {folder}/child\nwait\n")
    begin = time.monotonic()
    assert "had not compiled them after 0 s; start again when" in reason()
    assert time.monotonic() - begin < 30
    child = int((machine.folder / "child").read_text())
    while running(child):
        assert time.monotonic() - begin < 60
        time.sleep(0.01)
    assert [path.name for path in machine.cache.iterdir()] == ["lock"]


def running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{process}/stat")
    # One that nobody has waited for yet is over all the same.
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_cache_that_cannot_be_written_is_said(machine: Machine) -> None:
    machine.compiler()
    machine.cache.parent.write_text("a file where a folder should be")
    said = reason()
    assert f"{machine.cache} can't keep them (" in said and "set XDG_CACHE_HOME" in said
    assert machine.runs() == []


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a file system that nobody can write")
def test_a_read_only_file_system_is_said(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.compiler()
    monkeypatch.setattr(library, "cache_folder", lambda: Path("/proc/kvasir/kernels"))
    assert "/proc/kvasir/kernels can't keep them (" in reason()


def test_without_a_home_nothing_is_left_in_the_working_folder(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.compiler()
    monkeypatch.chdir(machine.folder)
    monkeypatch.setattr(library, "cache_folder", lambda: Path("~/.cache/kvasir-peer/kernels"))
    assert "the user has no home" in reason()
    assert not Path("~").exists()


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        ("ld: final link failed: No space left on device", "make room there, or set XDG_CACHE_HOME"),
        ("lanes.h:9:10: fatal error: string.h: No such file or directory", "apt install libc6-dev"),
    ],
)
def test_what_is_missing_is_said(machine: Machine, line: str, remedy: str) -> None:
    machine.compiler(does=f'\necho "{line}" >&2; echo "cc: error: no more" >&2; exit 1\n')
    said = reason()
    assert f"could not compile them: {line}; " in said and remedy in said


def replace(path: Path, content: bytes) -> None:
    """Put another file there: this process has the one that was there in its memory."""
    path.unlink()
    path.write_bytes(content)
    path.chmod(0o700)


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda path: replace(path, path.read_bytes()[: path.stat().st_size // 2]), id="cut off"),
        pytest.param(lambda path: replace(path, b""), id="empty"),
        pytest.param(lambda path: replace(path, path.read_bytes()[:-1] + b"?"), id="one byte"),
        pytest.param(lambda path: path.chmod(0o777), id="others may write"),
    ],
)
def test_a_spoilt_library_is_compiled_anew(machine: Machine, spoil: Callable[[Path], None]) -> None:
    machine.compiler()
    path = find().path
    spoil(path)
    assert find().path == path
    assert path.read_bytes() == machine.source.read_bytes()
    assert path.stat().st_mode & 0o077 == 0
    assert len(machine.runs()) == 2


def test_one_that_cannot_be_loaded_is_said_and_not_compiled_again(machine: Machine) -> None:
    machine.source = machine.folder / "no-library"
    machine.source.write_text("no library")
    machine.compiler()
    for _ in range(2):
        assert "set XDG_CACHE_HOME to a folder from which programs may be run" in reason()
    assert len(machine.runs()) == 1


def test_plain_loops_are_not_used(machine: Machine) -> None:
    source = machine.folder / "loops.c"
    source.write_text(
        'const char *kvasir_instructions(void) { return "portable"; }\n'
        "unsigned long kvasir_panel_bytes(void) { return 0; }\nvoid kvasir_pack(void) {}\n"
    )
    machine.source = machine.folder / "loops.so"
    cc = next(found for name in ("cc", "gcc", "clang") if (found := shutil.which(name, path=os.defpath)))
    subprocess.run(
        [cc, "-shared", "-fPIC", source, "-o", machine.source], check=True, env={"PATH": os.defpath}
    )
    machine.compiler()
    assert "a processor with AVX2" in reason()


def test_what_others_own_is_not_loaded(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.compiler()
    path = find().path
    if os.geteuid():
        # To whom else could it be given? So somebody else asks.
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    else:
        os.chown(path, 12345, -1)
        assert find().path == path
        assert len(machine.runs()) == 2
        assert path.stat().st_uid == 0
        os.chown(machine.cache, 12345, -1)
    said = reason()
    assert "others can write there" in said and "set XDG_CACHE_HOME" in said


def test_a_folder_that_others_may_write_is_closed_to_them(machine: Machine) -> None:
    machine.compiler()
    machine.cache.mkdir(parents=True)
    machine.cache.chmod(0o777)
    assert isinstance(find(), Library)
    assert machine.cache.stat().st_mode & 0o777 == 0o700


def test_the_name_says_what_it_depends_on(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    cc = machine.compiler()
    first = find().path
    monkeypatch.setattr(library, "_processor", lambda: "another")
    second = find().path
    cc.write_text(cc.read_text() + "\n# a newer one\n")
    third = find().path
    monkeypatch.setattr(library, "_FLAGS", (*library._FLAGS, "-g"))
    fourth = find().path
    source = machine.folder / "multiply.c"
    source.write_text("/* changed */")
    monkeypatch.setattr(library, "_SOURCES", [source])
    assert len({first, second, third, fourth, find().path}) == 5


def test_processes_that_start_together_compile_once(machine: Machine) -> None:
    machine.compiler(does="\n/bin/sleep 0.5" + COPY)
    code = "from kvasir_peer.engines.kernels.library import find_library; print(find_library().path)"
    environment = {
        "PATH": str(machine.programs),
        "PYTHONPATH": os.pathsep.join(sys.path),
        "XDG_CACHE_HOME": str(machine.folder),
    }
    started = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE)
        for _ in range(3)
    ]
    said = {process.communicate(timeout=100)[0] for process in started}
    assert len(said) == 1 and said.pop().endswith(b".so\n")
    assert len(machine.runs()) == 1


def test_a_lock_that_is_never_let_go_holds_nobody_up(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.compiler()
    machine.cache.mkdir(parents=True)
    with library._locked(machine.cache / "lock"):
        monkeypatch.setattr(library, "_DEADLINE", 0.3)
        assert isinstance(find(), Library)


def test_leftovers_go_after_a_while(machine: Machine) -> None:
    machine.compiler()
    old, new = machine.cache / "compiling-old", machine.cache / "compiling-new"
    for folder in (old, new):
        folder.mkdir(parents=True)
        (folder / "library.so").touch()
    os.utime(old, (0, 0))
    find()
    assert not old.exists() and new.exists()


@pytest.mark.parametrize("word", ["0", "off", "No"])
def test_the_machines_owner_can_do_without(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    machine.compiler()
    monkeypatch.setenv("KVASIR_ENGINE_KERNELS", word)
    assert reason() == "KVASIR_ENGINE_KERNELS switches them off; unset it to have them"
    assert machine.runs() == []


def test_a_library_that_is_gone_is_an_error_of_the_engine(tmp_path: Path) -> None:
    g = Graph()
    g.output(g.own(tmp_path / "gone.so", "Linear", g.input("x", ["n", 32])), "y", ["n", 16])
    with pytest.raises(EngineError, match=r"gone\.so"):
        g.session(Runtime(1))
