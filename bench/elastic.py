"""The elastic loop, live: a swarm that grows under load, shrinks when it ends, and is warm for the next surge.

    python bench/elastic.py [--model FILE.gguf] [--volunteers 8] [--disk 700000] [--quick] [--svg FILE]
        [--json FILE] [--timeline FILE]
    python bench/elastic.py --demo --model FILE.gguf --volunteers 4 --disk 40M     (make demo-experts)

A relay, a bridge without a ring, a coordinator and idle volunteers, each a process of its own, meet only through the
relay. Base 1 and boost 1 replica of four ranges of experts. Clients load the coordinator twice; one volunteer is killed
under load. What happened is printed, drawn, and held against the rules: exit status 1 where one is broken. All compute
exactly and send f32, so that every answer must be the same text; periods are the defaults. The demo asks a chat model
a question in the calm, and again while volunteers share the work.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import httpx
import psutil
import trio

from kvasir_peer import running
from kvasir_peer.commands.common import INTERRUPTED, run_until_stopped
from kvasir_peer.commands.processes import Child, Children
from kvasir_peer.progress import Progress

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "tests" / "data" / "stories260K-moe8x2.gguf"
PERIOD = 0.5  # seconds between two samples
CLIENTS = 6
QUIET = ["--no-direct", "--json-progress"]
FLOOR_MS = 1.0  # of the coordinator's own experts per row and expert: a machine worth helping
# The same in the demo, where a token takes 240 of them: all are one machine, of which volunteers would only take the
# coordinator's own time.
DEMO_FLOOR_MS = 0.2


@dataclass
class Sample:
    """One look at the bridge; ``remote`` is the share of pairs that workers computed since the last one."""

    at: float
    busy: int
    target: int
    base: int
    workers: int
    leases: int
    saturated: bool
    mode: str
    remote: float
    remote_pairs: int
    shadows: int


@dataclass
class Run:
    """The timeline and what the processes said."""

    began: float = field(default_factory=time.monotonic)
    samples: list[Sample] = field(default_factory=list)
    marks: list[tuple[float, str]] = field(default_factory=list)
    leases: int = 0
    peers: dict[str, str] = field(default_factory=dict)
    idle: set[str] = field(default_factory=set)
    texts: list[str] = field(default_factory=list)
    relay: str = ""
    ticket: str = ""
    base_url: str = ""
    ready: set[str] = field(default_factory=set)
    ready_for: dict[str, int] = field(default_factory=dict)

    def now(self) -> float:
        return time.monotonic() - self.began

    def mark(self, text: str) -> None:
        self.marks.append((self.now(), text))
        print(f"{self.now():7.1f} s  {text}", flush=True)

    def hear(self, child: Child, line: str) -> None:
        if line.startswith("/") and not self.relay:
            self.relay = line
        elif line.startswith("kvasir1"):
            self.ticket = line
        elif line.startswith("http://"):
            self.base_url = line
        elif (progress := Progress.from_json(line)) is not None:
            if progress.step == "ready":
                self.ready.add(child.name)
            if progress.step == "start":
                self.peers[child.name] = progress.text
            if progress.step == "plan" and "needed" in progress.text:
                self.idle.add(child.name)
            if child.name == "bridge" and "is asked for" in progress.text:
                self.leases += 1
            if child.name.startswith("volunteer"):
                if progress.step == "ready":
                    self.ready_for[child.name] = self.ready_for.get(child.name, 0) + 1
                    self.mark(f"{child.name} {progress.text}")
                elif "load has gone" in progress.text:
                    self.mark(f"{child.name} retires: {progress.text}")
            elif child.name == "bridge" and ("saturated" in progress.text or "calm" in progress.text):
                self.mark(progress.text)


@dataclass
class Swarm:
    """The processes, and what is asked of their bridge."""

    run: Run
    children: Children
    home: Path
    disk: str
    flags: list[str]
    slice_bytes: int = 0
    volunteers: list[Child] = field(default_factory=list)
    started: int = 0

    async def volunteer(self) -> Child:
        """Start one more."""
        name = f"volunteer{self.started}"
        self.started += 1
        return await self.children.start(
            name,
            "kvasir-peer",
            [
                *("volunteer", "--threads", "1", "--disk", self.disk, "--home", str(self.home / name)),
                *self.flags,
            ],
            log=self.home / f"{name}.log",
            KVASIR_TICKET=self.run.ticket,
        )

    async def wait_idle(self, child: Child) -> None:
        """Until a volunteer has offered itself."""
        await self.children.wait_for(lambda: child.name in self.run.idle or None, child.name)

    async def get(self, path: str) -> dict:
        """The only model of a route."""
        root = self.run.base_url.removesuffix("/v1")
        async with httpx.AsyncClient(base_url=root, timeout=20, trust_env=False) as client:
            return (await client.get(path)).json()["models"][0]

    async def recruitment(self) -> dict:
        """``GET /api/moe/recruitment``."""
        return await self.get("/api/moe/recruitment")


async def start(
    run: Run, children: Children, home: Path, model: Path, volunteers: int, disk: str, demo: bool
) -> Swarm:
    floor_ms = DEMO_FLOOR_MS if demo else FLOOR_MS
    swarm = Swarm(run, children, home, disk, QUIET if demo else [*QUIET, "--precision", "exact"])
    quiet = QUIET
    await children.start(
        "relay",
        "kvasir-relay",
        ["--listen", "/ip4/127.0.0.1/tcp/0", "--home", str(home / "relay")],
        log=home / "relay.log",
    )
    relay = await children.wait_for(lambda: run.relay or None, "the relay")
    await children.start(
        "bridge",
        "kvasir-peer",
        [
            *("bridge", "--model", str(model), "--relay", relay, "--stages", "0", "--port", "0", *quiet),
            *("--base-replicas", "1", "--boost-replicas", "1", "--home", str(home / "bridge")),
            *("--ticket-role", "volunteer", "--ticket-role", "coordinator", "--max-queue", "64"),
            *(() if demo else ("--experts-dtype", "f32")),
        ],
        log=home / "bridge.log",
    )
    ticket = await children.wait_for(lambda: run.ticket or None, "the bridge")
    await children.wait_for(lambda: run.base_url or None, "the bridge")
    await children.start(
        "coordinator",
        "kvasir-peer",
        ["coordinator", "--threads", "1", "--home", str(home / "coordinator"), *swarm.flags],
        log=home / "coordinator.log",
        KVASIR_TICKET=ticket,
        KVASIR_EXPERT_FLOOR_MS=str(floor_ms),
    )
    await children.wait_for(lambda: "coordinator" in run.ready or None, "the coordinator")
    for _ in range(volunteers):
        swarm.volunteers.append(await swarm.volunteer())
    for child in swarm.volunteers:
        await swarm.wait_idle(child)
    return swarm


async def watch(run: Run) -> None:
    root = run.base_url.removesuffix("/v1")
    last = (0, 0)
    async with httpx.AsyncClient(base_url=root, timeout=20, trust_env=False) as client:
        while True:
            found = (await client.get("/api/moe/recruitment")).json()["models"][0]
            modes = list(found["dispatch"].values())
            pairs = (
                sum(m["local_pairs"] for m in modes),
                sum(m["remote_pairs"] for m in modes),
            )
            local, remote = pairs[0] - last[0], pairs[1] - last[1]
            last = pairs
            previous = run.samples[-1].remote if run.samples else 0.0
            share = (
                remote / (local + remote) if local + remote > 0 else (0.0 if not found["busy"] else previous)
            )
            run.samples.append(
                Sample(
                    run.now(),
                    found["busy"],
                    found["effective_target"],
                    found["base_target"],
                    found["workers"],
                    found["leases"],
                    found["saturated"],
                    modes[0]["mode"] if modes else "",
                    share,
                    pairs[1],
                    sum(m["shadows"] for m in modes),
                )
            )
            await trio.sleep(PERIOD)


async def chat(run: Run, question: str) -> None:
    """Ask, and print the answer as it comes."""
    from kvasir_peer.commands import answers

    print(f"\n> {question}\n", flush=True)
    began, count = time.monotonic(), 0
    async with httpx.AsyncClient(base_url=run.base_url, timeout=300, trust_env=False) as client:
        model = (await client.get("models")).json()["data"][0]["id"]
        body = {
            "model": model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": 60,
            "temperature": 0,
            "stream": True,
        }
        async with client.stream("POST", "chat/completions", json=body) as got:
            if got.status_code != 200:
                raise SystemExit(
                    f"the bridge answered {got.status_code}: {(await got.aread()).decode()[:300]}"
                )
            async for line in got.aiter_lines():
                for event in answers.read_line(line):
                    if isinstance(event, answers.Text):
                        count += 1
                        print(event.text, end="", flush=True)
    print(f"\n\n{count} pieces in {time.monotonic() - began:.1f} s\n", flush=True)


async def demo(run: Run, nursery: trio.Nursery, volunteers: int, question: str) -> None:
    run.mark(f"the coordinator is a slow machine here: {DEMO_FLOOR_MS} ms for a row and expert, 240 a token")
    run.mark("calm: it computes everything itself")
    await chat(run, question)
    stop = trio.Event()
    run.mark("three clients come at once")
    nursery.start_soon(load, run, stop, 32, 3)
    await until(run, lambda s: s.workers >= volunteers, 240, f"{volunteers} workers")
    await until(run, lambda s: s.remote > 0.02, 120, "rows computed by volunteers")
    run.mark(f"volunteers compute {run.samples[-1].remote:.0%} of the experts' rows")
    await chat(run, question)
    run.mark("the clients leave")
    stop.set()
    await until(run, lambda s: s.busy == 0, 240, "the end of the last answers")


async def load(run: Run, stop: trio.Event, tokens: int = 120, count: int = CLIENTS) -> None:
    """Clients that ask again and again until told to stop."""
    async with httpx.AsyncClient(base_url=run.base_url, timeout=300, trust_env=False) as client:
        model = (await client.get("models")).json()["data"][0]["id"]

        async def one() -> None:
            while not stop.is_set():
                body = {"model": model, "prompt": "Once upon a time", "max_tokens": tokens, "temperature": 0}
                answer = await client.post("completions", json=body)
                if answer.status_code == 200:
                    run.texts.append(answer.json()["choices"][0]["text"])
                else:
                    await trio.sleep(0.5)

        async with trio.open_nursery() as nursery:
            for _ in range(count):
                nursery.start_soon(one)


async def until(run: Run, condition: Callable[[Sample], bool], seconds: float, what: str) -> float:
    """Seconds until a sample meets the condition."""
    began = run.now()
    seen = len(run.samples)
    with trio.move_on_after(seconds):
        while True:
            for sample in run.samples[seen:]:
                if condition(sample):
                    return sample.at - began
            seen = len(run.samples)
            await trio.sleep(PERIOD / 2)
    raise SystemExit(f"not within {seconds:.0f} s: {what}\n{table(run)}")


@dataclass
class Row:
    """One rule of the loop, as it was seen.

    Attributes:
        found, goal: in words.
        value, unit, most: where the rule is a number that must not be larger; else the value is 1 where it holds, or 0.
    """

    name: str
    goal: str
    found: str
    holds: bool
    value: float
    unit: str = ""
    most: float | None = None

    def as_json(self) -> dict[str, object]:
        """As :mod:`rows` has it, and what was found in words."""
        goal = ">= 1" if self.most is None else f"<= {self.most:g}"
        row = {"name": self.name, "value": round(self.value, 3), "unit": self.unit, "goal": goal}
        return row | {"holds": self.holds, "remark": f"{self.found} (goal: {self.goal})"}


class Rules:
    """Rows as they are found."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.rows: list[Row] = []

    def row(self, name: str, goal: str, found: str, holds: bool) -> None:
        self._add(Row(name, goal, found, holds, float(holds)))

    def within(self, name: str, seconds: float, most: float) -> None:
        self._add(Row(name, f"at most {most:g} s", f"{seconds:.1f} s", seconds <= most, seconds, "s", most))

    def _add(self, row: Row) -> None:
        self.rows.append(row)
        self._run.mark(f"{'holds' if row.holds else 'BROKEN'}: {row.name}: {row.found} (goal: {row.goal})")


