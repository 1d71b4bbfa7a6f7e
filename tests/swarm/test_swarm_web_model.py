"""A model that lies on a web server: no peer ever has all of it, and the answers are the same."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import trio
from swarm_in_process import swarm_in_process
from swarm_processes import DATA, expected_greedy
from test_swarm_exact import complete, text_of

sys.path.append(str(Path(__file__).parent.parent / "net"))  # its web server

from helpers_https import FileServer

MODEL = "stories260K.gguf"


@pytest.mark.timeout(180)
async def test_a_ring_serves_a_model_from_the_web_by_ranges(tmp_path: Path) -> None:
    case = expected_greedy(MODEL)[0]
    with FileServer(DATA).running() as server:
        async with swarm_in_process(
            tmp_path, f"{server.url}/{MODEL}", stages=2, boundary="f32", context_length=256
        ) as swarm:
            text = await trio.to_thread.run_sync(complete, swarm.base_url, swarm.model, case)
        assert text == text_of(MODEL, case["ids"])
        assert server.requests and all(asked for _, asked in server.requests), "every request is for a range"
    size = (DATA / MODEL).stat().st_size
    kept = [f for f in (tmp_path / "bridge").rglob("*") if f.is_file() and f.stat().st_size > size // 2]
    assert kept == [], "the bridge keeps hashes, not weights"
