"""All settings, typed, in one place: what they are called, what they mean, and where they come from.

Every setting is a field of one of the dataclasses below. Its value is the first found in

1. the command's flag (``--max-requests 4``),
2. the environment, with the role (``KVASIR_BRIDGE_MAX_REQUESTS``) or without (``KVASIR_MAX_REQUESTS``),
3. the file ``config.toml`` in the home directory, in the role's table (``[bridge]``) or above all tables,
4. the default.

A setting without a role's name holds for every role that has it. Nothing is guessed: an unknown key in the file,
or a value that is outside its range, is refused with its place. (An unknown ``KVASIR_`` variable is not: the
environment is shared with other programs.)
"""

from __future__ import annotations

import dataclasses
import difflib
import ipaddress
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from kvasir_peer import addresses, identity, ticket
from kvasir_peer.errors import SettingsError, TicketError
from kvasir_peer.ticket import Ticket

CONFIG_FILE: Final = "config.toml"
TICKET_FILE: Final = "ticket"
STORE_FOLDER: Final = "store"
LEDGER_FILE = "ledger.sqlite"
MAX_STAGES: Final = 64

ENV_PREFIX: Final = "KVASIR_"


# --- Values -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """How a value is read from text or TOML, and how the command line shows it.

    Attributes:
        parse: from a TOML value or text to the value; ValueError says what was expected.
        annotation: the type of the flag.
        many: whether the flag may be repeated, each time with one value.
        expects: what the documentation says about values.
    """

    parse: Callable[[object], Any]
    annotation: Any
    expects: str
    many: bool = False


def _text_of(value: object, expects: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"expected {expects}")
    return value.strip()


def whole(low: int, high: int) -> Kind:
    """A whole number from ``low`` to ``high``."""
    expects = f"a whole number from {low} to {high}"

    def parse(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise ValueError(f"expected {expects}")
        try:
            number = int(value)
        except ValueError:
            raise ValueError(f"expected {expects}") from None
        if not low <= number <= high:
            raise ValueError(f"expected {expects}")
        return number

    return Kind(parse, int, expects)


def yes_no() -> Kind:
    """True or false; in the environment also yes/no, on/off, 1/0."""
    expects = "true or false"
    words = {"true": True, "yes": True, "on": True, "1": True}
    words |= {"false": False, "no": False, "off": False, "0": False}

    def parse(value: object) -> bool:
        if isinstance(value, bool):
            return value
        word = words.get(_text_of(value, expects).lower())
        if word is None:
            raise ValueError(f"expected {expects}")
        return word

    return Kind(parse, bool, expects)


def choice(*names: str) -> Kind:
    """One of some words."""
    expects = f"one of {', '.join(names)}"

    def parse(value: object) -> str:
        word = _text_of(value, expects).lower()
        if word not in names:
            raise ValueError(f"expected {expects}")
        return word

    return Kind(parse, Literal[names], expects)


def text(expects: str = "text", check: Callable[[str], object] | None = None) -> Kind:
    """One line of text; ``check`` raises ValueError for what is refused."""

    def parse(value: object) -> str:
        word = _text_of(value, expects)
        if not word.isprintable():
            raise ValueError(f"expected {expects}")
        if word and check is not None:
            check(word)
        return word

    return Kind(parse, str, expects)


def texts(expects: str, check: Callable[[str], object] | None = None) -> Kind:
    """Several texts: a TOML array, the flag repeated, or separated by commas in the environment."""
    one = text(expects, check)

    def parse(value: object) -> tuple[str, ...]:
        if isinstance(value, str):
            value = value.split(",")
        if not isinstance(value, list | tuple):
            raise ValueError(f"expected {expects}")
        words = [one.parse(word) for word in value]
        return tuple(dict.fromkeys(word for word in words if word))

    return Kind(parse, list[str], expects, many=True)


_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\Z", re.IGNORECASE)


def size(low: int) -> Kind:
    """Bytes: a number, or with a unit: ``500M`` is 500 x 10^6, ``2GiB`` is 2 x 2^30; ``auto`` is 0."""
    expects = f"a size such as 500M, 2G or 2GiB, at least {low / 1e6:g}M"

    def parse(value: object) -> int:
        if isinstance(value, int) and not isinstance(value, bool):
            number = value
        else:
            word = _text_of(value, expects)
            if word.lower() == "auto":
                return 0
            match = _SIZE.match(word)
            if match is None:
                raise ValueError(f"expected {expects}")
            base = 1024 if match[3] else 1000
            number = int(float(match[1]) * base ** " kmgt".index(match[2].lower() or " "))
        if number != 0 and number < low:
            raise ValueError(f"expected {expects}")
        return number

    return Kind(parse, str, expects)


_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([smhd]?)\Z", re.IGNORECASE)
_SECONDS: Final = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def duration(low: float, high: float) -> Kind:
    """Seconds: a number, or with a unit: ``30s``, ``15m``, ``12h``, ``30d``."""
    expects = f"a time such as 90s, 15m, 12h or 30d, from {low:g} to {high:g} seconds"

    def parse(value: object) -> float:
        if isinstance(value, int | float) and not isinstance(value, bool):
            number = float(value)
        else:
            match = _DURATION.match(_text_of(value, expects))
            if match is None:
                raise ValueError(f"expected {expects}")
            number = float(match[1]) * _SECONDS[match[2].lower()]
        if not low <= number <= high:
            raise ValueError(f"expected {expects}")
        return number

    return Kind(parse, str, expects)


def number(low: float, high: float) -> Kind:
    """A number from ``low`` to ``high``."""
    expects = f"a number from {low:g} to {high:g}"

    def parse(value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise ValueError(f"expected {expects}")
        try:
            found = float(value)
        except ValueError:
            raise ValueError(f"expected {expects}") from None
        if not low <= found <= high:  # also false for NaN
            raise ValueError(f"expected {expects}")
        return found

    return Kind(parse, float, expects)


def option(kind: Kind, default: Any, help_text: str, *, flag: bool = True) -> Any:
    """A field of a settings dataclass."""
    return field(default=default, metadata={"kind": kind, "help": help_text, "flag": flag})


def check_invite(text: str) -> None:
    """ValueError for what no relay has written; only the relay can tell whether an invite is good."""
    if not re.fullmatch(r"kvr1-[A-Za-z0-9_-]{80,1020}", text):
        raise ValueError("not an invite to a relay, which begins with kvr1-")


# --- The settings -------------------------------------------------------------------------------------------------

_RELAY: Final = texts(
    "addresses of relays, each /ip4/HOST/tcp/PORT/p2p/PEER-ID", addresses.split_peer_address
)
_LISTEN: Final = texts(
    "addresses, each /ip4/ADDRESS/tcp/PORT or /ip6/ADDRESS/tcp/PORT", addresses.check_listen
)


def _check_secret(word: str) -> None:
    if not re.fullmatch("[0-9a-fA-F]{32}", word):
        raise ValueError("expected 32 hexadecimal digits")


def _check_role(word: str) -> None:
    if word not in ticket.ROLES:
        raise ValueError(f"expected roles out of {', '.join(ticket.ROLES)}")


_ENGINE: Final = choice("auto", "onnx", "torch")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What every command with settings has.

    Attributes:
        home: folder of the peer's key, ticket, configuration and chunk store.
    """

    section = ""  # the table in config.toml

    home: Path
    log: str = option(
        choice("error", "warning", "info", "debug"), "warning", "What is written to standard error."
    )

    def check(self) -> None:
        """Refuse settings that do not fit together.

        Raises:
            SettingsError: names them.
        """


