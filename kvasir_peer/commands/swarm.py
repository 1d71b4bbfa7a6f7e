"""``kvasir-peer swarm``: a relay, a bridge and stages on this machine, each a peer and a process of its own.

Direct paths are switched off, so that all that peers say to each other goes through circuits of the relay, as it
would between homes.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from kvasir_peer.commands import answers
from kvasir_peer.commands.common import INTERRUPTED, Reporter, run_until_stopped, start_logging, with_settings
from kvasir_peer.commands.terminal import printable
from kvasir_peer.errors import BusyError, LinkError, NotReadyError, SettingsError, UsageError
from kvasir_peer.progress import Progress
from kvasir_peer.settings import SwarmSettings

if TYPE_CHECKING:
    import httpx

    from kvasir_peer.commands.processes import Child, Children

QUESTION = "Why is the sky blue? Answer in one short sentence."
READY_SECONDS = 120.0  # from the last stage's word that it serves until the bridge takes a request
SILENCE_SECONDS = 120.0  # between two lines of an answer
# Until the bridge has counted the last rows: they come with the tokens, but for batches that give none.
COUNT_SECONDS = 2.0
TEMPORARY_PREFIX = "kvasir-swarm-"


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@with_settings(SwarmSettings)
def run_swarm(
    settings: SwarmSettings,
    *,
    serve: Annotated[
        bool, Parameter(negative="", help="Print the OpenAI base URL when ready, and serve until Ctrl-C.")
    ] = False,
    prompt: Annotated[
        str | None, Parameter(help="Question to ask; without --serve a short one if not given.")
    ] = None,
    max_tokens: Annotated[int, Parameter(help="Longest answer, in tokens.")] = 160,
    given_home: Path | None = None,
) -> int:
    """Run a whole swarm on this machine: a relay, a bridge and stage peers that meet only through the relay.

    Asks a question, streams the answer, shows how long it took, and ends; with --serve it stays. The peers' keys
    and weights are kept under --home; without it, in a temporary folder that is removed.
    """
    start_logging(settings.log)
    if max_tokens < 1:
        raise SettingsError(f"--max-tokens {max_tokens}: give 1 or more")
    _check_model(settings.model, settings.stages)
    if prompt is None and not serve:
        prompt = QUESTION
    with _home(given_home) as home:
        swarm = Swarm(settings, home)

        async def run() -> None:
            await swarm.run(prompt=prompt, serve=serve, max_tokens=max_tokens)

        stopped = run_until_stopped(run)
    return INTERRUPTED if stopped and not serve else 0


def _check_model(model: str, stages: int) -> None:
    """Refuse a file that these stages could not serve before anything is started."""
    if model.startswith("https://"):
        return
    from kvasir_peer.models.gguf import GgufFile
    from kvasir_peer.roles.served_model import shape_of

    with GgufFile.open(Path(model).expanduser()) as file:
        layers = shape_of(model, file.metadata, file.tensors).n_layer
    if stages > layers:
        raise SettingsError(
            f"--stages {stages}: the model has {layers} layers, and a stage needs one or more"
        )


@contextmanager
def _home(given: Path | None) -> Iterator[Path]:
    if given is not None:
        yield given.expanduser().absolute()
        return
    folder = tempfile.mkdtemp(prefix=TEMPORARY_PREFIX)
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass
class Measured:
    """One answer, timed by the client's clock; seconds."""

    first_token: float = 0.0
    last_token: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def line(self) -> str:
        """For people."""
        count = self.completion_tokens
        text = f"{count} tokens after a prompt of {self.prompt_tokens}; first after {self.first_token:.2f} s"
        between = self.last_token - self.first_token
        if count > 1 and between > 0:
            text += f", then {(count - 1) / between:.1f} tokens/s"
        return text


