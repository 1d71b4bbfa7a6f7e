"""The volunteer role: composes node, engine process, chunk store and the experts' volunteer."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import psutil
import trio

from kvasir_peer import identity, running
from kvasir_peer.agent.chunk_transfer import serve_chunks
from kvasir_peer.agent.engine import open_engine
from kvasir_peer.engines.choice import choose_engine
from kvasir_peer.experts.expert_server import ServerStatistics
from kvasir_peer.experts.volunteer import Volunteer, VolunteerConfig, VolunteerNews
from kvasir_peer.models.store import ChunkStore
from kvasir_peer.net.node import Node
from kvasir_peer.progress import Progress, Report, Step
from kvasir_peer.running import PAUSE_FILE
from kvasir_peer.settings import VolunteerSettings
from kvasir_peer.wire import chunks

logger = logging.getLogger(__name__)

RELAY_SECONDS = 30.0  # for the first reservation; a peer without one can't be reached
FREE_MEMORY_SHARE = 0.5  # of what is free, where the owner sets no limit: the machine stays usable
GIVEN_SECONDS = 10.0  # between two writes of what was given
PAUSE_SECONDS = 0.25  # between two looks at whether the owner has paused this peer

# Bytes of memory for each byte of a file: containers wider than the file's, and what loading leaves behind.
EXPANSION = {"onnx": 2.2, "torch": 2.0}

_STEPS: dict[str, Step] = {
    "idle": "plan",
    "fetching": "fetch",
    "loading": "load",
    "serving": "ready",
    "paused": "stop",
    "problem": "problem",
}


async def run_volunteer(settings: VolunteerSettings, *, report: Report) -> None:
    """Volunteer until cancelled.

    Raises:
        TicketError: there is no ticket, or it is no good.
        LinkError: no relay could be reached.
        RefusedError: the bridge does not let this peer in.
    """
    invitation = settings.invitation(now=time.time(), role="volunteer")
    me = identity.load_or_create(settings.identity_path)
    report(Progress("start", me.peer_id))
    engine_name, device = choose_engine(settings.engine, settings.device)
    store = await trio.to_thread.run_sync(ChunkStore, settings.store_path, settings.disk_limit())
    memory = settings.memory or int(psutil.virtual_memory().available * FREE_MEMORY_SHARE)
    relays = settings.relays or invitation.relays

    def tell(news: VolunteerNews) -> None:
        unit = "bytes" if news.total else ""
        report(Progress(_STEPS[news.state], news.text, news.done, news.total, unit))

    async with Node.open(
        me.private_key,
        relays=relays,
        invites=settings.relay_invites,
        listen=settings.listen,
        direct=settings.direct,
    ) as node:
        await node.relays_ready(RELAY_SECONDS)
        report(Progress("relay", f"reachable through a relay; computes with {engine_name} on {device}"))
        async with open_engine() as engine, trio.open_nursery() as nursery:
            volunteer = Volunteer(
                node,
                engine,
                store,
                VolunteerConfig(
                    bridge=invitation.bridge,
                    bridge_addresses=(),
                    secret=invitation.credential(),
                    home=settings.home,
                    memory=memory,
                    disk=settings.disk_limit(),
                    engine=engine_name,
                    device=device,
                    precision="exact" if settings.precision == "exact" else "fast",
                    threads=settings.threads,
                    model=settings.model,
                    expansion=EXPANSION[engine_name],
                ),
                sign=me.sign,
                verify=identity.verify,
                report=tell,
            )
            node.handle(
                chunks.PROTOCOL,
                chunks.MAX_WANT_FRAME,
                lambda link: serve_chunks(link, lambda: [store]),
                accept=volunteer.may_fetch,
            )
            nursery.start_soon(_watch_pause, settings.home, volunteer)
            nursery.start_soon(_keep_given, settings.home, volunteer)
            await volunteer.run()


async def _keep_given(home: Path, volunteer: Volunteer) -> None:
    """Keep count, in the home directory, of what this machine has given."""
    before = running.given(home)
    kept = 0
    try:
        while True:
            await trio.sleep(GIVEN_SECONDS)
            served = volunteer.statistics().served
            if served.rows != kept:
                kept = served.rows
                running.keep_given(home, _sum(before, served))
    finally:
        running.keep_given(home, _sum(before, volunteer.statistics().served))


def _sum(before: running.Given, served: ServerStatistics) -> running.Given:
    return running.Given(before.rows + served.rows, before.seconds + served.held_ms / 1e3)


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