@dataclass(frozen=True, kw_only=True)
class PeerSettings(Settings):
    """What every role has."""

    relays: tuple[str, ...] = option(_RELAY, (), "Address of a relay; may be given more than once.")
    relay_invites: tuple[str, ...] = option(
        texts("invites as a relay's operator gives them, each kvr1-…", check_invite),
        (),
        "Invite to a relay that does not serve everyone; may be given more than once.",
    )
    direct: bool = option(yes_no(), True, "Go over to direct connections where they work.")
    listen: tuple[str, ...] = option(
        _LISTEN,
        ("/ip4/0.0.0.0/tcp/0",),
        "Where to listen for direct connections; may be given more than once. Port 0 is any free one.",
    )
    muxer: Literal["own", "stock"] = option(
        choice("own", "stock"),
        "own",
        "Multiplexer of connections: kvasir-peer's own, or py-libp2p's, which is slower, should ours fail you.",
        flag=False,
    )
    disk: int = option(
        size(1_000_000), 0, "Most disk space for chunks of weights; auto is half of what is free."
    )

    @property
    def identity_path(self) -> Path:
        """The key file."""
        return self.home / identity.KEY_FILE

    @property
    def store_path(self) -> Path:
        """The folder of the chunk store."""
        return self.home / STORE_FOLDER

    def disk_limit(self) -> int:
        """Bytes that the chunk store may take: the setting, or what it has and half of what is free."""
        if self.disk:
            return self.disk
        folder = next(path for path in (self.store_path, *self.store_path.parents) if path.exists())
        held = 0
        if self.store_path.is_dir():
            held = sum(file.stat().st_size for file in self.store_path.rglob("*") if file.is_file())
        return held + shutil.disk_usage(folder).free // 2


