"""Peers behind home routers: network namespaces, and nftables as the routers' NAT. Needs root on Linux."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import trio
from helpers_net import ROOT

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(
        sys.platform != "linux" or os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("nft"),
        reason="network namespaces need root, iproute2 and nftables",
    ),
]

WAN = "10.77.0"
#: What a router does to the port of a packet that leaves: keep it where that can be, or not (as symmetric NATs do).
KEEPS_PORTS, CHANGES_PORTS = "masquerade", "masquerade fully-random"


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"


def _in(namespace: str, *command: str) -> list[str]:
    return ["ip", "netns", "exec", namespace, *command]


@contextmanager
def internet(prefix: str, nats: list[str]) -> Iterator[tuple[str, list[str]]]:
    """A public network with a relay's machine, and a home behind a router for each of ``nats``.

    Yields the namespaces: of the public machine, and of the machine in each home.
    """
    public = f"{prefix}-pub"
    homes = [f"{prefix}-h{number}" for number in range(len(nats))]
    routers = [f"{prefix}-r{number}" for number in range(len(nats))]
    made: list[str] = []
    try:
        for namespace in (public, *homes, *routers):
            _run("ip", "netns", "add", namespace)
            made.append(namespace)
            _run("ip", "-n", namespace, "link", "set", "lo", "up")
        _run("ip", "-n", public, "link", "add", "wan", "type", "bridge")
        _run("ip", "-n", public, "addr", "add", f"{WAN}.1/24", "dev", "wan")
        _run("ip", "-n", public, "link", "set", "wan", "up")
        for number, (home, router, nat) in enumerate(zip(homes, routers, nats, strict=True)):
            lan = f"192.168.{60 + number}"
            _run(
                "ip",
                "-n",
                router,
                "link",
                "add",
                "up0",
                "type",
                "veth",
                "peer",
                "name",
                f"w{number}",
                "netns",
                public,
            )
            _run("ip", "-n", public, "link", "set", f"w{number}", "master", "wan", "up")
            _run("ip", "-n", router, "addr", "add", f"{WAN}.{10 + number}/24", "dev", "up0")
            _run("ip", "-n", router, "link", "set", "up0", "up")
            _run(
                "ip",
                "-n",
                router,
                "link",
                "add",
                "lan0",
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                home,
            )
            _run("ip", "-n", router, "addr", "add", f"{lan}.1/24", "dev", "lan0")
            _run("ip", "-n", router, "link", "set", "lan0", "up")
            _run("ip", "-n", home, "addr", "add", f"{lan}.2/24", "dev", "eth0")
            _run("ip", "-n", home, "link", "set", "eth0", "up")
            _run("ip", "-n", home, "route", "add", "default", "via", f"{lan}.1")
            _run(*_in(router, "sysctl", "-qw", "net.ipv4.ip_forward=1"))
            rules = f"""
                table ip nat {{
                    chain post {{
                        type nat hook postrouting priority 100;
                        oifname "up0" {nat};
                    }}
                }}
                table ip filter {{
                    chain forward {{
                        type filter hook forward priority 0; policy accept;
                        iifname "up0" ct state new drop;
                    }}
                    chain input {{
                        type filter hook input priority 0; policy accept;
                        iifname "up0" ct state new drop;
                    }}
                }}
            """
            _run(*_in(router, "nft", rules))
        yield public, homes
    finally:
        for namespace in made:
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True)


class _Processes(ExitStack):
    """Processes in namespaces, ended at the end of the block."""

    def start(self, namespace: str, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            _in(namespace, sys.executable, *arguments),
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "relay")])},
        )
        self.callback(process.wait)
        self.callback(process.kill)
        return process


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


async def _paths(nats: list[str], tmp_path: Path, prefix: str, seconds: float) -> list[str]:
    """The paths of a link between the first two homes, one after the other, until it is direct or time is up."""
    seen: list[str] = []
    with internet(prefix, nats) as (public, homes), _Processes() as processes:
        relay = processes.start(
            public, "-m", "kvasir_relay", "--home", str(tmp_path), "--listen", f"/ip4/{WAN}.1/tcp/4001"
        )
        with trio.fail_after(30):
            address = await trio.to_thread.run_sync(_line, relay, abandon_on_cancel=True)
        assert address.startswith("/ip4/"), address
        script = str(Path(__file__).with_name("nat_peer.py"))
        server = processes.start(homes[0], script, address, "serve")
        with trio.fail_after(30):
            peer = json.loads(await trio.to_thread.run_sync(_line, server, abandon_on_cancel=True))["peer"]
        client = processes.start(homes[1], script, address, peer)
        with trio.move_on_after(seconds):
            while "direct" not in seen:
                line = json.loads(await trio.to_thread.run_sync(_line, client, abandon_on_cancel=True))
                assert "lost" not in line
                seen.append(line["path"])
        assert client.poll() is None, "the link ended"
        client.kill()
    return seen


async def test_two_home_routers_are_punched_through(tmp_path: Path) -> None:
    seen = await _paths([KEEPS_PORTS, KEEPS_PORTS], tmp_path, "kvn1", 40)
    assert seen[-1] == "direct"


async def test_a_router_that_changes_ports_leaves_the_link_on_the_relay(tmp_path: Path) -> None:
    assert await _paths([CHANGES_PORTS, CHANGES_PORTS], tmp_path, "kvn2", 7) == ["relayed"]
