"""A ring in the terminal: what ``GET /api/ring/{model}`` and its timeline say, as text with colours. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

COLOURS = (
    "bright_yellow",
    "bright_blue",
    "bright_green",
    "bright_magenta",
    "bright_cyan",
    "bright_red",
    "yellow",
    "blue",
    "green",
    "magenta",
    "cyan",
    "red",
)
BLOCKS = " ▁▂▃▄▅▆▇█"
ASCII_BLOCKS = " .:-=+*#@"
LABEL = 9  # columns before a row of the timeline
BAR = 20  # columns of a stage's shares
WIDE = 110  # columns from which on everything is shown; a narrow terminal gets what matters most
STATE_STYLE = {"serving": "bold green", "mending": "bold red", "gathering": "bold", "away": "bold red"}
RING_STATE_STYLE = {"saturated": "bold yellow", "blocked": "bold red", "stalled": "bold red"}

Ring = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Cell:
    """One column of one stage's row: how much of its time is held, and by which request most."""

    share: float
    request: int | None


def colour_of(request: int) -> str:
    """The terminal colour of a request; neighbours differ."""
    return COLOURS[request % len(COLOURS)]


def cells(
    batches: Iterable[Mapping[str, Any]], stage: int, start: float, end: float, width: int
) -> list[Cell]:
    """A stage's row: ``width`` columns between two times (seconds on the bridge's clock)."""
    step = (end - start) / width
    held = [0.0] * width
    owners: list[dict[int, float]] = [{} for _ in range(width)]
    for batch in batches:
        if stage >= len(batch["bars"]):
            continue
        begin, finish = batch["bars"][stage]
        first, last = int((begin - start) / step), int((finish - start) / step)
        for column in range(max(0, first), min(width - 1, last) + 1):
            left = start + column * step
            part = min(finish, left + step) - max(begin, left)
            if part <= 0:
                continue
            held[column] += part
            rows = sum(run[1] for run in batch["runs"]) or 1
            for request, count, _ in batch["runs"]:
                owners[column][request] = owners[column].get(request, 0.0) + part * count / rows
    return [
        Cell(min(1.0, held[column] / step), max(owner, key=owner.__getitem__) if owner else None)
        for column, owner in enumerate(owners)
    ]


def view(
    ring: Ring, timeline: Mapping[str, Any], *, seconds: float, width: int, blocks: str = BLOCKS
) -> RenderableType:
    """Everything, for ``width`` columns."""
    parts: list[RenderableType] = [*_head(ring, width), _words(ring), Text()]
    if ring["stages"]:
        parts += [_stages(ring, blocks, width), Text()]
    parts += [_other(other) for other in ring["others"]]
    if timeline["stages"]:
        parts += _timeline(timeline, seconds, width, blocks)
    return Group(*parts)


def _head(ring: Ring, width: int) -> list[RenderableType]:
    window, requests = ring["window"], ring["requests"]
    head = Text.assemble(
        (ring["model"], "bold"), "  ", (ring["state"], STATE_STYLE.get(ring["state"], "bold yellow"))
    )
    if ring["epoch"]:
        head.append(f"  epoch {ring['epoch']}", "dim")
    if ring["state"] == "serving":
        figures = (
            f"{window['tokens_per_second']:.1f} tokens/s   {requests['active']} under way   "
            f"{window['in_flight']} in flight   {_time(window['round_trip_ms'])} around"
        )
        if len(head) + 3 + len(figures) > width:
            return [head, Text(figures)]
        head.append(f"   {figures}")
    return [head]


def _words(ring: Ring) -> Text:
    state = ring["ring_state"]
    if not state["name"]:
        return Text(ring["missing"])
    name, _, rest = state["text"].partition(": ")
    return Text.assemble((name, RING_STATE_STYLE.get(name, "bold")), ": ", rest)


