"""Children of a command live as long as it does, and not longer, however it ends."""

import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest
import trio
from helpers_unit import DATA, ROOT, environment, kvasir

from kvasir_peer.commands import processes
from kvasir_peer.commands.processes import Children
from kvasir_peer.errors import KvasirError, UsageError

RELAY = ["--listen", "/ip4/127.0.0.1/tcp/0", "--home"]
PATIENCE = 60.0  # seconds; a busy machine takes long to import libp2p


@pytest.fixture(autouse=True)
def children_find_this_checkout(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])


def gone(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_until(condition, seconds=PATIENCE):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


async def test_children_say_lines_and_end_with_the_block(tmp_path):
    heard = []
    async with trio.open_nursery() as nursery:
        children = Children(nursery, lambda child, line: heard.append((child.name, line)))
        relay = await children.start(
            "relay", "kvasir-relay", [*RELAY, str(tmp_path)], log=tmp_path / "logs" / "log"
        )
        with trio.fail_after(PATIENCE):
            address = await children.wait_for(lambda: next((line for _, line in heard), None), "the relay")
        assert address.startswith("/ip4/127.0.0.1/tcp/")
        await children.end()
    assert relay.process.returncode == 0
    assert gone(relay.process.pid)


async def test_a_child_that_ends_ends_everything_with_its_last_words(tmp_path):
    with pytest.raises(ExceptionGroup) as caught:
        async with trio.open_nursery() as nursery:
            children = Children(nursery, lambda child, line: None)
            try:
                relay = await children.start(
                    "relay", "kvasir-relay", [*RELAY, str(tmp_path)], log=tmp_path / "log"
                )
                await children.start("bridge", "kvasir-peer", ["bridge"], log=tmp_path / "bridge.log")
                with trio.fail_after(PATIENCE):
                    await children.wait_for(lambda: None, "nothing")
            finally:
                await children.end()
    (error,) = caught.value.exceptions
    assert isinstance(error, UsageError)
    assert str(error) == "the bridge ended (status 2): no model: give --model FILE.gguf, or --model https://…"
    assert gone(relay.process.pid)


async def test_silence_has_an_end(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "STALL_SECONDS", 0.05)
    with pytest.raises(ExceptionGroup) as caught:
        async with trio.open_nursery() as nursery:
            children = Children(nursery, lambda child, line: None)
            try:
                await children.start("relay", "kvasir-relay", [*RELAY, str(tmp_path)], log=tmp_path / "log")
                await children.wait_for(lambda: None, "a miracle")
            finally:
                await children.end()
    assert isinstance(caught.value.exceptions[0], KvasirError)
    assert "while waiting for a miracle" in str(caught.value.exceptions[0])


PARENT = """
import sys, trio
from pathlib import Path
from kvasir_peer.commands.processes import Children

async def main():
    async with trio.open_nursery() as nursery:
        children = Children(nursery, lambda child, line: print(child.process.pid, flush=True))
        home = Path(sys.argv[1])
        await children.start(
            "relay", "kvasir-relay", ["--listen", "/ip4/127.0.0.1/tcp/0", "--home", str(home)], log=home / "log"
        )
        await trio.sleep_forever()

trio.run(main)
"""


def test_children_end_when_their_parent_is_killed(tmp_path):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE, env=environment(), text=True
    )
    try:
        child = int(parent.stdout.readline())
        assert not gone(child)
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    wait_until(lambda: gone(child))


SWARM = ["-m", "kvasir_peer.cli", "swarm", "--model", f"{DATA}/stories260K.gguf", "--stages", "2"]
ELASTIC = [str(ROOT / "bench" / "elastic.py"), "--volunteers", "1"]


@pytest.mark.parametrize(
    ("command", "number"), [(SWARM, signal.SIGINT), (SWARM, signal.SIGTERM), (ELASTIC, signal.SIGTERM)]
)
def test_a_swarm_that_is_interrupted_leaves_nothing(tmp_path, command, number):
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    swarm = subprocess.Popen(
        [sys.executable, *command],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment(TMPDIR=str(temporary), KVASIR_HOME=str(tmp_path / "home")),
        text=True,
    )
    try:
        wait_until(lambda: len(psutil.Process(swarm.pid).children()) >= 2)  # a relay and a bridge
        children = psutil.Process(swarm.pid).children(recursive=True)
        assert list(temporary.iterdir())
        os.kill(swarm.pid, number)
        output, errors = swarm.communicate(timeout=PATIENCE)
    finally:
        swarm.kill()
        swarm.wait()
    assert swarm.returncode == 130
    assert "Traceback" not in errors and output == ""
    assert all(gone(child.pid) for child in children)
    assert list(temporary.iterdir()) == []
    assert not (tmp_path / "home").exists()


def test_a_swarm_shows_what_its_question_took_and_nothing_of_the_request_before(tmp_path):
    ran = kvasir(
        *SWARM[2:],
        "--prompt",
        "Once upon a time",
        "--max-tokens",
        "8",
        timeout=170,
        KVASIR_HOME=str(tmp_path),
    )
    assert ran.returncode == 0, ran.stderr
    said = re.search(r"^(\d+) tokens after a prompt of (\d+); first after", ran.stdout, re.MULTILINE)
    rows = re.findall(r"^[12] +\d-\d +(\d+) ", ran.stdout, re.MULTILINE)
    assert said is not None and rows == [str(int(said[1]) + int(said[2]) - 1)] * 2, ran.stdout
