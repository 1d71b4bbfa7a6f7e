"""``kvasir-peer stage`` and ``kvasir-peer join``."""

from __future__ import annotations

import dataclasses
import time
from typing import Annotated

from cyclopts import Parameter

from kvasir_peer import settings as settings_module
from kvasir_peer import ticket
from kvasir_peer.commands.common import JsonProgressFlag, TicketArgument, run_member, with_settings
from kvasir_peer.errors import TicketError
from kvasir_peer.progress import Report
from kvasir_peer.settings import StageSettings

# The roles that join can start, in the order in which it looks for one that the ticket allows.
RUNNABLE = ("stage",)


def _run(settings: StageSettings, ticket_text: str | None, *, json_progress: bool) -> None:
    from kvasir_peer.roles.stage import Leaving
    from kvasir_peer.roles.stage import run_stage as serve_stage

    leaving = Leaving()

    async def serve(settings: StageSettings, report: Report) -> None:
        await serve_stage(settings, report, leaving)

    run_member(
        settings,
        "stage",
        serve,
        ticket_text=ticket_text,
        json_progress=json_progress,
        leave=leaving.begin,
    )


@with_settings(StageSettings)
def run_stage(
    settings: StageSettings,
    ticket_text: TicketArgument = None,
    /,
    *,
    json_progress: JsonProgressFlag = False,
) -> None:
    """Compute a run of layers in a ring: fetch just their weights, and serve until Ctrl-C."""
    _run(settings, ticket_text, json_progress=json_progress)


@with_settings(StageSettings)
def join(
    settings: StageSettings,
    ticket_text: Annotated[str, Parameter(name="TICKET", help="Ticket, as the bridge prints it.")],
    /,
    *,
    json_progress: JsonProgressFlag = False,
) -> None:
    """Join a swarm: save its ticket, then take the first role that it allows (stage)."""
    found = ticket.parse(ticket_text)
    found.check(now=time.time())
    role = next((role for role in RUNNABLE if role in found.roles), None)
    if role is None:
        roles = found.ordered_roles()
        raise TicketError(f"the ticket is for {' or '.join(roles)}: run kvasir-peer {roles[0]} TICKET")
    settings_module.save_ticket(settings.home, found)
    _run(dataclasses.replace(settings, ticket=""), None, json_progress=json_progress)
