"""Layer 1 of scaling with the load: does a dispatcher use workers at all, and which?

Functions over a snapshot, with the clock passed in. They run at a coordinator, and at every ring stage that
dispatches (its slots are the plan's ``max_requests``). The rules:

* calm: everything is local, which is the quickest way per token;
* under load (``busy >= saturation_threshold``): proven workers share the rows, however long ago they last served;
* a worker that has just attached gets a *shadow* first: rows that are computed locally as well, so that no token
  waits for it. A success makes it proven;
* a worker that attached and never served is not recruited under load;
* when the load ends, whoever is serving goes on until ``serve_ttl`` has passed since the last success under load, so
  that a short lull does not make the dispatch flap; then everything is local again, and the workers stay warm.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from kvasir_peer.experts.worker_health import Breaker, Frame, Latency

# Shadow tries of one worker before its grace is used up.
SHADOW_TRIES = 3


@dataclass(frozen=True, slots=True)
class DispatchSettings:
    """What may be set; seconds.

    Attributes:
        saturation_threshold: busy slots from which on the dispatcher is under load.
        attach_grace: how long a worker is fresh.
        serve_ttl: how long a worker counts as serving after a success.
        poll_period: between two readings of the own slots.
        poll_deadline: for one reading.
        reading_ttl: how long a reading counts.
    """

    saturation_threshold: int = 2
    attach_grace: float = 15.0
    serve_ttl: float = 20.0
    poll_period: float = 3.0
    poll_deadline: float = 2.0
    reading_ttl: float = 9.0


DEFAULT_SETTINGS = DispatchSettings()


@dataclass(frozen=True, slots=True)
class SlotReading:
    """Slots as read through the dispatcher's own interface at time ``at``."""

    busy: int
    total: int
    queue: int
    at: float

    @property
    def load(self) -> int:
        """Busy slots; where there is a single slot, those who wait for it count too."""
        return self.busy + self.queue if self.total <= 1 else self.busy


@dataclass(frozen=True, slots=True)
class Worker:
    """A volunteer in the signed dispatch map, as one dispatcher sees it.

    Attributes:
        peer: peer id.
        ranges: ``(layer, lo, hi)`` that it serves.
        attached_at: when its link stood (seconds).
        expires_at: when its coverage ends, unless renewed.
        last_serve: when it last computed experts for this dispatcher; None for never.
        last_loaded_serve: the same, counting only work that was asked for under load.
        shadows: shadow tries that were made.
        frames: what is on its way, oldest first.
        answered_at: when its newest answer came.
        latency, breaker: see :mod:`kvasir_peer.experts.worker_health`.
    """

    peer: str
    ranges: tuple[tuple[int, int, int], ...]
    attached_at: float
    expires_at: float
    last_serve: float | None = None
    last_loaded_serve: float | None = None
    shadows: int = 0
    frames: tuple[Frame, ...] = ()
    answered_at: float = -math.inf
    latency: Latency = field(default_factory=Latency)
    breaker: Breaker = field(default_factory=Breaker)

    @property
    def proven(self) -> bool:
        """It has really computed experts."""
        return self.last_serve is not None

    def live(self, now: float) -> bool:
        """Its coverage has not expired."""
        return now < self.expires_at

    def fresh(self, now: float, settings: DispatchSettings = DEFAULT_SETTINGS) -> bool:
        """It has just attached, and may have its first try."""
        return not self.proven and 0 <= now - self.attached_at < settings.attach_grace

    def serving(self, now: float, settings: DispatchSettings = DEFAULT_SETTINGS) -> bool:
        """It has computed something lately, when there was load."""
        return self.last_loaded_serve is not None and now - self.last_loaded_serve < settings.serve_ttl

    @property
    def outstanding(self) -> int:
        """Row-expert pairs on their way."""
        return sum(frame.pairs for frame in self.frames)

    def overdue(self, now: float) -> bool:
        """It has not answered a frame for so long that somebody else was asked."""
        return any(now >= frame.late_at for frame in self.frames)

    def finish(self, now: float, pairs: int = 0) -> float:
        """When it should have answered everything, ``pairs`` more included that go out now (seconds)."""
        frames = (*self.frames, Frame(0, now, pairs)) if pairs else self.frames
        return self.latency.finish(frames, self.answered_at, now)

    def covers(self, layer: int, expert: int) -> bool:
        return any(at == layer and lo <= expert < hi for at, lo, hi in self.ranges)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that a decision looks at."""

    reading: SlotReading | None
    workers: tuple[Worker, ...]
    settings: DispatchSettings = DEFAULT_SETTINGS


@dataclass(frozen=True, slots=True)
class Decision:
    """Who gets rows until the next decision.

    Attributes:
        mode: ``local`` (nobody), ``load`` or ``cooling`` (the load has just ended).
        workers: peer ids that share the rows.
        shadows: peer ids that get rows which are computed locally too.
        trials: peer ids whose breaker is half open: one shadow each.
        late: peer ids that share the rows again once they have answered.
    """

    mode: Literal["local", "load", "cooling"]
    workers: tuple[str, ...] = ()
    shadows: tuple[str, ...] = ()
    trials: tuple[str, ...] = ()
    late: tuple[str, ...] = ()


def poll_due(started: float | None, now: float, settings: DispatchSettings = DEFAULT_SETTINGS) -> bool:
    """Whether the next reading of the own slots should begin (``started``: when the last one did)."""
    return started is None or now - started >= settings.poll_period


def under_load(
    reading: SlotReading | None, now: float, settings: DispatchSettings = DEFAULT_SETTINGS
) -> bool:
    """Whether the dispatcher is under load. An old reading, or none, is no load: a stalled poll ages out."""
    if reading is None or now - reading.at > settings.reading_ttl:
        return False
    return reading.load >= settings.saturation_threshold


def decide(snapshot: Snapshot, now: float) -> Decision:
    """Who gets rows."""
    settings = snapshot.settings
    live = [w for w in snapshot.workers if w.live(now)]
    sound = [w for w in live if w.breaker.state(now) == "closed"]
    shadows = tuple(
        w.peer
        for w in live
        if w.fresh(now, settings) and w.shadows < SHADOW_TRIES and w.breaker.state(now) != "open"
    )
    trials = tuple(w.peer for w in live if w.proven and w.breaker.state(now) == "half-open")
    if under_load(snapshot.reading, now, settings):
        there, late = punctual((w for w in sound if w.proven), now)
        return Decision("load", there, shadows, trials, late)
    there, late = punctual((w for w in sound if w.serving(now, settings)), now)
    if there or late:
        return Decision("cooling", there, shadows, trials, late)
    return Decision("local", (), shadows, ())


def punctual(workers: Iterable[Worker], now: float) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Peer ids of those that are not late, and of those that are."""
    there, late = list[str](), list[str]()
    for worker in workers:
        (late if worker.overdue(now) else there).append(worker.peer)
    return tuple(there), tuple(late)


