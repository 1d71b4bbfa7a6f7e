"""Who may use the relay: lists, invites, private addresses, proxies."""

from __future__ import annotations

import base64
import contextlib
import json
import re
import secrets
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio
from helpers_relay import (
    PATIENCE,
    Peer,
    Refused,
    joined,
    joined_circuit,
    make_config,
    receive,
    running_peers,
    running_relay,
    until,
)
from hypothesis import given
from hypothesis import strategies as st

from kvasir_peer.errors import LinkError, RefusedError, SettingsError, WireError
from kvasir_peer.identity import Identity
from kvasir_peer.net import delimited, multistream
from kvasir_peer.net.connection import Connection
from kvasir_peer.net.duplex import receive_exactly
from kvasir_peer.net.node import Node
from kvasir_relay import invites
from kvasir_relay.access import Gatekeeper
from kvasir_relay.addresses import advertised, is_public
from kvasir_relay.config import Access
from kvasir_relay.limits import parse_address
from kvasir_relay.listeners import Listener
from kvasir_relay.proxies import forwarded_address
from kvasir_relay.server import Relay

RELAY, ISSUER, STRANGER = (Identity.generate() for _ in range(3))
PUBLIC, PRIVATE, LOOPBACK = (parse_address(text) for text in ("8.8.8.8", "192.168.1.9", "127.0.0.1"))


async def denied(peer: Peer, reason: str, other: Peer) -> None:
    """Neither a reservation nor a circuit is to be had."""
    for ask in (peer.reserve, lambda: peer.connect(other.peer_id)):
        with pytest.raises(Refused) as refused:
            await ask()
        assert (refused.value.status, refused.value.reason) == (202, reason)


async def closed(connection: Connection | None) -> None:
    assert connection is not None
    with trio.fail_after(PATIENCE):
        await connection.closed.wait()


async def show(peer: Peer, text: str) -> str:
    """Show an invite; the relay's answer."""
    assert peer.connection is not None
    with trio.fail_after(PATIENCE):
        stream = await peer.connection.open_stream(invites.INVITE_PROTOCOL)
        await stream.send_all(multistream.encode_varint(len(text)) + text.encode())
        length = await multistream.read_varint(stream, 100)
        answer = (await receive_exactly(stream, length)).decode()
    stream.close()
    return answer


# --- lists -------------------------------------------------------------------------------------------------------


async def test_only_listed_peers_may_use_a_relay_for_listed_ones() -> None:
    async with running_peers(3) as (a, b, stranger):
        allowed = [a.peer_id, b.peer_id]
        async with running_relay(access__mode="listed", access__allow_peers=allowed) as relay:
            for peer in (a, b, stranger):
                await peer.join(relay)
            await a.reserve()
            await b.reserve()
            await denied(stranger, "not_listed", a)
            near, far = await joined_circuit(a, b)
            await near.send_all(b"x")
            assert await receive(far, 1) == b"x"


async def test_a_listed_network_is_enough() -> None:
    networks = {"access__mode": "listed", "access__allow_networks": ["127.0.0.0/8"]}
    async with running_relay(**networks) as relay, joined(relay, 2) as (a, b):
        await joined_circuit(a, b)


async def test_denied_peers_and_networks_cannot_even_connect() -> None:
    async with running_peers(2) as (bad, good):
        async with running_relay(access__deny_peers=[bad.peer_id]) as relay:
            await good.join(relay)
            await good.reserve()
            with pytest.raises(LinkError):
                await closed(await bad.join(relay))
                raise LinkError("closed by the relay at once")
            assert relay.counters.refusals["connection", "denied_peer"] == 1
        async with running_relay(access__deny_networks=["127.0.0.0/30"]) as relay:
            with pytest.raises(LinkError):
                await good.join(relay)
            assert relay.counters.refusals["connection", "denied_network"] == 1


