import dataclasses
import stat

import pytest

from kvasir_peer import identity, progress, settings, ticket
from kvasir_peer.errors import SettingsError, TicketError
from kvasir_peer.settings import BridgeSettings, StageSettings

PEER = identity.Identity.from_private_key(b"p" * 32).peer_id
RELAY = f"/ip4/192.0.2.7/tcp/4001/p2p/{PEER}"


def bridge(home, *, environment=None, **flags):
    flags = {"model": "model.gguf", "relays": [RELAY], **flags}
    return settings.load(BridgeSettings, home=home, flags=flags, environment=environment or {})


def stage(home, *, environment=None, **flags):
    return settings.load(StageSettings, home=home, flags=flags, environment=environment or {})


def test_each_source_gives_way_to_the_one_before(tmp_path):
    assert bridge(tmp_path).max_requests == 8
    config = tmp_path / settings.CONFIG_FILE
    config.write_text("max_requests = 2\n")
    assert bridge(tmp_path).max_requests == 2
    config.write_text("max_requests = 2\n[bridge]\nmax_requests = 3\n")
    assert bridge(tmp_path).max_requests == 3
    environment = {"KVASIR_MAX_REQUESTS": "4"}
    assert bridge(tmp_path, environment=environment).max_requests == 4
    environment["KVASIR_BRIDGE_MAX_REQUESTS"] = "5"
    assert bridge(tmp_path, environment=environment).max_requests == 5
    assert bridge(tmp_path, environment=environment, max_requests=6).max_requests == 6
    assert bridge(tmp_path, environment=environment, max_requests=None).max_requests == 5


def test_a_setting_without_a_role_holds_for_all(tmp_path):
    (tmp_path / settings.CONFIG_FILE).write_text('direct = false\n[stage]\nthreads = 3\nmemory = "2GiB"\n')
    assert bridge(tmp_path).direct is False
    found = stage(tmp_path)
    assert (found.direct, found.threads, found.memory) == (False, 3, 2 << 30)


@pytest.mark.parametrize(
    ("name", "given", "value"),
    [
        ("disk", "500M", 500_000_000),
        ("disk", "1.5 GB", 1_500_000_000),
        ("disk", "2gib", 2 << 30),
        ("disk", "auto", 0),
        ("disk", 7_000_000, 7_000_000),
        ("ticket_lifetime", "90", 90.0),
        ("ticket_lifetime", "12h", 43200.0),
        ("ticket_lifetime", 61.5, 61.5),
        ("direct", "off", False),
        ("direct", "YES", True),
        ("listen", "/ip4/0.0.0.0/tcp/0,/ip6/::/tcp/4010", ("/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/4010")),
        ("boundary", "BF16", "bf16"),
        ("port", "0", 0),
        ("relays", f"{RELAY}, {RELAY}", (RELAY,)),
        ("api_keys", ["a" * 16, "b" * 16], ("a" * 16, "b" * 16)),
        ("ticket_roles", "stage", ("stage",)),
    ],
)
def test_values_are_read(tmp_path, name, given, value):
    assert getattr(bridge(tmp_path, **{name: given}), name) == value


@pytest.mark.parametrize(
    ("name", "given", "says"),
    [
        ("port", "80a", r"--port: '80a' is wrong: expected a whole number from 0 to 65535"),
        ("port", 65536, "whole number from 0 to 65535"),
        ("port", True, "whole number"),
        ("port", 1.5, "whole number"),
        ("stages", 65, r"--stages: 65 is wrong: expected a whole number from 0 to 64"),
        ("direct", "maybe", "true or false"),
        ("listen", ["/ip4/0.0.0.0/udp/4010"], r"--listen: .* does not have the form /ip4/HOST/tcp/PORT"),
        ("listen", ["/dns/example.org/tcp/4010"], r"--listen: .* is not to be listened on"),
        ("listen", ["/ip4/0.0.0.0/tcp/443/wss"], r"--listen: .* is not to be listened on"),
        ("boundary", "f8", "one of f16, f32, bf16"),
        ("disk", "many", "a size such as"),
        ("disk", "5", "a size such as"),
        ("ticket_lifetime", "1y", "a time such as"),
        ("ticket_lifetime", 1, "a time such as"),
        ("relays", ["relay.example.org"], r"--relay: .* does not end in /p2p/"),
        ("relays", 5, "addresses of relays"),
        ("model", ["x"], "a GGUF file"),
        ("swarm", "a\tb", "a name"),
        ("ticket_roles", ["king"], "--ticket-role: .* expected roles out of"),
    ],
)
def test_bad_values_are_refused_with_their_place(tmp_path, name, given, says):
    with pytest.raises(SettingsError, match=says) as caught:
        bridge(tmp_path, **{name: given})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("max_request = 2", "no setting 'max_request'; did you mean 'max_requests'"),
        ("[bridge]\nthreads = 2", r"\[bridge\] has no setting 'threads'"),
        ("[brigde]\nport = 1", r"unknown table \[brigde\]; did you mean 'bridge'"),
        ("stage = 3", "no setting 'stage'"),
        ("port = ", "not valid TOML"),
        ("[bridge]\nport = 'x'", r"config.toml: \[bridge\] port: 'x' is wrong"),
    ],
)
def test_bad_configuration_is_refused_with_its_place(tmp_path, content, says):
    (tmp_path / settings.CONFIG_FILE).write_text(content)
    with pytest.raises(SettingsError, match=says):
        bridge(tmp_path)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"model": ""}, "no model"),
        ({"relays": []}, "no relay"),
        ({"host": "0.0.0.0"}, "without a key"),
        ({"host": "example.org"}, "without a key"),
        ({"api_keys": ["short"]}, "at least 16"),
        ({"micro_batch_rows": 300}, "over --batch-rows 256"),
        ({"stages": 1}, "a ring has 2 stages or more"),
    ],
)
def test_settings_that_do_not_fit_together(tmp_path, flags, says):
    with pytest.raises(SettingsError, match=says):
        bridge(tmp_path, **flags)