Cells = list[list[int]]


def cells(ranges: Cells) -> set[tuple[int, int]]:
    """Single experts of ranges."""
    return {(layer, expert) for layer, lo, hi in ranges for expert in range(lo, hi)}


def replicas(covered: list[dict]) -> dict[tuple[int, int], int]:
    """Of each expert that somebody serves."""
    count: dict[tuple[int, int], int] = {}
    for worker in covered:
        for cell in cells(worker["ranges"]):
            count[cell] = count.get(cell, 0) + 1
    return count


def slowest_surplus(covered: list[dict], target: int) -> set[str]:
    """Who may go, the slowest first, so that each expert keeps ``target`` replicas."""
    count, going = replicas(covered), set()
    for worker in sorted(covered, key=lambda w: (w["rate"], w["peer"])):
        if all(count[cell] > target for cell in cells(worker["ranges"])):
            going.add(worker["peer"])
            for cell in cells(worker["ranges"]):
                count[cell] -= 1
    return going


def processes(child: Child) -> list[psutil.Process]:
    """A peer's agent and its engine."""
    agent = psutil.Process(child.process.pid)
    return [agent, *agent.children(recursive=True)]


def memory(child: Child) -> float:
    """Megabytes in RAM of a peer's engine process."""
    return sum(process.memory_info().rss for process in processes(child)[1:]) / 1e6


