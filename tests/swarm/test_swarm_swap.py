"""A latecomer takes a stage's place while answers are under way, and no token of theirs changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio
from streams import MODEL, Streams, cases
from swarm_in_process import run_in_scope, swarm_in_process
from swarm_processes import DATA

from kvasir_peer.ring import stage_market
from kvasir_peer.settings import StageSettings


@pytest.mark.timeout(240)
async def test_a_latecomer_takes_a_place_and_all_answers_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_market, "SWAP", 0.0)  # peers of one machine are all alike, and any will do
    monkeypatch.setattr(stage_market, "SWAP_SETTLED", 0.0)
    monkeypatch.setattr(stage_market, "SWAP_HOLDS", 0.0)
    monkeypatch.setattr(stage_market, "SWAP_PATIENCE", 0.0)
    async with (
        swarm_in_process(tmp_path, DATA / MODEL, stages=2, boundary="f32", context_length=256) as swarm,
        trio.open_nursery() as nursery,
    ):
        before = await swarm.status()
        home = tmp_path / "latecomer"
        home.mkdir()
        late = StageSettings(home=home, ticket=swarm.ticket, threads=1, direct=False, precision="exact")
        nursery.start_soon(run_in_scope, swarm, "latecomer", late)
        then = [stage["peer"] for stage in before["stages"]]
        status, exact = before, 0
        while (now := [stage["peer"] for stage in status["stages"]]) == then or status["state"] != "serving":
            streams = Streams(swarm.base_url, swarm.model, cases(8))
            await streams.run()
            for answer in streams.answers:
                # Who asks while the place changes hands waits for that.
                assert answer.exact, (answer.error, "\n".join(swarm.lines[-40:]))
                exact += answer.exact
            status = await swarm.status()
        assert exact, "there were answers all the while"
        places = [(stage["first"], stage["end"]) for stage in before["stages"]]
        assert [(stage["first"], stage["end"]) for stage in status["stages"]] == places
        assert sum(a != b for a, b in zip(then, now, strict=True)) == 1
        [gone] = set(then) - set(now)
        [other] = status["others"]
        assert (other["peer"], other["role"]) == (gone, "standby")
        assert status["requests"]["failed"] == 0 and status["requests"]["digest_mismatches"] == 0
        nursery.cancel_scope.cancel()
