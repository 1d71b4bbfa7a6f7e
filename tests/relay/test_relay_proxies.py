"""The relay behind a TLS proxy: the configurations that docs/relay.md gives, run as they stand there."""

from __future__ import annotations

import re
import shutil
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio
from helpers_relay import PATIENCE, ROOT, running_relay, until

from kvasir_peer.identity import Identity
from kvasir_peer.net.link import Link
from kvasir_peer.net.node import Node
from kvasir_relay.config import load
from kvasir_relay.server import Relay

sys.path.insert(0, str(ROOT / "tests" / "net"))

from helpers_https import tls_contexts

DOCS = (ROOT / "docs" / "relay.md").read_text()
CHAPTER = DOCS[DOCS.index("## WebSocket behind a TLS proxy") :]


def block(start: str) -> str:
    """The indented text between the fences of the chapter's block that contains ``start``."""
    [found] = [text for text in re.findall(r"```\w*\n(.*?)```", CHAPTER, re.DOTALL) if start in text]
    return found


def test_the_documented_settings_are_taken(tmp_path: Path) -> None:
    file = tmp_path / "relay.toml"
    file.write_text(block("trusted_proxies"))
    config = load({}, {}, file)
    assert [str(network) for network in config.trusted_proxies] == ["127.0.0.1/32"]
    assert config.listen[1].endswith("/tcp/4002/ws") and config.announce[1].endswith("/tcp/443/wss")


def replaced(text: str, *pairs: tuple[str, str]) -> str:
    """``text`` with each first replaced by its second, which must stand there."""
    for old, new in pairs:
        assert old in text, f"{old!r} does not stand in the documentation any more"
        text = text.replace(old, new)
    return text


