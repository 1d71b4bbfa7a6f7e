"""Children of one command: started, listened to line by line, and ended all together."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import trio

from kvasir_peer.errors import KvasirError, UsageError
from kvasir_peer.settings import ENV_PREFIX

STOP_SECONDS = 10.0  # until a child that was asked to end is ended
STALL_SECONDS = 180.0  # without a word from any child: importing and loading on a slow, busy machine say more
MAX_LINE_BYTES = 1 << 16

T = TypeVar("T")


@dataclass(eq=False)
class Child:
    """One child process.

    Attributes:
        name: for people, such as ``stage 2``.
        log: file that has its standard error.
    """

    name: str
    process: trio.Process
    log: Path
    lines: list[str] = field(default_factory=list)
    killed: bool = False

    def last_words(self) -> str:
        """The last line that it wrote to standard error."""
        written = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        words = next((line for line in reversed(written) if line.strip()), "it said nothing")
        for program in ("kvasir-peer: ", "kvasir-relay: "):
            words = words.removeprefix(program)
        return words


class Children:
    """Child processes that live as long as the block, not longer, and end it when one of them ends.

    Use as ``async with Children.open(on_line) as children``.
    """

    def __init__(self, nursery: trio.Nursery, on_line: Callable[[Child, str], None]) -> None:
        self._nursery = nursery
        self._on_line = on_line
        self._children: list[Child] = []
        self._ending = False
        self._changed = trio.Event()

    async def start(
        self, name: str, program: str, arguments: Sequence[str], *, log: Path, **environment: str
    ) -> Child:
        """Start ``kvasir-peer`` or ``kvasir-relay``; settings in this process's environment do not reach it."""
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(ENV_PREFIX)}
        command = [sys.executable, "-m", "kvasir_peer.commands.child", program, *arguments]
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as errors:
            process = await trio.lowlevel.open_process(
                command,
                stdin=subprocess.PIPE,  # held open: a child ends when its parent is gone
                stdout=subprocess.PIPE,
                stderr=errors,
                env=inherited | environment,
                start_new_session=True,  # Ctrl-C is for the parent, which then ends the children in order
            )
        child = Child(name, process, log)
        self._children.append(child)
        self._nursery.start_soon(self._listen, child)
        return child

    async def _listen(self, child: Child) -> None:
        assert child.process.stdout is not None
        rest = b""
        async for piece in child.process.stdout:
            *lines, rest = (rest + piece).split(b"\n")
            rest = rest[-MAX_LINE_BYTES:]
            for raw in lines:
                line = raw.decode(errors="replace").strip()
                child.lines.append(line)
                del child.lines[:-100]
                self._on_line(child, line)
            self._changed.set()
            self._changed = trio.Event()
        status = await child.process.wait()
        if not self._ending and not child.killed:
            kind = UsageError if status == UsageError.exit_status else KvasirError
            raise kind(f"the {child.name} ended (status {status}): {child.last_words()}")

    async def kill(self, child: Child) -> None:
        """End one child with SIGKILL, as a crash would; the others go on."""
        child.killed = True
        child.process.kill()
        await child.process.wait()

    async def wait_for(self, condition: Callable[[], T | None], what: str) -> T:
        """Wait until ``condition()`` gives something, looking again after each line of any child.

        Raises:
            KvasirError: no child has said anything for three minutes.
        """
        while True:
            found = condition()
            if found is not None:
                return found
            with trio.move_on_after(STALL_SECONDS) as scope:
                await self._changed.wait()
            if scope.cancelled_caught:
                raise KvasirError(f"no progress for {STALL_SECONDS:.0f} s while waiting for {what}")

    async def end(self) -> None:
        """End all children, the last started first, and wait until they are gone."""
        self._ending = True
        with trio.CancelScope(shield=True):
            for child in reversed(self._children):
                if child.process.returncode is None:
                    child.process.terminate()
            with trio.move_on_after(STOP_SECONDS):
                for child in self._children:
                    await child.process.wait()
            for child in self._children:
                if child.process.returncode is None:
                    child.process.kill()
                    await child.process.wait()
                for stream in (child.process.stdin, child.process.stdout):
                    if stream is not None:
                        await stream.aclose()
