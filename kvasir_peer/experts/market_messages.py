"""What goes into the market of experts, and what comes out of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvasir_peer.engines.footprint import DEFAULT_EXPANSION
from kvasir_peer.experts.dispatch_policy import SlotReading

Range = tuple[int, int, int]  # layer, first expert, past the last expert

# Coverage holds so long (seconds) after a heartbeat.
COVERAGE_TTL = 120.0


@dataclass(frozen=True, slots=True)
class ExpertModel:
    """A mixture-of-experts model on offer, from its GGUF metadata.

    Attributes:
        model: name in the API.
        manifest: id.
        n_layer: layers in all.
        layers: those that have experts.
        n_expert: experts of each of them.
        expert_bytes: file bytes of one expert, by layer (the same order as ``layers``).
        least_expansion: bytes of memory for each byte of the file, whatever the engine: floats become float32.
    """

    model: str
    manifest: str
    n_layer: int
    layers: tuple[int, ...]
    n_expert: int
    expert_bytes: tuple[int, ...]
    least_expansion: float = 1.0


@dataclass(frozen=True, slots=True)
class Budget:
    """What a volunteer gives.

    Attributes:
        memory, disk: bytes.
        expansion: bytes of memory for each byte of block-quantised weights, as its engine needs.
        rate: measured row-expert pairs per second; 0 if not known.
        addresses: where it is reached.
        device: for people.
        model: only this model; empty for any.
        held: ranges it has on disk already, by model; they are given to it first.
    """

    memory: int
    disk: int
    expansion: float = DEFAULT_EXPANSION
    rate: float = 0.0
    addresses: tuple[str, ...] = ()
    device: str = ""
    model: str = ""
    held: tuple[Range, ...] = ()

    def bytes(self, model: ExpertModel) -> int:
        """File bytes of the model's experts that fit."""
        return min(int(self.memory / max(self.expansion, model.least_expansion)), self.disk)


@dataclass(frozen=True, slots=True)
class Lease:
    """A promise to fetch and serve.

    Attributes:
        id: unique at this bridge.
        peer, model: whose, of what.
        ranges: sorted, apart from each other.
        progress: bytes fetched and loaded.
        expires_at: seconds; moves with progress.
    """

    id: int
    peer: str
    model: str
    ranges: tuple[Range, ...]
    progress: int
    expires_at: float


@dataclass(frozen=True, slots=True)
class Coverage:
    """A worker that serves.

    Attributes:
        connected: its connection is known to the bridge, so that silence shows.
    """

    peer: str
    model: str
    ranges: tuple[Range, ...]
    seen: float
    rate: float = 0.0
    addresses: tuple[str, ...] = ()
    device: str = ""
    connected: bool = True
    retiring: bool = False

    def expires_at(self) -> float:
        return self.seen + COVERAGE_TTL


# --- events -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelOffered:
    """The bridge serves this model from now on."""

    model: ExpertModel


@dataclass(frozen=True, slots=True)
class CoordinatorUp:
    """A coordinator, or a dispatching stage, is there to be polled."""

    peer: str
    model: str


@dataclass(frozen=True, slots=True)
class CoordinatorDown:
    peer: str


@dataclass(frozen=True, slots=True)
class SlotsRead:
    """A poll was answered. ``heat``: rows routed per layer since the coordinator started."""

    peer: str
    reading: SlotReading
    heat: Mapping[int, int] | None = None


@dataclass(frozen=True, slots=True)
class SlotsUnread:
    """A poll failed or took too long."""

    peer: str


@dataclass(frozen=True, slots=True)
class VolunteerAsked:
    """An idle peer offers itself. ``wait``: seconds it will wait for a lease."""

    peer: str
    budget: Budget
    wait: float = 0.0


@dataclass(frozen=True, slots=True)
class VolunteerWent:
    """It waits no longer (its connection closed, its owner changed their mind)."""

    peer: str


@dataclass(frozen=True, slots=True)
class LeaseProgress:
    """Bytes fetched and loaded so far. Only growth renews a lease."""

    peer: str
    lease: int
    progress: int


@dataclass(frozen=True, slots=True)
class LeaseReturned:
    """The volunteer can't do it after all."""

    peer: str
    lease: int


@dataclass(frozen=True, slots=True)
class CoverageReported:
    """Registration and heartbeat, signed by the peer's own key (the shell has checked that).

    Attributes:
        lease: under which the ranges were fetched; 0 for none (the bridge was restarted).
    """

    peer: str
    model: str
    lease: int
    ranges: tuple[Range, ...]
    rate: float = 0.0
    addresses: tuple[str, ...] = ()
    device: str = ""
    connected: bool = True


@dataclass(frozen=True, slots=True)
class CoverageKept:
    """A worker that was wired before the bridge was restarted; it stays so for a moment, to be heard of again."""

    peer: str
    model: str
    ranges: tuple[Range, ...]
    rate: float = 0.0
    addresses: tuple[str, ...] = ()
    device: str = ""


@dataclass(frozen=True, slots=True)
class WorkerLeft:
    """Its connection closed, or it said goodbye."""

    peer: str


@dataclass(frozen=True, slots=True)
class Caught:
    """A check has shown that it computes wrong results."""

    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class Pardoned:
    """The bridge's owner lets it in again."""

    peer: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = (
    ModelOffered
    | CoordinatorUp
    | CoordinatorDown
    | SlotsRead
    | SlotsUnread
    | VolunteerAsked
    | VolunteerWent
    | LeaseProgress
    | LeaseReturned
    | CoverageReported
    | CoverageKept
    | WorkerLeft
    | Caught
    | Pardoned
    | Tick
)

# --- decisions ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Poll:
    """Read the slots of this coordinator; answer with :class:`SlotsRead` or :class:`SlotsUnread`."""

    peer: str
    timeout: float


@dataclass(frozen=True, slots=True)
class Granted:
    """Answer the volunteer with this lease. ``scarcity``: of each of its ranges before the grant."""

    lease: Lease
    manifest: str
    scarcity: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class NotNeeded:
    """Answer the volunteer that there is nothing for it, and why."""

    peer: str
    why: str


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    """The lease counts no more."""

    lease: Lease
    why: str


@dataclass(frozen=True, slots=True)
class Wired:
    """Answer the coverage report: the worker is in the dispatch map."""

    peer: str
    expires_at: float


@dataclass(frozen=True, slots=True)
class NotWired:
    """Answer the coverage report: it is not, and why."""

    peer: str
    why: str


@dataclass(frozen=True, slots=True)
class Retire:
    """Answer the coverage report, and tell it at once where it can be reached: it may go, free its memory."""

    peer: str
    why: str


@dataclass(frozen=True, slots=True)
class MapChanged:
    """Sign the dispatch map of this model again, and answer whoever waits for it."""

    model: str
    version: int


@dataclass(frozen=True, slots=True)
class SaturationChanged:
    """For people and the log."""

    model: str
    saturated: bool
    target: int


Decision = (
    Poll | Granted | NotNeeded | LeaseEnded | Wired | NotWired | Retire | MapChanged | SaturationChanged
)
