"""``kvasir-peer doctor``."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvasir_peer import __version__, addresses, identity, running, settings
from kvasir_peer.commands.common import HomeFlag
from kvasir_peer.commands.swarm import cores
from kvasir_peer.errors import KvasirError
from kvasir_peer.models.store import MIN_DISK_FREE

Verdict = Literal["ok", "note", "bad"]
RELAY_SECONDS = 5.0  # to open a TCP connection to a relay

# What each part needs; the packages are named as pip has them.
PARTS = (
    ("network", ("libp2p", "trio"), ("libp2p", "trio"), "kvasir-peer"),
    (
        "bridge",
        ("hypercorn", "tokenizers", "jinja2"),
        ("hypercorn", "tokenizers", "jinja2"),
        "kvasir-peer[bridge]",
    ),
    ("onnx engine", ("onnxruntime", "onnx"), ("onnxruntime", "onnx"), "kvasir-peer[onnx]"),
    ("torch engine", ("torch",), ("torch",), "kvasir-peer[torch]"),
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    verdict: Verdict
    subject: str
    text: str


def examine(*, home: HomeFlag = None) -> int:
    """Check what this machine can do: versions, memory, disk, engines (by small computations), key, ticket, relays.

    Ends with status 1 if something would keep this machine from taking part.
    """
    folder = settings.home_directory(home)
    checks: tuple[Callable[[], Iterator[Finding]], ...] = (
        _program,
        _machine,
        lambda: _disk(folder),
        _parts,
        _engines,
        lambda: _home(folder),
        lambda: _relays(folder),
    )
    worst = False
    for check in checks:
        for finding in check():
            print(f"{finding.verdict:<5} {finding.subject:<13} {finding.text}", flush=True)
            worst = worst or finding.verdict == "bad"
    return 1 if worst else 0


def _program() -> Iterator[Finding]:
    supported = (3, 11) <= sys.version_info < (3, 14)
    yield Finding(
        "ok" if supported else "bad",
        "program",
        f"kvasir-peer {__version__}, Python {platform.python_version()}"
        + ("" if supported else ": use Python 3.11, 3.12 or 3.13"),
    )


def _machine() -> Iterator[Finding]:
    import psutil

    yield Finding("ok", "processor", f"{cores()} cores, {platform.machine()}, {platform.system()}")
    memory = psutil.virtual_memory()
    enough = memory.available >= 1 << 30
    yield Finding(
        "ok" if enough else "note",
        "memory",
        f"{memory.available / 1e9:.1f} of {memory.total / 1e9:.1f} GB free"
        + ("" if enough else ": only small slices will fit"),
    )


def _disk(folder: Path) -> Iterator[Finding]:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if not os.access(existing, os.W_OK):
        yield Finding("bad", "disk", f"{folder} cannot be written: give another with --home")
    elif free < MIN_DISK_FREE + (1 << 30):
        yield Finding("note", "disk", f"only {free / 1e9:.1f} GB free under {folder}: weights may not fit")
    else:
        yield Finding("ok", "disk", f"{free / 1e9:.1f} GB free under {folder}")


def _parts() -> Iterator[Finding]:
    for subject, modules, packages, extra in PARTS:
        if all(importlib.util.find_spec(module) for module in modules):
            versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in packages)
            yield Finding("ok", subject, versions)
        else:
            required = subject == "network"
            yield Finding("bad" if required else "note", subject, f"not installed: pip install '{extra}'")
    if not any(importlib.util.find_spec(name) for name in ("onnxruntime", "torch")):
        yield Finding("bad", "engines", "none is installed: pip install 'kvasir-peer[onnx]'")


def _engines() -> Iterator[Finding]:
    from kvasir_peer.engines import self_test
    from kvasir_peer.engines.choice import choose_engine, installed

    for name in ("onnx", "torch"):
        if not installed(name):
            continue
        try:
            found = self_test.run(*choose_engine(name, ""))
        except KvasirError as error:
            yield Finding("bad", f"{name} engine", str(error))
        else:
            yield Finding(
                "ok",
                f"{name} engine",
                f"computes right on {found.device}: error {found.exact_error:.1g} in float32, "
                f"{found.fast_error:.1g} in four bits",
            )
            if name == "onnx":
                yield from _onnx_kernels()


def _onnx_kernels() -> Iterator[Finding]:
    from kvasir_peer.engines.onnx_probe import probe

    trials = probe().trials
    working = sum(trial.works for trial in trials)
    yield Finding("ok", "onnx kernels", f"{working} of {len(trials)} work")
    for trial in trials:
        if not trial.works:
            yield Finding("note", "onnx kernels", f"{trial.name}: {trial.remark}")


def _home(folder: Path) -> Iterator[Finding]:
    try:
        yield Finding("ok", "key", identity.load(folder / identity.KEY_FILE).peer_id)
    except FileNotFoundError:
        yield Finding("ok", "key", "none yet; made on the first start")
    except KvasirError as error:
        yield Finding("bad", "key", str(error))
    role = running.find(folder)
    if role is not None:
        yield Finding("ok", "running", f"{role.role} (process {role.pid}): {role.text}")


def _relays(folder: Path) -> Iterator[Finding]:
    if not (folder / settings.TICKET_FILE).exists():
        yield Finding("note", "ticket", "none: kvasir-peer join TICKET saves one")
        return
    try:
        ticket = settings.load_ticket(folder)
        ticket.check(now=time.time())
    except KvasirError as error:
        yield Finding("bad", "ticket", str(error))
        return
    yield Finding("ok", "ticket", f"swarm {ticket.swarm}, for {' or '.join(ticket.ordered_roles())}")
    for relay in ticket.relays:
        transport, _ = addresses.split_peer_address(relay)
        _, _, host, _, port, *_ = transport.split("/")
        began = time.monotonic()
        try:
            socket.create_connection((host, int(port)), timeout=RELAY_SECONDS).close()
        except OSError as error:
            yield Finding("bad", "relay", f"{transport} does not answer: {error}")
        else:
            yield Finding("ok", "relay", f"{transport} answers in {(time.monotonic() - began) * 1000:.0f} ms")