@contextmanager
def nginx(folder: Path, relay_port: int, port: int) -> Iterator[None]:
    """nginx with the documented server."""
    certificate = "/etc/letsencrypt/live/relay.example.org/"
    server = replaced(
        block("proxy_pass"),
        ("listen 443 ssl;", f"listen 127.0.0.1:{port} ssl;"),
        ("listen [::]:443 ssl;", ""),
        (f"{certificate}fullchain.pem", str(folder / "server.pem")),
        (f"{certificate}privkey.pem", str(folder / "server.pem")),
        ("127.0.0.1:4002", f"127.0.0.1:{relay_port}"),
    )
    paths = "".join(
        f"{name}_temp_path {folder / name};\n"
        for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (folder / "nginx.conf").write_text(
        f"daemon off;\nmaster_process off;\npid {folder / 'pid'};\nerror_log stderr;\nevents {{}}\n"
        f"http {{\naccess_log off;\n{paths}{server}\n}}\n"
    )
    with process(folder, ["nginx", "-p", str(folder), "-c", str(folder / "nginx.conf")]):
        yield


@contextmanager
def caddy(folder: Path, relay_port: int, port: int) -> Iterator[None]:
    """Caddy with the documented site; its certificate is ours, since nobody would give it one here."""
    site = replaced(
        block("reverse_proxy"),
        (
            "relay.example.org {",
            f"https://127.0.0.1:{port} {{\n    tls {folder / 'server.pem'} {folder / 'server.pem'}",
        ),
        ("127.0.0.1:4002", f"127.0.0.1:{relay_port}"),
    )
    (folder / "Caddyfile").write_text(f"{{\n    admin off\n    auto_https disable_redirects\n}}\n{site}")
    command = ["caddy", "run", "--config", str(folder / "Caddyfile"), "--adapter", "caddyfile"]
    with process(folder, command):
        yield


@contextmanager
def process(folder: Path, command: list[str]) -> Iterator[None]:
    """A proxy, with everything that it writes in ``folder``."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed (Debian: apt-get install {command[0]})")
    environment = {"HOME": str(folder), "XDG_DATA_HOME": str(folder), "XDG_CONFIG_HOME": str(folder)}
    with (folder / "log").open("w") as log:
        running = subprocess.Popen(
            [shutil.which(command[0]) or "", *command[1:]],
            stdout=log,
            stderr=log,
            cwd=folder,
            env=environment,
        )
        try:
            yield
        finally:
            running.kill()
            running.wait()


async def echo(link: Link) -> None:
    """Send back every frame."""
    while True:
        await link.send(await link.receive())


async def free_port() -> int:
    """A port that nobody uses now."""
    listener = (await trio.open_tcp_listeners(0, host="127.0.0.1"))[0]
    port: int = listener.socket.getsockname()[1]
    await listener.aclose()
    return port


async def answers(port: int) -> None:
    """Wait until somebody listens."""
    with trio.fail_after(PATIENCE):
        while True:
            try:
                await (await trio.open_tcp_stream("127.0.0.1", port)).aclose()
            except OSError:
                await trio.sleep(0.05)
            else:
                return


async def talk_through(port: int, relay: Relay) -> None:
    """Two peers that reach the relay at wss alone talk to each other."""
    address = f"/ip4/127.0.0.1/tcp/{port}/wss/p2p/{relay.identity.peer_id}"
    async with (
        Node.open(Identity.generate().private_key, relays=[address], direct=False) as a,
        Node.open(Identity.generate().private_key, relays=[address], direct=False) as b,
    ):
        a.handle("/echo/1", 2_000_000, echo)
        for node in (a, b):
            await node.relays_ready(PATIENCE)
        assert a.addresses() == [f"{address}/p2p-circuit/p2p/{a.peer_id}".replace("/wss/", "/tls/ws/")]
        link = await b.open_link(a.peer_id, "/echo/1", max_frame=2_000_000)
        with trio.fail_after(PATIENCE):
            for size in (0, 1000, 1_000_000):
                await link.send(bytes(size))
                assert len(await link.receive()) == size
        await until(lambda: len(relay.members()) == 2)
        assert "proxy_header" not in relay.notices._last, "the proxy does not say whom it stands for"


@pytest.mark.parametrize("proxy", [nginx, caddy])
async def test_peers_meet_behind_the_documented_proxies(
    proxy: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, client = tls_contexts(tmp_path)
    port = await free_port()
    async with running_relay(listen=["/ip4/127.0.0.1/tcp/0/ws"], trusted_proxies=["127.0.0.1"]) as relay:
        relay_port = int(relay.addresses[0].split("/")[4])
        with proxy(tmp_path, relay_port, port):  # type: ignore[operator]
            await answers(port)
            monkeypatch.setattr(ssl, "create_default_context", lambda: client)
            await talk_through(port, relay)


async def test_peers_reach_a_relay_by_tls_alone_and_check_its_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the least of a proxy, for machines that have neither of the two."""
    server, client = tls_contexts(tmp_path)
    async with (
        running_relay(listen=["/ip4/127.0.0.1/tcp/0/ws"], trusted_proxies=["127.0.0.1"]) as relay,
        trio.open_nursery() as nursery,
    ):
        relay_port = int(relay.addresses[0].split("/")[4])

        async def serve(raw: trio.SocketStream) -> None:
            near = trio.SSLStream(raw, server, server_side=True, https_compatible=True)
            far = await trio.open_tcp_stream("127.0.0.1", relay_port)
            try:
                head = b""
                while b"\r\n\r\n" not in head:
                    part = await near.receive_some(4096)
                    if not part:
                        return
                    head += part
                await far.send_all(head.replace(b"\r\n\r\n", b"\r\nX-Forwarded-For: 127.0.0.1\r\n\r\n", 1))
                async with trio.open_nursery() as both:
                    both.start_soon(pump, near, far, both.cancel_scope)
                    both.start_soon(pump, far, near, both.cancel_scope)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                return
            finally:
                await trio.aclose_forcefully(near)
                await trio.aclose_forcefully(far)

        listeners = await nursery.start(trio.serve_tcp, serve, 0)
        port = listeners[0].socket.getsockname()[1]
        address = f"/ip4/127.0.0.1/tcp/{port}/wss/p2p/{relay.identity.peer_id}"
        async with Node.open(Identity.generate().private_key, relays=[address], direct=False) as stranger:
            await until(lambda: stranger.statistics().relays[0].failures)
            assert "certificate verify failed" in stranger.relay_words()
        monkeypatch.setattr(ssl, "create_default_context", lambda: client)
        await talk_through(port, relay)
        nursery.cancel_scope.cancel()


async def pump(source: trio.abc.ReceiveStream, target: trio.abc.SendStream, both: trio.CancelScope) -> None:
    """Move bytes one way until the end."""
    while data := await source.receive_some(65536):
        await target.send_all(data)
    both.cancel()
