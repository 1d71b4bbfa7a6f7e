"""A ring of real stages whose volunteer turns: samples catch it, it is kept out, and what came of it is made again."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
import trio
from swarm_in_process import InProcessSwarm, swarm_in_process
from swarm_processes import DATA, expected_greedy
from test_swarm_exact import MOE, complete, text_of

from kvasir_peer.commands.status import show_status
from kvasir_peer.experts import stage_experts
from kvasir_peer.experts.expert_server import ExpertServer
from kvasir_peer.experts.ledger import Ledger
from kvasir_peer.identity import load
from kvasir_peer.roles.volunteer import run_volunteer
from kvasir_peer.settings import LEDGER_FILE, VolunteerSettings

PATIENCE = 90.0
CLIENTS = 4


async def market(swarm: InProcessSwarm) -> dict:
    root = swarm.base_url.removesuffix("/v1")
    async with httpx.AsyncClient() as client:
        return (await client.get(f"{root}/api/moe/recruitment", timeout=20)).json()["models"][0]


@pytest.mark.timeout(300)
async def test_a_ring_makes_again_what_came_of_a_volunteer_that_turned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lying = False
    honest = ExpertServer.answer
    config = stage_experts.DispatcherConfig

    async def answer(self, link, message, sums):
        await honest(self, link, message, bytes(len(sums)) if lying else sums)

    monkeypatch.setattr(ExpertServer, "answer", answer)
    # The own experts of so small a model are quicker than any volunteer, which would never be asked.
    monkeypatch.setattr(stage_experts, "DispatcherConfig", lambda *values: config(*values, remote="all"))
    case = min(expected_greedy(MOE, min_gap=0.02), key=lambda c: len(c["prompt_ids"]))
    expected = text_of(MOE, case["ids"])
    texts: list[str] = []
    async with (
        swarm_in_process(
            tmp_path, DATA / MOE, stages=2, ticket_roles=("stage", "volunteer"), experts_dtype="f32"
        ) as swarm,
        trio.open_nursery() as nursery,
    ):
        home = tmp_path / "volunteer"
        settings = VolunteerSettings(
            home=home, ticket=swarm.ticket, threads=1, direct=False, precision="exact", engine="onnx"
        )
        home.mkdir()

        async def volunteer() -> None:
            await run_volunteer(settings, report=swarm.report("volunteer"))

        async def client() -> None:
            while True:
                texts.append(await trio.to_thread.run_sync(complete, swarm.base_url, swarm.model, case))

        nursery.start_soon(volunteer)
        clients = trio.CancelScope()

        async def load_it() -> None:
            with clients:
                async with trio.open_nursery() as several:
                    for _ in range(CLIENTS):
                        several.start_soon(client)

        nursery.start_soon(load_it)
        with trio.fail_after(PATIENCE):
            while sum(one["remote_pairs"] for one in (await market(swarm))["dispatch"].values()) < 500:
                await trio.sleep(0.3)
        assert texts and set(texts) == {expected}
        peer = load(home / "identity.key").peer_id
        lying = True
        with trio.fail_after(PATIENCE):
            while (await market(swarm))["workers"]:
                await trio.sleep(0.2)
            while not (await swarm.status())["requests"]["rewound"]:
                await trio.sleep(0.2)
        clients.cancel()
        after = await trio.to_thread.run_sync(complete, swarm.base_url, swarm.model, case)
        assert after == expected
        status = await swarm.status()
        assert status["requests"]["digest_mismatches"] == 0
        assert any("lied" in line for line in swarm.lines), swarm.lines[-20:]
        nursery.cancel_scope.cancel()
    ledger = Ledger(tmp_path / "bridge" / LEDGER_FILE)
    (given,) = ledger.given()
    assert given.peer == peer and given.rows > given.checked > 0
    assert list(ledger.quarantined()) == [peer]
    ledger.close()
    show_status(home=tmp_path / "bridge")
    assert f"{given.rows:,} rows of 1 volunteers" in capsys.readouterr().out
    show_status(home=home)
    assert "rows of experts" in capsys.readouterr().out