@dataclass(frozen=True, kw_only=True)
class RingSettings(Settings):
    """How wide a ring is: what its stages hold, and what goes round at once."""

    boundary: str = option(
        choice("f16", "f32", "bf16", "int8"), "f16", "Type of hidden states between stages."
    )
    max_requests: int = option(whole(1, 1024), 8, "Requests that are computed at once.")
    context_length: int = option(
        whole(0, 1 << 22), 0, "Positions of each request; 0 is the model's, at most 4096."
    )
    batch_rows: int = option(whole(1, 65536), 256, "Rows that the scheduler may take per step.")
    micro_batch_rows: int = option(whole(1, 4096), 64, "Rows of one pass; bounds each frame between stages.")
    max_in_flight: int = option(whole(0, 256), 0, "Batches under way at once; 0 lets the head adapt it.")

    def check(self) -> None:
        """See :meth:`Settings.check`."""
        super().check()
        if self.micro_batch_rows > self.batch_rows:
            raise SettingsError(
                f"--micro-batch-rows {self.micro_batch_rows} is over --batch-rows {self.batch_rows}"
            )


@dataclass(frozen=True, kw_only=True)
class BridgeSettings(PeerSettings, RingSettings):
    """A bridge: opens the model, plans the ring, serves OpenAI clients."""

    section = "bridge"

    model: str = option(
        text("a GGUF file or an https:// address"), "", "GGUF file, or its https:// address, to serve."
    )
    name: str = option(text(), "", "Name of the model for clients; the file's own name if not given.")
    swarm: str = option(text("a name"), "kvasir", "Name of the swarm, written on its tickets.")
    stages: int = option(
        whole(0, MAX_STAGES), 2, "Stages of the ring, at least 2; 0 serves by coordinators alone."
    )
    engine: str = option(_ENGINE, "auto", "Engine that stages are asked to use; auto leaves it to each.")
    host: str = option(text("an address or a host name"), "127.0.0.1", "Address that the HTTP server binds.")
    port: int = option(whole(0, 65535), 8000, "Port of the HTTP server; 0 takes a free one.")
    api_keys: tuple[str, ...] = option(
        texts("keys of 16 characters or more"),
        (),
        "Bearer key that clients must send; may be given more than once. Better in config.toml.",
    )
    max_queue: int = option(whole(0, 4096), 64, "Requests that may wait for a place.")
    top_logprobs: int = option(whole(0, 20), 20, "Most alternatives with log-probabilities per token.")
    saturation_threshold: int = option(
        whole(1, 1024), 2, "Busy slots of a coordinator from which on volunteers are recruited."
    )
    base_replicas: int = option(whole(1, 64), 2, "Volunteers wanted for each expert that is covered.")
    boost_replicas: int = option(whole(0, 64), 1, "Volunteers wanted on top while coordinators are busy.")
    calm_after: float = option(duration(1, 3600), 30.0, "Time without load after which the boost ends.")
    experts_dtype: str = option(
        choice("f16", "f32", "bf16"), "f16", "Type of rows between dispatchers and volunteers."
    )
    ticket_lifetime: float = option(duration(60, 3.2e8), 30 * 86400.0, "How long a ticket lets machines in.")
    ticket_roles: tuple[str, ...] = option(
        texts("roles out of volunteer, stage, coordinator", _check_role),
        ("volunteer", "stage"),
        "Role that the ticket allows; may be given more than once.",
    )

    def check(self) -> None:
        """See :meth:`Settings.check`."""
        if not self.model:
            raise SettingsError("no model: give --model FILE.gguf, or --model https://…")
        if not self.relays:
            raise SettingsError("no relay: give --relay ADDRESS, as kvasir-relay prints it")
        if self.stages:
            check_stages(self.stages)
        if short := [key for key in self.api_keys if len(key) < 16]:
            raise SettingsError(f"an API key has {len(short[0])} characters: use at least 16")
        if not self.api_keys and not is_loopback(self.host):
            raise SettingsError(
                f"--host {self.host} lets other machines in without a key: give --api-key, or use 127.0.0.1"
            )
        super().check()


