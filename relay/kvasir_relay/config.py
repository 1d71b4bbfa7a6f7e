"""What an operator can set: one table of keys that the TOML file, the environment and the flags share.

``limits.circuits_per_peer`` in the file's table ``[limits]`` is ``KVASIR_RELAY_LIMITS_CIRCUITS_PER_PEER`` in the
environment and ``--limits.circuits-per-peer`` on the command line. Flags win over the environment, the environment
over the file, the file over the profile, the profile over the defaults here.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import math
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvasir_peer.errors import SettingsError
from kvasir_peer.identity import public_key_of

ENVIRONMENT_PREFIX = "KVASIR_RELAY_"
CONFIG_FILE = "relay.toml"  # looked for in the home folder when no --config is given

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_KIB, _MIB, _GIB, _TIB = 2**10, 2**20, 2**30, 2**40
_SIZE_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": _KIB,
    "mib": _MIB,
    "gib": _GIB,
    "tib": _TIB,
}
_TIME_UNITS = {"": 1.0, "ms": 0.001, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*")

_LISTEN = re.compile(r"/(ip4|ip6)/([0-9a-fA-F.:]+)/tcp/([0-9]{1,5})(/ws)?")


def _count(value: object) -> int:
    if isinstance(value, str) and re.fullmatch(r"\s*[0-9]+\s*", value):
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise ValueError("a whole number, 0 or more")


def _quantity(value: object, units: Mapping[str, float], expected: str) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf:
        return float(value)
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    if match is None or match[2].lower() not in units:
        raise ValueError(expected)
    return float(match[1]) * units[match[2].lower()]


def _size(value: object) -> int:
    return int(_quantity(value, _SIZE_UNITS, 'a number of bytes, or a text such as "10 MiB"'))


def parse_seconds(value: object) -> float:
    return _quantity(value, _TIME_UNITS, 'a number of seconds, or a text such as "30s", "5min", "1h"')


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("a text")
    return value


def _choice(*choices: str) -> Callable[[object], str]:
    def parse(value: object) -> str:
        if value not in choices:
            raise ValueError("one of " + ", ".join(choices))
        return str(value)

    return parse


def _path(value: object) -> Path:
    text = _text(value)
    if not text:
        raise ValueError("a path")
    return Path(text).expanduser()


def _items(value: object) -> list[object]:
    if isinstance(value, str):  # from the environment
        return [part.strip() for part in value.split(",") if part.strip()]
    if isinstance(value, (list, tuple)):
        return list(value)
    raise ValueError("a list")


def _list_of(parse: Callable[[object], Any]) -> Callable[[object], tuple[Any, ...]]:
    def parse_list(value: object) -> tuple[Any, ...]:
        return tuple(_parse_item(parse, item) for item in _items(value))

    return parse_list


class _ItemError(ValueError):
    """A ValueError that names the item of a list."""

    def __init__(self, item: object, expected: ValueError) -> None:
        super().__init__(str(expected))
        self.item = item


def _parse_item(parse: Callable[[object], Any], item: object) -> Any:
    try:
        return parse(item)
    except ValueError as error:
        raise _ItemError(item, error) from error


def _listen_address(value: object) -> str:
    match = _LISTEN.fullmatch(value) if isinstance(value, str) else None
    expected = "an address to listen on, such as /ip4/0.0.0.0/tcp/4001 or /ip4/127.0.0.1/tcp/4002/ws"
    if match is None or int(match[3]) > 65535:
        raise ValueError(expected)
    try:
        address = ipaddress.ip_address(match[2])
    except ValueError:
        raise ValueError(expected) from None
    if address.version != int(match[1][2:]):
        raise ValueError(expected)
    return match[0]


def _announce_address(value: object) -> str:
    from multiaddr import Multiaddr

    try:
        return str(Multiaddr(_text(value)))
    except Exception as error:  # multiaddr raises many kinds; each means that the text is wrong
        raise ValueError("a multiaddress, such as /dns4/relay.example.org/tcp/443/wss") from error


def _network(value: object) -> Network:
    try:
        return ipaddress.ip_network(_text(value), strict=False)
    except ValueError:
        raise ValueError("an address or a network, such as 203.0.113.0/24") from None


def _peer(value: object) -> str:
    try:
        public_key_of(_text(value))
    except ValueError:
        raise ValueError("a peer id, such as 12D3KooW…") from None
    return str(value)


def _host_port(value: object) -> tuple[str, int] | None:
    text = _text(value)
    if not text or text == "off":
        return None
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    expected = "an address and a port, such as 127.0.0.1:9641, or off"
    if not colon or not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
        raise ValueError(expected)
    try:
        ipaddress.ip_address(host)
    except ValueError:
        raise ValueError(expected) from None
    return host, int(port)


def _key(default: Any, parse: Callable[[object], Any], text: str) -> Any:
    return field(default=default, metadata={"parse": parse, "help": text, "list": isinstance(default, tuple)})


@dataclass(frozen=True, slots=True)
class Limits:
    """How much of the relay anybody may hold. 0 means no limit."""

    connections: int = _key(4096, _count, "Connections in all.")
    connections_per_ip: int = _key(256, _count, "Connections from one address.")
    connections_per_prefix: int = _key(
        1024, _count, "Connections from one network (see prefix-v4, prefix-v6)."
    )
    connections_per_peer: int = _key(8, _count, "Connections of one peer; the oldest idle one makes way.")
    handshakes: int = _key(256, _count, "Connections that have not proved who they are, in all.")
    handshakes_per_ip: int = _key(
        64, _count, "Connections that have not proved who they are, from one address."
    )
    new_connections_per_ip: int = _key(600, _count, "New connections from one address in a minute.")
    handshake_time: float = _key(15.0, parse_seconds, "Time in which a connection must prove who it is.")
    unused_time: float = _key(
        600.0, parse_seconds, "How long a connection may stay that has neither a reservation nor a circuit."
    )
    streams_per_connection: int = _key(1024, _count, "Streams that one connection may have open.")
    requests_per_peer: int = _key(600, _count, "Reservations and circuits asked for by one peer in a minute.")
    requests_per_ip: int = _key(
        2400, _count, "Reservations and circuits asked for from one address in a minute."
    )
    reservations: int = _key(2048, _count, "Reservations in all; a peer has at most one.")
    reservations_per_ip: int = _key(128, _count, "Reservations from one address.")
    reservations_per_prefix: int = _key(512, _count, "Reservations from one network.")
    reservation_time: float = _key(
        3600.0, parse_seconds, "How long a reservation holds unless it is renewed."
    )
    circuits: int = _key(4096, _count, "Circuits in all.")
    circuits_per_peer: int = _key(256, _count, "Circuits from or to one peer.")
    circuits_per_ip: int = _key(1024, _count, "Circuits from or to one address.")
    circuits_per_prefix: int = _key(2048, _count, "Circuits from or to one network.")
    circuit_time: float = _key(0.0, parse_seconds, "How long one circuit may live.")
    circuit_idle_time: float = _key(0.0, parse_seconds, "How long one circuit may carry nothing.")
    circuit_bytes: int = _key(0, _size, "Bytes that one circuit may carry, both directions together.")
    buffer_bytes: int = _key(
        256 * _MIB,
        _size,
        "Bytes that may wait in all circuits; beyond, the circuit with the most waiting ends.",
    )
    peer_bytes: int = _key(0, _size, "Bytes that one peer's circuits may carry within peer-bytes-time.")
    peer_bytes_time: float = _key(86400.0, parse_seconds, "The time that peer-bytes is for.")
    pieces_per_peer: int = _key(
        50_000,
        _count,
        "Pieces of data that one peer's circuits may bring in a second; honest ones are up to 64 KiB large.",
    )
    month_bytes: int = _key(0, _size, "Bytes that the relay may carry in a calendar month (UTC).")
    prefix_v4: int = _key(24, _count, "Bits of an IPv4 address that make a network.")
    prefix_v6: int = _key(56, _count, "Bits of an IPv6 address that make a network.")


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """How fast circuits may carry, in bytes a second, both directions together. 0 means no limit."""

    total: int = _key(0, _size, "Bytes a second of all circuits, shared fairly between them.")
    peer: int = _key(0, _size, "Bytes a second of one peer's circuits.")
    circuit: int = _key(0, _size, "Bytes a second of one circuit.")
    burst_time: float = _key(
        0.25, parse_seconds, "How much of a second's worth may go at once after a pause."
    )


@dataclass(frozen=True, slots=True)
class Access:
    """Who may reserve and open circuits."""

    mode: str = _key(
        "everyone",
        _choice("everyone", "listed", "invited"),
        "Who may use the relay: everyone, the peers and networks in the allow lists, or those and holders of an "
        "invite.",
    )
    allow_peers: tuple[str, ...] = _key((), _list_of(_peer), "Peer ids that may use the relay.")
    deny_peers: tuple[str, ...] = _key((), _list_of(_peer), "Peer ids that may not even connect.")
    allow_networks: tuple[Network, ...] = _key((), _list_of(_network), "Networks that may use the relay.")
    deny_networks: tuple[Network, ...] = _key((), _list_of(_network), "Networks that may not even connect.")
    invite_issuers: tuple[str, ...] = _key(
        (), _list_of(_peer), "Peer ids whose invites count, besides the relay's own."
    )
    private_peers: str = _key(
        "auto",
        _choice("auto", "allow", "refuse"),
        "Peers that come from private or loopback addresses: auto refuses them on a public relay.",
    )


@dataclass(frozen=True, slots=True)
class Log:
    """What is written to standard error."""

    format: str = _key("text", _choice("text", "json"), "Lines for people, or JSON objects.")
    level: str = _key(
        "info", _choice("debug", "info", "warning", "error"), "The least severe line that is written."
    )


@dataclass(frozen=True, slots=True)
class Config:
    """All settings of a relay."""

    listen: tuple[str, ...] = _key(
        ("/ip4/0.0.0.0/tcp/4001",),
        _list_of(_listen_address),
        "Address to listen on; /ws at the end for WebSocket. May be given more than once.",
    )
    announce: tuple[str, ...] = _key(
        (), _list_of(_announce_address), "Address that peers are told, in place of the ones listened on."
    )
    home: Path | None = _key(  # noqa: RUF009 - makes a field, however it is spelt
        None, _path, "Folder of the relay's key, revoked invites and month counter."
    )
    http: tuple[str, int] | None = _key(
        None, _host_port, "Address and port of /metrics, /health, /ready and the status page; loopback only."
    )
    profile: str = _key(
        "carry",
        _choice("carry", "introduce"),
        "carry: circuits as long and as large as the limits say. introduce: 2 minutes and 128 KiB each, enough for "
        "peers to find a direct path.",
    )
    trusted_proxies: tuple[Network, ...] = _key(
        (),
        _list_of(_network),
        "Networks of reverse proxies whose header names the peer's address (WebSocket).",
    )
    proxy_header: str = _key(
        "x-forwarded-for", _text, "The header in which a trusted proxy names the address."
    )
    drain_time: float = _key(10.0, parse_seconds, "How long circuits may go on after SIGTERM.")
    limits: Limits = field(default_factory=Limits)
    bandwidth: Bandwidth = field(default_factory=Bandwidth)
    access: Access = field(default_factory=Access)
    log: Log = field(default_factory=Log)


_SECTIONS: dict[str, type] = {"limits": Limits, "bandwidth": Bandwidth, "access": Access, "log": Log}

# What go-libp2p gives to strangers by default (`relay/options`): enough to punch a hole, not to carry traffic.
_PROFILES: dict[str, dict[str, object]] = {
    "carry": {},
    "introduce": {"limits.circuit_time": 120.0, "limits.circuit_bytes": 128 * _KIB},
}


@dataclass(frozen=True, slots=True)
class Key:
    """One setting.

    Attributes:
        name: dotted, as in the file: ``limits.circuits_per_peer``.
        parse: from a TOML value or a text; raises ValueError with what was expected.
        help: one sentence.
        default: when nobody sets it.
        is_list: whether it may be given more than once.
    """

    name: str
    parse: Callable[[object], Any]
    help: str
    default: Any
    is_list: bool

    @property
    def flag(self) -> str:
        """``--limits.circuits-per-peer``."""
        return "--" + self.name.replace("_", "-")

    @property
    def environment(self) -> str:
        """``KVASIR_RELAY_LIMITS_CIRCUITS_PER_PEER``."""
        return ENVIRONMENT_PREFIX + self.name.replace(".", "_").upper()


def _keys_of(section: str, cls: type) -> Iterator[Key]:
    for item in dataclasses.fields(cls):
        if item.metadata:
            name = f"{section}.{item.name}" if section else item.name
            yield Key(
                name, item.metadata["parse"], item.metadata["help"], item.default, item.metadata["list"]
            )


KEYS: dict[str, Key] = {
    key.name: key for section, cls in (("", Config), *_SECTIONS.items()) for key in _keys_of(section, cls)
}


def _read_file(path: Path) -> Iterator[tuple[str, object]]:
    try:
        with path.open("rb") as file:
            document = tomllib.load(file)
    except FileNotFoundError:
        raise SettingsError(f"there is no configuration file {path}") from None
    except OSError as error:
        raise SettingsError(f"cannot read the configuration file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"the configuration file {path} is not TOML: {error}") from error
    for name, value in document.items():
        if name in _SECTIONS and isinstance(value, dict):
            for inner, inner_value in value.items():
                yield f"{name}.{inner}", inner_value
        else:
            yield name, value


def _parsed(key: Key, value: object, where: str) -> Any:
    try:
        return key.parse(value)
    except ValueError as error:
        wrong = error.item if isinstance(error, _ItemError) else value
        raise SettingsError(f"{where}: {wrong!r} is not {error}") from None


def load(
    flags: Mapping[str, object] | None = None,
    environ: Mapping[str, str] | None = None,
    path: Path | None = None,
) -> Config:
    """The settings in force.

    Args:
        flags: by dotted name; texts, or lists of texts.
        environ: the process's environment; only names that begin with ``KVASIR_RELAY_`` are looked at.
        path: configuration file; without one, ``relay.toml`` in the home folder if it is there.

    Raises:
        SettingsError: an unknown key, or a value that is wrong; says where.
    """
    flags, environ = flags or {}, environ or {}
    values: dict[str, Any] = {}
    if path is None:
        home = flags.get("home") or environ.get(KEYS["home"].environment)
        candidate = Path(str(home)).expanduser() / CONFIG_FILE if home else None
        path = candidate if candidate is not None and candidate.exists() else None
    if path is not None:
        for name, value in _read_file(path):
            key = KEYS.get(name)
            if key is None:
                raise SettingsError(f"{path}: there is no setting {name!r}{_similar(name)}")
            values[name] = _parsed(key, value, f"{path}, {name}")
    by_environment = {key.environment: key for key in KEYS.values()}
    for variable, text in environ.items():
        if not variable.startswith(ENVIRONMENT_PREFIX) or variable == ENVIRONMENT_PREFIX + "CONFIG":
            continue
        key = by_environment.get(variable)
        if key is None:
            raise SettingsError(f"the environment variable {variable} names no setting of the relay")
        values[key.name] = _parsed(key, text, variable)
    for name, value in flags.items():
        values[name] = _parsed(KEYS[name], value, KEYS[name].flag)
    return _checked(_build(values))


def _similar(name: str) -> str:
    import difflib

    close = difflib.get_close_matches(name, KEYS, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _build(values: dict[str, Any]) -> Config:
    profile = values.get("profile", KEYS["profile"].default)
    merged = {**_PROFILES[profile], **values}
    top = {name: value for name, value in merged.items() if "." not in name}
    for section, cls in _SECTIONS.items():
        prefix = section + "."
        top[section] = cls(
            **{name.removeprefix(prefix): value for name, value in merged.items() if name.startswith(prefix)}
        )
    return Config(**top)


def _checked(config: Config) -> Config:
    if not config.listen:
        raise SettingsError("listen is empty: give at least one address, such as /ip4/0.0.0.0/tcp/4001")
    if len(set(config.listen)) != len(config.listen):
        raise SettingsError("listen names the same address twice")
    if config.http is not None and not ipaddress.ip_address(config.http[0]).is_loopback:
        raise SettingsError(
            f"http: {config.http[0]} is not a loopback address; metrics are for this machine, put a proxy in front"
        )
    limits = config.limits
    if not 1 <= limits.prefix_v4 <= 32:
        raise SettingsError(f"limits.prefix_v4: {limits.prefix_v4} is not between 1 and 32")
    if not 1 <= limits.prefix_v6 <= 128:
        raise SettingsError(f"limits.prefix_v6: {limits.prefix_v6} is not between 1 and 128")
    if limits.reservation_time < MIN_RESERVATION_SECONDS:
        raise SettingsError(
            f"limits.reservation_time: {limits.reservation_time:g} s is too short, peers renew at half of it; "
            f"give at least {MIN_RESERVATION_SECONDS:g} s"
        )
    for name in ("handshake_time", "peer_bytes_time"):
        if getattr(limits, name) <= 0:
            raise SettingsError(f"limits.{name}: must be more than 0 s")
    if not 0.01 <= config.bandwidth.burst_time <= 60:
        raise SettingsError(
            f"bandwidth.burst_time: {config.bandwidth.burst_time:g} s is not between 10 ms and 1 min"
        )
    if config.access.mode == "listed" and not (config.access.allow_peers or config.access.allow_networks):
        raise SettingsError(
            "access.mode is listed, but allow_peers and allow_networks are empty: nobody could use it"
        )
    return config


# Below this a client that renews at half-time would ask more often than every second.
MIN_RESERVATION_SECONDS = 2.0


def describe(config: Config) -> list[str]:
    """The settings in force, one TOML line each, for ``--check-config`` and the status page."""
    lines = []
    for key in KEYS.values():
        section, _, name = key.name.rpartition(".")
        value = getattr(getattr(config, section) if section else config, name)
        if value is not None or key.name == "http":
            lines.append(f"{key.name} = {_toml(value)}")
    return lines


def _toml(value: object) -> str:
    if value is None:
        return '"off"'
    if isinstance(value, tuple):
        if len(value) == 2 and isinstance(value[1], int):
            return f'"{value[0]}:{value[1]}"'
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, int):
        return str(value)
    return f'"{value}"'
