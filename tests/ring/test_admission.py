"""Whatever a peer says of itself, a plan with it passes its check, and what was measured becomes costs of layers."""

from __future__ import annotations

import math

import msgspec
import pytest
from helpers_plan import WIDTHS, needs, offer
from hypothesis import given
from hypothesis import strategies as st

from kvasir_peer import identity
from kvasir_peer.ring.admission import MAX_WORDS, link_times, reported, words
from kvasir_peer.ring.offers import PASS_SECONDS, Ground, Links, LinkTime, Wishes, memory_needed
from kvasir_peer.ring.plan import MAX_ADDRESSES
from kvasir_peer.ring.planner import plan_ring
from kvasir_peer.ring.volunteering import LinkReport, Measured, Offer, Report

PEER, RELAY = (identity.Identity.generate().peer_id for _ in range(2))
GOOD = f"/ip4/127.0.0.1/tcp/4001/p2p/{RELAY}/p2p-circuit/p2p/{PEER}"
amounts = st.floats(0, 1e15)
layers = st.integers(0, 1 << 16)


def offered(**values: object) -> Offer:
    return Offer(memory=1 << 40, disk=1 << 40, engine="onnx", **values)  # type: ignore[arg-type]


@given(
    amounts,
    st.lists(st.text(max_size=40) | st.just(GOOD), max_size=40),
    st.none()
    | st.builds(Measured, st.just(needs().model) | st.text(max_size=9), layers, layers, amounts, amounts),
    st.lists(st.builds(LinkReport, st.just("other"), amounts, amounts), max_size=3),
)
def test_nothing_that_a_peer_says_can_break_a_plan(
    rate: float, addresses: list[str], measured: Measured | None, links: list[LinkReport]
) -> None:
    report = Report(
        offered(read_bytes_per_second=rate, addresses=tuple(addresses), measured=measured), links=tuple(links)
    )
    event = reported(PEER, report, needs())
    times = {(PEER, other): time for other, time in link_times(report).items()}
    offers = [event.offer, offer("other", memory=80_000)]
    ground = Ground(offers, needs(), Links(LinkTime(0.005), times), Wishes(WIDTHS, 2))
    planned = plan_ring(ground, bridge="bridge", plan_id="ring")
    assert planned.plan is not None  # assembling it has checked it
    assert planned.forecast is not None and math.isfinite(planned.forecast.score)


def test_memory_is_counted_by_what_a_peer_says_of_its_engine() -> None:
    def needed(offer: Offer) -> int:
        return memory_needed(needs(), WIDTHS, reported(PEER, Report(offer), needs()).offer, 0, 4)

    weights = needs().file_bytes(0, 4)
    assert needed(offered(expansion=8.0)) - needed(offered(expansion=1.2)) == pytest.approx(
        6.8 * weights, abs=2
    )
    assert needed(offered()) == needed(offered(expansion=2.0)), "of one that says nothing"


@pytest.mark.parametrize("expansion", ["0.9", "16.1", "-1", "1e300", "null", '"2"'])
def test_factors_that_no_engine_has_are_refused_with_the_reason(expansion: str) -> None:
    said = f'{{"offer": {{"memory": 1, "disk": 1, "engine": "onnx", "expansion": {expansion}}}}}'
    with pytest.raises(msgspec.ValidationError, match=r"offer\.expansion"):
        msgspec.json.decode(said, type=Report)
    assert msgspec.json.decode(said.replace(expansion, "16"), type=Report).offer.expansion == 16.0


def test_only_addresses_that_lead_to_the_peer_are_given_to_others() -> None:
    elsewhere = GOOD.replace(PEER, identity.Identity.generate().peer_id)
    long = f"/dns/{'a' * 500}/tcp/1/p2p/{PEER}"
    report = Report(offered(addresses=(elsewhere, "nonsense", long, *[GOOD] * 40)))
    assert reported(PEER, report, needs()).offer.addresses == (GOOD,) * MAX_ADDRESSES


def test_measured_passes_become_the_cost_of_a_layer() -> None:
    model = needs(24)
    measured = Measured(model.model, 4, 8, PASS_SECONDS + 0.040, 0.008)
    found = reported(PEER, Report(offered(measured=measured)), model).offer
    assert found.pass_base == pytest.approx(0.010) and found.pass_row == pytest.approx(0.002)
    line = found.line(model, 0, 10)
    assert line.base == pytest.approx(PASS_SECONDS + 0.100) and line.per_row == pytest.approx(0.020)


def test_passes_too_quick_to_tell_are_not_taken_for_unmeasured() -> None:
    model = needs(24)
    for base, row in ((PASS_SECONDS / 3, 0.0), (0.0, 1e-7), (1e-300, 0.0)):
        found = reported(PEER, Report(offered(measured=Measured(model.model, 4, 8, base, row))), model).offer
        assert 1e-8 < found.pass_base + found.pass_row < 1e-6, "nor for quicker than anything is"


def test_the_tail_s_output_counts_as_layers() -> None:
    model = needs(24, layer=50, tail=100)
    measured = Measured(model.model, 22, 24, PASS_SECONDS + 0.040, 0.0)
    assert reported(PEER, Report(offered(measured=measured)), model).offer.pass_base == pytest.approx(0.010)


@pytest.mark.parametrize(
    "measured",
    [
        Measured("another model", 0, 4, 0.1, 0.01),
        Measured(needs().model, 4, 4, 0.1, 0.01),
        Measured(needs().model, 0, 100, 0.1, 0.01),
        Measured(needs().model, 0, 4, 1e12, 0.01),
        Measured(needs().model, 0, 4, 0.0, 0.0),
    ],
)
def test_measurements_that_mean_nothing_here_are_left_out(measured: Measured) -> None:
    found = reported(PEER, Report(offered(measured=measured)), needs()).offer
    assert (found.pass_base, found.pass_row) == (0.0, 0.0)


def test_a_peer_s_words_stay_on_one_line_and_short() -> None:
    assert words("it broke\n\x1b[2Jhere") == "it broke [2Jhere"
    assert len(words("x" * 10_000)) == MAX_WORDS