@dataclass(frozen=True, kw_only=True)
class ComputingSettings(PeerSettings):
    """What every role has that joins with a ticket and computes."""

    ticket: str = option(text("a ticket"), "", "Ticket to use in place of the saved one.", flag=False)
    bridge_peer: str = option(
        text("a peer id", identity.public_key_of), "", "Peer id of the bridge, where there is no ticket."
    )
    secret: str = option(
        text("32 hexadecimal digits", _check_secret), "", "The ticket's secret, where there is no ticket."
    )
    engine: str = option(_ENGINE, "auto", "Engine; auto takes torch with CUDA if a kernel passes, else onnx.")
    device: str = option(
        text("a device"), "", "Device of the engine (cpu, cuda:0, mps); chosen if not given."
    )
    precision: str = option(
        choice("fast", "exact"), "fast", "exact computes linears with float32 activations."
    )
    threads: int = option(whole(0, 4096), 0, "Threads of computation; 0 takes all cores.")
    memory: int = option(
        size(16_000_000), 0, "Most memory of the engine, on a GPU the GPU's; auto looks at what is free."
    )
    leave_time: float = option(
        duration(0, 86_400),
        60.0,
        "Longest time to hand the place over after Ctrl-C; a second one ends it at once.",
    )

    def invitation(self, *, now: float, role: str = "stage") -> Ticket:
        """The ticket to join with: the one given, one made of the settings, or the saved one.

        Raises:
            TicketError: there is none, or it is wrong, over at ``now`` (Unix time), or for other roles.
        """
        if self.ticket:
            found = ticket.parse(self.ticket)
        elif self.bridge_peer or self.secret:
            if not (self.bridge_peer and self.secret and self.relays):
                raise TicketError("without a ticket give all of --bridge-peer, --secret and --relay")
            secret = bytes.fromhex(self.secret)
            end = (1 << 40) - 1  # the bridge knows when its secret is over
            found = Ticket(self.relays, self.bridge_peer, "kvasir", frozenset({role}), end, secret)
        else:
            found = load_ticket(self.home)
        found.check(now=now, role=role)
        return found


@dataclass(frozen=True, kw_only=True)
class StageSettings(ComputingSettings):
    """A stage: computes a run of layers of a ring."""

    section = "stage"

    saturation_threshold: int = option(
        whole(1, 1024), 2, "Busy slots from which on routed experts go to volunteers."
    )
    checks: str = option(
        choice("sampled", "strict"),
        "sampled",
        "strict has every row of a volunteer computed twice before it is used.",
    )


@dataclass(frozen=True, kw_only=True)
class VolunteerSettings(ComputingSettings):
    """A volunteer: computes experts of a mixture-of-experts model while a swarm needs it."""

    section = "volunteer"

    model: str = option(text("a model's name"), "", "Help only with this model; any if not given.")
    disk: int = option(
        size(100_000), 0, "Most disk space for chunks of weights; auto is half of what is free."
    )


@dataclass(frozen=True, kw_only=True)
class CoordinatorSettings(ComputingSettings):
    """A coordinator: runs the whole model, and lets volunteers compute experts when it is busy."""

    section = "coordinator"

    slots: int = option(whole(1, 1024), 8, "Requests that are computed at once.")
    context_length: int = option(
        whole(0, 1 << 22), 0, "Positions of each request; 0 is the model's, at most 4096."
    )
    micro_batch_rows: int = option(whole(1, 4096), 64, "Rows of one pass.")
    max_in_flight: int = option(whole(1, 64), 4, "Passes under way at once, while some wait for volunteers.")
    top_logprobs: int = option(whole(0, 20), 20, "Most alternatives with log-probabilities per token.")
    saturation_threshold: int = option(
        whole(1, 1024), 2, "Busy slots from which on experts go to volunteers."
    )
    checks: str = option(
        choice("sampled", "strict"),
        "sampled",
        "strict has every row of a volunteer computed twice before it is used.",
    )
    remote: str = option(
        choice("auto", "all"), "auto", "all sends away whatever volunteers cover, busy or not.", flag=False
    )
    expert_floor_ms: float = option(
        number(0.0, 1000.0), 0.0, "Least time of the own experts for each row and expert.", flag=False
    )


