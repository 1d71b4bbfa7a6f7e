"""What is mended of py-libp2p: each defect that touches us, shown not to touch us."""

from __future__ import annotations

import logging
import re
import secrets
import subprocess
import sys

import pytest
import trio
from helpers_net import ECHO, ROOT, address_of, exchange, hosts, pattern, until
from proxy import tcp_proxy

from kvasir_peer.errors import LinkError, WireError
from kvasir_peer.net import maddr, noise, upstream, yamux
from kvasir_peer.net.noise import ReceiveCipher, SendCipher


def test_an_unknown_version_of_libp2p_is_refused() -> None:
    assert upstream.check_version("0.8.1") == "0.8.1"
    assert upstream.check_version("0.8.9rc1") == "0.8.9rc1"
    for version in ("0.8.0", "0.9.0", "1.0"):
        with pytest.raises(ImportError, match="install"):
            upstream.check_version(version)


def test_libp2p_is_imported_in_one_place() -> None:
    importing = re.compile(r"^\s*(from|import) (libp2p|noise|nacl|google)\b", re.MULTILINE)
    found = [
        str(path.relative_to(ROOT))
        for folder in ("kvasir_peer", "relay")
        for path in (ROOT / folder).rglob("*.py")
        if importing.search(path.read_text())
    ]
    assert found == ["kvasir_peer/net/upstream.py"]


def test_its_loggers_stay_quiet() -> None:
    for name in ("libp2p.security.noise.patterns", "multiaddr.transforms"):
        assert not logging.getLogger(name).isEnabledFor(logging.INFO)


async def test_twenty_cancelled_writes_and_opens_leave_the_connection_usable() -> None:
    """Y5: with py-libp2p each of these leaves half a frame on the wire, and the connection is lost."""
    async with hosts(2) as (a, b):
        target = address_of(a)
        async with tcp_proxy((target.host, target.port), delay=0.01, rate=4e6) as proxy:
            connection = await b.dial(maddr.parse(f"/ip4/127.0.0.1/tcp/{proxy.port}/p2p/{a.peer_id}"))
            stream = await connection.open_stream(ECHO)
            sent = bytearray()
            received = bytearray()

            async def read() -> None:
                while True:
                    received.extend(await stream.receive_some())

            async with trio.open_nursery() as nursery:
                nursery.start_soon(read)
                cancelled = 0
                for number in range(20):
                    data = bytes([number]) * 200_000
                    with trio.move_on_after(0.002) as scope:
                        await stream.send_all(data)
                    if scope.cancelled_caught:
                        cancelled += 1
                    else:
                        sent += data
                    with trio.move_on_after(0.001):
                        await connection.open_stream(ECHO)
                assert cancelled >= 5
                await until(lambda: len(received) == len(sent))
                nursery.cancel_scope.cancel()
            assert received == sent
            assert await exchange(stream, pattern(50_000)) == pattern(50_000)


async def test_a_dial_does_not_wait_for_other_addresses() -> None:
    """py-libp2p waits 250 ms after each dial, even of the only address there is."""
    async with hosts(2) as (a, b):
        best = 10.0
        for _ in range(5):
            begun = trio.current_time()
            connection = await b.dial(address_of(a))
            best = min(best, trio.current_time() - begun)
            connection.close()
        assert best < 0.2


async def test_a_peer_that_cannot_be_reached_may_be_tried_again_at_once() -> None:
    """C2: py-libp2p refuses to dial a peer for 60 s after a dial that failed."""
    async with hosts(2) as (a, b):
        wrong = maddr.parse(f"/ip4/127.0.0.1/tcp/1/p2p/{a.peer_id}")
        with pytest.raises(LinkError):
            await b.dial(wrong)
        assert (await b.dial(address_of(a))).remote_peer == a.peer_id


async def test_two_hundred_and_fifty_seven_streams_are_open_at_once() -> None:
    """py-libp2p's 257th stream of a connection waits for ever, without a word."""
    async with hosts(2, limits=None) as (a, b):
        connection = await b.dial(address_of(a))
        streams = [await connection.open_stream(ECHO) for _ in range(200)]
        with trio.fail_after(10):
            assert await exchange(streams[-1], b"x") == b"x"
        refused = 0
        for _ in range(100):
            try:
                await connection.open_stream(ECHO)
            except LinkError:
                refused += 1
        assert refused > 0, "a limit is said, not waited for"


def test_ciphers_agree_with_and_without_the_newer_interface() -> None:
    key = secrets.token_bytes(32)
    new, old, receive = SendCipher(key), SendCipher(key), ReceiveCipher(key)
    old._into = None
    for size in (0, 1, 1000, noise.MAX_PLAINTEXT_BYTES):
        plain = secrets.token_bytes(size)
        out = memoryview(bytearray(size + noise.OVERHEAD)), memoryview(bytearray(size + noise.OVERHEAD))
        assert (
            new.seal(memoryview(plain), out[0])
            == old.seal(memoryview(plain), out[1])
            == size + noise.OVERHEAD
        )
        assert out[0] == out[1]
        assert receive.open(out[0][2:]) == plain
    spoiled = bytearray(out[0][2:])
    spoiled[5] ^= 1
    with pytest.raises(WireError) as caught:
        receive.open(memoryview(spoiled))
    assert caught.value.code == "tampered"


def test_the_numbers_of_the_wire_format() -> None:
    """Interoperability hangs on these."""
    assert noise.MAX_PLAINTEXT_BYTES == 65519
    assert yamux.INITIAL_WINDOW_BYTES == 262144
    assert yamux.HEADER.size == 12


def test_the_narrow_interface_brings_in_no_engine() -> None:
    code = "import sys, kvasir_peer.net.node; print([m for m in ('torch', 'onnxruntime', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() in ("[]", "['numpy']"), done.stdout