def forget_expired(workers: Iterable[Worker], now: float) -> tuple[Worker, ...]:
    """Workers whose coverage still holds; with the others goes all that was known of them, breaker included."""
    return tuple(w for w in workers if w.live(now))


def sent(worker: Worker, number: int, pairs: int, now: float, *, shadow: bool = False) -> Worker:
    """Rows have gone to it as frame ``number``."""
    breaker = worker.breaker.tried() if worker.breaker.failures else worker.breaker
    expected = worker.finish(now, pairs) - now
    frame = Frame(
        number,
        now,
        pairs,
        not worker.frames,
        expected,
        now + worker.latency.hedge_after(expected),
        now + worker.latency.deadline(expected),
    )
    return replace(worker, frames=(*worker.frames, frame), shadows=worker.shadows + shadow, breaker=breaker)


def served(worker: Worker, number: int, compute_seconds: float, now: float, *, loaded: bool) -> Worker:
    """It has answered a frame in time, and what it said passed the checks.

    Args:
        number: of the frame.
        compute_seconds: its own word on the time of computing.
        loaded: the rows were sent under load.
    """
    return replace(
        answered(worker, number, compute_seconds, now),
        last_serve=now,
        last_loaded_serve=now if loaded else worker.last_loaded_serve,
        breaker=worker.breaker.succeeded(),
    )


def answered(worker: Worker, number: int, compute_seconds: float, now: float) -> Worker:
    """The answer to a frame is here."""
    place = next((i for i, frame in enumerate(worker.frames) if frame.number == number), None)
    if place is None:  # its link was lost meanwhile, and all that was under way with it
        return worker
    frame = worker.frames[place]
    seconds = now - frame.sent
    latency = worker.latency.observe(
        seconds,
        frame.pairs,
        min(compute_seconds, seconds),
        expected=frame.expected,
        since_answer=now - worker.answered_at if worker.answered_at > -math.inf else None,
        alone=frame.alone,
    )
    frames = (*worker.frames[:place], *worker.frames[place + 1 :])
    return replace(worker, frames=frames, answered_at=now, latency=latency)


def failed(worker: Worker, number: int, now: float) -> Worker:
    """It was late, wrong, or lost. It gets no more work for now."""
    return replace(dropped(worker, number), breaker=worker.breaker.failed(now))


def dropped(worker: Worker, number: int) -> Worker:
    """A frame is waited for no more."""
    return replace(worker, frames=tuple(frame for frame in worker.frames if frame.number != number))