@dataclass(frozen=True, kw_only=True)
class SwarmSettings(RingSettings):
    """A whole swarm on one machine: a relay, a bridge and stages, each a process of its own."""

    section = "swarm"

    model: str = option(
        text("a GGUF file or an https:// address"), "", "GGUF file, or its https:// address, to serve."
    )
    name: str = option(text(), "", "Name of the model for clients; the file's own name if not given.")
    stages: int = option(whole(0, MAX_STAGES), 3, "Stages of the ring; at least 2.")
    port: int = option(whole(0, 65535), 0, "Port of the bridge's HTTP server; 0 takes a free one.")
    engine: str = option(_ENGINE, "auto", "Engine of the stages.")
    precision: str = option(
        choice("fast", "exact"), "fast", "exact computes linears with float32 activations."
    )
    threads: int = option(whole(0, 4096), 0, "Threads of each engine; 0 shares the cores between them.")

    def check(self) -> None:
        """See :meth:`Settings.check`."""
        if not self.model:
            raise SettingsError("no model: give --model FILE.gguf, or --model https://…")
        check_stages(self.stages)
        super().check()


@dataclass(frozen=True, kw_only=True)
class PlanSettings(RingSettings):
    """A ring that is only planned: what each of its peers would be."""

    section = "plan"

    model: str = option(
        text("a GGUF file"), "", "GGUF file to plan for; if not given, the plan of a running bridge is shown."
    )
    url: str = option(
        text("an address"), "", "Address of the running bridge; if not given, that of the one that runs here."
    )
    stages: int = option(whole(0, MAX_STAGES), 0, "Stages of the ring; 0 takes as many as are good.")
    peers: int = option(whole(0, 256), 0, "Peers that offer themselves; 0 takes one for each stage.")
    memory: int = option(size(16_000_000), 8_000_000_000, "Memory that each offers.")
    read_rate: int = option(
        size(1_000_000), 4_000_000_000, "Weights that each goes through in a second; a measured one is best."
    )
    hop_ms: float = option(
        number(0.0, 10_000.0), 5.0, "Time of an empty frame from one peer to the next, in milliseconds."
    )
    link_rate: int = option(size(1_000), 0, "Bytes a second between peers; auto does not count them.")

    def check(self) -> None:
        """See :meth:`Settings.check`."""
        if self.model and self.url:
            raise SettingsError(
                "--model plans a ring of that file, --url shows a running one: give one of them"
            )
        if self.stages:
            check_stages(self.stages)
        super().check()


ROLE_SETTINGS: Final[Mapping[str, type[Settings]]] = {
    role.section: role
    for role in (
        BridgeSettings,
        StageSettings,
        VolunteerSettings,
        CoordinatorSettings,
        SwarmSettings,
        PlanSettings,
    )
}


@dataclass(frozen=True, slots=True)
class BridgeReady:
    """What a bridge says when its HTTP server answers and its ticket is good.

    Attributes:
        ticket: the ticket's text.
        base_url: OpenAI base URL, such as ``http://127.0.0.1:8000/v1``.
        model: name of the model for clients.
        peer_id: the bridge's.
    """

    ticket: str
    base_url: str
    model: str
    peer_id: str


def check_stages(stages: int) -> None:
    """Refuse a ring of fewer than two stages.

    Raises:
        SettingsError: with the reason.
    """
    if stages < 2:
        raise SettingsError(
            f"--stages {stages}: a ring has 2 stages or more, because no peer of it may hold the whole model; "
            "a whole model on one machine is the coordinator's job"
        )


def is_loopback(host: str) -> bool:
    """Whether a bind address can be reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


# --- Where they come from -----------------------------------------------------------------------------------------

S = TypeVar("S", bound=Settings)


def home_directory(flag: str | Path | None = None, *, environment: Mapping[str, str] = os.environ) -> Path:
    """The peer's folder: ``--home``, else ``KVASIR_HOME``, else the platform's folder for user data."""
    given = flag or environment.get("KVASIR_HOME")
    if given:
        return Path(given).expanduser().absolute()
    from platformdirs import user_data_path

    return user_data_path("kvasir-peer", appauthor=False)


def flag_name(name: str) -> str:
    """The command-line flag of a setting; a list's is in the singular, because it is repeated."""
    if name in ("relays", "relay_invites", "api_keys", "ticket_roles"):
        name = name[:-1]
    return "--" + name.replace("_", "-")