def listening(child: Child) -> int:
    """TCP ports that a peer's processes listen on."""
    return sum(
        connection.status == psutil.CONN_LISTEN
        for process in processes(child)
        for connection in process.net_connections(kind="tcp")
    )


def changes(run: Run, since: float = 0.0) -> int:
    """Times that the effective target changed between two values other than none at all."""
    targets = [s.target for s in run.samples if s.at >= since]
    return sum(a != b for a, b in itertools.pairwise(targets))


async def scenario(run: Run, swarm: Swarm, nursery: trio.Nursery, volunteers: int, rules: Rules) -> None:
    """The whole loop: calm, surge, a death, calm, surge."""
    half = volunteers // 2
    ports = sum(listening(child) for child in swarm.volunteers)
    rules.row("ports that volunteers listen on", "none", f"{ports} of {volunteers} volunteers", ports == 0)
    await trio.sleep(3)
    calm = all(s.workers == 0 and s.target == 0 for s in run.samples)
    rules.row("calm without a worker is no demand", "target 0", f"target {run.samples[-1].target}", calm)

    stop = trio.Event()
    run.mark("first surge")
    surge = run.now()
    nursery.start_soon(load, run, stop)
    await until(run, lambda s: s.saturated, 60, "saturation")
    saturated = next(s.at for s in run.samples if s.saturated)
    demand = await swarm.get("/api/expert-demand")
    rules.row(
        "saturation is demand",
        "recruiting: true, target 2",
        f"recruiting: {str(demand['recruiting']).lower()}, target {demand['effective_target']}",
        demand["recruiting"] is True and demand["effective_target"] == 2,
    )
    await until(run, lambda s: s.remote_pairs > 0, 90, "a first remote row")
    first = next(s for s in run.samples if s.remote_pairs > 0)
    rules.within("saturation to the first remote row", first.at - saturated, 15)
    run.mark(f"first remote row {first.at - surge:.1f} s after the first client came")
    tried = first.shadows
    rules.row("a first try before rows are shared", "a shadow", f"{tried} shadows", tried > 0)
    await until(run, lambda s: s.workers >= volunteers, 120, f"{volunteers} workers")
    covered = (await swarm.recruitment())["covered_by"]
    kinds = len({tuple(sorted(cells(w["ranges"]))) for w in covered})
    both = set(replicas(covered).values())
    rules.row(
        "leases on different ranges",
        f"{half} ranges, each expert twice",
        f"{kinds} ranges, replicas {sorted(both)}",
        kinds >= half and both == {2},
    )
    await trio.sleep(8)
    before = run.samples[-1].remote_pairs
    await trio.sleep(5)
    more = run.samples[-1].remote_pairs - before
    rules.row("workers share the rows while the load lasts", "remote rows", f"{more} pairs in 5 s", more > 0)

    spare = await swarm.volunteer()
    await swarm.wait_idle(spare)
    victim = swarm.volunteers[0]
    lost = next(w for w in covered if w["peer"] == run.peers[victim.name])
    run.mark(f"{victim.name} is killed")
    killed = run.now()
    await swarm.children.kill(victim)
    while any(w["peer"] == lost["peer"] for w in (await swarm.recruitment())["covered_by"]):
        await trio.sleep(0.1)
        if run.now() - killed > 60:
            raise SystemExit("the coverage of a dead volunteer did not end")
    rules.within("a killed volunteer is out of the map", run.now() - killed, 5)
    while True:
        covered = (await swarm.recruitment())["covered_by"]
        heir = [w for w in covered if w["peer"] == run.peers.get(spare.name)]
        if heir:
            break
        await trio.sleep(0.2)
        if run.now() - killed > 90:
            raise SystemExit("nobody took the experts of a dead volunteer")
    same = cells(heir[0]["ranges"]) == cells(lost["ranges"])
    rules.row(
        "another takes its experts",
        "the same, within 30 s",
        f"{'the same' if same else 'others'}, after {run.now() - killed:.1f} s",
        same and run.now() - killed <= 30,
    )
    await trio.sleep(6)

    held = {child.name: memory(child) for child in [*swarm.volunteers[1:], spare]}
    run.mark("the load ends")
    stop.set()
    await until(run, lambda s: s.busy == 0, 60, "the end of the last answers")
    last: list[dict] = []
    while (seen := await swarm.recruitment())["saturated"]:
        last = seen["covered_by"]
        await trio.sleep(0.2)
        if run.now() - killed > 240:
            raise SystemExit("the saturation does not end")
    expected = slowest_surplus(last, 1)
    await until(run, lambda s: s.workers <= half, 30, f"{half} workers left")
    await trio.sleep(4)
    stay = (await swarm.recruitment())["covered_by"]
    gone = {w["peer"] for w in last} - {w["peer"] for w in stay}
    rules.row(
        "the slowest surplus workers retire",
        f"{volunteers - half} of them, the slowest by their rates",
        f"{len(gone)}, {len(gone & expected)} of them as expected",
        len(gone) == volunteers - half and gone == expected,
    )
    names = {peer: name for name, peer in run.peers.items()}
    children = {child.name: child for child in [*swarm.volunteers[1:], spare]}
    freed = [held[names[peer]] - memory(children[names[peer]]) for peer in gone]
    # Only where the experts are large does it show beside what an engine process takes for itself.
    size = swarm.slice_bytes / 1e6
    if size > 10:
        rules.row(
            "they free their memory",
            f"over half of the {size:.0f} MB of their experts, each",
            f"{min(freed):.0f} to {max(freed):.0f} MB",
            min(freed) > size / 2,
        )
    await trio.sleep(20)
    rules.row(
        "the others stay warm", f"{half}", f"{run.samples[-1].workers}", run.samples[-1].workers == half
    )
    modes = {s.mode for s in run.samples[-20:]}
    still = run.samples[-1].remote_pairs - run.samples[-20].remote_pairs
    rules.row(
        "all rows are local in the calm",
        "mode local, no remote pair in 10 s",
        f"mode {', '.join(sorted(modes))}, {still} pairs",
        modes == {"local"} and still == 0,
    )
    served_by = {w["peer"] for w in (await swarm.recruitment())["covered_by"]}
    for peer in gone:  # so that whoever computes in the next surge was warm
        running.set_paused(swarm.home / names[peer], True)
    await trio.sleep(2)
    run.mark(f"the {len(gone)} that have retired are paused by their owners")
    granted = run.leases
    again = trio.Event()
    before = run.samples[-1].remote_pairs
    run.mark("second surge")
    surge = run.now()
    nursery.start_soon(load, run, again)
    await until(run, lambda s: s.remote_pairs > before, 60, "remote rows again")
    sample = next(s for s in run.samples if s.remote_pairs > before)
    rules.within("the second surge is served by warm workers", sample.at - surge, 6)
    now = {w["peer"] for w in (await swarm.recruitment())["covered_by"]}
    rules.row(
        "without a recruit",
        "no lease, the same workers",
        f"{run.leases - granted} leases, {len(now - served_by)} new workers",
        run.leases == granted and served_by == now,
    )
    await trio.sleep(5)
    again.set()
    await until(run, lambda s: s.busy == 0, 90, "the end of the last answers")
    count = changes(run)
    rules.row("no flapping", "the target changes at most 4 times", f"{count} times", count <= 4)
    wrong = len(set(run.texts))
    rules.row("no token is changed", "one text", f"{len(run.texts)} answers, {wrong} text(s)", wrong == 1)