async def test_a_peer_that_is_denied_by_a_reload_loses_what_it_has() -> None:
    async with running_relay() as relay, joined(relay, 3) as (a, b, c):
        near, far = await joined_circuit(a, b)
        other, other_far = await joined_circuit(c, b)
        config = make_config(listen=list(relay.config.listen), access__deny_peers=[a.peer_id])
        relay.reload(config, frozenset())
        await closed(a.connection)
        with pytest.raises(LinkError), trio.fail_after(PATIENCE):
            await far.receive_some()
        await other.send_all(b"x")
        assert await receive(other_far, 1) == b"x"
        assert near.closed


async def test_a_reload_to_listed_lets_strangers_go_and_keeps_the_listed() -> None:
    async with running_relay() as relay, joined(relay, 2) as (a, b):
        config = make_config(
            listen=list(relay.config.listen), access__mode="listed", access__allow_peers=[a.peer_id]
        )
        relay.reload(config, frozenset())
        await closed(b.connection)
        await a.reserve()


# --- private addresses -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "public", "refused"),
    [("auto", True, True), ("auto", False, False), ("allow", True, False), ("refuse", False, True)],
)
def test_private_addresses_are_refused_on_a_public_relay(rule: str, public: bool, refused: bool) -> None:
    keeper = Gatekeeper(Access(private_peers=rule), public=public)
    for address in (PRIVATE, LOOPBACK, parse_address("fd00::1"), parse_address("169.254.1.1")):
        denial = keeper.use(address, STRANGER.peer_id, None, 0)
        assert (denial is not None and denial.reason == "private_address") == refused
    assert keeper.use(PUBLIC, STRANGER.peer_id, None, 0) is None
    assert keeper.connect(LOOPBACK, STRANGER.peer_id) is None


def test_private_peers_that_are_listed_are_welcome() -> None:
    networks = make_config(access__allow_networks=["192.168.0.0/16"]).access.allow_networks
    access = Access(private_peers="refuse", allow_networks=networks)
    keeper = Gatekeeper(access, public=True)
    assert keeper.use(PRIVATE, STRANGER.peer_id, None, 0) is None
    assert keeper.use(LOOPBACK, STRANGER.peer_id, None, 0) is not None


async def test_a_relay_that_announces_a_public_address_serves_nobody_from_loopback() -> None:
    """What an operator sees who forgot trusted_proxies: a refusal with the reason, not an open relay."""
    async with (
        running_relay(announce=["/dns4/relay.example.org/tcp/443/wss"]) as relay,
        running_peers(1) as (peer,),
    ):
        port = relay._listeners[0].port
        await peer.join(relay, f"/ip4/127.0.0.1/tcp/{port}/p2p/{relay.identity.peer_id}")
        await denied(peer, "private_address", peer)


def bound(host: str, *, websocket: bool = False) -> Listener:
    return Listener(socket.socket(), host, 4001, frozenset({websocket}))


def test_private_addresses_are_not_advertised_beside_public_ones() -> None:
    machine = ["127.0.0.1", "10.0.0.7", "8.8.4.4", "::1", "2001:4860::1"]
    everywhere = [bound("0.0.0.0"), bound("::", websocket=True)]
    assert advertised((), everywhere, machine) == ["/ip4/8.8.4.4/tcp/4001", "/ip6/2001:4860::1/tcp/4001/ws"]
    assert advertised((), everywhere, ["127.0.0.1", "10.0.0.7"]) == ["/ip4/10.0.0.7/tcp/4001"]
    assert advertised((), everywhere, ["127.0.0.1"]) == ["/ip4/127.0.0.1/tcp/4001"]
    assert advertised(["/dns4/r.example/tcp/443/wss"], everywhere, machine) == ["/dns4/r.example/tcp/443/wss"]
    assert advertised((), [bound("127.0.0.1")], machine) == ["/ip4/127.0.0.1/tcp/4001"]
    assert advertised((), [bound("127.0.0.1"), bound("8.8.4.4")], machine) == ["/ip4/8.8.4.4/tcp/4001"]
    assert is_public(["/ip4/8.8.4.4/tcp/4001"])
    assert is_public(["/ip4/10.0.0.7/tcp/1", "/dns4/r.example/tcp/443/wss"])
    assert not is_public(["/ip4/10.0.0.7/tcp/4001", "/ip4/127.0.0.1/tcp/1/ws"])


