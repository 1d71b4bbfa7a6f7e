"""What every role that joins a bridge and computes goes by."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvasir_peer.engines.footprint import DEFAULT_EXPANSION


@dataclass(frozen=True)
class Membership:
    """Where a peer belongs, what its owner gives, and what computes there.

    Attributes:
        bridge, bridge_addresses: its peer id, and where it is reached if not through a relay.
        secret: of the ticket.
        memory: bytes for weights, cache, workspace and the engine itself.
        disk: bytes for chunks.
        engine: computes on ``device``, at ``precision``.
        threads: of computation; 0 takes all cores.
        expansion: bytes of memory that the engine makes of each byte of block-quantised weights.
    """

    bridge: str
    bridge_addresses: tuple[str, ...]
    secret: str
    home: Path
    memory: int
    disk: int
    engine: str
    device: str
    precision: Literal["exact", "fast"]
    threads: int
    expansion: float = DEFAULT_EXPANSION

    @property
    def manifests(self) -> Path:
        """The folder of manifest files."""
        return self.home / "manifests"

    def manifest(self, model: str) -> Path:
        """The file of the manifest with this id."""
        return self.manifests / f"{model}.manifest"
