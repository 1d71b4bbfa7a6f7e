"""Layer 2 of scaling with the load, first half: how busy are the coordinators, and what is the target?

Readings go in, a saturation with hysteresis and a target of replicas come out: up after two readings over the
threshold, down when none has been over it for half a minute. Pure; time is passed in (seconds).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvasir_peer.experts.dispatch_policy import SlotReading

READINGS_UP = (
    2  # readings over the threshold, one after another at one coordinator, that make a model saturated
)


@dataclass(frozen=True, slots=True)
class RecruitmentSettings:
    """What may be set; seconds.

    Attributes:
        saturation_threshold: busy slots of one coordinator from which on it is over.
        base: replicas wanted of each expert that is covered at all.
        boost: replicas wanted on top while saturated.
        poll_period, busy_poll_period: between two polls of a coordinator; the second from a reading over the
            threshold until ``calm_after`` has passed.
        poll_timeout: for one poll.
        reading_ttl: how long a reading counts.
        calm_after: without a reading over the threshold, until the saturation ends.
    """

    saturation_threshold: int = 2
    base: int = 2
    boost: int = 1
    poll_period: float = 5.0
    busy_poll_period: float = 1.0
    poll_timeout: float = 4.0
    reading_ttl: float = 45.0
    calm_after: float = 30.0


DEFAULT_RECRUITMENT = RecruitmentSettings()


@dataclass(frozen=True, slots=True)
class CoordinatorState:
    """What is known of one coordinator (or dispatching stage).

    Attributes:
        model: that it serves.
        reading: the last one; None before the first.
        over: readings over the threshold in a row.
        last_over: when the last of them was read; None for never.
        polled_at: when the last poll began.
        polling: a poll is under way.
        failures: polls without an answer, in a row.
        heat: rows routed to each layer's experts since it started, as it counts them.
    """

    model: str
    reading: SlotReading | None = None
    over: int = 0
    last_over: float | None = None
    polled_at: float | None = None
    polling: bool = False
    failures: int = 0
    heat: Mapping[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Saturation:
    """Of one model.

    Attributes:
        saturated: as it stands.
        last_over: when a reading was over the threshold last; None for never.
        since: when ``saturated`` last changed.
    """

    saturated: bool = False
    last_over: float | None = None
    since: float = 0.0

    def target(self, settings: RecruitmentSettings) -> int:
        """Replicas wanted of each expert."""
        return settings.base + (settings.boost if self.saturated else 0)


def poll_due(coordinator: CoordinatorState, now: float, settings: RecruitmentSettings) -> bool:
    """Whether to ask it for its slots now. A poll that got no answer in time does not hold up the next one."""
    if coordinator.polled_at is None:
        return True
    waited = now - coordinator.polled_at
    if coordinator.polling and waited < settings.poll_timeout:
        return False
    last = coordinator.last_over
    # Until the saturation can end, so that an uneven load is seen as it is and does not make the target flap.
    busy = last is not None and now - last < settings.calm_after
    period = settings.busy_poll_period if busy else settings.poll_period
    return waited >= period


def take_reading(
    coordinator: CoordinatorState,
    reading: SlotReading,
    settings: RecruitmentSettings,
    heat: Mapping[int, int] | None = None,
) -> CoordinatorState:
    """Take up an answer; one that is older than what is known is ignored."""
    if coordinator.reading is not None and reading.at <= coordinator.reading.at:
        return replace(coordinator, polling=False)
    over = coordinator.over + 1 if reading.load >= settings.saturation_threshold else 0
    return replace(
        coordinator,
        reading=reading,
        over=over,
        last_over=reading.at if over else coordinator.last_over,
        polling=False,
        failures=0,
        heat=coordinator.heat if heat is None else heat,
    )


def reading_counts(coordinator: CoordinatorState, now: float, settings: RecruitmentSettings) -> bool:
    """Whether its last reading is young enough."""
    return coordinator.reading is not None and now - coordinator.reading.at <= settings.reading_ttl


def saturation_of(
    before: Saturation,
    coordinators: list[CoordinatorState],
    now: float,
    settings: RecruitmentSettings,
) -> Saturation:
    """The model's saturation, from those of its coordinators whose readings count."""
    fresh = [c for c in coordinators if reading_counts(c, now, settings)]
    over = [c.reading.at for c in fresh if c.reading is not None and c.over > 0]
    last = before.last_over
    if over:
        last = max(over) if last is None else max(last, *over)
    up = any(c.over >= READINGS_UP for c in fresh)
    if before.saturated:
        calm = last is None or now - last >= settings.calm_after
        return Saturation(not calm, last, now if calm else before.since)
    if up:
        return Saturation(True, last, now)
    return Saturation(False, last, before.since)


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """Sums over the coordinators of a model whose readings count.

    Attributes:
        age: of the oldest of these readings, seconds; None without any.
    """

    busy: int
    slots: int
    queue: int
    coordinators: int
    age: float | None


def load_of(coordinators: list[CoordinatorState], now: float, settings: RecruitmentSettings) -> ModelLoad:
    """What the coordinators of a model say together."""
    readings = [c.reading for c in coordinators if reading_counts(c, now, settings) and c.reading is not None]
    return ModelLoad(
        busy=sum(r.busy for r in readings),
        slots=sum(r.total for r in readings),
        queue=sum(r.queue for r in readings),
        coordinators=len(readings),
        age=max((now - r.at for r in readings), default=None),
    )
