import os
import stat
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_peer import identity
from kvasir_peer.errors import SettingsError


def test_peer_id_and_signatures_are_libp2ps():
    from libp2p.crypto.ed25519 import create_new_key_pair
    from libp2p.peer.id import ID

    for seed in (bytes(32), bytes(range(32)), b"\xff" * 32):
        ours = identity.Identity.from_private_key(seed)
        theirs = create_new_key_pair(seed)
        assert ours.peer_id == str(ID.from_pubkey(theirs.public_key))
        # py-libp2p writes the seed alone; the specification wants the public key behind it.
        assert ours.libp2p_private_key() == b"\x08\x01\x12\x40" + seed + theirs.public_key.to_bytes()
        assert len(ours.peer_id) == identity.PEER_ID_CHARACTERS
        message = b"a plan"
        assert identity.verify(ours.peer_id, theirs.private_key.sign(message), message)
        assert theirs.public_key.verify(message, ours.sign(message))


@given(st.binary(min_size=32, max_size=32))
@settings(max_examples=50, deadline=None)
def test_peer_id_holds_the_public_key(key):
    assert identity.public_key_of(identity.peer_id_of(key)) == key


@pytest.mark.parametrize(
    "text",
    [
        "",
        "12D3KooW",
        "0" * 52,
        "1" * 52,
        "z" * 52,
        "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",
        "é" * 52,
    ],
)
def test_what_is_no_peer_id_is_refused(text):
    with pytest.raises(ValueError, match="not the peer id"):
        identity.public_key_of(text)
    assert identity.verify(text, bytes(64), b"") is False


def test_only_the_right_signature_verifies():
    one, other = identity.Identity.generate(), identity.Identity.generate()
    signature = one.sign(b"rows")
    assert len(signature) == identity.SIGNATURE_BYTES
    assert identity.verify(one.peer_id, signature, b"rows")
    assert not identity.verify(one.peer_id, signature, b"row5")
    assert not identity.verify(other.peer_id, signature, b"rows")
    assert not identity.verify(one.peer_id, signature[:-1], b"rows")
    assert not identity.verify(one.peer_id, bytes(64), b"rows")


def test_key_is_made_once_and_is_private(tmp_path):
    path = tmp_path / "home" / identity.KEY_FILE
    first = identity.load_or_create(path)
    assert identity.load_or_create(path) == first
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == [identity.KEY_FILE]
    assert first.private_key.hex() not in repr(first)
    assert str(first.private_key) not in repr(first)


def test_many_at_once_get_the_same_key(tmp_path):
    path = tmp_path / identity.KEY_FILE
    barrier = threading.Barrier(8)
    found = []

    def start():
        barrier.wait()
        found.append(identity.load_or_create(path).peer_id)

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len(set(found)) == 1


def test_bad_key_files_are_refused_with_what_to_do(tmp_path):
    path = tmp_path / identity.KEY_FILE
    first = identity.load_or_create(path)
    path.chmod(0o644)
    with pytest.raises(SettingsError, match="chmod 600"):
        identity.load(path)
    path.chmod(0o600)
    whole = path.read_bytes()
    for damaged in (b"", whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1]), b"\x00" + whole[1:], whole + b"\n"):
        path.write_bytes(damaged)
        with pytest.raises(SettingsError, match="damaged"):
            identity.load_or_create(path)
    path.write_bytes(whole)
    assert identity.load(path) == first
    blocked = tmp_path / "file"
    blocked.write_text("x")
    with pytest.raises(SettingsError, match="cannot create the key"):
        identity.load_or_create(blocked / identity.KEY_FILE)


def test_a_file_system_without_hard_links_is_enough(tmp_path, monkeypatch):
    def no_links(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    path = tmp_path / identity.KEY_FILE
    assert identity.load_or_create(path) == identity.load(path)
