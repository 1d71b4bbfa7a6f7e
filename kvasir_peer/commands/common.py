"""What commands share: settings as flags, progress on the terminal, running a role until it is told to stop."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from kvasir_peer import running, settings
from kvasir_peer.commands.terminal import PrintableFormatter, printable
from kvasir_peer.progress import Progress, Report
from kvasir_peer.settings import ComputingSettings

if TYPE_CHECKING:
    from trio import CancelScope

HomeFlag = Annotated[
    Path | None,
    Parameter(name="--home", help="Folder of key, ticket, configuration and weights."),
]
TicketArgument = Annotated[
    str | None, Parameter(name="TICKET", help="Ticket to use this once; the saved one if not given.")
]
JsonProgressFlag = Annotated[bool, Parameter(name="--json-progress", negative="", show=False)]

STOP_SIGNALS = [signal.SIGINT, signal.SIGTERM]
if hasattr(signal, "SIGHUP"):
    STOP_SIGNALS.append(signal.SIGHUP)  # the terminal was closed

INTERRUPTED = 130  # exit status after Ctrl-C where that is no normal end, as shells have it


def _time_text(seconds: float) -> str:
    size, unit = next(((s, u) for s, u in ((86400, "d"), (3600, "h"), (60, "m")) if seconds >= s), (1, "s"))
    return f"{seconds / size:g}{unit}"


def _flag_help(setting: Any) -> str:
    kind, default = setting.metadata["kind"], setting.default
    shown = ", ".join(default) if isinstance(default, tuple) else str(default).lower()
    if kind.annotation is str and isinstance(default, int | float):  # a size or a time
        if setting.metadata["kind"].expects.startswith("a time"):
            shown = _time_text(default)
        else:
            shown = f"{default / 1e9:g}G" if default else "auto"
    text = str(setting.metadata["help"])
    return f"{text} [{shown}]" if shown else text


def _flag_type(setting: Any) -> Any:
    kind, name, help_text = setting.metadata["kind"], settings.flag_name(setting.name), _flag_help(setting)
    if kind.many:
        flag = Parameter(name=name, help=help_text, negative="", consume_multiple=False)
    else:
        flag = Parameter(name=name, help=help_text)
    return Annotated[kind.annotation | None, flag]


def with_settings(cls: type[settings.Settings]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a command of a function whose first parameter is a settings object: every setting becomes a flag.

    A keyword parameter ``given_home`` of the function gets the value of ``--home``, None if it was not given.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
        wants_home = any(parameter.name == "given_home" for parameter in own)
        own = [parameter for parameter in own if parameter.name != "given_home"]
        # The role's own first, then what all rings have, then what all peers have.
        places = {
            setting.name: place
            for place, kind in ((1, settings.RingSettings), (2, settings.PeerSettings))
            for setting in settings.options(kind)
        }
        flags_of = [setting for setting in settings.options(cls) if setting.metadata["flag"]]
        flags_of.sort(key=lambda setting: places.get(setting.name, 0))

        @functools.wraps(function)
        def command(*args: Any, **kwargs: Any) -> Any:
            flags = {setting.name: kwargs.pop(setting.name, None) for setting in flags_of}
            given_home = kwargs.pop("home", None)
            home = settings.home_directory(given_home)
            if wants_home:
                kwargs["given_home"] = given_home
            return function(settings.load(cls, home=home, flags=flags), *args, **kwargs)

        parameters = [
            inspect.Parameter(
                setting.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=_flag_type(setting),
            )
            for setting in flags_of
        ]
        home = inspect.Parameter("home", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=HomeFlag)
        positional = [p for p in own if p.kind is not inspect.Parameter.KEYWORD_ONLY]
        keywords = [p for p in own if p.kind is inspect.Parameter.KEYWORD_ONLY]
        signature = inspect.Signature([*positional, *parameters, home, *keywords])
        command.__signature__ = signature  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
        del command.__wrapped__  # else cyclopts takes its signature
        return command

    return decorate


def start_logging(level: str) -> None:
    """Write this program's log to standard error; other libraries' from warnings on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PrintableFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    for name in ("kvasir_peer", "kvasir_relay"):
        logging.getLogger(name).setLevel(level.upper())


