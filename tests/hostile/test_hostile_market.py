"""Volunteers and coordinators that lie: neither the bridge nor who dials them may end by it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
from helpers_hostile import ROOT, besieged

from kvasir_peer.errors import WireError
from kvasir_peer.experts.allotment import choose_ranges
from kvasir_peer.experts.market_messages import Budget, ExpertModel
from kvasir_peer.experts.volunteering import Claim, check_claim, sign_claim
from kvasir_peer.identity import Identity, verify

MOE = ROOT / "tests" / "data" / "stories260K-moe8x2.gguf"
ME = Identity.generate()
BRIDGE = Identity.generate().peer_id

ABSURD: list[dict[str, Any]] = [
    {"memory": 10**400},
    {"memory": -1},
    {"disk": 1 << 80},
    {"rate": -1.0},
    {"expansion": -2.0},
    {"expansion": 0.5},
    {"expansion": 17.0},
    {"held": [[0, 0, 10**12]]},
    {"held": [[-1, 0, 1]]},
    {"held": [[0, 0, 8]] * 5000},
    {"device": "x" * 1000},
    {"addresses": ["x"] * 1000},
    {"lease": -1},
]


async def test_absurd_offers_are_refused_and_garbage_addresses_dialled_by_nobody(tmp_path: Path) -> None:
    roles = ("volunteer", "stage", "coordinator")
    async with (
        besieged(tmp_path, model=str(MOE), ticket_roles=roles) as bridge,
        bridge.attacker() as (_, peer),
    ):

        async def post(route: str, **body: Any) -> httpx.Response:
            return await peer.post(route, json={"secret": bridge.secret, **body})

        for ask in ABSURD:
            answer = await post("/api/expert-volunteer", **{"memory": 1, "disk": 1, **ask})
            assert answer.status_code == 400, (ask, answer.text[:200])
        assert (await post("/api/expert-volunteer", memory=1 << 60, disk=1 << 60)).status_code == 200
        for route in ("/api/expert-volunteer", "/api/expert-coverage", "/api/coordinator"):
            for body in (b"", b"[" * 100_000, b'{"x":' * 20_000, b"\xff"):
                assert (await peer.post(route, content=body)).status_code == 400
        for addresses in (["garbage"], [f"/ip4/127.0.0.1/tcp/1/p2p/{bridge.bridge}"], ["\0" * 1000]):
            answer = await post("/api/coordinator", addresses=addresses)
            assert answer.status_code == 200, answer.text[:200]
            await trio.sleep(0.3)  # the bridge dials whoever has joined
            await bridge.lives()


def _claim(**changes: Any) -> Claim:
    fields: dict[str, Any] = {
        "peer": ME.peer_id,
        "bridge": BRIDGE,
        "time": time.time(),
        "model": "m",
        "lease": 1,
        "ranges": ((0, 0, 8),),
    }
    return Claim(**{**fields, **changes})


def test_a_claim_with_addresses_that_lead_elsewhere_is_refused() -> None:
    good = f"/ip4/127.0.0.1/tcp/1/p2p/{BRIDGE}/p2p-circuit/p2p/{ME.peer_id}"
    assert check_claim(sign_claim(_claim(addresses=(good,)), ME.sign), BRIDGE, time.time(), verify)
    for changes, code in (
        ({"addresses": ("garbage",)}, "address"),
        ({"addresses": (f"/ip4/127.0.0.1/tcp/1/p2p/{BRIDGE}",)}, "address"),
        ({"addresses": (good,) * 17}, "oversize"),
        ({"addresses": ("x" * 600,)}, "oversize"),
        ({"model": "m" * 600}, "oversize"),
        ({"ranges": ((0, 0, 8),) * 5000}, "malformed"),
        ({"ranges": ((0, 0, 1 << 40),)}, "malformed"),
        ({"rate": -1.0}, "malformed"),
    ):
        with pytest.raises(WireError) as caught:
            check_claim(sign_claim(_claim(**changes), ME.sign), BRIDGE, time.time(), verify)
        assert caught.value.code == code, changes


def test_experts_that_the_model_does_not_have_are_not_counted() -> None:
    """Else one offer would fill the memory of the bridge."""
    model = ExpertModel("m", "id", 2, (0, 1), 4, (10, 10))
    counts = [[0] * 4, [0] * 4]
    budget = Budget(200, 80, held=((0, 2, 1 << 60), (7, 0, 1 << 60), (1 << 50, 0, 4)))
    assert choose_ranges(model, counts, 1, {}, budget) == ((0, 0, 4), (1, 0, 4))
