"""An Internet in network namespaces: a relay in the open, and homes behind routers of two kinds.

::

    relay 11.0.0.1 ──┬── "inet", a switch ──┬────────────────┐
                     │                      │                │
         router 11.0.0.10          router 11.0.0.20     router 11.0.0.30
         keeps ports               new port for each    keeps ports
         192.168.10.0/24           192.168.20.0/24      192.168.30.0/24
         a                         b, e                 c, d

All routers take from outside only what belongs to connections made from inside; the rest they drop without a word.
Nothing of it touches the machine's own network; it is gone with its namespaces.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

Value = TypeVar("Value")

CLONE_NEWNET = 0x40000000  # of setns(2)
RELAY_ADDRESS = "11.0.0.1"

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Home:
    """A home network.

    Attributes:
        number: of its router, the last part of its address.
        machines: names of those inside.
        keeps_ports: its NAT leaves the ports of connections as they are; else it gives each connection a random one,
            as routers of companies and mobile networks do, so that nobody outside can guess it.
    """

    number: int
    machines: tuple[str, ...]
    keeps_ports: bool

    @property
    def outside(self) -> str:
        """The router's address."""
        return f"11.0.0.{self.number}"


HOMES = (
    Home(10, ("a",), keeps_ports=True),
    Home(20, ("b", "e"), keeps_ports=False),
    Home(30, ("c", "d"), keeps_ports=True),
)

_ROUTER = """
table ip home {{
    counter from10 {{
    }}
    counter from20 {{
    }}
    counter from30 {{
    }}
    chain leave {{
        type nat hook postrouting priority srcnat
        oifname "wan" masquerade{random}
    }}
    chain cut {{
        type filter hook forward priority -10
    }}
    chain forward {{
        type filter hook forward priority filter; policy drop
        ct state established,related accept
        iifname "lan" accept
    }}
    chain input {{
        type filter hook input priority filter; policy drop
        ct state established,related accept
        iifname "lan" accept
        counter name ip saddr map {{ 11.0.0.10 : "from10", 11.0.0.20 : "from20", 11.0.0.30 : "from30" }}
    }}
}}
"""


