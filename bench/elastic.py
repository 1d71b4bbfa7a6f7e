"""The elastic loop, live: a swarm that grows under load, shrinks when it ends, and is warm for the next surge.

    python bench/elastic.py [--model FILE.gguf] [--volunteers 8] [--disk 700000] [--svg FILE]
    python bench/elastic.py --demo --model FILE.gguf --volunteers 4 --disk 40M     (make demo-experts)

A relay, a bridge without a ring, a coordinator and idle volunteers, each a process of its own, meet only through the
relay. Base 1 and boost 1 replica of four ranges of experts. Clients load the coordinator twice. What happened is
printed as a timeline, drawn, and held against the rules: exit status 1 where one is broken. The demo asks a chat
model a question in the calm, and again while volunteers share the work.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import trio

from kvasir_peer.commands.processes import Child, Children
from kvasir_peer.progress import Progress

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "tests" / "data" / "stories260K-moe8x2.gguf"
PERIOD = 0.5  # seconds between two samples
CLIENTS = 6
FLOOR_MS = 1.0  # of the coordinator's own experts per row and expert: a machine worth helping


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


@dataclass
class Run:
    """The timeline and what the processes said."""

    began: float = field(default_factory=time.monotonic)
    samples: list[Sample] = field(default_factory=list)
    marks: list[tuple[float, str]] = field(default_factory=list)
    granted: int = 0
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
            if child.name.startswith("volunteer"):
                if progress.step == "ready":
                    self.ready_for[child.name] = self.ready_for.get(child.name, 0) + 1
                    self.mark(f"{child.name} {progress.text}")
                elif "load has gone" in progress.text:
                    self.mark(f"{child.name} retires: {progress.text}")
            elif child.name == "bridge" and ("saturated" in progress.text or "calm" in progress.text):
                self.mark(progress.text)


async def start(
    run: Run, children: Children, home: Path, model: Path, volunteers: int, disk: str, floor_ms: float
) -> None:
    quiet = ["--no-direct", "--json-progress"]
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
        ],
        log=home / "bridge.log",
    )
    ticket = await children.wait_for(lambda: run.ticket or None, "the bridge")
    await children.wait_for(lambda: run.base_url or None, "the bridge")
    await children.start(
        "coordinator",
        "kvasir-peer",
        ["coordinator", "--threads", "1", "--home", str(home / "coordinator"), *quiet],
        log=home / "coordinator.log",
        KVASIR_TICKET=ticket,
        KVASIR_EXPERT_FLOOR_MS=str(floor_ms),
    )
    await children.wait_for(lambda: "coordinator" in run.ready or None, "the coordinator")
    for number in range(volunteers):
        folder = home / f"volunteer{number}"
        await children.start(
            f"volunteer{number}",
            "kvasir-peer",
            ["volunteer", "--threads", "1", "--disk", disk, "--home", str(folder), *quiet],
            log=home / f"volunteer{number}.log",
            KVASIR_TICKET=ticket,
        )


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
    run.mark("calm: the coordinator computes everything itself")
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
                if answer.status_code != 200:
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


async def scenario(run: Run, nursery: trio.Nursery, volunteers: int, failures: list[str]) -> None:
    def hold(good: bool, text: str) -> None:
        run.mark(("holds: " if good else "BROKEN: ") + text)
        if not good:
            failures.append(text)

    await trio.sleep(3)
    hold(all(s.workers == 0 and s.target == 0 for s in run.samples), "calm: no worker, no demand")
    half = volunteers // 2
    stop = trio.Event()
    run.mark("first surge")
    nursery.start_soon(load, run, stop)
    await until(run, lambda s: s.saturated, 60, "saturation")
    saturated = run.now()
    seconds = await until(run, lambda s: s.remote_pairs > 0, 60, "a first remote row")
    hold(seconds <= 15, f"first remote row {run.now() - saturated:.1f} s after saturation (at most 15)")
    await until(run, lambda s: s.workers >= volunteers, 120, f"{volunteers} workers")
    await trio.sleep(10)
    before = run.samples[-1].remote_pairs
    await trio.sleep(5)
    hold(run.samples[-1].remote_pairs > before, "workers share the rows while the load lasts")
    run.mark("the load ends")
    stop.set()
    await until(run, lambda s: not s.saturated, 90, "the end of the saturation")
    await until(run, lambda s: s.workers <= half, 30, f"{half} workers left")
    await trio.sleep(25)
    hold(run.samples[-1].workers == half, f"{half} workers stay warm")
    hold(run.samples[-1].mode == "local", "all rows are local in the calm")
    leases = sum(run.ready_for.values())
    again = trio.Event()
    before = run.samples[-1].remote_pairs
    run.mark("second surge")
    nursery.start_soon(load, run, again)
    seconds = await until(run, lambda s: s.remote_pairs > before, 60, "remote rows again")
    hold(seconds <= 6 + PERIOD, f"warm workers serve again after {seconds:.1f} s (at most 6)")
    hold(sum(run.ready_for.values()) == leases, "and nobody was recruited for it")
    again.set()
    await until(run, lambda s: s.busy == 0, 60, "the end of the last answers")
    flips = sum(a.saturated != b.saturated for a, b in zip(run.samples, run.samples[1:], strict=False))
    hold(flips <= 4, f"no flapping: saturation changed {flips} times")


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
    """The timeline as SVG."""
    width, height, left = 960, 300, 50
    end = max(s.at for s in run.samples)
    top = max(max(s.busy, s.workers) for s in run.samples) or 1

    def line(value: Callable[[Sample], float], colour: str, scale: float) -> str:
        points = " ".join(
            f"{left + (width - left) * s.at / end:.1f},{height - 20 - (height - 40) * value(s) / scale:.1f}"
            for s in run.samples
        )
        return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>'

    legend = [("busy slots", "#888"), ("target", "#c60"), ("workers", "#06c"), ("remote share", "#393")]
    texts = "".join(
        f'<text x="{left + 130 * i}" y="12" fill="{colour}">{name}</text>'
        for i, (name, colour) in enumerate(legend)
    )
    marks = "".join(
        f'<line x1="{left + (width - left) * at / end:.1f}" x2="{left + (width - left) * at / end:.1f}" y1="20" '
        f'y2="{height - 20}" stroke="#ddd"><title>{text}</title></line>'
        for at, text in run.marks
        if "surge" in text or "load ends" in text
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="11">{texts}{marks}{line(lambda s: s.busy, "#888", top)}{line(lambda s: s.target, "#c60", top)}'
        f"{line(lambda s: s.workers, '#06c', top)}{line(lambda s: s.remote, '#393', 1.0)}"
        f'<text x="{left}" y="{height - 4}">0 s</text><text x="{width - 50}" y="{height - 4}">{end:.0f} s</text></svg>'
    )


async def main_async(run: Run, failures: list[str], given: argparse.Namespace, home: Path) -> None:
    async with trio.open_nursery() as nursery:
        children = Children(nursery, run.hear)
        try:
            floor_ms = 0.0 if given.demo else FLOOR_MS
            await start(run, children, home, given.model, given.volunteers, given.disk, floor_ms)
            run.mark(f"{given.volunteers} idle volunteers, a coordinator")
            async with trio.open_nursery() as clients:
                clients.start_soon(watch, run)
                if given.demo:
                    await demo(run, clients, given.volunteers, given.prompt)
                else:
                    await scenario(run, clients, given.volunteers, failures)
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
    parser.add_argument("--svg", type=Path)
    parser.add_argument("--demo", action="store_true", help="a short run with a chat")
    parser.add_argument("--prompt", default="Why is the sky blue? Answer in one short sentence.")
    parser.add_argument("--home", type=Path, help="keep the processes' folders and logs here")
    given = parser.parse_args()
    os.environ.setdefault("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "relay")]))
    with tempfile.TemporaryDirectory(prefix="kvasir-elastic-") as home:
        run = Run()
        failures: list[str] = []
        trio.run(main_async, run, failures, given, given.home or Path(home))
    print(table(run))
    if given.svg is not None:
        given.svg.write_text(draw(run))
        print(f"drawn to {given.svg}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
