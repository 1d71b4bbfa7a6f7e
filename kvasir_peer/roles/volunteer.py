"""The volunteer role: composes node, engine process, chunk store and the experts' volunteer."""

from __future__ import annotations

from pathlib import Path

import trio

from kvasir_peer import identity, running
from kvasir_peer.experts.volunteer import Volunteer, VolunteerConfig, VolunteerStatistics
from kvasir_peer.progress import Report
from kvasir_peer.roles.member import open_member
from kvasir_peer.running import PAUSE_FILE
from kvasir_peer.settings import VolunteerSettings
from kvasir_peer.wire import chunks

FREE_MEMORY_SHARE = 0.5  # of what is free, where the owner sets no limit: the machine stays usable
GIVEN_SECONDS = 10.0  # between two writes of what was given
PAUSE_SECONDS = 0.25  # between two looks at whether the owner has paused this peer


async def run_volunteer(settings: VolunteerSettings, report: Report) -> None:
    """Volunteer until cancelled.

    Raises:
        TicketError: there is no ticket, or it is no good.
        LinkError: no relay could be reached.
        RefusedError: the bridge does not let this peer in.
    """
    async with (
        open_member(settings, "volunteer", report, memory_share=FREE_MEMORY_SHARE) as member,
        trio.open_nursery() as nursery,
    ):
        config = VolunteerConfig(member.membership, model=settings.model)
        volunteer = Volunteer(
            member.node,
            member.engine,
            member.store,
            config,
            sign=member.me.sign,
            verify=identity.verify,
            report=report,
        )
        member.node.handle(chunks.PROTOCOL, chunks.MAX_WANT_FRAME, volunteer.give_chunks)
        nursery.start_soon(_watch_pause, settings.home, volunteer)
        nursery.start_soon(_keep_given, settings.home, volunteer)
        await volunteer.run()


async def _keep_given(home: Path, volunteer: Volunteer) -> None:
    """Keep count, in the home directory, of what this machine has given."""
    before = running.given(home)
    kept = before
    try:
        while True:
            await trio.sleep(GIVEN_SECONDS)
            found = _sum(before, volunteer.statistics())
            if found != kept:
                kept = found
                running.keep_given(home, found)
    finally:
        running.keep_given(home, _sum(before, volunteer.statistics()))


def _sum(before: running.Given, now: VolunteerStatistics) -> running.Given:
    return running.Given(
        before.rows + now.served.rows,
        before.seconds + now.served.held_ms / 1e3,
        before.sent_bytes + now.given_bytes,
    )


async def _watch_pause(home: Path, volunteer: Volunteer) -> None:
    """Follow what ``kvasir-peer pause`` and ``resume`` leave in the home directory."""
    paused = False
    file = home / PAUSE_FILE
    while True:
        wanted = file.exists()
        if wanted != paused:
            paused = wanted
            if wanted:
                volunteer.pause()
            else:
                volunteer.resume()
        await trio.sleep(PAUSE_SECONDS)