def _stages(ring: Ring, blocks: str, width: int) -> Table:
    wide = width >= WIDE
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("stage", "layers", *(["peer"] if wide else []), ""):
        table.add_column(name, no_wrap=True)
    figures = ("held", *(["starved"] if wide else []), "blocked", "queue", "rows/s", "a pass")
    for name in figures:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("sends", no_wrap=True)
    for stage in ring["stages"]:
        window, last = stage["window"], stage["end"] - 1
        name = str(stage["first"]) if last == stage["first"] else f"{stage['first']}-{last}"
        first: list[str | Text] = [Text(str(stage["stage"] + 1), _stage_style(ring, stage)), name]
        if wide:
            first.append(f"…{stage['peer'][-8:]}")
        if ring["state"] != "serving" or window is None:
            table.add_row(*first, stage["state"], *[""] * len(figures), _moved(stage))
            continue
        table.add_row(
            *first,
            _bar(window, blocks, BAR if wide else BAR // 2),
            _percent(window["held"]),
            *([_percent(window["starved"])] if wide else []),
            _percent(window["blocked"]),
            f"{window['queue']:.1f}",
            f"{window['rows_per_second']:.1f}",
            _time(window["pass_ms"]),
            Text(_link(window, wide), "red" if ring["ring_state"]["link"] == stage["stage"] else ""),
        )
    return table


def _stage_style(ring: Ring, stage: Mapping[str, Any]) -> str:
    if stage["state"] in ("gone", "broken"):
        return "bold red"
    return "bold yellow" if ring["ring_state"]["stage"] == stage["stage"] else "bold"


def _bar(window: Mapping[str, Any], blocks: str, columns: int) -> Text:
    held = round(columns * window["held"])
    blocked = min(columns - held, round(columns * window["blocked"]))
    full, empty = blocks[-1], "·" if blocks is BLOCKS else "."
    return Text.assemble(
        (full * held, "yellow"), (full * blocked, "red"), (empty * (columns - held - blocked), "dim")
    )


def _link(window: Mapping[str, Any], wide: bool) -> str:
    if not window["path"]:
        return ""
    text = f"{window['path']}, {_time(window['round_trip_ms'])}"
    return f"{text}, busy {_percent(window['link'])}" if wide and window["link"] >= 0.05 else text


def _moved(stage: Mapping[str, Any]) -> str:
    moved = stage["transfer"]
    if stage["reason"]:
        return str(stage["reason"])
    if not moved or not moved["total"]:
        return ""
    return f"{moved['done'] / 1e6:.1f} of {moved['total'] / 1e6:.1f} MB"


def _other(other: Mapping[str, Any]) -> Text:
    return Text(f"…{other['peer'][-8:]}  {other['role']}: {other['why']}", "dim")


def _timeline(timeline: Mapping[str, Any], seconds: float, width: int, blocks: str) -> list[RenderableType]:
    columns = max(10, width - LABEL - 1)
    end = timeline["now"]
    rows: list[RenderableType] = []
    for stage in range(timeline["stages"]):
        row = Text(f"stage {stage + 1}".ljust(LABEL), "dim", no_wrap=True, overflow="crop")
        for cell in cells(timeline["batches"], stage, end - seconds, end, columns):
            level = min(len(blocks) - 1, round(cell.share * (len(blocks) - 1)) or (cell.share > 0.02))
            style = colour_of(cell.request) if cell.request is not None else "dim"
            row.append(blocks[level], f"{style} on grey11")
        rows.append(row)
    left, right = f"{seconds:g} s ago", "now"
    rows.append(Text(" " * LABEL + left + right.rjust(columns - len(left)), "dim", no_wrap=True))
    rows.append(_requests(timeline["requests"], blocks))
    return rows


def _requests(requests: Sequence[Mapping[str, Any]], blocks: str) -> Text:
    text = Text(" " * LABEL)
    for request in requests[-12:]:
        text.append(blocks[-1], colour_of(request["request"]))
        done = f"{request['tokens']} tokens" if request["tokens"] else f"{request['prefill_rows']} rows read"
        text.append(f" {request['request']}: {done}   ", "" if request["active"] else "dim")
    return text


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _time(milliseconds: float) -> str:
    if not milliseconds:
        return "-"
    if milliseconds >= 1000:
        return f"{milliseconds / 1000:.1f} s"
    return f"{milliseconds:.0f} ms" if milliseconds >= 10 else f"{milliseconds:.1f} ms"
