"""The command ``kvasir-relay``. Nothing heavy is imported before it is known what to do."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import field, make_dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Group, Parameter

from kvasir_peer import __version__
from kvasir_peer.errors import KvasirError, SettingsError
from kvasir_relay import config as settings

USAGE_STATUS = 2

app = App(
    name="kvasir-relay",
    version=__version__,
    help="A public circuit relay for Kvasir peers: it carries ciphertext between them and reads none of it.",
    help_format="plaintext",
    result_action="return_value",
)
invite_app = App(
    name="invite", help="Invites: signed texts that let their holders use a relay that is not for everyone."
)
app.command(invite_app)

_GROUPS = {
    "": Group("Relay", sort_key=1),
    "limits": Group("Limits (0: no limit)", sort_key=2),
    "bandwidth": Group("Bandwidth (0: no limit)", sort_key=3),
    "access": Group("Access", sort_key=4),
    "log": Group("Log", sort_key=5),
}


def _flag_field(key: settings.Key) -> tuple[str, Any, Any]:
    """A field of the flags' dataclass: a text, or texts; the values are parsed with those of the other sources."""
    section = key.name.rpartition(".")[0]
    kind = list[str] | None if key.is_list else str | None
    parameter = Parameter(
        name=key.flag,
        help=key.help,
        group=_GROUPS[section],
        negative="",
        show_default=False,
        consume_multiple=False,
    )
    return key.name.replace(".", "__"), Annotated[kind, parameter], field(default=None)  # type: ignore[return-value]


Flags = make_dataclass(
    "Flags", [_flag_field(key) for key in settings.KEYS.values()], frozen=True, kw_only=True
)
Flags.__module__ = (
    __name__  # cyclopts looks the annotations up there; make_dataclass can set it from Python 3.12 on
)


def _given(flags: Any) -> dict[str, object]:
    values = {key: getattr(flags, key.replace(".", "__"), None) for key in settings.KEYS}
    return {key: value for key, value in values.items() if value is not None}


def _environment_config(environ: Mapping[str, str]) -> Path | None:
    path = environ.get(settings.ENVIRONMENT_PREFIX + "CONFIG")
    return Path(path).expanduser() if path else None


@app.default
def serve(
    *,
    config: Annotated[Path | None, Parameter(group=_GROUPS[""])] = None,
    check_config: Annotated[bool, Parameter(negative="", group=_GROUPS[""])] = False,
    flags: Annotated[Flags | None, Parameter(name="*")] = None,  # type: ignore[valid-type]
) -> None:
    """Run the relay until it is told to stop.

    When it is ready it prints its addresses, one a line. SIGTERM drains, SIGINT stops at once, SIGHUP reads the
    settings anew. Each setting is also a key of the TOML file (limits.circuits in the table [limits]) and an
    environment variable (KVASIR_RELAY_LIMITS_CIRCUITS).

    Parameters
    ----------
    config
        TOML file with settings; without it, relay.toml in the home folder if it is there.
    check_config
        Check the settings, print those in force, and end.
    """
    given = _given(flags)
    path = config or _environment_config(os.environ)

    def read() -> settings.Config:
        return settings.load(given, os.environ, path)

    loaded = read()
    if check_config:
        print("\n".join(settings.describe(loaded)))
        return
    from kvasir_relay.service import run

    run(loaded, read)


HomeFlag = Annotated[Path | None, Parameter(help="Home folder of the relay.")]


def _home(home: Path | None) -> Path:
    from kvasir_relay.home import home_folder

    return home_folder(
        settings.load({"home": str(home)} if home else {}, os.environ, _environment_config(os.environ))
    )


@invite_app.command
def create(*, home: HomeFlag = None, valid_for: str = "30d", peer: str = "", peers: int = 0) -> None:
    """Make an invite, signed by the relay's key, and print it; its id for revoking goes to standard error.

    Parameters
    ----------
    valid_for
        How long it holds, such as 12h or 30d.
    peer
        Peer id that it is for; without one, whoever has it may use it.
    peers
        How many different peers may be connected by it at once; 0 for any number.
    """
    import time

    from kvasir_peer.identity import KEY_FILE, load_or_create, public_key_of
    from kvasir_relay import invites

    try:
        seconds = settings.parse_seconds(valid_for)
    except ValueError as error:
        raise SettingsError(f"--valid-for: {valid_for!r} is not {error}") from None
    if peer:
        try:
            public_key_of(peer)
        except ValueError as error:
            raise SettingsError(f"--peer: {error}") from None
    if peers < 0:
        raise SettingsError("--peers: give 0 or more")
    identity = load_or_create(_home(home) / KEY_FILE)
    invite, text = invites.create(
        identity, identity.peer_id, not_after=int(time.time() + seconds), peer=peer, peers=peers
    )
    print(text)
    print(f"id {invite.id}; revoke it with: kvasir-relay invite revoke {invite.id}", file=sys.stderr)


@invite_app.command
def revoke(invite_id: str, /, *, home: HomeFlag = None) -> None:
    """Revoke an invite: the running relay closes the connections of its holders within seconds.

    Parameters
    ----------
    invite_id
        The id that was printed when it was made.
    """
    from kvasir_relay import invites

    new = invites.revoke(_home(home), invite_id)
    print("revoked" if new else "it was revoked already")


def main() -> None:
    """Entry point: errors are one line, wrong usage ends with status 2."""
    try:
        app(exit_on_error=False, print_error=False)
    except KvasirError as error:
        _fail(str(error), error.exit_status)
    except BaseExceptionGroup as group:
        ours, rest = group.split(KvasirError)
        if rest is not None or ours is None:
            raise
        first = _first(ours)
        _fail(str(first), first.exit_status)
    except Exception as error:
        if type(error).__module__.partition(".")[0] != "cyclopts":
            raise
        _fail(" ".join(str(error).split()), USAGE_STATUS)


def _first(group: BaseExceptionGroup[KvasirError]) -> KvasirError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, KvasirError)
    return error


def _fail(text: str, status: int) -> None:
    print(f"kvasir-relay: {text}", file=sys.stderr)
    sys.exit(status)
