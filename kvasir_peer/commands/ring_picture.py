"""The timeline of a ring as a PNG picture: stages as rows, batches as bars, coloured by request."""

from __future__ import annotations

import colorsys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvasir_peer.errors import SettingsError, UsageError

INCHES_WIDE = 12.0
INCHES_A_STAGE = 0.75
MAX_LEGEND = 16  # requests named below the picture


def colour_of(request: int) -> tuple[float, float, float]:
    """Red, green, blue of a request; neighbouring numbers are far apart on the wheel."""
    return colorsys.hls_to_rgb(((38 + request * 137.508) % 360) / 360, 0.56, 0.55)


def draw(ring: Mapping[str, Any], timeline: Mapping[str, Any], seconds: float, path: Path) -> None:
    """Write the last ``seconds`` of a ring to ``path``.

    Raises:
        UsageError: matplotlib is missing.
        SettingsError: the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.collections import PolyCollection
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        raise UsageError("--png needs matplotlib: pip install matplotlib") from None

    stages, end = max(1, timeline["stages"]), timeline["now"]
    figure = Figure(figsize=(INCHES_WIDE, 1.9 + INCHES_A_STAGE * stages), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    boxes: list[list[tuple[float, float]]] = []
    fills: list[tuple[float, float, float]] = []
    seen: set[int] = set()
    for batch in timeline["batches"]:
        rows = sum(run[1] for run in batch["runs"]) or 1
        for stage, (begin, finish) in enumerate(batch["bars"]):
            if finish < end - seconds or stage >= stages:
                continue
            low, left, right = stage - 0.4, begin - end, finish - end
            for request, count, _ in batch["runs"] or ((0, 1, False),):
                high = low + 0.8 * count / rows
                boxes.append([(left, low), (right, low), (right, high), (left, high)])
                fills.append(colour_of(request) if batch["runs"] else (0.6, 0.6, 0.6))
                low = high
                seen.add(request)
    axes.add_collection(PolyCollection(boxes, facecolors=fills, linewidths=0))
    axes.set_xlim(-seconds, 0)
    axes.set_ylim(stages - 0.5, -0.5)
    axes.set_yticks(range(stages), [_label(ring, stage) for stage in range(stages)])
    axes.set_xlabel("seconds before now")
    axes.set_facecolor("#f3eee3")
    axes.tick_params(length=0)
    axes.grid(axis="x", color="#ddd5c4", linewidth=0.8)
    axes.set_axisbelow(True)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_title(_title(ring), loc="left", fontsize=12)
    named = [request for request in timeline["requests"] if request["request"] in seen][-MAX_LEGEND:]
    if named:
        figure.legend(
            handles=[
                Patch(color=colour_of(r["request"]), label=f"request {r['request']} ({r['tokens']} tokens)")
                for r in named
            ],
            loc="outside lower left",
            ncols=6,
            frameon=False,
            fontsize=9,
        )
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise SettingsError(f"can't write {path}: {error.strerror}") from None


def _title(ring: Mapping[str, Any]) -> str:
    return f"{ring['model']}, {ring['state']}\n{ring['ring_state']['text'] or ring['missing']}"


def _label(ring: Mapping[str, Any], index: int) -> str:
    if index >= len(ring["stages"]):
        return f"stage {index + 1}"
    stage = ring["stages"][index]
    last = stage["end"] - 1
    layers = f"layers {stage['first']}-{last}" if stage["first"] < last else f"layer {last}"
    held = f", held {100 * stage['window']['held']:.0f} %" if stage["window"] else ""
    return f"stage {index + 1}\n{layers}{held}"
