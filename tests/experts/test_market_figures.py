"""What a bridge's metrics say of experts: sums over peers that never fall, without a peer's name."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.registry import Collector

from kvasir_peer.api.experts_metrics import experts_metrics
from kvasir_peer.experts.dispatch_policy import SlotReading
from kvasir_peer.experts.dispatcher import DispatchStatistics, WorkerFigures
from kvasir_peer.experts.market import MarketState, apply
from kvasir_peer.experts.market_figures import DispatchTotals, experts_statistics, figures_of
from kvasir_peer.experts.market_messages import CoordinatorUp, ExpertModel, ModelOffered, SlotsRead
from kvasir_peer.experts.recruitment import RecruitmentSettings
from kvasir_peer.wire.dispatching import DispatchFigures

PEER = "12D3KooWCoordinator"


def worker(
    peer: str, *, attached: bool = True, proven: bool = True, breaker: str = "closed"
) -> WorkerFigures:
    return WorkerFigures(peer, attached, proven, breaker, 0, 0, 1.0, 0.5, 0.1, 0, 0.0, 0, 0)


def shown(totals: DispatchTotals) -> dict[str, float]:
    state = MarketState(RecruitmentSettings(base=1, boost=1))
    model = ExpertModel("moe", "f" * 64, 2, (0, 1), 4, (1, 1))
    for event in (
        ModelOffered(model),
        CoordinatorUp(PEER, "moe"),
        SlotsRead(PEER, SlotReading(3, 8, 1, 1.0)),
        SlotsRead(PEER, SlotReading(3, 8, 1, 2.0)),
    ):
        state, _ = apply(state, event, 2.0)
    found = experts_statistics(state, "moe", 2.0, totals, 40, 7)
    assert found is not None and experts_statistics(state, "another", 2.0, totals, 0, 0) is None

    class One(Collector):
        def collect(self):
            return experts_metrics(found)

    registry = CollectorRegistry()
    registry.register(One())
    text = generate_latest(registry).decode()
    assert PEER not in text and "12D3" not in text
    return {
        line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if not line.startswith("#")
    }


def test_figures_count_workers_by_how_they_stand() -> None:
    workers = (
        worker("a"),
        worker("b", breaker="open"),
        worker("c", proven=False, breaker="half-open"),
        worker("d", attached=False),
    )
    figures = figures_of(
        DispatchStatistics(
            mode="load", reading=None, routed=9, local_pairs=5, remote_pairs=6, fallbacks=1, hedges=2, shadows=3,
            checks=4, skipped_checks=0, refused_sums=1, frames=30, late=2, caught=(("x", "zeros"),), heat={},
            refused_maps=0, twice=0, work=(), workers=workers, local_s=0.0, check_s=0.0,
        )
    )  # fmt: skip
    assert (figures.attached, figures.proven) == (3, 2)
    assert (figures.closed, figures.half_open, figures.open) == (1, 1, 1)
    assert (figures.frames, figures.late, figures.hedges, figures.caught) == (30, 2, 2, 1)


def test_metrics_are_sums_that_do_not_fall_when_a_coordinator_is_started_again() -> None:
    totals = DispatchTotals()
    totals.told(PEER, 1, 100, 50, DispatchFigures(frames=20, late=1, attached=2, proven=2, closed=2))
    totals.told("other", 1, 10, 0, DispatchFigures(frames=5, attached=1, half_open=1))
    first = shown(totals)
    assert first['kvasir_experts_pairs_total{where="remote"}'] == 50
    assert first["kvasir_experts_frames_total"] == 25 and first["kvasir_experts_deadline_misses_total"] == 1
    assert first["kvasir_experts_links"] == 3 and first["kvasir_experts_links_proven"] == 2
    assert first['kvasir_experts_breakers{state="half-open"}'] == 1
    assert first['kvasir_experts_slots{state="busy"}'] == 3 and first["kvasir_experts_saturated"] == 1
    assert first['kvasir_experts_target{kind="effective"}'] == 2
    assert first["kvasir_experts_rows_total"] == 40 and first["kvasir_experts_rows_checked_total"] == 7
    totals.gone(PEER)
    totals.told(PEER, 2, 3, 1, DispatchFigures(frames=2, attached=1, closed=1))
    second = shown(totals)
    assert all(second[name] >= value for name, value in first.items() if "_total" in name)
    assert second['kvasir_experts_pairs_total{where="remote"}'] == 51
    assert second["kvasir_experts_links"] == 2
