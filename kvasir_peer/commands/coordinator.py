"""``kvasir-peer coordinator``."""

from __future__ import annotations

from kvasir_peer.commands.common import JsonProgressFlag, TicketArgument, run_member, with_settings
from kvasir_peer.settings import CoordinatorSettings


@with_settings(CoordinatorSettings)
def run_coordinator(
    settings: CoordinatorSettings,
    ticket_text: TicketArgument = None,
    /,
    *,
    json_progress: JsonProgressFlag = False,
) -> None:
    """Run a whole model for a bridge; when it is busy, volunteers compute experts."""
    from kvasir_peer.roles.coordinator import run_coordinator as serve

    run_member(settings, "coordinator", serve, ticket_text=ticket_text, json_progress=json_progress)
