"""``kvasir-peer plan``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvasir_peer.commands.common import with_settings
from kvasir_peer.errors import PlanError
from kvasir_peer.settings import PlanSettings

if TYPE_CHECKING:
    from kvasir_peer.engines.architectures import ModelShape
    from kvasir_peer.models.gguf import GgufFile
    from kvasir_peer.ring.offers import ModelNeeds

KV_VALUE_BYTES = 4  # both engines keep float32 caches on a CPU
IN_FLIGHT_PER_STAGE = 3  # where nothing is set: one batch computed, one waiting, one on the way


@with_settings(PlanSettings)
def show_plan(settings: PlanSettings) -> None:
    """Show what a ring takes and gives: layers, bytes, memory, forecast, and why each peer has its place.

    Without --model it is the ring of a running bridge, by what its peers have measured. With it, a ring that is only
    imagined: its peers are alike, each with --memory and --read-rate.
    """
    if not settings.model:
        _show_running(settings)
        return
    from kvasir_peer.engines import architectures
    from kvasir_peer.models.gguf import GgufFile
    from kvasir_peer.ring.offers import Ground, Links, LinkTime, StageOffer, Wishes
    from kvasir_peer.ring.planner import describe, plan_ring
    from kvasir_peer.serving.widths import Widths

    with GgufFile.open(Path(settings.model).expanduser()) as file:
        shape = architectures.parse(file.metadata, file.tensors)
        needs = needs_of(file, shape)
    context = settings.context_length or min(shape.context_length, 4096)
    peers = settings.peers or settings.stages or 2
    widths = Widths(
        settings.batch_rows,
        settings.micro_batch_rows,
        settings.max_in_flight or min(64, IN_FLIGHT_PER_STAGE * (settings.stages or peers)),
        settings.max_requests,
        context,
        0,
    )
    offers = [
        StageOffer(f"peer-{number + 1}", settings.memory, 1 << 62, read_rate=float(settings.read_rate))
        for number in range(peers)
    ]
    planned = plan_ring(
        Ground(
            offers,
            needs,
            Links(LinkTime(settings.hop_ms / 1000, float(settings.link_rate))),
            Wishes(widths, settings.stages or None, settings.boundary),
        ),
        bridge="bridge",
        plan_id="plan",
    )
    if planned.plan is None or planned.forecast is None:
        raise PlanError(f"no ring can be made of {peers} such peers: {planned.missing}")
    print("\n".join(describe(planned.plan, needs, planned.forecast, planned.places)))


def _show_running(settings: PlanSettings) -> None:
    """The present plan of a running bridge, in words."""
    from kvasir_peer import running
    from kvasir_peer.commands.chat import DEFAULT_URL
    from kvasir_peer.commands.ring import Bridge

    here = running.find(settings.home)
    bridge = Bridge(settings.url or (here.base_url if here else "") or DEFAULT_URL, None)
    status = bridge.get(bridge.model(None))
    print(f"{status['model']}: {status['state']}, epoch {status['epoch']}")
    print("\n".join(status["words"]))


def needs_of(file: GgufFile, shape: ModelShape) -> ModelNeeds:
    """The sizes of an open model that planning goes by."""
    from kvasir_peer.engines.footprint import Floats, floats_of
    from kvasir_peer.ring.offers import ModelNeeds

    def size(names: list[str]) -> int:
        return sum(file.tensors[name].n_bytes for name in names)

    def floats(names: list[str]) -> Floats:
        return floats_of(file.tensors[name] for name in names)

    layers, layer_floats, n_layer = [], [], shape.n_layer
    for layer in range(n_layer):
        own = [name for name in shape.stage_tensors(layer, layer + 1) if name.startswith(f"blk.{layer}.")]
        layers.append(size(own))
        layer_floats.append(floats(own))
    tail = [name for name in shape.stage_tensors(n_layer - 1, n_layer) if not name.startswith("blk.")]
    caches = max(sum(layer.attention.cache_widths) for layer in shape.layers)
    return ModelNeeds(
        model=file.path.name[:64],
        n_embd=shape.n_embd,
        vocab=shape.n_vocab,
        layer_bytes=tuple(layers),
        head_bytes=size(["token_embd.weight"]),
        tail_bytes=size(tail),
        kv_bytes=KV_VALUE_BYTES * caches,
        layer_floats=tuple(layer_floats),
        head_floats=floats(["token_embd.weight"]),
        tail_floats=floats(tail),
    )