class Swarm:
    """The processes of one swarm, and the questions to it."""

    def __init__(self, settings: SwarmSettings, home: Path) -> None:
        self._settings = settings
        self._home = home
        self._relay_address = ""
        self._ticket = ""
        self._base_url = ""
        self._serving: set[str] = set()
        self._chats = True
        self._ending = False
        self._rows = 0  # that each stage has computed for the questions so far
        self._reporters: dict[str, Reporter] = {}

    async def run(self, *, prompt: str | None, serve: bool, max_tokens: int) -> None:
        """Start everything, answer ``prompt`` if there is one, and stay if asked to; end everything.

        Raises:
            UsageError, KvasirError: a part ended, or said nothing for too long; with its last words.
        """
        import trio

        from kvasir_peer.commands.processes import Children

        async with trio.open_nursery() as nursery:
            children = Children(nursery, self._hear)
            try:
                await self._start(children)
                await self._answer(prompt=prompt, serve=serve, max_tokens=max_tokens)
                if serve:
                    await trio.sleep_forever()
            finally:
                self._ending = True
                await children.end()

    # --- Starting ---

    async def _start(self, children: Children) -> None:
        settings = self._settings
        self._tell("swarm", f"a relay, a bridge and {settings.stages} stages on {cores()} cores")
        relay_home = self._home / "relay"
        await children.start(
            "relay",
            "kvasir-relay",
            ["--listen", "/ip4/127.0.0.1/tcp/0", "--home", str(relay_home)],
            log=relay_home / "log",
        )
        relay = await children.wait_for(lambda: self._relay_address or None, "the relay")
        bridge_home = self._home / "bridge"
        await children.start(
            "bridge", "kvasir-peer", self._bridge_arguments(bridge_home, relay), log=bridge_home / "log"
        )
        ticket = await children.wait_for(lambda: self._ticket or None, "the bridge")
        await children.wait_for(lambda: self._base_url or None, "the bridge")
        names = [
            f"peer {number + 1}" for number in range(settings.stages)
        ]  # until the plan says which stage it is
        for name in names:
            stage_home = self._home / name.replace(" ", "-")
            # The ticket has a secret, which a command line would show to everybody on the machine.
            await children.start(
                name,
                "kvasir-peer",
                self._stage_arguments(stage_home),
                log=stage_home / "log",
                KVASIR_TICKET=ticket,
            )
        await children.wait_for(lambda: self._serving.issuperset(names) or None, "the stages")

    def _bridge_arguments(self, home: Path, relay: str) -> list[str]:
        settings = self._settings
        model = settings.model
        if not model.startswith("https://"):
            model = str(Path(model).expanduser().absolute())
        arguments = ["bridge", "--model", model, "--relay", relay, "--no-direct", "--host", "127.0.0.1"]
        if settings.name:
            arguments += ["--name", settings.name]
        for name in (
            "stages",
            "port",
            "engine",
            "boundary",
            "max_requests",
            "context_length",
            "batch_rows",
            "micro_batch_rows",
            "max_in_flight",
        ):
            arguments += ["--" + name.replace("_", "-"), str(getattr(settings, name))]
        return [*arguments, "--log", settings.log, "--home", str(home), "--json-progress"]

    def _stage_arguments(self, home: Path) -> list[str]:
        settings = self._settings
        threads = settings.threads or max(1, cores() // settings.stages)
        return [
            "stage",
            "--no-direct",
            *("--engine", settings.engine, "--precision", settings.precision, "--threads", str(threads)),
            *("--log", settings.log, "--home", str(home), "--json-progress"),
        ]

    def _hear(self, child: Child, line: str) -> None:
        """One line of a child's standard output."""
        if self._ending:
            return  # that links break when their peers end is no news
        if child.name == "relay":
            if line.startswith("/") and not self._relay_address:
                self._relay_address = line
                self._tell(child.name, line)
        elif line.startswith("kvasir1"):
            self._ticket = line
        elif line.startswith("http://"):
            self._base_url = line
        elif (progress := Progress.from_json(line)) is not None:
            if progress.step == "ready":
                self._serving.add(child.name)
            self._tell(f"stage {progress.stage}" if progress.stage else child.name, progress)

    def _tell(self, name: str, what: str | Progress) -> None:
        reporter = self._reporters.setdefault(name, Reporter(json_lines=False, prefix=f"{name:<8} "))
        reporter(what if isinstance(what, Progress) else Progress("start", what))

    # --- Asking ---

    async def _answer(self, *, prompt: str | None, serve: bool, max_tokens: int) -> None:
        import httpx

        timeout = httpx.Timeout(SILENCE_SECONDS, connect=10.0)
        async with httpx.AsyncClient(base_url=self._base_url, timeout=timeout, trust_env=False) as client:
            model = await self._ready(client)
            if serve:
                print(self._base_url, flush=True)
            if prompt is not None:
                before = await self._stage_figures(client, model)
                print(f"\n> {prompt}\n", flush=True)
                measured = await self._ask(client, model, prompt, max_tokens)
                print(f"\n\n{measured.line()}", flush=True)
                print(stage_table(await self._stage_figures(client, model), before), flush=True)

    async def _ready(self, client: httpx.AsyncClient) -> str:
        """The model's name, as soon as a request for one token has been answered."""
        import trio

        got = await client.get("models")
        if got.status_code != 200:
            raise answers.refusal(got.status_code, got.headers, got.content)
        model = str(got.json()["data"][0]["id"])
        give_up = time.monotonic() + READY_SECONDS
        while True:
            try:
                await self._ask(client, model, "Hello", 1, show=False)
            except UsageError:
                if not self._chats:
                    raise
                self._chats = False  # a model without a chat template: it goes on with a text
            except (NotReadyError, BusyError) as error:
                if time.monotonic() > give_up:
                    raise
                self._tell("bridge", str(error))
                await trio.sleep(min(error.retry_after, 1.0))
            else:
                return model

    async def _ask(
        self, client: httpx.AsyncClient, model: str, prompt: str, max_tokens: int, *, show: bool = True
    ) -> Measured:
        import httpx

        route = "chat/completions" if self._chats else "completions"
        body = {
            "model": model,
            **({"messages": [{"role": "user", "content": prompt}]} if self._chats else {"prompt": prompt}),
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        measured = Measured()
        began = time.monotonic()
        try:
            async with client.stream("POST", route, json=body) as got:
                if got.status_code != 200:
                    raise answers.refusal(got.status_code, got.headers, await got.aread())
                async for line in got.aiter_lines():
                    for event in answers.read_line(line):
                        if isinstance(event, answers.Text):
                            measured.last_token = time.monotonic() - began
                            measured.first_token = measured.first_token or measured.last_token
                            if show:
                                print(printable(event.text), end="", flush=True)
                        elif isinstance(event, answers.Usage):
                            measured.prompt_tokens = event.prompt_tokens
                            measured.completion_tokens = event.completion_tokens
                        elif isinstance(event, answers.Remark):
                            self._tell("bridge", event.text)
        except httpx.HTTPError as error:
            raise LinkError(f"the connection to the bridge broke: {error or type(error).__name__}") from None
        self._rows += measured.prompt_tokens + measured.completion_tokens - 1
        return measured

    async def _stage_figures(self, client: httpx.AsyncClient, model: str) -> list[Mapping[str, Any]]:
        """Each stage's entry of ``/api/ring/{model}``, when the bridge has counted the rows of all questions."""
        import trio

        give_up = time.monotonic() + COUNT_SECONDS
        while True:
            got = await client.get(str(client.base_url.join(f"/api/ring/{model}")))
            if got.status_code != 200:
                raise answers.refusal(got.status_code, got.headers, got.content)
            stages: list[Mapping[str, Any]] = list(got.json()["stages"])
            if time.monotonic() > give_up or all(_total(stage, "rows") >= self._rows for stage in stages):
                return stages
            await trio.sleep(0.1)


def _total(stage: Mapping[str, Any], name: str) -> float:
    return float((stage.get("totals") or {}).get(name, 0.0))


def stage_table(stages: Sequence[Mapping[str, Any]], before: Sequence[Mapping[str, Any]]) -> str:
    """How each stage has spent its time between two looks at the entries of ``/api/ring/{model}``."""

    def since(number: int, name: str) -> float:
        earlier = _total(before[number - 1], name) if number <= len(before) else 0.0
        return _total(stages[number - 1], name) - earlier

    lines = [f"{'stage':<7} {'layers':<9} {'rows':>6} {'held':>9} {'starved':>9} {'blocked':>9}  sends"]
    for number, stage in enumerate(stages, start=1):
        layers = f"{stage['first']}-{stage['end'] - 1}"
        spent = [since(number, f"{name}_seconds") for name in ("held", "starved", "blocked")]
        times = " ".join(f"{seconds:>7.2f} s" for seconds in spent)
        path = str((stage.get("figures") or {}).get("path", ""))
        lines.append(f"{number:<7} {layers:<9} {since(number, 'rows'):>6.0f} {times}  {path}".rstrip())
    return "\n".join(lines)
