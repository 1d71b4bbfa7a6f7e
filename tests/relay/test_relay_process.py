"""The relay as a process: signals, revocations, peers that are killed."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import trio
from helpers_relay import (
    PATIENCE,
    Peer,
    Refused,
    command,
    environment,
    joined,
    joined_circuit,
    receive,
    relay_process,
    running_peers,
    running_relay,
    until,
)

from kvasir_peer.errors import LinkError
from kvasir_peer.identity import load as load_identity
from kvasir_peer.net import delimited, maddr, multistream, upstream
from kvasir_peer.net.yamux import MuxedStream
from kvasir_relay import invites

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX's")


async def join(peer: Peer, address: str) -> None:
    with trio.fail_after(PATIENCE):
        peer.connection = await peer.host.dial(maddr.parse(address))


async def test_sigterm_drains(tmp_path: Path) -> None:
    """Nothing new is taken, peers are told, what runs may end, then all is closed."""
    options = ("--drain-time", "20s", "--http", "127.0.0.1:0", "--log.format", "json")
    with relay_process(tmp_path, *options) as relay:
        async with running_peers(3) as (a, b, idle):
            told = trio.Event()

            async def pushed(stream: MuxedStream) -> None:
                message = await delimited.read_message(stream, upstream.Identify)
                assert message.protocols
                assert not [name for name in message.protocols if "/hop" in name]
                told.set()

            idle.host.handle("/ipfs/id/push/1.0.0", pushed)
            for peer in (a, b, idle):
                await join(peer, relay.address)
                await peer.reserve()
            near, far = await joined_circuit(a, b)
            relay.signal(signal.SIGTERM)
            with trio.fail_after(PATIENCE):
                await told.wait()
                assert idle.connection is not None
                await idle.connection.closed.wait()
            for what, ask in (("reserve", a.reserve), ("connect", lambda: a.connect(b.peer_id))):
                with pytest.raises(Refused) as refused:
                    await ask()
                assert refused.value.reason == "draining", what
            with pytest.raises(LinkError):
                await join(idle, relay.address)
            await near.send_all(b"the last words")
            assert await receive(far, 14) == b"the last words"
            near.finish()
            assert await far.receive_some() == b""
            assert relay.process.poll() is None
            far.finish()
            assert await relay.wait() == 0
        assert "Traceback" not in relay.log
        # The log is JSON, and at the level in use names nobody and shows nothing of what was carried.
        assert all(json.loads(line)["text"] for line in relay.log.splitlines())
        for secret in (a.peer_id, b.peer_id, idle.peer_id, "the last words"):
            assert secret not in relay.log


async def test_a_drain_ends_after_its_time() -> None:
    async with running_relay() as relay, joined(relay, 2) as (a, b):
        near, _ = await joined_circuit(a, b)
        await relay.drain(0.3)
        assert not relay.members()
        with pytest.raises(LinkError), trio.fail_after(PATIENCE):
            await near.receive_some()
        assert relay.counters.circuits_ended == {"draining": 1}


async def test_a_second_signal_hurries_a_drain(tmp_path: Path) -> None:
    with relay_process(tmp_path, "--drain-time", "60s") as relay:
        async with running_peers(2) as (a, b):
            for peer in (a, b):
                await join(peer, relay.address)
                await peer.reserve()
            near, _ = await joined_circuit(a, b)
            relay.signal(signal.SIGTERM)
            await until(lambda: "draining" in relay.log)
            relay.signal(signal.SIGTERM)
            assert await relay.wait() == 0
            with pytest.raises(LinkError), trio.fail_after(PATIENCE):
                await near.receive_some()


async def test_sighup_reloads_and_a_broken_file_changes_nothing(tmp_path: Path) -> None:
    config = tmp_path / "relay.toml"
    config.write_text("[limits]\nreservations = 1\n")
    with relay_process(tmp_path) as relay:
        async with running_peers(3) as (a, b, c):
            for peer in (a, b, c):
                await join(peer, relay.address)
            await a.reserve()
            with pytest.raises(Refused):
                await b.reserve()
            config.write_text("[limits]\nreservations = 2\n")
            relay.signal(signal.SIGHUP)
            await until(lambda: "read anew" in relay.log)
            await b.reserve()
            config.write_text("[limits]\nreservations = many\n")
            relay.signal(signal.SIGHUP)
            await until(lambda: "stay in force" in relay.log)
            with pytest.raises(Refused) as refused:
                await c.reserve()
            assert refused.value.reason == "reservations"


async def test_a_revocation_is_seen_by_the_running_relay(tmp_path: Path) -> None:
    with relay_process(tmp_path, "--access.mode", "invited") as relay:
        identity = load_identity(tmp_path / "identity.key")
        invite, text = invites.create(identity, identity.peer_id, not_after=int(time.time()) + 60)
        async with running_peers(1) as (peer,):
            await join(peer, relay.address)
            assert peer.connection is not None
            stream = await peer.connection.open_stream(invites.INVITE_PROTOCOL)
            await stream.send_all(multistream.encode_varint(len(text)) + text.encode())
            assert await receive(stream, 3) == b"\x02ok"
            await peer.reserve()
            invites.revoke(tmp_path, invite.id)
            with trio.fail_after(PATIENCE):
                await peer.connection.closed.wait()


KILLED = """
import sys, trio
from kvasir_peer.identity import Identity
from helpers_relay import running_peers, joined_circuit, Peer
from kvasir_peer.net import maddr

