"""Links find their way through home routers: directly where the routers let them, over the relay where they don't."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from helpers_lab import HOMES, Lab
from helpers_peers import Conversation, peers, wait

pytestmark = [pytest.mark.root, pytest.mark.timeout(180)]

HOME_A, HOME_B, HOME_C = HOMES


def test_links_become_direct_where_they_can_and_no_frame_is_lost_or_repeated(
    network: Lab, relay: str, tmp_path: Path
) -> None:
    with peers(network, relay, "abcd", tmp_path) as found:
        knocks = network.unasked(HOME_A, HOME_B)
        a, b, c, d = (found[machine] for machine in "abcd")
        through_holes = Conversation(a, c)
        never_direct = Conversation(a, b)
        at_home = Conversation(d, c)
        for conversation in (through_holes, never_direct, at_home):
            conversation.go_on()

        through_holes.wait_for_path("direct", "through two NATs that keep ports")
        at_home.wait_for_path("direct", "inside one home")
        assert at_home.state()["address"].startswith("/ip4/192.168.30."), "it leads round by the router"
        assert through_holes.state()["address"].startswith("/ip4/11.0.0.30/")
        wait(lambda: network.unasked(HOME_A, HOME_B) > knocks, "b has knocked at the router of a in vain")
        for conversation in (through_holes, never_direct, at_home):
            conversation.go_on()
        assert never_direct.path == "relayed"

        network.cut(HOME_A, HOME_C)
        through_holes.wait_for_path("relayed", "the direct connection is broken")
        for conversation in (through_holes, never_direct, at_home):
            conversation.go_on()
        assert at_home.path == "direct"
        network.mend(HOME_A, HOME_C)

        state = through_holes.state()
        assert state["path_changes"] >= 2 and state["round_trip_p50"] is not None
        for conversation in (through_holes, never_direct, at_home):
            conversation.stop()


def test_a_live_link_goes_on_within_fifteen_seconds_of_a_change_of_network(
    network: Lab, relay: str, tmp_path: Path
) -> None:
    with peers(network, relay, "ae", tmp_path) as found:
        a, e = found["a"], found["e"]
        conversation = Conversation(a, e)
        conversation.go_on()
        network.move("e", HOME_C, "192.168.30.77")
        began = time.monotonic()
        conversation.go_on()
        assert time.monotonic() - began < 15
        conversation.stop()
