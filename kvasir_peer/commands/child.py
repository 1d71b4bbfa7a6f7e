"""Runs one of the two programs as the child of another process, and ends with it.

``python -m kvasir_peer.commands.child kvasir-peer stage …``: the parent holds the other end of standard input.
When that closes, because the parent wants it or because it was killed, the program gets SIGTERM, and is ended
for certain some seconds later. This works however the parent ends, and on every system.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

GRACE_SECONDS = 8.0  # for a clean end: streams are closed, slots are given back


def _watch_parent() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os._exit(1)


def main() -> None:
    """Watch standard input from a thread, and run the program that the arguments name."""
    program, arguments = sys.argv[1], sys.argv[2:]
    threading.Thread(target=_watch_parent, daemon=True, name="parent").start()
    sys.argv = [program, *arguments]
    if program == "kvasir-relay":
        from kvasir_relay.cli import main as run
    else:
        from kvasir_peer.cli import main as run
    run()


if __name__ == "__main__":
    main()
