"""The command as a person meets it: what it prints, and its exit status."""

import errno
import json
import re
import socket
import subprocess
import sys
import time

import pytest
from helpers_unit import DATA, ROOT, environment, kvasir

from kvasir_peer import cli, identity, running, settings, ticket
from kvasir_peer.errors import KvasirError, LinkError, UsageError

PEER = identity.Identity.from_private_key(b"c" * 32).peer_id
RELAY = f"/ip4/127.0.0.1/tcp/4001/p2p/{PEER}"


def a_ticket(**changes):
    options = {
        "relays": [RELAY],
        "bridge": PEER,
        "swarm": "ours",
        "roles": ["stage"],
        "lifetime": 3600,
    } | changes
    return ticket.Ticket.issue(**options)


def refused(result, says, status=2):
    """The command has refused: one line on standard error, nothing on standard output, no traceback."""
    assert result.returncode == status, result.stderr
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("kvasir-peer: ")
    assert re.search(says, lines[0]), lines[0]


def test_without_arguments_it_shows_what_there_is():
    result = kvasir()
    assert result.returncode == 2
    for name, _, _ in cli.COMMANDS:
        assert re.search(rf"^\W*{name}\b", result.stdout, re.MULTILINE), name


@pytest.mark.parametrize("name", [name for name, _, _ in cli.COMMANDS])
def test_every_command_has_help(name):
    result = kvasir(name, "--help")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert f"kvasir-peer {name}" in result.stdout