# --- proxies -----------------------------------------------------------------------------------------------------


TRUSTED = make_config(trusted_proxies=["127.0.0.0/8", "10.0.0.0/8"]).trusted_proxies


@pytest.mark.parametrize(
    ("caller", "header", "expected"),
    [
        ("127.0.0.1", "203.0.113.5", "203.0.113.5"),
        ("127.0.0.1", "1.1.1.1, 203.0.113.5", "203.0.113.5"),  # the left one is invented
        ("127.0.0.1", "1.1.1.1, 203.0.113.5, 10.0.0.2", "203.0.113.5"),  # through two proxies
        ("127.0.0.1", "", "127.0.0.1"),
        ("127.0.0.1", "10.0.0.9", "10.0.0.9"),
        ("127.0.0.1", "2001:db8::1", "2001:db8::1"),
        ("203.0.113.9", "1.1.1.1", "203.0.113.9"),  # nobody's proxy
    ],
)
def test_only_trusted_proxies_are_believed(caller: str, header: str, expected: str) -> None:
    assert forwarded_address(parse_address(caller), header, TRUSTED) == parse_address(expected)


def test_a_proxy_that_names_no_address_is_an_error() -> None:
    with pytest.raises(WireError):
        forwarded_address(parse_address("127.0.0.1"), "unknown", TRUSTED)


# --- invites -----------------------------------------------------------------------------------------------------


def test_an_invite_says_what_was_signed() -> None:
    invite, text = invites.create(RELAY, RELAY.peer_id, not_after=2_000_000_000, peers=3)
    assert invites.read(text, relay=RELAY.peer_id, issuers=[RELAY.peer_id]) == invite
    assert invite.peers == 3
    assert len(text) < invites.MAX_INVITE_BYTES


def test_an_invite_is_for_one_relay_and_from_a_known_issuer() -> None:
    _, text = invites.create(ISSUER, RELAY.peer_id, not_after=2_000_000_000)
    for relay, issuers, reason in (
        (STRANGER, [ISSUER], "invite_for_another_relay"),
        (RELAY, [RELAY], "invite_from_unknown_issuer"),
    ):
        with pytest.raises(RefusedError, match=reason):
            invites.read(text, relay=relay.peer_id, issuers=[issuer.peer_id for issuer in issuers])
    assert invites.read(text, relay=RELAY.peer_id, issuers=[ISSUER.peer_id]).issuer == ISSUER.peer_id


@given(st.integers(0, 400), st.integers(1, 255))
def test_a_changed_invite_is_refused(position: int, change: int) -> None:
    _, text = invites.create(RELAY, RELAY.peer_id, not_after=2_000_000_000)
    raw = bytearray(base64.urlsafe_b64decode(text.removeprefix(invites.PREFIX) + "=="))
    raw[position % len(raw)] ^= change
    changed = invites.PREFIX + base64.urlsafe_b64encode(raw).decode().rstrip("=")
    with pytest.raises(RefusedError):
        invites.read(changed, relay=RELAY.peer_id, issuers=[RELAY.peer_id])


NO_INVITES = st.one_of(
    st.text(max_size=200),
    st.binary(max_size=200).map(lambda raw: invites.PREFIX + base64.urlsafe_b64encode(raw).decode()),
)


@given(NO_INVITES)
def test_what_is_no_invite_is_refused(text: str) -> None:
    with pytest.raises(RefusedError):
        invites.read(text, relay=RELAY.peer_id, issuers=[RELAY.peer_id])


