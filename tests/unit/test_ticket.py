import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_peer import identity, ticket
from kvasir_peer.errors import TicketError

RELAY = identity.Identity.from_private_key(b"r" * 32).peer_id
BRIDGE = identity.Identity.from_private_key(b"b" * 32).peer_id
NOW = 1_800_000_000


def make(relays=(f"/ip4/192.0.2.7/tcp/4001/p2p/{RELAY}",), **changes):
    ready = ticket.Ticket.issue(relays=relays, bridge=BRIDGE, swarm="our swarm", lifetime=3600, now=NOW)
    return dataclasses.replace(ready, **changes)


def test_round_trip_and_size():
    one = make()
    text = one.encode()
    assert text.startswith("kvasir1") and text == text.lower() and len(text) < 230
    assert ticket.parse(text) == one
    assert ticket.parse(text.upper()) == one
    assert ticket.parse(f"  {text[:40]}\n{text[40:]}\n") == one
    assert one.secret.hex() not in repr(one)


@given(
    relays=st.lists(
        st.sampled_from(
            [
                f"/ip4/192.0.2.7/tcp/4001/p2p/{RELAY}",
                f"/ip6/2001:db8::7/tcp/1/p2p/{RELAY}",
                f"/dns4/relay.example.org/tcp/443/wss/p2p/{BRIDGE}",
                f"/dns/a.example/tcp/80/ws/p2p/{RELAY}",
                f"/dns6/a.example/tcp/443/tls/ws/p2p/{RELAY}",
            ]
        ),
        min_size=1,
        max_size=4,
    ),
    swarm=st.text(min_size=1, max_size=10).filter(str.isprintable),
    roles=st.sets(st.sampled_from(ticket.ROLES), min_size=1),
    expires=st.integers(0, (1 << 40) - 1),
    secret=st.binary(min_size=16, max_size=16),
)
@settings(deadline=None)
def test_every_ticket_comes_back(relays, swarm, roles, expires, secret):
    one = ticket.Ticket(tuple(relays), BRIDGE, swarm, frozenset(roles), expires, secret)
    assert ticket.parse(one.encode()) == one


def test_every_single_wrong_character_is_refused():
    text = make().encode()
    for place in range(len(text)):
        for character in "qpzry9x8gf2tvdw0s3jn54khce6mua7lbQ":
            if character == text[place]:
                continue
            wrong = text[:place] + character + text[place + 1 :]
            with pytest.raises(TicketError):
                ticket.parse(wrong)


def test_every_transposition_is_refused():
    text = make().encode()
    for place in range(len(text) - 1):
        swapped = text[:place] + text[place + 1] + text[place] + text[place + 2 :]
        if swapped != text:
            with pytest.raises(TicketError):
                ticket.parse(swapped)
    for distance in (2, 3, 17):
        for place in range(7, len(text) - distance):
            letters = list(text)
            letters[place], letters[place + distance] = letters[place + distance], letters[place]
            if "".join(letters) != text:
                with pytest.raises(TicketError):
                    ticket.parse("".join(letters))


def test_every_lost_and_doubled_character_is_refused():
    text = make().encode()
    for place in range(len(text)):
        with pytest.raises(TicketError):
            ticket.parse(text[:place] + text[place + 1 :])
        with pytest.raises(TicketError):
            ticket.parse(text[:place] + text[place] + text[place:])


def test_errors_name_what_is_wrong():
    text = make().encode()
    other = "q" if text[30] != "q" else "p"
    for wrong, says in (
        ("", "empty"),
        ("   \n", "empty"),
        ("hello", "begins with kvasir1"),
        ("kvasir1" + "q" * 2000, "at most 1000"),
        (text[:30] + other + text[31:], rf"character 31, '{other}', is wrong"),
        (text[:30] + "b" + text[31:], r"character 31, 'b', occurs in no ticket"),
        (text[:60], "copy it again, whole"),
        (text + text, "copy it again|occurs in no ticket"),
    ):
        with pytest.raises(TicketError, match=says) as caught:
            ticket.parse(wrong)
        assert "\n" not in str(caught.value)
        assert caught.value.exit_status == 2


def test_longest_ticket_keeps_the_guarantee():
    name = "/dns/" + ".".join(["a" * 40] * 3) + "/tcp/443/wss"
    one = make(relays=(f"{name}/p2p/{RELAY}",) * 3)
    assert len(one.encode()) <= ticket.MAX_CHARACTERS
    assert ticket.parse(one.encode()) == one
    with pytest.raises(TicketError, match="too long"):
        make(relays=(f"{name}/p2p/{RELAY}",) * 4).encode()