def _read_config(path: Path) -> dict[str, object]:
    import tomllib

    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except FileNotFoundError:
        return {}
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{path} is not valid TOML: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"cannot read {path}: {error}") from None


def _check_config(path: Path, config: Mapping[str, object]) -> None:
    """Refuse keys and tables that no role has."""
    known = {f.name for role in ROLE_SETTINGS.values() for f in options(role)}
    for key, value in config.items():
        if isinstance(value, dict):
            if key not in ROLE_SETTINGS:
                raise SettingsError(f"{path}: unknown table [{key}]{_nearest(key, ROLE_SETTINGS)}")
            role_known = {f.name for f in options(ROLE_SETTINGS[key])}
            for name in value:
                if name not in role_known:
                    raise SettingsError(
                        f"{path}: [{key}] has no setting {name!r}{_nearest(name, role_known)}"
                    )
        elif key not in known:
            raise SettingsError(f"{path}: there is no setting {key!r}{_nearest(key, known)}")


def _nearest(word: str, known: Any) -> str:
    found = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {found[0]!r}?" if found else ""


def options(cls: type[Settings]) -> list[dataclasses.Field[Any]]:
    """The fields of a settings class that can be set (all but ``home``)."""
    return [f for f in fields(cls) if "kind" in f.metadata]


def load(
    cls: type[S],
    *,
    home: Path,
    flags: Mapping[str, object] | None = None,
    environment: Mapping[str, str] = os.environ,
) -> S:
    """Read the settings of a role from flags, environment, ``config.toml`` and defaults, in this order.

    Args:
        cls: the role's settings class.
        home: the peer's folder; need not exist.
        flags: by field name; None means that the flag was not given.
        environment: the process's.

    Raises:
        SettingsError: names the flag, variable or key, what it has, and what it must be.
    """
    path = home / CONFIG_FILE
    config = _read_config(path)
    _check_config(path, config)
    table = config.get(cls.section, {})
    assert isinstance(table, dict)  # _check_config has refused everything else
    values: dict[str, Any] = {}
    for setting in options(cls):
        name = setting.name
        upper = name.upper()
        role_variable = f"{ENV_PREFIX}{cls.section.upper()}_{upper}"
        sources: tuple[tuple[str, object], ...] = (
            (flag_name(name), (flags or {}).get(name)),
            (role_variable, environment.get(role_variable)),
            (ENV_PREFIX + upper, environment.get(ENV_PREFIX + upper)),
            (f"{path}: [{cls.section}] {name}", table.get(name)),
            (f"{path}: {name}", config.get(name)),
        )
        for source, value in sources:
            if value is None:
                continue
            try:
                values[name] = setting.metadata["kind"].parse(value)
            except ValueError as error:
                given = ", ".join(map(str, value)) if isinstance(value, list | tuple) else value
                shown = "" if name in ("api_keys", "secret", "ticket") else f"{given!r} is wrong: "
                raise SettingsError(f"{source}: {shown}{error}") from None
            break
    settings = cls(home=home, **values)
    settings.check()
    return settings


# --- The saved ticket ---------------------------------------------------------------------------------------------


def load_ticket(home: Path) -> Ticket:
    """The ticket that ``kvasir-peer join`` has saved.

    Raises:
        TicketError: there is none, or it is damaged.
    """
    try:
        saved = (home / TICKET_FILE).read_text("ascii")
    except FileNotFoundError:
        raise TicketError("this peer has no ticket: run kvasir-peer join TICKET") from None
    except (OSError, UnicodeDecodeError) as error:
        raise TicketError(f"cannot read the saved ticket {home / TICKET_FILE}: {error}") from None
    try:
        return ticket.parse(saved)
    except TicketError as error:
        raise TicketError(f"the saved ticket {home / TICKET_FILE}: {error}") from None


def save_ticket(home: Path, found: Ticket) -> None:
    """Keep a ticket for the next start, mode 0600, in place of an earlier one, whole or not at all.

    Raises:
        SettingsError: the folder cannot be written.
    """
    path = home / TICKET_FILE
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(found.encode() + "\n")
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise SettingsError(f"cannot save the ticket in {home}: {error.strerror or error}") from None
