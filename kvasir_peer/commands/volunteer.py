"""``kvasir-peer volunteer``, ``pause`` and ``resume``."""

from __future__ import annotations

from kvasir_peer import running
from kvasir_peer.commands.common import (
    HomeFlag,
    JsonProgressFlag,
    TicketArgument,
    run_member,
    with_settings,
)
from kvasir_peer.errors import UsageError
from kvasir_peer.settings import VolunteerSettings, home_directory


@with_settings(VolunteerSettings)
def run_volunteer(
    settings: VolunteerSettings,
    ticket_text: TicketArgument = None,
    /,
    *,
    json_progress: JsonProgressFlag = False,
) -> None:
    """Compute experts of a model while its swarm is busy: fetch just their weights, serve until Ctrl-C.

    kvasir-peer pause gives the machine back within a second, kvasir-peer resume goes on.
    """
    from kvasir_peer.roles.volunteer import run_volunteer as serve

    run_member(settings, "volunteer", serve, ticket_text=ticket_text, json_progress=json_progress)


def pause(*, home: HomeFlag = None) -> None:
    """Take the machine back from a running volunteer: it hands back what it computes and frees its memory."""
    folder = home_directory(home)
    found = running.find(folder)
    if found is None or found.role != "volunteer":
        raise UsageError(f"no volunteer runs from {folder}: there is nothing to pause")
    running.set_paused(folder, True)
    print("paused: kvasir-peer resume goes on")


def resume(*, home: HomeFlag = None) -> None:
    """Let a paused volunteer go on."""
    folder = home_directory(home)
    running.set_paused(folder, False)
    print("goes on" if running.find(folder) else "nothing runs here; the next volunteer will not be paused")