@pytest.mark.parametrize(
    "fields", [{"not_after": "never"}, {"peers": True}, {"relay": 5}, {"more": 1}, {"id": "x"}]
)
def test_signed_nonsense_is_refused(fields: dict[str, object]) -> None:
    payload = {
        "id": "0" * 16,
        "relay": RELAY.peer_id,
        "issuer": RELAY.peer_id,
        "not_after": 9,
        "peer": "",
        "peers": 0,
    }
    body = json.dumps({**payload, **fields}).encode()
    raw = RELAY.sign(invites.DOMAIN + body) + body
    with pytest.raises(RefusedError, match=r"not_an_invite|invite_for_another_relay"):
        text = invites.PREFIX + base64.urlsafe_b64encode(raw).decode()
        invites.read(text, relay=RELAY.peer_id, issuers=[RELAY.peer_id])


def invite_for(relay: Relay, seconds: float = 60, **what: Any) -> tuple[invites.Invite, str]:
    return invites.create(
        relay.identity, relay.identity.peer_id, not_after=int(time.time() + seconds), **what
    )


async def test_an_invite_opens_the_relay_and_its_revocation_closes_live_connections() -> None:
    async with running_relay(access__mode="invited") as relay, running_peers(4) as peers:
        a, b, c, stranger = peers
        for peer in peers:
            await peer.join(relay)
        invite, text = invite_for(relay)
        _, other_text = invite_for(relay)
        assert await show(a, text) == "ok"
        assert await show(b, other_text) == "ok"
        assert await show(c, other_text) == "ok"
        for peer in (a, b, c):
            await peer.reserve()
        await denied(stranger, "no_invite", a)
        near, far = await joined_circuit(a, b)
        kept, kept_far = await joined_circuit(b, c)
        relay.revoke(frozenset({invite.id}))
        await closed(a.connection)
        with pytest.raises(LinkError), trio.fail_after(PATIENCE):
            await far.receive_some()
        assert near.closed
        await kept.send_all(b"x")
        assert await receive(kept_far, 1) == b"x"
        await a.join(relay)
        assert await show(a, text) == "invite_revoked"
        await denied(a, "no_invite", b)


async def test_an_invite_that_ends_closes_what_it_opened() -> None:
    async with running_relay(access__mode="invited") as relay, running_peers(1) as (peer,):
        await peer.join(relay)
        _, text = invite_for(relay, 2.9)
        assert await show(peer, text) == "ok"
        await peer.reserve()
        await closed(peer.connection)
        await peer.join(relay)
        assert await show(peer, text) == "invite_ended"


async def test_invites_bound_to_a_peer_or_a_number_of_peers() -> None:
    async with running_relay(access__mode="invited") as relay, running_peers(3) as peers:
        a, b, c = peers
        for peer in peers:
            await peer.join(relay)
        _, text = invite_for(relay, peer=a.peer_id)
        assert await show(b, text) == "invite_for_another_peer"
        assert await show(a, text) == "ok"
        _, text = invite_for(relay, peers=1)
        assert await show(b, text) == "ok"
        assert await show(b, text) == "ok"
        assert await show(c, text) == "invite_used_up"
        assert b.connection is not None
        b.connection.close()
        await until(lambda: len(relay.members()) == 2)
        assert await show(c, text) == "ok"
        assert await show(c, "nonsense") == "not_an_invite"
        assert relay.counters.refusals["invite", "invite_used_up"] == 1


async def test_invites_cannot_be_tried_without_end() -> None:
    limits = {"access__mode": "invited", "limits__requests_per_peer": 3}
    async with running_relay(**limits) as relay, running_peers(1) as (peer,):
        await peer.join(relay)
        answers = [await show(peer, "guess") for _ in range(5)]
    assert answers == ["not_an_invite"] * 3 + ["requests_per_peer"] * 2


async def test_an_oversize_invite_ends_its_stream_alone() -> None:
    async with running_relay() as relay, joined(relay, 1) as (peer,):
        assert peer.connection is not None
        stream = await peer.connection.open_stream(invites.INVITE_PROTOCOL)
        await stream.send_all(multistream.encode_varint(1 << 40))
        with pytest.raises(LinkError), trio.fail_after(PATIENCE):
            await stream.receive_some()
        await peer.reserve()