def test_validity_and_roles():
    one = make(roles=frozenset({"stage"}))
    one.check(now=NOW + 3599, role="stage")
    with pytest.raises(TicketError, match=r"expired on 2027-01-15 09:00 UTC"):
        one.check(now=NOW + 3600, role="stage")
    with pytest.raises(TicketError, match="for stage, not for volunteer"):
        one.check(now=NOW, role="volunteer")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"relays": ()}, "1 to 4 relays"),
        ({"relays": ("/ip4/192.0.2.7/tcp/4001",)}, "does not end in /p2p/"),
        ({"relays": (f"/ip4/192.0.2.7/udp/4001/p2p/{RELAY}",)}, "form"),
        ({"relays": (f"/ip4/1.2.3/tcp/4001/p2p/{RELAY}",)}, "no ip4 address"),
        ({"relays": (f"/ip4/::1/tcp/4001/p2p/{RELAY}",)}, "no ip4 address"),
        ({"relays": (f"/ip4/192.0.2.7/tcp/70000/p2p/{RELAY}",)}, "port"),
        ({"relays": (f"/onion3/x/tcp/1/p2p/{RELAY}",)}, "onion3"),
        ({"relays": (f"/dns/-bad/tcp/1/p2p/{RELAY}",)}, "no host name"),
        ({"relays": (f"/ip4/1.2.3.4/tcp/1/quic/p2p/{RELAY}",)}, "quic"),
        ({"relays": ("/ip4/1.2.3.4/tcp/1/p2p/12D3KooWx",)}, "no peer id"),
        ({"bridge": "12D3KooW"}, "not the peer id"),
        ({"swarm": ""}, "name"),
        ({"swarm": "é" * 21}, "name"),
        ({"swarm": "a\nb"}, "name"),
        ({"roles": frozenset()}, "none"),
        ({"roles": frozenset({"king"})}, "king"),
        ({"expires": -1}, "Unix time"),
        ({"secret": b"short"}, "16 bytes"),
    ],
)
def test_wrong_fields_are_refused(changes, says):
    with pytest.raises(TicketError, match=says):
        make(**changes)


def test_well_checked_nonsense_is_refused():
    whole = ticket._decode_text(make().encode())
    for raw, says in (
        (b"", "too early"),
        (bytes([2]) + whole[1:], "version 2"),
        (whole[:1] + b"\xff" + whole[2:], "role that this program does not know"),
        (whole[:-1], "too early"),
        (whole + b"\0", "left over"),
    ):
        with pytest.raises(TicketError, match=says):
            ticket.parse(ticket._encode_text(raw))


@given(st.binary(max_size=300))
@settings(deadline=None)
def test_no_bytes_raise_anything_but_a_ticket_error(raw):
    try:
        ticket.parse(ticket._encode_text(raw))
    except TicketError:
        return
    assert raw[0] == 1


def test_a_credential_is_good_for_its_roles_until_its_end():
    own = b"o" * 16

    def shown(*, roles=frozenset({"volunteer"}), expires=NOW + 3600, changes=None):
        one = make(roles=roles, expires=expires, secret=ticket.secret_for(own, roles, expires))
        return ticket.parse(dataclasses.replace(one, **(changes or {})).encode()).credential()

    assert ticket.admits(own, shown(), role="volunteer", now=NOW)
    assert not ticket.admits(own, shown(), role="stage", now=NOW)
    assert not ticket.admits(own, shown(), role="volunteer", now=NOW + 3600)
    assert not ticket.admits(b"x" * 16, shown(), role="volunteer", now=NOW)
    # Whoever changes what a ticket allows has no secret for it.
    wider = shown(changes={"roles": frozenset(ticket.ROLES)})
    longer = shown(changes={"expires": NOW + 10**6})
    assert not ticket.admits(own, wider, role="stage", now=NOW)
    assert not ticket.admits(own, longer, role="volunteer", now=NOW)
    for text in ("", "zz", "00", shown()[2:], shown() + "00", shown()[12:]):
        assert not ticket.admits(own, text, role="volunteer", now=NOW)
    # The operator's own secret, which no ticket holds.
    assert ticket.admits(own, own.hex(), role="coordinator", now=NOW)
