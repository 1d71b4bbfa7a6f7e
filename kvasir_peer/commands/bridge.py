"""``kvasir-peer bridge``."""

from __future__ import annotations

from kvasir_peer import running
from kvasir_peer.commands.common import (
    JsonProgressFlag,
    Reporter,
    run_until_stopped,
    start_logging,
    with_settings,
)
from kvasir_peer.settings import BridgeReady, BridgeSettings


@with_settings(BridgeSettings)
def run_bridge(settings: BridgeSettings, *, json_progress: JsonProgressFlag = False) -> None:
    """Serve a model to OpenAI clients: open the GGUF, plan the ring, hand out tickets.

    Prints the ticket and the OpenAI base URL, each on a line of its own, as soon as stages can join.
    """
    from kvasir_peer.roles.bridge import run_bridge as serve_bridge

    start_logging(settings.log)
    with running.run_from(settings.home, "bridge") as notice:
        report = Reporter(json_lines=json_progress, also=notice.report)

        def ready(found: BridgeReady) -> None:
            notice.serves(found.base_url)
            print(found.ticket, flush=True)
            print(found.base_url, flush=True)

        async def serve() -> None:
            await serve_bridge(settings, ready=ready, report=report)

        run_until_stopped(serve)