def test_the_list_of_revoked_invites(tmp_path: Path) -> None:
    assert invites.read_revoked(tmp_path) == frozenset()
    assert invites.revoke(tmp_path, "00112233445566AA")
    assert not invites.revoke(tmp_path, "00112233445566aa")
    assert invites.read_revoked(tmp_path) == {"00112233445566aa"}
    with pytest.raises(SettingsError):
        invites.revoke(tmp_path, "not an id")
    (tmp_path / invites.REVOKED_FILE).write_text("damaged")
    with pytest.raises(SettingsError):
        invites.read_revoked(tmp_path)


async def test_what_identify_says() -> None:
    from kvasir_peer.net import upstream

    async with running_relay() as relay, joined(relay, 1) as (peer,):
        assert peer.connection is not None
        stream = await peer.connection.open_stream("/ipfs/id/1.0.0")
        with trio.fail_after(PATIENCE):
            message = await delimited.read_message(stream, upstream.Identify)
        assert "/libp2p/circuit/relay/0.2.0/hop" in message.protocols
        assert (
            upstream.PeerID.from_pubkey(upstream.deserialize_public_key(message.public_key)).to_base58()
            == relay.identity.peer_id
        )
        observed = str(upstream.Multiaddr(message.observed_addr))
        assert observed.startswith("/ip4/127.0.0.1/tcp/")
        assert [str(upstream.Multiaddr(raw)) for raw in message.listen_addrs] == relay.addresses


async def test_ping() -> None:
    async with running_relay() as relay, joined(relay, 1) as (peer,):
        assert peer.connection is not None
        stream = await peer.connection.open_stream("/ipfs/ping/1.0.0")
        for number in range(3):
            await stream.send_all(bytes([number]) * 32)
            assert await receive(stream, 32) == bytes([number]) * 32
        stream.close()
        await until(lambda: not relay.members()[0].connection.mux.streams)


async def test_our_own_peers_show_their_invites_by_themselves() -> None:
    async with running_relay(access__mode="invited") as relay:
        address = relay.full_addresses[0]
        _, good = invites.create(relay.identity, relay.identity.peer_id, not_after=2_000_000_000)
        _, foreign = invites.create(ISSUER, STRANGER.peer_id, not_after=2_000_000_000)
        async with Node.open(secrets.token_bytes(32), relays=[address], invites=[foreign]) as without:
            with pytest.raises(LinkError, match=r"no place .*\(no_invite\); give one with --relay-invite$"):
                await without.relays_ready(2)
        async with Node.open(secrets.token_bytes(32), relays=[address], invites=[foreign, good]) as invited:
            await invited.relays_ready(PATIENCE)
            assert invited.addresses()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"access__deny_peers": "OWN"}, "denied_peer"),
        ({"limits__reservations": 1}, r"refuses reservations \(reservations\)"),
        ({"access__private_peers": "refuse"}, r"\(private_address\); it serves nobody from its own network"),
    ],
    ids=["peer", "reservations", "private"],
)
async def test_owners_read_which_limit_or_rule_it_was(settings: dict[str, Any], words: str) -> None:
    identity = Identity.generate()
    values = {name: [identity.peer_id] if value == "OWN" else value for name, value in settings.items()}
    async with running_relay(**values) as relay, joined_if_possible(relay):
        said: list[str] = []
        address = relay.full_addresses[0]
        async with Node.open(identity.private_key, relays=[address], direct=False) as node:
            node.on_relays(said.append)
            await until(lambda: node.statistics().relays[0].failures)
            assert node.addresses() == []
            if "denied" in words:  # it is let in no further than the door, where nothing can be said
                assert node.relay_words().startswith("not reachable: ")
                return
            assert re.search(words, node.statistics().relays[0].last_error)
            assert re.search(words, said[-1])
            assert "\n" not in said[-1]


@contextlib.asynccontextmanager
async def joined_if_possible(relay: Relay) -> AsyncIterator[None]:
    """Somebody who holds a place, so that it is taken."""
    async with running_peers(1) as (other,):
        await other.join(relay)
        with contextlib.suppress(Refused):
            await other.reserve()
        yield
