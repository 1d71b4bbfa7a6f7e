"""``kvasir-peer id``."""

from __future__ import annotations

from kvasir_peer import identity, settings
from kvasir_peer.commands.common import HomeFlag


def show_id(*, home: HomeFlag = None) -> None:
    """Show this peer's id; the key is made on the first call."""
    path = settings.home_directory(home) / identity.KEY_FILE
    print(identity.load_or_create(path).peer_id)
