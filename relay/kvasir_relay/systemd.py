"""Telling systemd how the relay is doing (``sd_notify``), if it is what started it."""

from __future__ import annotations

import logging
import os
import socket
import time

log = logging.getLogger("kvasir_relay")


def notify(*lines: str) -> None:
    """Send ``READY=1``, ``STOPPING=1`` and the like; does nothing elsewhere."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path:
        return
    if path.startswith("@"):
        path = "\0" + path[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | getattr(socket, "SOCK_CLOEXEC", 0)) as sock:
            sock.connect(path)
            sock.sendall("\n".join(lines).encode())
    except OSError as error:
        log.warning("systemd could not be told %s: %s", lines[0], error)


def reloading() -> None:
    """A reload begins; READY=1 ends it."""
    notify("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")


def watchdog_seconds() -> float | None:
    """How often the watchdog wants a sign of life, or None when there is none."""
    microseconds = os.environ.get("WATCHDOG_USEC", "")
    if not microseconds.isdigit() or os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    return int(microseconds) / 1e6 / 2
