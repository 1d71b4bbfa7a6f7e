"""Settings: file, environment and flags say the same things; what is wrong is said in one line."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from helpers_relay import ROOT, command, environment, make_config

from kvasir_peer.errors import SettingsError
from kvasir_peer.identity import Identity
from kvasir_relay import config as settings
from kvasir_relay.config import KEYS, Config, load

PEER = Identity.generate().peer_id

FILE = """
listen = ["/ip4/127.0.0.1/tcp/0", "/ip6/::1/tcp/4002/ws"]
profile = "carry"
drain_time = "2min"

[limits]
circuits = 7
circuit_bytes = "1.5 GiB"
reservation_time = "30m"

[bandwidth]
total = "10 MB"

[access]
deny_networks = ["203.0.113.0/24", "2001:db8::1"]

[log]
format = "json"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "relay.toml"
    path.write_text(FILE)
    return path


def test_a_file_is_read_with_its_units(file: Path) -> None:
    config = load({}, {}, file)
    assert config.listen == ("/ip4/127.0.0.1/tcp/0", "/ip6/::1/tcp/4002/ws")
    assert config.drain_time == 120
    assert config.limits.circuits == 7
    assert config.limits.circuit_bytes == 3 * 2**29
    assert config.limits.reservation_time == 1800
    assert config.bandwidth.total == 10_000_000
    assert [str(network) for network in config.access.deny_networks] == ["203.0.113.0/24", "2001:db8::1/128"]
    assert config.log.format == "json"
    assert config.limits.reservations == Config().limits.reservations


def test_flags_win_over_the_environment_and_it_over_the_file(file: Path) -> None:
    environ = {"KVASIR_RELAY_LIMITS_CIRCUITS": "8", "KVASIR_RELAY_DRAIN_TIME": "1s", "OTHER": "x"}
    config = load({"limits.circuits": "9"}, environ, file)
    assert (config.limits.circuits, config.drain_time) == (9, 1)
    assert load({}, environ, file).limits.circuits == 8
    listen = {"KVASIR_RELAY_LISTEN": "/ip4/127.0.0.1/tcp/1, /ip4/127.0.0.1/tcp/2"}
    assert len(load({}, listen, file).listen) == 2


def test_the_file_in_the_home_folder_is_taken_by_itself(file: Path) -> None:
    assert load({"home": str(file.parent)}, {}).limits.circuits == 7
    assert load({}, {"KVASIR_RELAY_HOME": str(file.parent)}).limits.circuits == 7


def test_profiles_set_what_nobody_has_set() -> None:
    introduce = make_config(profile="introduce")
    assert (introduce.limits.circuit_time, introduce.limits.circuit_bytes) == (120, 128 * 1024)
    assert make_config(profile="introduce", limits__circuit_bytes="1 MB").limits.circuit_bytes == 10**6
    assert make_config().limits.circuit_bytes == 0


def test_what_describe_says_is_what_load_reads(tmp_path: Path) -> None:
    config = make_config(
        listen=["/ip4/127.0.0.1/tcp/7/ws"],
        http="127.0.0.1:9641",
        access__allow_peers=[PEER],
        access__mode="invited",
        trusted_proxies=["10.0.0.0/8"],
        bandwidth__burst_time="0.5s",
        home=str(tmp_path),
        announce=["/dns4/relay.example.org/tcp/443/wss"],
    )
    path = tmp_path / "again.toml"
    path.write_text("\n".join(settings.describe(config)))  # dotted keys are TOML too
    assert load({}, {}, path) == config


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("listen = 5", "listen"),
        ('listen = ["/ip4/0.0.0.0/udp/4001"]', "/ip4/0.0.0.0/udp/4001"),
        ('listen = ["/ip4/0.0.0.0/tcp/99999"]', "99999"),
        ('listen = ["/ip6/127.0.0.1/tcp/1"]', "/ip6/127.0.0.1/tcp/1"),
        ("listen = []", "listen is empty"),
        ('listen = ["/ip4/0.0.0.0/tcp/1", "/ip4/0.0.0.0/tcp/1"]', "twice"),
        ('announce = ["relay.example.org:443"]', "relay.example.org:443"),
        ("[limits]\ncircuits = -1", "limits.circuits"),
        ("[limits]\ncircuits = true", "limits.circuits"),
        ('[limits]\ncircuit_bytes = "10 parsecs"', "10 parsecs"),
        ('[limits]\nreservation_time = "1s"', "too short"),
        ("[limits]\nprefix_v4 = 33", "prefix_v4"),
        ("[limits]\ncircuit_per_peer = 3", "did you mean 'limits.circuits_per_peer'"),
        ("limitz = 3", "limitz"),
        ("limits = 3", "limits"),
        ('[access]\nmode = "friends"', "everyone, listed, invited"),
        ('[access]\nmode = "listed"', "nobody could use it"),
        ('[access]\nallow_peers = ["12D3KooWnope"]', "12D3KooWnope"),
        ('[access]\ndeny_networks = ["300.1.1.1/8"]', "300.1.1.1/8"),
        ('http = "0.0.0.0:9641"', "loopback"),
        ('http = "localhost"', "http"),
        ("[bandwidth]\nburst_time = 0", "burst_time"),
        ("not toml at all", "not TOML"),
        ('profile = "fast"', "carry, introduce"),
    ],
)
def test_what_is_wrong_in_a_file_is_said_in_one_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "relay.toml"
    path.write_text(text)
    with pytest.raises(SettingsError) as error:
        load({}, {}, path)
    assert words in str(error.value)
    assert "\n" not in str(error.value)
    assert error.value.exit_status == 2


