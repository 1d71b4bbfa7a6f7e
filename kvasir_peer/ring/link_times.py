"""Which pairs of peers are measured, and what they said. Pure; time is passed in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kvasir_peer.ring.offers import Links, LinkTime

# Peers that measure with each other: those of a large ring and its standbys. With more, all pairs are too many.
MAX_MEASURED = 16
MEASURED_FOR = 900.0  # seconds after which a pair is measured again
RETRY_AFTER = 30.0  # seconds after which a pair that was asked for, and did not answer, is asked for again


class LinkTimes:
    """One ring's pairs.

    Args:
        bridge: peer id of the bridge, whose way to each peer counts too.
        remembered: of another day; they count until the pair has been measured, or one of the two has left.
    """

    def __init__(self, bridge: str, remembered: Mapping[tuple[str, str], LinkTime] | None = None) -> None:
        self._bridge = bridge
        self._remembered = {_pair(*pair): time for pair, time in (remembered or {}).items()}
        self._times: dict[tuple[str, str], LinkTime] = {}
        self._measured: dict[tuple[str, str], float] = {}
        self._asked: dict[tuple[str, str], float] = {}

    def due(self, peer: str, members: Sequence[str], now: float) -> list[str]:
        """Whom the peer should measure now: the bridge, and stages with a greater id; those with a lesser one do it."""
        found = []
        for other in [self._bridge, *members[:MAX_MEASURED]]:
            if (
                other == peer
                or (other != self._bridge and not peer < other)
                or peer not in members[:MAX_MEASURED]
            ):
                continue
            pair = _pair(peer, other)
            if now - self._measured.get(pair, -MEASURED_FOR) < MEASURED_FOR:
                continue
            if now - self._asked.get(pair, -RETRY_AFTER) >= RETRY_AFTER:
                found.append(other)
        return found

    def asked(self, peer: str, others: Iterable[str], now: float) -> None:
        """The peer has been told to measure these."""
        for other in others:
            self._asked[_pair(peer, other)] = now

    def take(self, peer: str, other: str, time: LinkTime, members: Sequence[str], now: float) -> bool:
        """What a peer has measured; whether that is news. Of pairs that nobody asked for it is not."""
        pair = _pair(peer, other)
        if pair not in self._asked or (other != self._bridge and other not in members):
            return False
        del self._asked[pair]
        self._measured[pair], self._times[pair] = now, time
        return True

    def forget(self, peer: str) -> None:
        """A peer is gone; it may come back from somewhere else."""
        for table in (self._times, self._measured, self._asked, self._remembered):
            for pair in [pair for pair in table if peer in pair]:
                del table[pair]

    @property
    def links(self) -> Links:
        """For the planner; pairs that were not measured are believed to be as far apart as the usual one."""
        times = {**self._remembered, **self._times}
        if not times:
            return Links()
        seconds = sorted(time.seconds for time in times.values())
        return Links(LinkTime(seconds[len(seconds) // 2]), times)


def _pair(a: str, b: str) -> tuple[str, str]:
    return (a, b) if a < b else (b, a)
