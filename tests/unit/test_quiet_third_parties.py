"""Third-party code keeps quiet: nothing is written to a user's folders but what this project itself keeps there."""

import re
import subprocess
import sys
from pathlib import PurePath

import pytest
from helpers_unit import environment

USE_ONNXRUNTIME = """
from kvasir_peer.engines import self_test
print(self_test.run("onnx").exact_error)
import onnxruntime
print(onnxruntime.__version__)
"""

USE_LIBP2P = """
import kvasir_peer.net.node
"""


def entries(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize(
    ("script", "kept"),
    [
        # The kernels that the onnxruntime engine compiles once.
        pytest.param(USE_ONNXRUNTIME, r"kvasir-peer kernels kernels-\w+-\w+\.so lock", id="onnxruntime"),
        pytest.param(USE_LIBP2P, "", id="libp2p"),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no variable says where caches are")
def test_a_fresh_home_stays_clean(tmp_path, script, kept):
    home, cache, temporary = tmp_path / "home", tmp_path / "cache", tmp_path / "tmp"
    for folder in (home, cache, temporary):
        folder.mkdir()
    folders = {
        "HOME": home,
        "USERPROFILE": home,
        "XDG_CACHE_HOME": cache,
        "XDG_CONFIG_HOME": home / ".config",
        "XDG_DATA_HOME": home / ".local",
        "XDG_STATE_HOME": home / ".state",
        "TMPDIR": temporary,
    }
    result = subprocess.run(
        [sys.executable, "-B", "-c", script],
        env=environment(**{name: str(path) for name, path in folders.items()}),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert entries(home) == []
    assert re.fullmatch(kept, " ".join(PurePath(name).name for name in entries(cache)))
    assert entries(temporary) == []


def test_telemetry_is_off_before_anything_else_is_imported():
    code = "import kvasir_peer, os, sys; print(os.environ['ORT_DISABLE_TELEMETRY'], 'onnxruntime' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert result.stdout.split() == ["1", "False"]