def test_a_public_bind_with_a_key_and_loopback_without_are_fine(tmp_path):
    assert bridge(tmp_path, host="0.0.0.0", api_keys=["k" * 20]).host == "0.0.0.0"
    for host in ("localhost", "127.0.0.9", "::1", "[::1]"):
        assert bridge(tmp_path, host=host).host == host


def test_secrets_are_not_repeated_in_errors(tmp_path):
    with pytest.raises(SettingsError) as caught:
        stage(tmp_path, secret="0123456789abcdef0123456789abcde")
    assert "0123456789" not in str(caught.value)


def test_every_setting_explains_itself():
    for role in settings.ROLE_SETTINGS.values():
        for setting in settings.options(role):
            kind = setting.metadata["kind"]
            assert setting.metadata["help"].endswith("."), setting.name
            default = setting.default
            assert kind.parse(list(default) if isinstance(default, tuple) else default) == default, (
                setting.name
            )


def test_home(tmp_path, monkeypatch):
    assert settings.home_directory("~/x", environment={"KVASIR_HOME": "/y"}).name == "x"
    assert settings.home_directory(None, environment={"KVASIR_HOME": str(tmp_path)}) == tmp_path
    assert "kvasir-peer" in str(settings.home_directory(None, environment={}))


def test_disk_limit_counts_what_is_held(tmp_path):
    assert bridge(tmp_path, disk="5M").disk_limit() == 5_000_000
    found = bridge(tmp_path / "not" / "there")
    assert found.disk_limit() > 0
    (tmp_path / settings.STORE_FOLDER).mkdir()
    (tmp_path / settings.STORE_FOLDER / "chunk").write_bytes(bytes(1000))
    assert bridge(tmp_path).disk_limit() > 1000


def test_saved_ticket(tmp_path):
    home = tmp_path / "home"
    with pytest.raises(TicketError, match="run kvasir-peer join TICKET"):
        settings.load_ticket(home)
    first = ticket.Ticket.issue(
        relays=[RELAY], bridge=PEER, swarm="s", roles=["stage"], lifetime=100, now=1000
    )
    settings.save_ticket(home, dataclasses.replace(first, swarm="old"))
    settings.save_ticket(home, first)
    assert settings.load_ticket(home) == first
    assert stat.S_IMODE((home / settings.TICKET_FILE).stat().st_mode) == 0o600
    assert [entry.name for entry in home.iterdir()] == [settings.TICKET_FILE]
    assert stage(home).invitation(now=1050) == first
    with pytest.raises(TicketError, match="expired"):
        stage(home).invitation(now=1100)
    with pytest.raises(TicketError, match="not for volunteer"):
        stage(home).invitation(now=1050, role="volunteer")
    (home / settings.TICKET_FILE).write_text("kvasir1qq")
    with pytest.raises(TicketError, match="the saved ticket"):
        settings.load_ticket(home)
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(SettingsError, match="cannot save"):
        settings.save_ticket(blocked / "home", first)


def test_an_invitation_without_a_ticket(tmp_path):
    secret = "00112233445566778899aabbccddeeff"
    found = stage(tmp_path, bridge_peer=PEER, secret=secret, relays=[RELAY]).invitation(now=0)
    assert (found.bridge, found.secret.hex(), found.relays) == (PEER, secret, (RELAY,))
    with pytest.raises(TicketError, match="give all of"):
        stage(tmp_path, bridge_peer=PEER, secret=secret).invitation(now=0)
    given = ticket.Ticket.issue(relays=[RELAY], bridge=PEER, swarm="s", lifetime=100, now=0)
    assert stage(tmp_path, ticket=given.encode()).invitation(now=0) == given


def test_progress_lines():
    one = progress.Progress("fetch", "layers 0 to 9", 41_000_000, 62_300_000, "bytes")
    assert one.line() == "fetch: layers 0 to 9 (41.0 of 62.3 MB)"
    assert (
        progress.Progress("load", "the engine", 2, 5, "layers").line() == "load: the engine (2 of 5 layers)"
    )
    assert progress.Progress("ready").line() == "ready"
    assert progress.Progress.from_json(one.to_json()) == one
    for line in ("", "hello", "[]", "3", '{"step": "ready"}'):
        assert progress.Progress.from_json(line) is None
