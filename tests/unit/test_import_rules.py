"""Holds the layers of the house: imports go downwards only, and each heavy library stays in its room."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Room or module to its layer; an import may go to the same room, or to a lower layer.
LAYERS = {
    "__init__": 0,
    "errors": 0,
    "progress": 0,
    "identity": 0,
    "addresses": 0,
    "settings": 0,
    "ticket": 0,
    "running": 0,
    "wire": 1,
    "models": 1,
    "engines": 2,
    "serving": 2,
    "net": 3,
    "agent": 4,
    "owner": 4,
    "ring": 5,
    "experts": 5,
    "api": 6,
    "roles": 7,
    "commands": 8,
    "cli": 8,
}
# Modules of layer 0 lean on each other in this order only.
GROUND = ("errors", "progress", "identity", "addresses", "ticket", "settings", "running")

NO_EVENT_LOOP = ("wire", "models", "engines", "serving")
FORBIDDEN_THERE = ("trio", "asyncio", "anyio", "libp2p", "httpx", "httpcore", "h11", "starlette", "hypercorn")
ONLY_NET = ("libp2p", "multiaddr")
ONLY_ENGINES = ("torch", "onnxruntime", "onnx")


def imports(path):
    """(module, line, whether at run time) for each import of a file, also those inside functions."""
    tree = ast.parse(path.read_text(), str(path))
    type_only = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            type_only.update(id(inner) for inner in ast.walk(node))
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(tree):
        at_run_time = id(node) not in type_only
        if isinstance(node, ast.Import):
            for name in node.names:
                yield name.name, node.lineno, at_run_time
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                base = package[: len(package) - node.level + 1]
                module = ".".join([*base, module]).rstrip(".")
            for name in node.names:
                yield f"{module}.{name.name}", node.lineno, at_run_time


def room_of(path):
    parts = path.relative_to(ROOT / "kvasir_peer").parts
    return parts[0] if len(parts) > 1 else path.stem


FILES = sorted((ROOT / "kvasir_peer").rglob("*.py"))
RELAY_FILES = sorted((ROOT / "relay" / "kvasir_relay").rglob("*.py"))


def test_every_room_has_a_layer():
    assert {room_of(path) for path in FILES} <= set(LAYERS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_downwards(path):
    room = room_of(path)
    wrong = []
    for module, line, _ in imports(path):
        parts = module.split(".")
        if parts[0] != "kvasir_peer" or len(parts) < 2 or parts[1] not in LAYERS:
            continue
        other = parts[1]
        if other == room:
            continue
        if room in GROUND and other in GROUND:
            allowed = GROUND.index(other) < GROUND.index(room)
        else:
            allowed = LAYERS[other] < LAYERS[room] or {room, other} <= {"commands", "cli"}
        if not allowed:
            wrong.append(f"{path.relative_to(ROOT)}:{line} imports {module}")
    assert not wrong


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_heavy_libraries_stay_in_their_rooms(path):
    room = room_of(path)
    wrong = []
    for module, line, at_run_time in imports(path):
        top = module.split(".")[0]
        if room in NO_EVENT_LOOP and top in FORBIDDEN_THERE:
            wrong.append(f"{line}: {module} in a room without event loop and network")
        if top in ONLY_NET and room != "net":
            wrong.append(f"{line}: {module} outside net")
        if top == "kvasir_relay" and room not in ("net", "commands"):
            wrong.append(f"{line}: {module} outside net")
        if top in ONLY_ENGINES and room != "engines" and at_run_time:
            wrong.append(f"{line}: {module} outside engines")
    assert not wrong


@pytest.mark.parametrize("path", RELAY_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_relay_leans_on_few_rooms(path):
    ground = {"errors", "identity", "settings", "addresses", "progress", "running", "__version__"}
    allowed = {"net", "wire", *ground}
    wrong = []
    for module, line, _ in imports(path):
        parts = module.split(".")
        if parts[0] == "kvasir_peer" and len(parts) > 1 and parts[1] not in allowed:
            wrong.append(f"{path.relative_to(ROOT)}:{line} imports {module}")
    assert not wrong


def test_the_checks_see_imports_in_functions_and_relative_ones(tmp_path):
    path = ROOT / "kvasir_peer" / "net" / "imaginary.py"
    tree = "def f():\n    import libp2p.x\nfrom . import y\nfrom ..api import z\nif TYPE_CHECKING:\n    import torch\n"
    copy = tmp_path / "imaginary.py"
    copy.write_text(tree)

    class Placed(type(path)):
        def read_text(self):
            return copy.read_text()

    found = set(imports(Placed(path)))
    assert ("libp2p.x", 2, True) in found
    assert ("kvasir_peer.net.y", 3, True) in found
    assert ("kvasir_peer.api.z", 4, True) in found
    assert ("torch", 6, False) in found
