"""The relay as a process: its home, its signals, its end."""

from __future__ import annotations

import signal
from pathlib import Path

import platformdirs
import trio

from kvasir_peer.identity import KEY_FILE, load_or_create
from kvasir_relay.server import Relay, open_listener


def run(listen: list[str], home: Path | None) -> None:
    """Serve until SIGTERM or SIGINT."""
    folder = home or Path(platformdirs.user_data_dir("kvasir-relay"))
    relay = Relay(load_or_create(folder / KEY_FILE))
    trio.run(_serve, relay, listen)


async def _serve(relay: Relay, listen: list[str]) -> None:
    listeners = [await open_listener(text) for text in listen]
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with trio.open_nursery() as nursery:
            await nursery.start(relay.serve, listeners)
            for address in relay.addresses:
                print(address, flush=True)
            async for _ in signals:
                nursery.cancel_scope.cancel()
