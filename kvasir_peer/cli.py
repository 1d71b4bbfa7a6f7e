"""The command ``kvasir-peer``: finds the subcommand, turns errors into one line and an exit status.

Subcommands are named as text and imported when they are called, so that ``--help``, ``id`` and ``status`` answer
at once.
"""

from __future__ import annotations

import difflib
import errno
import os
import sys
from collections.abc import Sequence
from typing import Final

from kvasir_peer import __version__
from kvasir_peer.commands.terminal import printable
from kvasir_peer.errors import KvasirError, UsageError

PROGRAM: Final = "kvasir-peer"
WRONG_USE: Final = 2

# name, function, one line of help: the order is the order in --help
COMMANDS: Final = (
    ("swarm", "kvasir_peer.commands.swarm:run_swarm", "Run a whole swarm on this machine and ask it."),
    ("join", "kvasir_peer.commands.stage:join", "Join a swarm with a ticket."),
    ("bridge", "kvasir_peer.commands.bridge:run_bridge", "Serve a model to OpenAI clients."),
    ("stage", "kvasir_peer.commands.stage:run_stage", "Compute a run of layers in a ring."),
    (
        "volunteer",
        "kvasir_peer.commands.volunteer:run_volunteer",
        "Compute experts of a model while its swarm is busy.",
    ),
    (
        "coordinator",
        "kvasir_peer.commands.coordinator:run_coordinator",
        "Run a whole model for a bridge, with volunteers when it is busy.",
    ),
    ("pause", "kvasir_peer.commands.volunteer:pause", "Take the machine back from a running volunteer."),
    ("resume", "kvasir_peer.commands.volunteer:resume", "Let a paused volunteer go on."),
    ("chat", "kvasir_peer.commands.chat:chat", "Talk to a bridge in the terminal."),
    ("ring", "kvasir_peer.commands.ring:show_ring", "Show a ring at work: state, stages, timeline."),
    ("plan", "kvasir_peer.commands.plan:show_plan", "Show what a ring would take and give."),
    ("status", "kvasir_peer.commands.status:show_status", "Show what this machine is in its swarm."),
    ("id", "kvasir_peer.commands.id:show_id", "Show this peer's id."),
    ("doctor", "kvasir_peer.commands.doctor:examine", "Check what this machine can do."),
    ("bench", "kvasir_peer.commands.bench:measure", "Measure how fast this machine computes."),
)
MODEL_COMMANDS: Final = (
    ("list", "kvasir_peer.commands.models:list_models", "List the models whose weights are on disk."),
    ("rm", "kvasir_peer.commands.models:remove_model", "Remove a model's weights from disk."),
    ("info", "kvasir_peer.commands.models:show_model", "Show what a GGUF file holds."),
    (
        "split-experts",
        "kvasir_peer.commands.models:split_experts",
        "Re-lay a dense model's feed-forward neurons as experts, exactly.",
    ),
)


def _say(message: str) -> None:
    # What another peer has said may be in it.
    print(f"{PROGRAM}: {printable(' '.join(message.split()))}", file=sys.stderr)


# What the system refuses and a person can mend, and how; any other OSError is a fault of ours, and shows its traceback.
MENDABLE: Final = {
    errno.EACCES: "make it yours, or give another --home",
    errno.EPERM: "make it yours, or give another --home",
    errno.EROFS: "give another --home",
    errno.ENOTDIR: "give another --home",
    errno.ENOSPC: "free some space, or give a --home on another disk",
    errno.EDQUOT: "free some space, or give a --home on another disk",
    errno.EADDRINUSE: "",
    errno.EADDRNOTAVAIL: "",
}


def _mendable(error: BaseException | None) -> KvasirError | None:
    """The error as one that is raised on purpose, or None."""
    if not isinstance(error, OSError) or error.errno not in MENDABLE:
        return error if isinstance(error, KvasirError) else None
    what = f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror)
    advice = MENDABLE[error.errno]
    return UsageError(f"{what}: {advice}" if advice else what)


def _expected(group: BaseExceptionGroup[BaseException]) -> KvasirError | None:
    """The error to tell of, where a nursery ended with nothing but errors that are raised on purpose."""
    first: KvasirError | None = None
    for error in group.exceptions:
        found = _expected(error) if isinstance(error, BaseExceptionGroup) else _mendable(error)
        if found is None:
            return None
        # A person can mend a UsageError; what broke because of it says less.
        if first is None or found.exit_status > first.exit_status:
            first = found
    return first


def _unknown(word: str, arguments: Sequence[str]) -> str:
    in_models = arguments[0] == "models" and word != "models"
    names = [name for name, _, _ in (MODEL_COMMANDS if in_models else COMMANDS)]
    if not in_models:
        names.append("models")
    near = difflib.get_close_matches(word, names, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)}"
    return f"unknown command {word!r}: {hint}"


def run(arguments: Sequence[str]) -> int:
    """Run a command line (without the program's name) and return its exit status."""
    from cyclopts import App, CycloptsError, UnknownCommandError

    app = App(
        name=PROGRAM,
        version=__version__,
        help="People's own machines serve one large language model together.",
        help_epilogue=f"Each command has its own help: {PROGRAM} COMMAND --help",
    )
    for order, (name, function, help_text) in enumerate(COMMANDS):
        app.command(function, name=name, help=help_text, sort_key=order)
    models = App(name="models", help="Look after GGUF files and weights on disk.", sort_key=len(COMMANDS))
    for name, function, help_text in MODEL_COMMANDS:
        models.command(function, name=name, help=help_text)
    app.command(models)
    if not arguments:
        app.help_print([])
        return WRONG_USE
    try:
        result = app(arguments, exit_on_error=False, print_error=False, result_action="return_value")
    except UnknownCommandError as error:
        # Its own text would import every command to look for a likely name.
        _say(_unknown(error.unused_tokens[0] if error.unused_tokens else "", arguments))
        return WRONG_USE
    except CycloptsError as error:
        chain = [word for word in error.command_chain or () if word != PROGRAM]
        _say(f"{error} (see {' '.join([PROGRAM, *chain])} --help)")
        return WRONG_USE
    except KvasirError as error:
        _say(str(error))
        return error.exit_status
    except OSError as error:
        mendable = _mendable(error)
        if mendable is None:
            raise
        _say(str(mendable))
        return mendable.exit_status
    except BaseExceptionGroup as group:
        expected = _expected(group)
        if expected is None:
            raise
        _say(str(expected))
        return expected.exit_status
    return result if isinstance(result, int) and not isinstance(result, bool) else 0


def main() -> None:
    """Entry point of the command."""
    try:
        status = run(sys.argv[1:])
        sys.stdout.flush()
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError:
        # The reader of our output went away (kvasir-peer … | head): no error, but nothing more to say to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 141
    sys.exit(status)


if __name__ == "__main__":
    main()
