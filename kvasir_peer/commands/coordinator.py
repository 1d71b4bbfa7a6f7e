"""``kvasir-peer coordinator``."""

from __future__ import annotations

import dataclasses
import time
from typing import Annotated

from cyclopts import Parameter

from kvasir_peer import running
from kvasir_peer.commands.common import (
    JsonProgressFlag,
    Reporter,
    run_until_stopped,
    start_logging,
    with_settings,
)
from kvasir_peer.settings import CoordinatorSettings


@with_settings(CoordinatorSettings)
def run_coordinator(
    settings: CoordinatorSettings,
    ticket_text: Annotated[
        str | None, Parameter(name="TICKET", help="Ticket to use this once; the saved one if not given.")
    ] = None,
    /,
    *,
    json_progress: JsonProgressFlag = False,
) -> None:
    """Run a whole model for a bridge; when it is busy, volunteers compute experts."""
    from kvasir_peer.roles import coordinator

    if ticket_text is not None:
        settings = dataclasses.replace(settings, ticket=ticket_text)
    settings.invitation(now=time.time(), role="coordinator")
    start_logging(settings.log)
    with running.run_from(settings.home, "coordinator") as notice:
        report = Reporter(json_lines=json_progress, also=notice.report)

        async def serve() -> None:
            await coordinator.run_coordinator(settings, report=report)

        run_until_stopped(serve)