def why_not() -> str:
    """Why no network can be made here, or "" if one can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [f"{tool} ({package})" for tool, package in _TOOLS.items() if shutil.which(tool) is None]
    if missing:
        return f"missing: {', '.join(missing)}"
    name = f"kv{os.getpid()}-probe"
    try:
        _run("ip", "netns", "add", name)
        try:
            _run("ip", "-n", name, "link", "add", "probe", "type", "bridge")
            _nft(name, _ROUTER.format(random=""))
        finally:
            _run("ip", "netns", "delete", name)
    except RuntimeError as error:
        return f"no network namespaces are to be had: {error}"
    return ""


_TOOLS = {"ip": "Debian: iproute2", "nft": "Debian: nftables"}


def _run(*command: str, text: str = "") -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def _nft(namespace: str, rules: str) -> None:
    _run("ip", "netns", "exec", namespace, "nft", "-f", "-", text=rules)


@dataclass
class Lab:
    """The network. Machines are ``relay`` and those of the homes; routers are named by their homes' numbers."""

    prefix: str
    namespaces: list[str] = field(default_factory=list)

    def namespace(self, machine: str) -> str:
        """Its namespace."""
        return f"{self.prefix}-{machine}"

    def within(self, machine: str, function: Callable[..., Value], *arguments: Any, **options: Any) -> Value:
        """Call ``function`` in a thread of that machine: its sockets, and processes that it starts, live there."""
        with ThreadPoolExecutor(1, initializer=self.enter, initargs=(machine,)) as thread:
            return thread.submit(function, *arguments, **options).result()

    def enter(self, machine: str) -> None:
        """Move the calling thread to that machine, for ever."""
        with (Path("/run/netns") / self.namespace(machine)).open() as file:
            if _libc.setns(file.fileno(), CLONE_NEWNET) != 0:
                number = ctypes.get_errno()
                raise OSError(number, f"setns: {os.strerror(number)}")

    def cut(self, home: Home, other: Home) -> None:
        """Break what goes between two homes directly, with a reset as of a router that lost its table."""
        for router, peer in ((home, other), (other, home)):
            rules = (
                f"add rule ip home cut ip daddr {peer.outside} reject with tcp reset\n"
                f"add rule ip home cut ip saddr {peer.outside} reject with tcp reset\n"
            )
            _nft(self.namespace(f"router{router.number}"), rules)

    def unasked(self, home: Home, other: Home) -> int:
        """Packets from another home that its router has dropped so far."""
        name = self.namespace(f"router{home.number}")
        listed = _run(
            "ip", "netns", "exec", name, "nft", "list", "counter", "ip", "home", f"from{other.number}"
        )
        return int(listed.split("packets ")[1].split()[0])

    def mend(self, home: Home, other: Home) -> None:
        """Undo :meth:`cut`."""
        for router in (home, other):
            _nft(self.namespace(f"router{router.number}"), "flush chain ip home cut\n")

    def move(self, machine: str, home: Home, address: str) -> None:
        """Take a machine to another home, as somebody does who goes from Wi-Fi to a mobile network.

        Its old interface disappears without a word to anybody; nothing closes its connections.
        """
        name = self.namespace(machine)
        _run("ip", "-n", name, "link", "delete", "eth0")
        self._wire(machine, "eth0", f"lan{home.number}", f"moved-{machine}", address)
        _run("ip", "-n", name, "route", "add", "default", "via", f"192.168.{home.number}.1")

    def _add(self, machine: str) -> str:
        name = self.namespace(machine)
        _run("ip", "netns", "add", name)
        self.namespaces.append(name)
        _run("ip", "-n", name, "link", "set", "lo", "up")
        return name

    def _wire(self, machine: str, interface: str, switch: str, port: str, address: str) -> None:
        """A cable from a machine's interface to a port of a switch (a namespace with a bridge)."""
        own, other = self.namespace(machine), self.namespace(switch)
        _run(
            *("ip", "link", "add", interface, "netns", own),
            *("type", "veth", "peer", "name", port, "netns", other),
        )
        _run("ip", "-n", own, "address", "add", f"{address}/24", "dev", interface)
        _run("ip", "-n", own, "link", "set", "dev", interface, "up")
        _run("ip", "-n", other, "link", "set", "dev", port, "master", "switch")
        _run("ip", "-n", other, "link", "set", "dev", port, "up")

    def _add_switch(self, machine: str) -> None:
        name = self._add(machine)
        _run("ip", "-n", name, "link", "add", "switch", "type", "bridge")
        _run("ip", "-n", name, "link", "set", "switch", "up")

    def build(self) -> None:
        """Make everything."""
        self._add_switch("inet")
        self._add("relay")
        self._wire("relay", "wan", "inet", "relay", RELAY_ADDRESS)
        for home in HOMES:
            lan, router = f"lan{home.number}", f"router{home.number}"
            self._add_switch(lan)
            self._add(router)
            self._wire(router, "wan", "inet", router, home.outside)
            self._wire(router, "lan", lan, router, f"192.168.{home.number}.1")
            self.within(router, Path("/proc/sys/net/ipv4/ip_forward").write_text, "1")
            _nft(self.namespace(router), _ROUTER.format(random="" if home.keeps_ports else " fully-random"))
            for index, machine in enumerate(home.machines, 10):
                name = self._add(machine)
                self._wire(machine, "eth0", lan, machine, f"192.168.{home.number}.{index}")
                gateway = f"192.168.{home.number}.1"
                _run("ip", "-n", name, "route", "add", "default", "via", gateway)

    def remove(self) -> None:
        """Take everything away."""
        for name in self.namespaces:
            _run("ip", "netns", "delete", name)


@contextmanager
def lab() -> Iterator[Lab]:
    """The network, until the end of the block."""
    found = Lab(f"kv{os.getpid()}")
    try:
        found.build()
        yield found
    finally:
        found.remove()
