"""What runs from a home directory: one process at a time, and what it last said about itself.

Two processes with the same key would be one peer in two places, which relays and bridges cannot serve; a lock on
the home directory keeps the second one out. The lock is the operating system's, so it ends with its process,
however that ends.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import IO

from kvasir_peer.errors import SettingsError, UsageError
from kvasir_peer.progress import Progress

LOCK_FILE = "running.lock"
STATE_FILE = "running.json"
GIVEN_FILE = "given.json"
PAUSE_FILE = "paused"  # is there while the owner wants the machine for something else


@dataclass(frozen=True, slots=True)
class Running:
    """What a running role says about itself.

    Attributes:
        role: ``bridge`` or ``stage``.
        pid: its process id.
        started: Unix time of its start, seconds.
        changed: Unix time of its last word, seconds.
        step: see :class:`kvasir_peer.progress.Progress`.
        text: its last word, for people.
        base_url: OpenAI base URL, of a bridge.
        relays: how it stands with the relays, in one line.
    """

    role: str
    pid: int
    started: float
    changed: float
    step: str = "start"
    text: str = ""
    base_url: str = ""
    relays: str = ""


class Notice:
    """The open state file of a running role."""

    def __init__(self, home: Path, role: str) -> None:
        now = time.time()
        self._path = home / STATE_FILE
        self._state = Running(role, os.getpid(), now, now)
        self._write()

    def report(self, progress: Progress) -> None:
        """Keep a role's progress as its last word, and what it says of its relays for itself."""
        self._state = replace(self._state, changed=time.time(), step=progress.step, text=progress.line())
        if progress.step == "relay":
            self._state = replace(self._state, relays=progress.text)
        self._write()

    def serves(self, base_url: str) -> None:
        """Keep a bridge's address."""
        self._state = replace(self._state, changed=time.time(), step="ready", base_url=base_url)
        self._write()

    def _write(self) -> None:
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(asdict(self._state)))
        temporary.replace(self._path)


def _lock(file: IO[str]) -> bool:
    """Take the lock for as long as the file is open; False if another process has it."""
    if os.name == "posix":
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
    import msvcrt

    try:
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined,unused-ignore]
    except OSError:
        return False
    return True


@contextmanager
def run_from(home: Path, role: str) -> Iterator[Notice]:
    """Hold the home directory while a role runs.

    Raises:
        UsageError: another process already runs from it.
        SettingsError: it cannot be written.
    """
    try:
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = (home / LOCK_FILE).open("w")
    except OSError as error:
        raise SettingsError(f"cannot use the home directory {home}: {error.strerror or error}") from None
    with file:
        if not _lock(file):
            other = _read(home)
            who = f"a {other.role} (process {other.pid})" if other else "another kvasir-peer"
            raise UsageError(f"{who} already runs from {home}: stop it, or give this one its own --home")
        notice = Notice(home, role)
        try:
            yield notice
        finally:
            with suppress(OSError):
                (home / STATE_FILE).unlink(missing_ok=True)


def _read(home: Path) -> Running | None:
    try:
        raw = json.loads((home / STATE_FILE).read_text())
        return Running(**{field.name: raw[field.name] for field in fields(Running)})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def find(home: Path) -> Running | None:
    """What runs from a home directory now, or None; what a killed process left behind does not count."""
    try:
        file = (home / LOCK_FILE).open("r+")
    except OSError:
        return None
    with file:
        if _lock(file):
            return None
    return _read(home)


def set_paused(home: Path, paused: bool) -> None:
    """Leave word for a running volunteer.

    Raises:
        SettingsError: the home directory cannot be written.
    """
    file = home / PAUSE_FILE
    try:
        if paused:
            home.mkdir(parents=True, exist_ok=True, mode=0o700)
            file.touch()
        else:
            file.unlink(missing_ok=True)
    except OSError as error:
        raise SettingsError(f"cannot write {file}: {error.strerror or error}") from None


@dataclass(frozen=True, slots=True)
class Given:
    """What a machine has given to swarms as a volunteer, since its home directory was made.

    Attributes:
        rows: of hidden states that experts were computed for.
        seconds: of computing.
        sent_bytes: of weights that other volunteers fetched from here.
    """

    rows: int = 0
    seconds: float = 0.0
    sent_bytes: int = 0


def given(home: Path) -> Given:
    """What was given so far; nothing where the file is absent or damaged."""
    try:
        raw = json.loads((home / GIVEN_FILE).read_text())
        return Given(int(raw["rows"]), float(raw["seconds"]), int(raw.get("sent_bytes", 0)))
    except (OSError, ValueError, KeyError, TypeError):
        return Given()


def keep_given(home: Path, found: Given) -> None:
    """Keep what was given; whole or not at all."""
    temporary = home / f".{GIVEN_FILE}.{os.getpid()}"
    temporary.write_text(json.dumps(asdict(found)))
    temporary.replace(home / GIVEN_FILE)