@pytest.mark.parametrize("name", [name for name, _, _ in cli.MODEL_COMMANDS])
def test_every_models_command_has_help(name):
    result = kvasir("models", name, "--help")
    assert result.returncode == 0, result.stderr
    assert f"models {name}" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["stge"], "unknown command 'stge': did you mean stage"),
        (["--nope"], "unknown command '--nope'"),
        (["models", "lst"], "unknown command 'lst': did you mean list"),
        (["stage", "--nope"], "Unknown option: --nope"),
        (["id", "extra"], "extra"),
        (["join"], "TICKET"),
        (["stage", "--threads", "many"], "--threads"),
        (["stage", "--memory", "lots"], "--memory: 'lots' is wrong: expected a size"),
        (["bridge"], "no model"),
        (["bridge", "--model", "x.gguf"], "no relay"),
        (["bridge", "--model", "x.gguf", "--relay", RELAY, "--stages", "1"], "a ring has 2 stages or more"),
        (["bridge", "--model", "x.gguf", "--relay", "/ip4/1.2.3.4/tcp/1"], "does not end in /p2p/"),
        (["bridge", "--model", "x.gguf", "--relay", RELAY, "--host", "0.0.0.0"], "without a key"),
        (["swarm"], "no model"),
        (["swarm", "--model", f"{DATA}/stories260K.gguf", "--stages", "1"], "a ring has 2 stages or more"),
        (["swarm", "--model", "there-is-none.gguf"], "there-is-none.gguf: no such file"),
        (["swarm", "--model", f"{ROOT}/LICENSE"], "not a GGUF"),
        (["models", "info", "there-is-none.gguf"], "no such file"),
        (["models", "rm", "x"], "there is no model 'x'"),
        (["stage"], "run kvasir-peer join TICKET"),
        (["stage", "kvasir1qqqq"], "ticket is damaged"),
        (["join", "hello"], "begins with kvasir1"),
        (["chat", "ftp://x"], "is no address"),
        (["bench", "--engine", "foo"], "give auto, onnx or torch"),
        (["models", "info"], "see kvasir-peer models info --help"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_use_is_one_line_and_status_2(tmp_path, arguments, says):
    home = tmp_path / "home"
    refused(kvasir(*arguments, KVASIR_HOME=str(home)), says)
    assert not home.exists()  # nothing left half-written


def test_truncated_models_are_refused(tmp_path):
    whole = (DATA / "stories260K.gguf").read_bytes()
    for length in (0, 3, 20, 5000, len(whole) - 1):
        (tmp_path / "cut.gguf").write_bytes(whole[:length])
        refused(kvasir("swarm", "--model", tmp_path / "cut.gguf"), "cut.gguf")


def test_tickets_with_typos_expired_or_for_other_roles(tmp_path):
    home = str(tmp_path)
    text = a_ticket().encode()
    wrong = text[:40] + ("q" if text[40] != "q" else "p") + text[41:]
    refused(kvasir("join", wrong, KVASIR_HOME=home), r"typo: character 41")
    refused(kvasir("join", a_ticket(lifetime=-5).encode(), KVASIR_HOME=home), "expired")
    refused(kvasir("join", a_ticket(roles=["volunteer"]).encode(), KVASIR_HOME=home), "for volunteer")
    assert not (tmp_path / settings.TICKET_FILE).exists()


def test_bad_configuration_and_environment_name_their_place(tmp_path):
    (tmp_path / settings.CONFIG_FILE).write_text("[stage]\nthread = 3\n")
    refused(
        kvasir("stage", "--home", tmp_path),
        r"config.toml: \[stage\] has no setting 'thread'; did you mean 'threads'",
    )
    (tmp_path / settings.CONFIG_FILE).unlink()
    refused(kvasir("stage", "--home", tmp_path, KVASIR_THREADS="x"), "KVASIR_THREADS: 'x' is wrong")


def test_id_and_status(tmp_path):
    home = tmp_path / "home"
    before = json.loads(kvasir("status", "--json", KVASIR_HOME=str(home)).stdout)
    assert before["peer"] is None and not home.exists()
    first = kvasir("id", "--home", home).stdout.strip()
    assert identity.public_key_of(first)
    assert kvasir("id", KVASIR_HOME=str(home)).stdout.strip() == first
    settings.save_ticket(home, a_ticket())
    (home / settings.STORE_FOLDER).mkdir()
    (home / settings.STORE_FOLDER / "chunk").write_bytes(bytes(2_500_000))
    shown = kvasir("status", "--home", home)
    assert shown.returncode == 0
    for part in (first, "swarm ours, for stage, valid until", RELAY, "2.5 MB on disk", "nothing"):
        assert part in shown.stdout
    assert a_ticket().secret.hex() not in shown.stdout
    after = json.loads(kvasir("status", "--home", home, "--json").stdout)
    assert after["peer"] == first and after["store_bytes"] == 2_500_000 and after["ticket"]["swarm"] == "ours"


def test_one_process_per_home(tmp_path):
    code = (
        "import sys\nfrom pathlib import Path\nfrom kvasir_peer import running\n"
        "from kvasir_peer.progress import Progress\n"
        f"with running.run_from(Path({str(tmp_path)!r}), 'stage') as notice:\n"
        "    notice.report(Progress('relay', 'reachable through 2 relays'))\n"
        "    notice.report(Progress('ready', 'layers 0 to 9'))\n"
        "    print('up', flush=True)\n    sys.stdin.read()\n"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert other.stdout.readline() == "up\n"
        found = running.find(tmp_path)
        assert (found.role, found.pid, found.text) == ("stage", other.pid, "ready: layers 0 to 9")
        settings.save_ticket(tmp_path, a_ticket())
        refused(kvasir("stage", "--home", tmp_path), rf"a stage \(process {other.pid}\) already runs")
        shown = kvasir("status", "--home", tmp_path).stdout
        assert f"stage (process {other.pid})" in shown
        assert "relays   reachable through 2 relays\n" in shown
    finally:
        other.kill()
        other.wait()
        other.stdin.close()
        other.stdout.close()
    assert running.find(tmp_path) is None  # what a killed process leaves behind does not count
    with running.run_from(tmp_path, "stage"):
        pass
    assert not (tmp_path / running.STATE_FILE).exists()


def test_models_info():
    result = kvasir("models", "info", f"{DATA}/stories260K-moe8x2.gguf")
    assert result.returncode == 0, result.stderr
    for part in ("architecture  llama", "F16: 15 tensors", "experts       8", "by 2 to 5 stages"):
        assert part in result.stdout


def test_a_reader_that_goes_away_is_no_error(tmp_path):
    command = f"{sys.executable} -m kvasir_peer.cli status --home {tmp_path} | true; echo ${{PIPESTATUS[0]}}"
    result = subprocess.run(
        ["bash", "-c", command], env=environment(), capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.strip() in ("0", "141")
    assert "Traceback" not in result.stderr


def test_errors_from_several_tasks_are_one_line(capsys, monkeypatch):
    import cyclopts

    def broken(*_, **__):
        raise ExceptionGroup("nursery", [LinkError("lost"), ExceptionGroup("n", [UsageError("mend\nthis")])])

    monkeypatch.setattr(cyclopts.App, "__call__", broken)
    assert cli.run(["id"]) == 2
    assert capsys.readouterr().err == "kvasir-peer: mend this\n"

    def a_bug(*_, **__):
        raise ExceptionGroup("nursery", [KvasirError("lost"), ZeroDivisionError()])

    monkeypatch.setattr(cyclopts.App, "__call__", a_bug)
    with pytest.raises(ExceptionGroup):
        cli.run(["id"])


def test_what_the_system_refuses_is_one_line_and_a_fault_of_ours_is_not(capsys, monkeypatch):
    import cyclopts

    def raised(error):
        def broken(*_, **__):
            raise error

        monkeypatch.setattr(cyclopts.App, "__call__", broken)

    full, gone = OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EBADF, "Bad file descriptor")
    for error in (full, ExceptionGroup("nursery", [full])):
        raised(error)
        assert cli.run(["id"]) == 2
        assert capsys.readouterr().err.startswith("kvasir-peer: No space left on device: free some space")
    for error in (gone, ExceptionGroup("nursery", [full, gone])):
        raised(error)
        with pytest.raises((OSError, ExceptionGroup)):
            cli.run(["id"])


def test_a_port_for_direct_connections_that_is_taken_is_one_line(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"/ip4/127.0.0.1/tcp/{taken.getsockname()[1]}"
        model = DATA / "stories260K.gguf"
        flags = ["--model", model, "--relay", RELAY, "--port", "0", "--listen", listen, "--home", tmp_path]
        result = kvasir("bridge", *flags)
    assert result.returncode == 2
    assert (
        f"kvasir-peer: cannot listen on {listen}: Address already in use; choose another port"
        in result.stderr
    )
    assert "Traceback" not in result.stderr


def test_expired_tickets_show_in_status(tmp_path):
    settings.save_ticket(tmp_path, a_ticket(lifetime=60, now=time.time() - 3600))
    assert "expired" in kvasir("status", "--home", tmp_path).stdout


def test_status_says_what_a_machine_has_given_and_what_a_bridge_has_had(tmp_path, capsys):
    from kvasir_peer.commands.status import show_status
    from kvasir_peer.experts.ledger import Ledger

    running.keep_given(tmp_path, running.Given(1234, 5.0, 7_000_000))
    ledger = Ledger(tmp_path / settings.LEDGER_FILE)
    ledger.add([("a", 300, 20), ("b", 40, 1)])
    ledger.quarantine("b", "zeros")
    show_status(home=tmp_path)
    shown = capsys.readouterr().out
    assert "1,234 rows of experts" in shown and "7.0 MB of weights to other volunteers" in shown
    assert "340 rows of 2 volunteers, 21 of them checked; quarantined: 1" in shown
    show_status(home=tmp_path, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["volunteers"] == {"peers": 2, "rows": 340, "checked": 21, "quarantined": 1}
    ledger.close()
    (tmp_path / settings.LEDGER_FILE).write_bytes(b"not a ledger")
    show_status(home=tmp_path, as_json=True)
    assert "volunteers" not in json.loads(capsys.readouterr().out)