def test_what_is_wrong_elsewhere_is_said_with_its_place(tmp_path: Path) -> None:
    for flags, environ, words in (
        ({"limits.circuits": "many"}, {}, "--limits.circuits"),
        ({}, {"KVASIR_RELAY_LIMITS_CIRCUITS": "many"}, "KVASIR_RELAY_LIMITS_CIRCUITS"),
        ({}, {"KVASIR_RELAY_LIMITZ": "1"}, "KVASIR_RELAY_LIMITZ"),
    ):
        with pytest.raises(SettingsError, match=words):
            load(flags, environ)
    with pytest.raises(SettingsError, match="there is no configuration file"):
        load({}, {}, tmp_path / "missing.toml")


def test_every_setting_is_documented() -> None:
    text = (ROOT / "docs" / "relay.md").read_text()
    missing = [key.name for key in KEYS.values() if f"`{key.name}`" not in text]
    assert not missing


def test_the_shipped_configuration_is_valid() -> None:
    config = load({}, {}, ROOT / "packaging" / "kvasir-relay.toml")
    assert config.http == ("127.0.0.1", 9641)


# --- the command -------------------------------------------------------------------------------------------------


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        capture_output=True,
        text=True,
        timeout=60,
        env=environment(**environ),
        check=False,
    )


def test_check_config(file: Path) -> None:
    done = run("--check-config", "--config", str(file), "--limits.circuits-per-peer", "5")
    assert done.returncode == 0
    assert "limits.circuits = 7" in done.stdout.splitlines()
    assert "limits.circuits_per_peer = 5" in done.stdout.splitlines()
    assert not done.stderr
    file.write_text("[limits]\ncircuits = 'x'")
    done = run("--check-config", KVASIR_RELAY_CONFIG=str(file))
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "limits.circuits" in done.stderr
    assert not done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--limits.circuitz", "3"], "--limits.circuitz"),
        (["--limits.circuits", "x"], "whole number"),
        (["--listen", "0.0.0.0:4001"], "0.0.0.0:4001"),
        (["invite", "revoke", "nonsense"], "nonsense"),
        (["invite", "create", "--valid-for", "soon"], "soon"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(tmp_path: Path, arguments: list[str], words: str) -> None:
    done = run(*arguments, KVASIR_RELAY_HOME=str(tmp_path))
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert words in done.stderr


def test_a_port_that_is_taken_and_a_damaged_key_are_one_line(tmp_path: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run("--home", str(tmp_path), "--listen", f"/ip4/127.0.0.1/tcp/{port}")
        assert done.returncode == 2
        assert done.stderr == (
            f"kvasir-relay: cannot listen on /ip4/127.0.0.1/tcp/{port}: Address already in use; "
            "choose another port or stop what uses it\n"
        )
        assert not done.stdout
        done = run(
            *("--home", str(tmp_path), "--listen", "/ip4/127.0.0.1/tcp/0", "--http", f"127.0.0.1:{port}")
        )
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    (tmp_path / "identity.key").write_bytes(b"damaged")
    done = run("--home", str(tmp_path), "--listen", "/ip4/127.0.0.1/tcp/0")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "damaged" in done.stderr


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys, kvasir_relay.cli as cli\n"
        "sys.argv = ['kvasir-relay', '--help']\n"
        "try:\n    cli.main()\nexcept SystemExit:\n    pass\n"
        "heavy = {'libp2p', 'trio', 'torch', 'numpy', 'multiaddr', 'prometheus_client', 'psutil'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [*command()[:1], "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "--limits.circuits-per-peer" in done.stdout


def test_invites_are_made_and_revoked_by_the_command(tmp_path: Path) -> None:
    from kvasir_peer.identity import load as load_identity
    from kvasir_relay import invites

    made = run("invite", "create", "--home", str(tmp_path), "--valid-for", "1h", "--peer", PEER)
    assert made.returncode == 0, made.stderr
    relay = load_identity(tmp_path / "identity.key").peer_id
    invite = invites.read(made.stdout.strip(), relay=relay, issuers=[relay])
    assert invite.peer == PEER
    assert invite.id in made.stderr
    assert run("invite", "revoke", invite.id, "--home", str(tmp_path)).stdout == "revoked\n"
    assert invites.read_revoked(tmp_path) == {invite.id}