class _Pace:
    """Lets records of one step and text pass so often only, and always the last of them."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._last: tuple[str, str] = ("", "")
        self._last_time = 0.0

    def passes(self, progress: Progress) -> bool:
        key, now = (progress.step, progress.text), time.monotonic()
        finished = progress.done >= progress.total
        if key == self._last and not finished and now - self._last_time < self._seconds:
            return False
        self._last, self._last_time = key, now
        return True


class Reporter:
    """Prints progress: lines for people, of one kind at most two a second, or every record as JSON.

    JSON goes to standard output, because another process reads it; lines for people go to standard error, so that
    standard output has only what a script may want: the ticket, the address. Where standard error is no terminal,
    lines of one kind come every five seconds, so that a log stays short.
    """

    SECONDS = 0.5
    SECONDS_IN_LOG = 5.0

    def __init__(
        self, *, json_lines: bool, prefix: str = "", also: Callable[[Progress], None] | None = None
    ) -> None:
        self._json = json_lines
        self._prefix = prefix
        self._also = also
        self._lines = _Pace(self.SECONDS if sys.stderr.isatty() else self.SECONDS_IN_LOG)
        self._others = _Pace(self.SECONDS)

    def __call__(self, progress: Progress) -> None:
        if self._json:
            print(progress.to_json(), flush=True)
        elif self._lines.passes(progress):
            print(self._prefix + printable(progress.line()), file=sys.stderr, flush=True)
        if self._also is not None and self._others.passes(progress):
            self._also(progress)


def run_member(
    settings: ComputingSettings,
    role: str,
    serve: Callable[[Any, Report], Awaitable[None]],
    *,
    ticket_text: str | None,
    json_progress: bool,
    leave: Callable[[], None] | None = None,
) -> None:
    """Run a role that joins with a ticket until it is told to stop.

    Args:
        serve: the role, with settings that have the ticket.
        leave: see :func:`run_until_stopped`.

    Raises:
        TicketError: there is no ticket, or it is no good.
    """
    if ticket_text is not None:
        settings = dataclasses.replace(settings, ticket=ticket_text)
    settings.invitation(now=time.time(), role=role)
    start_logging(settings.log)
    with running.run_from(settings.home, role) as notice:
        report = Reporter(json_lines=json_progress, also=notice.report)
        run_until_stopped(lambda: serve(settings, report), leave=leave, seconds=settings.leave_time)


def run_until_stopped(
    function: Callable[[], Awaitable[None]], *, leave: Callable[[], None] | None = None, seconds: float = 0.0
) -> bool:
    """Run an async function until it returns, or until a signal to stop cancels it.

    Args:
        function: what to run; cancelled on the first signal; the second one ends the process at once.
        leave: called on the first signal instead, inside the event loop: the function should come to its end by
            itself within ``seconds``, and is cancelled then. The second signal cancels it, the third ends the process.

    Returns:
        Whether a signal stopped it.
    """
    import trio

    stopped = leaving = False

    async def watch(signals: AsyncIterator[int], scope: CancelScope) -> None:
        nonlocal stopped, leaving
        async for number in signals:
            if leave is not None and not leaving and seconds > 0:
                leaving = True
                scope.deadline = trio.current_time() + seconds
                leave()
                continue
            if stopped:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)
            stopped = True
            scope.cancel()

    async def main() -> None:
        # The signals are watched from outside the scope that they cancel, so that a second one still counts
        # while the role cleans up.
        with trio.open_signal_receiver(*STOP_SIGNALS) as signals:
            async with trio.open_nursery() as watcher:
                with trio.CancelScope() as scope:
                    watcher.start_soon(watch, signals, scope)
                    await function()
                watcher.cancel_scope.cancel()

    trio.run(main)
    return stopped or leaving
