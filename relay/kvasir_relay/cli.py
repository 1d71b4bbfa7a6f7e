"""The command ``kvasir-relay``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from kvasir_peer.errors import KvasirError

app = App(
    name="kvasir-relay", help="A public circuit relay for Kvasir peers: it carries ciphertext between them."
)


@app.default
def serve(
    *,
    listen: Annotated[list[str] | None, Parameter(consume_multiple=False)] = None,
    home: Path | None = None,
) -> None:
    """Run the relay until it is told to stop.

    Parameters
    ----------
    listen
        Multiaddress to listen on; may be given more than once.
    home
        Folder for the relay's key.
    """
    from kvasir_relay.service import run

    run(listen or ["/ip4/0.0.0.0/tcp/4001"], home)


def main() -> None:
    """Entry point: errors are one line, wrong usage ends with status 2."""
    try:
        app()
    except KvasirError as error:
        print(f"kvasir-relay: {error}", file=sys.stderr)
        sys.exit(error.exit_status)