async def main():
    async with running_peers(1) as (peer,):
        peer.connection = await peer.host.dial(maddr.parse(sys.argv[1]))
        await peer.reserve()
        print(peer.peer_id, flush=True)
        target = sys.stdin.readline().strip()
        if target:
            streams = [await peer.connect(target) for _ in range(3)]
            print("connected", flush=True)
        await trio.sleep_forever()

trio.run(main)
"""


@pytest.mark.parametrize("role", ["source", "target"])
async def test_kill_9_of_an_end_is_seen_by_the_other_in_two_seconds_and_leaks_nothing(role: str) -> None:
    environ = environment()
    environ["PYTHONPATH"] += os.pathsep + str(Path(__file__).parent)
    async with running_relay() as relay, joined(relay, 1) as (peer,):
        doomed = subprocess.Popen(  # noqa: ASYNC220 - starts at once; the test then waits for its first line
            [sys.executable, "-c", KILLED, relay.full_addresses[0]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environ,
        )
        assert doomed.stdin is not None
        assert doomed.stdout is not None
        try:
            doomed_id = (await trio.to_thread.run_sync(doomed.stdout.readline)).strip()
            doomed.stdin.write((peer.peer_id if role == "source" else "") + "\n")
            doomed.stdin.flush()
            if role == "source":
                ends = [await peer.incoming() for _ in range(3)]
            else:
                ends = [await peer.connect(doomed_id) for _ in range(3)]
            assert relay.statistics().ledger.circuits == 3
            doomed.kill()
            with trio.fail_after(2):
                for end in ends:
                    with pytest.raises(LinkError):
                        await end.receive_some()

            def held() -> tuple[int, ...]:
                now = relay.statistics()
                return (now.ledger.circuits, now.ledger.connections, now.ledger.reservations, now.peers)

            await until(lambda: held() == (0, 1, 1, 1))
            assert not relay.hop.circuits
            assert relay.members()[0].connection.busy == 0
        finally:
            doomed.kill()
            doomed.wait()
            doomed.stdin.close()
            doomed.stdout.close()


async def test_a_restart_keeps_the_identity_and_the_count_of_the_month(tmp_path: Path) -> None:
    names = set()
    for expected, number in ((5000, signal.SIGINT), (10_000, signal.SIGTERM)):
        with relay_process(tmp_path, "--limits.month-bytes", "9000") as relay:
            async with running_peers(2) as (a, b):
                for peer in (a, b):
                    await join(peer, relay.address)
                    await peer.reserve()
                near, far = await joined_circuit(a, b)
                await near.send_all(bytes(5000))
                if expected == 5000:
                    await receive(far, 5000)
                else:
                    with pytest.raises(LinkError), trio.fail_after(PATIENCE):
                        while await far.receive_some():
                            pass
            relay.signal(number)
            assert await relay.wait() == 0
            assert "Traceback" not in relay.log
            names.add(maddr.parse(relay.address).peer)
        assert json.loads((tmp_path / "month.json").read_text())["bytes"] == expected
    assert len(names) == 1
    assert (tmp_path / "identity.key").stat().st_mode & 0o777 == 0o600


async def test_two_relays_do_not_run_from_one_home(tmp_path: Path) -> None:
    with relay_process(tmp_path) as relay:
        second = await trio.run_process(
            command("--home", str(tmp_path), "--listen", "/ip4/127.0.0.1/tcp/0"),
            env=environment(),
            capture_stdout=True,
            capture_stderr=True,
            check=False,
        )
        assert second.returncode == 2
        [line] = second.stderr.decode().splitlines()
        assert f"a relay (process {relay.process.pid}) already runs from {tmp_path}" in line
        assert second.stdout == b""
        relay.process.kill()
        relay.process.wait()
    with relay_process(tmp_path):
        pass  # a lock ends with its process


async def test_systemd_is_told(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        path = str(tmp_path / "notify")
        listening.bind(path)
        listening.settimeout(PATIENCE)

        def told() -> str:
            return listening.recv(4096).decode()

        with relay_process(tmp_path, NOTIFY_SOCKET=path, WATCHDOG_USEC="200000") as relay:
            said = [told() for _ in range(4)]
            assert "READY=1" in said
            assert "WATCHDOG=1" in said
            relay.signal(signal.SIGHUP)
            while not told().startswith("RELOADING=1\nMONOTONIC_USEC="):
                pass
            while told() != "READY=1":
                pass
            relay.signal(signal.SIGTERM)
            while told() != "STOPPING=1":
                pass
            assert await relay.wait() == 0