def table(run: Run) -> str:
    lines = ["      s  busy  target  workers  leases  remote  mode"]
    last = None
    for s in run.samples:
        key = (s.busy, s.target, s.workers, s.leases, round(s.remote, 1), s.mode)
        if key != last:
            lines.append(
                f"{s.at:7.1f}  {s.busy:4}  {s.target:6}  {s.workers:7}  {s.leases:6}  {s.remote:6.0%}  {s.mode}"
            )
        last = key
    return "\n".join(lines)


def draw(run: Run) -> str:
    """The timeline as SVG: counts by the left scale, the remote share by the right one; grey where saturated."""
    width, height, left, right, top, bottom = 960, 320, 40, 50, 46, 30
    first, end = run.samples[0].at, run.samples[-1].at
    most = max(max(s.busy, s.workers, s.target) for s in run.samples) or 1

    def x(at: float) -> float:
        return left + (width - left - right) * (at - first) / (end - first)

    def y(share: float) -> float:
        return height - bottom - (height - top - bottom) * share

    def line(value: Callable[[Sample], float], colour: str, scale: float) -> str:
        """Steps: each value holds until the next one was read."""
        points, before = [], 0.0
        for sample in run.samples:
            now = y(value(sample) / scale)
            points += [f"{x(sample.at):.1f},{before or now:.1f}", f"{x(sample.at):.1f},{now:.1f}"]
            before = now
        return f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" stroke-width="1.5"/>'

    legend = [("busy slots", "#888"), ("target", "#c60"), ("workers", "#06c"), ("remote share", "#393")]
    parts = [f'<rect width="{width}" height="{height}" fill="#fff"/>']
    for a, b in itertools.pairwise(run.samples):
        if a.saturated:
            span = x(b.at) - x(a.at) + 0.1
            parts.append(
                f'<rect x="{x(a.at):.1f}" y="{top}" width="{span:.1f}" height="{y(0) - top:.1f}" fill="#f4f0e8"/>'
            )
    for i, (name, colour) in enumerate(legend):
        parts.append(f'<text x="{left + 120 * i}" y="14" fill="{colour}">{name}</text>')
    for count in range(0, most + 1, 2):
        parts.append(f'<text x="{left - 6}" y="{y(count / most) + 4:.1f}" text-anchor="end">{count}</text>')
    for share in (0, 50, 100):
        parts.append(
            f'<text x="{width - right + 6}" y="{y(share / 100) + 4:.1f}" fill="#393">{share} %</text>'
        )
    shown = [m for m in run.marks if m[1].endswith(("surge", "load ends", "is killed"))]
    for i, (at, text) in enumerate(shown):
        parts.append(f'<line x1="{x(at):.1f}" x2="{x(at):.1f}" y1="{top - 4}" y2="{y(0)}" stroke="#bbb"/>')
        parts.append(f'<text x="{x(at) + 3:.1f}" y="{top - 6 - 12 * (i % 2)}" fill="#555">{text}</text>')
    for seconds in range(int(first) // 20 * 20 + 20, int(end), 20):
        parts.append(f'<text x="{x(seconds):.1f}" y="{height - 10}" text-anchor="middle">{seconds} s</text>')
    parts += [
        line(lambda s: s.busy, "#888", most),
        line(lambda s: s.remote, "#393", 1.0),
        line(lambda s: s.target, "#c60", most),
        line(lambda s: s.workers, "#06c", most),
    ]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
    return head + 'font-family="sans-serif" font-size="11">' + "\n".join(parts) + "</svg>\n"


async def main_async(run: Run, rules: Rules, given: argparse.Namespace, home: Path) -> None:
    async with trio.open_nursery() as nursery:
        children = Children(nursery, run.hear)
        try:
            swarm = await start(run, children, home, given.model, given.volunteers, given.disk, given.demo)
            swarm.slice_bytes = given.slice_bytes
            run.mark(f"{given.volunteers} idle volunteers, a coordinator")
            async with trio.open_nursery() as clients:
                clients.start_soon(watch, run)
                if given.demo:
                    await demo(run, clients, given.volunteers, given.prompt)
                else:
                    await scenario(run, swarm, clients, given.volunteers, rules)
                clients.cancel_scope.cancel()
        finally:
            await children.end()
            nursery.cancel_scope.cancel()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--volunteers", type=int, default=8)
    parser.add_argument("--disk", default="700000", help="of each volunteer: a quarter of the small model")
    parser.add_argument(
        "--slice-bytes",
        type=int,
        default=0,
        help="of a volunteer's experts, where it is worth looking at memory",
    )
    parser.add_argument("--svg", type=Path, help="draw the timeline")
    parser.add_argument("--json", type=Path, help="write the rules as rows: name, value, unit, goal, holds")
    parser.add_argument("--timeline", type=Path, help="write the samples and what happened, as JSON")
    parser.add_argument(
        "--quick", action="store_true", help="the same: the loop's own periods take two minutes"
    )
    parser.add_argument("--demo", action="store_true", help="a short run with a chat")
    parser.add_argument("--prompt", default="Why is the sky blue? Answer in one short sentence.")
    parser.add_argument("--home", type=Path, help="keep the processes' folders and logs here")
    given = parser.parse_args()
    if not given.model.is_file():
        parser.error(f"{given.model}: no such file; `make demo-experts` makes the one of the demo")
    os.environ.setdefault("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "relay")]))
    run = Run()
    rules = Rules(run)
    with tempfile.TemporaryDirectory(prefix="kvasir-elastic-") as home:
        # Whatever ends it, the processes and their folder go.
        stopped = run_until_stopped(lambda: main_async(run, rules, given, given.home or Path(home)))
    if stopped:
        return INTERRUPTED
    print(table(run))
    for row in rules.rows:
        print(f"{'holds ' if row.holds else 'BROKEN'}  {row.name}: {row.found} (goal: {row.goal})")
    if given.json is not None:
        given.json.write_text(json.dumps([row.as_json() for row in rules.rows], indent=1) + "\n")
    if given.timeline is not None:
        found = {"timeline": [asdict(sample) for sample in run.samples], "marks": run.marks}
        given.timeline.write_text(json.dumps(found, indent=1) + "\n")
    if given.svg is not None:
        given.svg.write_text(draw(run))
        print(f"drawn to {given.svg}")
    return 0 if all(row.holds for row in rules.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
