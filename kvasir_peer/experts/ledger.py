"""What workers have given, and who is quarantined: a small SQLite file that survives the bridge."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvasir_peer.errors import SettingsError

_SCHEMA = """
CREATE TABLE IF NOT EXISTS given (
    peer TEXT PRIMARY KEY, rows INTEGER NOT NULL, checked INTEGER NOT NULL, first REAL NOT NULL, last REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS quarantine (peer TEXT PRIMARY KEY, reason TEXT NOT NULL, since REAL NOT NULL);
CREATE TABLE IF NOT EXISTS kept (name TEXT PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS admitted (peer TEXT PRIMARY KEY, secret BLOB NOT NULL, since REAL NOT NULL);
"""


MOST = 1 << 62  # of a sum: one more addition still fits SQLite's integers


@dataclass(frozen=True)
class Given:
    """What one peer has given: rows that were used, rows computed again and found right; Unix times."""

    peer: str
    rows: int
    checked: int
    first: float
    last: float


class Ledger:
    """One file; methods block for a disk write, so call them from a thread.

    Args:
        path: of the file; its folder is made.

    Raises:
        SettingsError: it can't be opened.
    """

    def __init__(self, path: Path) -> None:
        self._mutex = threading.Lock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._base = sqlite3.connect(path, check_same_thread=False)
            self._base.execute("PRAGMA journal_mode=WAL")
            self._base.executescript(_SCHEMA)
        except (sqlite3.Error, OSError) as error:
            raise SettingsError(f"the ledger {path} can't be used: {error}") from None

    def add(self, rows: Iterable[tuple[str, int, int]], keep: Mapping[str, bytes] | None = None) -> None:
        """Count ``(peer, rows, checked)`` on top of what is known, and :meth:`keep` things: all of it or nothing."""
        now = time.time()
        with self._mutex, self._base:
            self._base.executemany(
                "INSERT INTO given VALUES (?1, ?2, ?3, ?4, ?4) ON CONFLICT (peer) DO UPDATE SET "
                f"rows = MIN(rows, {MOST}) + ?2, checked = MIN(checked, {MOST}) + ?3, last = ?4",
                [(peer, count, checked, now) for peer, count, checked in rows],
            )
            self._base.executemany("INSERT OR REPLACE INTO kept VALUES (?, ?)", list((keep or {}).items()))

    def given(self) -> list[Given]:
        """All peers, those that gave most first."""
        with self._mutex:
            found = self._base.execute(
                "SELECT peer, rows, checked, first, last FROM given ORDER BY rows DESC, peer"
            )
            return [Given(*row) for row in found]

    def quarantine(self, peer: str, reason: str) -> None:
        """Keep a peer out from now on."""
        with self._mutex, self._base:
            self._base.execute(
                "INSERT OR REPLACE INTO quarantine VALUES (?, ?, ?)", (peer, reason[:500], time.time())
            )

    def pardon(self, peer: str) -> None:
        """Let a peer in again."""
        with self._mutex, self._base:
            self._base.execute("DELETE FROM quarantine WHERE peer = ?", (peer,))

    def quarantined(self) -> Mapping[str, str]:
        """Peers and why."""
        with self._mutex:
            return dict(self._base.execute("SELECT peer, reason FROM quarantine"))

    def admit(self, peer: str, secret: bytes) -> None:
        """A peer has shown the ticket with this secret."""
        with self._mutex, self._base:
            self._base.execute(
                "INSERT OR REPLACE INTO admitted VALUES (?, ?, ?)", (peer, secret, time.time())
            )

    def admitted(self, secret: bytes) -> set[str]:
        """Peers that have shown it."""
        with self._mutex:
            return {
                row[0] for row in self._base.execute("SELECT peer FROM admitted WHERE secret = ?", (secret,))
            }

    def keep(self, name: str, data: bytes) -> None:
        """Keep something under a name, in place of what was there."""
        with self._mutex, self._base:
            self._base.execute("INSERT OR REPLACE INTO kept VALUES (?, ?)", (name, data))

    def kept(self, name: str) -> bytes | None:
        """What was kept under a name."""
        with self._mutex:
            row = self._base.execute("SELECT data FROM kept WHERE name = ?", (name,)).fetchone()
            return None if row is None else bytes(row[0])

    def close(self) -> None:
        """Close the file."""
        with self._mutex:
            self._base.close()
