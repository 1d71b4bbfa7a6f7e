"""``kvasir-peer ring`` against a bridge: the view, the picture, and what it says when it can't."""

import io
import json
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import trio
from helpers_bridge import NAME, PlayedBridge, played
from rich.console import Console

from kvasir_peer.commands import ring_view

ROOT = Path(__file__).resolve().parents[2]
KEY = "a-key-of-the-owner"


async def ring(*arguments, **environment):
    """Run the command; a finished process with text output."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVASIR_")}
    with trio.fail_after(60):
        done = await trio.run_process(
            [sys.executable, "-m", "kvasir_peer.cli", "ring", *map(str, arguments)],
            capture_stdout=True,
            capture_stderr=True,
            check=False,
            env={
                **kept,
                "PYTHONPATH": str(ROOT),
                "COLUMNS": "140",
                "PYTHONIOENCODING": "utf-8",
                **environment,
            },
        )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


async def settled(server):
    """Let some batches pass."""
    await trio.sleep(0.5)


async def test_the_view_shows_state_stages_and_timeline(tmp_path):
    async with played(PlayedBridge()) as server:
        await settled(server)
        status, out, err = await ring(f"{server.url}/v1", "--seconds", 2, "--home", tmp_path)
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith(f"{NAME}  serving  epoch 1") and "tokens/s" in lines[0]
    assert lines[1].startswith(("starved: ", "saturated: "))
    stage = next(line for line in lines if line.startswith("2 "))
    assert "2-3" in stage and "relayed, 21 ms" in stage and stage.count("%") >= 3
    assert [line.split()[1] for line in lines if line.startswith("stage ")][-3:] == ["1", "2", "3"]
    assert any(
        set(line[ring_view.LABEL :]) & set(ring_view.BLOCKS[1:]) for line in lines if "stage 2" in line
    )
    assert "1: " in out and "tokens" in out
    assert "2 s ago" in out and "now" in out


async def test_a_narrow_terminal_gets_whole_columns(tmp_path):
    async with played(PlayedBridge()) as server:
        await settled(server)
        _, out, _ = await ring(server.url, "--home", tmp_path, COLUMNS="80")
    stage = next(line for line in out.splitlines() if line.startswith("2 "))
    assert "2-3" in stage and "relayed, 21 ms" in stage
    assert "…" not in out and max(map(len, out.splitlines())) <= 80


async def test_a_terminal_without_unicode_gets_plain_signs(tmp_path):
    async with played(PlayedBridge()) as server:
        await settled(server)
        status, out, _ = await ring("--url", server.url, "--home", tmp_path, PYTHONIOENCODING="ascii:replace")
    assert status == 0
    assert not set(out) & set(ring_view.BLOCKS[1:])
    assert "@" in out


async def test_json_holds_status_and_timeline(tmp_path):
    async with played(PlayedBridge()) as server:
        await settled(server)
        _, out, _ = await ring(server.url, "--json", "--home", tmp_path)
    shown = json.loads(out)
    assert shown["ring"]["model"] == NAME
    assert shown["timeline"]["batches"]


async def test_the_picture_is_one(tmp_path):
    picture = tmp_path / "ring.png"
    async with played(PlayedBridge()) as server:
        await settled(server)
        status, out, err = await ring(server.url, "--png", picture, "--home", tmp_path)
        missing = await ring(server.url, "--png", tmp_path / "no" / "ring.png", "--home", tmp_path)
    assert (status, out.strip(), err) == (0, str(picture), "")
    data = picture.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", data[16:24])
    assert width > 1000 and height > 300
    assert missing[0] == 2 and "can't write" in missing[2]


async def test_without_matplotlib_one_line_says_what_to_install(tmp_path):
    (tmp_path / "matplotlib").mkdir()
    (tmp_path / "matplotlib" / "__init__.py").write_text("raise ImportError('not here')")
    async with played(PlayedBridge()) as server:
        status, _, err = await ring(
            *(server.url, "--png", tmp_path / "x.png", "--home", tmp_path),
            PYTHONPATH=os.pathsep.join([str(tmp_path), str(ROOT)]),
        )
    assert status == 2
    assert err.splitlines() == ["kvasir-peer: --png needs matplotlib: pip install matplotlib"]


async def test_watching_goes_on_until_it_is_interrupted(tmp_path):
    async with played(PlayedBridge()) as server:
        command = [
            sys.executable,
            "-m",
            "kvasir_peer.cli",
            "ring",
            server.url,
            "--watch",
            "--home",
            str(tmp_path),
        ]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        process = await trio.lowlevel.open_process(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
        )
        seen = b""
        with trio.fail_after(60):
            while seen.count(NAME.encode()) < 2:
                seen += await process.stdout.receive_some()
            process.send_signal(signal.SIGINT)
            err = b"".join([piece async for piece in process.stderr])
            await process.wait()
    assert (process.returncode, err) == (0, b"")


async def test_a_bridge_that_wants_a_key_says_so(tmp_path):
    async with played(PlayedBridge(), keys=[KEY]) as server:
        refused = await ring(server.url, "--home", tmp_path)
        let_in = await ring(server.url, "--api-key", KEY, "--home", tmp_path)
    assert refused[0] == 2 and "--api-key" in refused[2]
    assert let_in[0] == 0


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["http://127.0.0.1:9"], 1, "nobody answers at http://127.0.0.1:9"),
        (["127.0.0.1"], 2, "is no address"),
        (["http://127.0.0.1:9", "--seconds", "0"], 2, "--seconds 0: give 0.1 to 60"),
        (["http://127.0.0.1:9", "--watch", "--json"], 2, "give one of them"),
        (["http://127.0.0.1:9", "--watch", "--png", "x"], 2, "give one of them"),
    ],
)
async def test_wrong_use_is_one_line(tmp_path, arguments, status, words):
    code, out, err = await ring(*arguments, "--home", tmp_path)
    assert (code, out) == (status, "")
    assert words in err and len(err.splitlines()) == 1


async def test_an_unknown_model_names_the_known_ones(tmp_path):
    async with played(PlayedBridge()) as server:
        status, _, err = await ring(server.url, "--model", "other", "--home", tmp_path)
    assert status == 2
    assert f"no ring of 'other' here, only: {NAME}" in err


# --- the view alone -------------------------------------------------------------------------------------------------


def batch(bars, runs):
    return {"bars": bars, "runs": runs}


def test_cells_hold_the_share_of_their_time_and_the_request_that_has_most_of_it():
    batches = [
        batch([[0.0, 1.0]], [[1, 1, True]]),
        batch([[1.0, 1.75]], [[2, 3, False], [3, 1, True]]),
        batch([[3.25, 3.5], [9.0, 10.0]], [[3, 1, True]]),
        batch([], []),
    ]
    row = ring_view.cells(batches, 0, 0.0, 4.0, 4)
    assert [(round(cell.share, 3), cell.request) for cell in row] == [
        (1.0, 1),
        (0.75, 2),
        (0.0, None),
        (0.25, 3),
    ]
    assert [cell.share for cell in ring_view.cells(batches, 1, 0.0, 4.0, 4)] == [0.0] * 4


def test_a_ring_that_is_being_loaded_shows_how_far_it_is():
    stage = {
        "stage": 0,
        "peer": "12D3KooWAbcdefgh",
        "first": 0,
        "end": 1,
        "state": "fetching",
        "reason": "",
        "window": None,
        "transfer": {"done": 3_000_000, "total": 12_000_000, "per_second": 0.0},
    }
    shown = {
        "model": "m",
        "state": "loading",
        "missing": "1 of 2 stages is not loaded yet",
        "epoch": 3,
        "requests": {},
        "window": {},
        "ring_state": {"name": "", "stage": None, "link": None, "text": ""},
        "stages": [stage, {**stage, "stage": 1, "end": 4, "state": "broken", "reason": "no room"}],
        "others": [{"peer": "12D3KooWStandby1", "role": "standby", "why": "ready for layer 0"}],
    }
    timeline = {"now": 0.0, "stages": 0, "batches": [], "requests": []}
    console = Console(width=100, file=io.StringIO(), record=True)
    console.print(ring_view.view(shown, timeline, seconds=5, width=100))
    text = console.export_text()
    assert "m  loading  epoch 3" in text
    assert "1 of 2 stages is not loaded yet" in text
    assert "fetching" in text and "3.0 of 12.0 MB" in text
    assert "no room" in text and "…Standby1  standby: ready for layer 0" in text
