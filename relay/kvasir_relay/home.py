"""The folder in which the relay keeps its key, revoked invites and the month's count."""

from __future__ import annotations

from pathlib import Path

from kvasir_relay.config import Config


def home_folder(config: Config) -> Path:
    """The configured folder, or the platform's place for data of users."""
    if config.home is not None:
        return config.home
    import platformdirs

    return Path(platformdirs.user_data_dir("kvasir-relay"))
