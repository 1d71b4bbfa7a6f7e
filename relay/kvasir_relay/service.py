"""The relay as a process: its home, its signals, its end."""

from __future__ import annotations

import logging
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from kvasir_peer import running
from kvasir_peer.errors import SettingsError
from kvasir_peer.identity import KEY_FILE, load_or_create
from kvasir_relay import invites, logs, month, systemd
from kvasir_relay.config import Config
from kvasir_relay.home import home_folder
from kvasir_relay.listeners import Listener, open_http_socket, open_listeners

if TYPE_CHECKING:
    from kvasir_relay.server import Relay

log = logging.getLogger("kvasir_relay")

REVOKED_LOOK_SECONDS = 2.0  # how soon a revocation is seen without SIGHUP
MONTH_STORE_SECONDS = 60.0
SPARE_FILES = 64  # descriptors beside connections: listeners, epoll, the key

# Settings that only a new start can change.
FIXED = ("listen", "home", "http")


def run(config: Config, reread: Callable[[], Config]) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        config: the settings.
        reread: gives them anew, for SIGHUP; raises SettingsError.

    Raises:
        SettingsError: the home, the key or an address cannot be used.
        UsageError: another relay runs from this home.
    """
    logs.set_up(config.log)
    with ExitStack() as stack:
        home = home_folder(config)
        # Two with one key would take each other's peers away, and each would count the month alone.
        stack.enter_context(running.run_from(home, "relay"))
        identity = load_or_create(home / KEY_FILE)
        revoked = invites.read_revoked(home)
        listeners = open_listeners(config.listen)
        for listener in listeners:
            stack.callback(listener.socket.close)
        http = None
        if config.http is not None:
            http = stack.enter_context(open_http_socket(config.http))
        _raise_file_limit(config)
        # What can be wrong in the settings is known by now; libp2p takes a second to import.
        from kvasir_relay.server import Relay

        async def serve() -> None:
            relay = Relay(identity, config, revoked)
            await _serve(relay, home, listeners, http, reread)

        trio.run(serve)


async def _serve(
    relay: Relay,
    home: Path,
    listeners: list[Listener],
    http: socket.socket | None,
    reread: Callable[[], Config],
) -> None:
    month.read_back(home, relay.ledger)
    numbers = [signal.SIGTERM, signal.SIGINT]
    if hasattr(signal, "SIGHUP"):
        numbers.append(signal.SIGHUP)
    try:
        with trio.open_signal_receiver(*numbers) as received:
            async with trio.open_nursery() as nursery:
                await nursery.start(relay.serve, listeners)
                if http is not None:
                    from kvasir_relay.pages import Pages

                    nursery.start_soon(Pages(relay).serve, http)
                nursery.start_soon(_watch_revocations, relay, home)
                nursery.start_soon(_keep_month, relay, home)
                if (every := systemd.watchdog_seconds()) is not None:
                    nursery.start_soon(_feed_watchdog, every)
                _say_ready(relay, http)
                nursery.start_soon(_obey, received, relay, home, reread, nursery.cancel_scope)
    finally:
        month.store(home, relay.ledger)
        log.info("stopped")


def _say_ready(relay: Relay, http: socket.socket | None) -> None:
    for address in relay.full_addresses:
        print(address, flush=True)
    if http is not None:
        host, port = http.getsockname()[:2]
        log.info("metrics and status on http://%s:%d/", f"[{host}]" if ":" in host else host, port)
    if not relay.addresses:
        log.warning("no address to tell peers: set announce")
    log.info("ready", extra={"peer": relay.identity.peer_id})
    systemd.notify("READY=1")


async def _obey(
    received: object,
    relay: Relay,
    home: Path,
    reread: Callable[[], Config],
    everything: trio.CancelScope,
) -> None:
    """Do what the signals say: HUP reloads, TERM drains, INT (or a second TERM) stops at once."""
    async with trio.open_nursery() as nursery:

        async def drain(seconds: float) -> None:
            await relay.drain(seconds)
            everything.cancel()

        async for number in received:  # type: ignore[attr-defined]
            if number not in (signal.SIGTERM, signal.SIGINT):
                _reload(relay, home, reread)
            elif number == signal.SIGTERM and not relay.draining:
                seconds = relay.config.drain_time
                log.info("draining: nothing new is taken, circuits have %g s to end", seconds)
                systemd.notify("STOPPING=1")
                nursery.start_soon(drain, seconds)
            else:
                systemd.notify("STOPPING=1")
                everything.cancel()
                return


def _reload(relay: Relay, home: Path, reread: Callable[[], Config]) -> None:
    systemd.reloading()
    try:
        config = reread()
        revoked = invites.read_revoked(home)
    except SettingsError as error:
        log.error("the old settings stay in force: %s", error)
    else:
        for name in FIXED:
            if getattr(config, name) != getattr(relay.config, name):
                log.warning("%s changed: that needs a restart", name)
        logs.set_up(config.log)
        relay.reload(config, revoked)
        log.info("settings read anew")
    systemd.notify("READY=1")


async def _watch_revocations(relay: Relay, home: Path) -> None:
    """Take up revocations as the list is written, without waiting for a signal."""
    path = home / invites.REVOKED_FILE
    seen = _stamp(path)
    while True:
        await trio.sleep(REVOKED_LOOK_SECONDS)
        if (stamp := _stamp(path)) != seen:
            seen = stamp
            try:
                relay.revoke(invites.read_revoked(home))
            except SettingsError as error:
                log.error("the old revocations stay in force: %s", error)


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


async def _keep_month(relay: Relay, home: Path) -> None:
    while True:
        await trio.sleep(MONTH_STORE_SECONDS)
        month.store(home, relay.ledger)


async def _feed_watchdog(every: float) -> None:
    while True:
        systemd.notify("WATCHDOG=1")
        await trio.sleep(every)


def _raise_file_limit(config: Config) -> None:
    """Ask for as many descriptors as there may be connections; say so when that is not granted."""
    if sys.platform == "win32":
        return
    import resource

    wanted = (config.limits.connections or 65536) + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= wanted:
        return
    granted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (granted, hard))
    if granted < wanted:
        log.warning(
            "only %d files may be open, limits.connections is %d: raise LimitNOFILE or lower it",
            granted,
            config.limits.connections,
        )
