"""``kvasir-peer ring``."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

from cyclopts import Parameter

from kvasir_peer import running, settings
from kvasir_peer.commands import answers
from kvasir_peer.commands.chat import CONNECT_SECONDS, DEFAULT_URL
from kvasir_peer.commands.common import HomeFlag
from kvasir_peer.commands.terminal import printable_json
from kvasir_peer.errors import LinkError, NotReadyError, UsageError

if TYPE_CHECKING:
    import httpx
    from rich.console import Console

ANSWER_SECONDS = 20.0
WATCH_SECONDS = 0.5  # between two looks on a terminal
PRINT_SECONDS = 2.0  # between two prints where nothing can be drawn over
MAX_SECONDS = 60.0  # what a bridge gives at most


class Bridge:
    """A bridge's pages.

    Args:
        url: OpenAI base URL, or the server's own.
        api_key: if it wants one.
    """

    def __init__(self, url: str, api_key: str | None) -> None:
        import httpx

        root = url.rstrip("/").removesuffix("/v1")
        self.client = httpx.Client(
            base_url=root,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS),
            trust_env=False,
        )

    def get(self, path: str) -> Any:
        """A page's JSON."""
        import httpx

        try:
            got = self.client.get(path)
        except httpx.ConnectError:
            raise LinkError(
                f"nobody answers at {self.client.base_url}: does kvasir-peer bridge run there?"
            ) from None
        except httpx.TimeoutException:
            raise LinkError(f"{self.client.base_url} has been silent for too long") from None
        except httpx.HTTPError as error:
            raise LinkError(f"the connection to {self.client.base_url} broke: {error}") from None
        if got.status_code != 200:
            raise answers.refusal(got.status_code, got.headers, got.content)
        return self._parsed(got)

    def _parsed(self, got: httpx.Response) -> Any:
        try:
            return printable_json(got.json())
        except ValueError:
            raise LinkError(
                f"{self.client.base_url} does not answer as a bridge: check the address"
            ) from None

    def model(self, wanted: str | None) -> str:
        """Path of the ring to show."""
        try:
            names = [str(entry["model"]) for entry in self.get("/api/ring")["models"]]
        except (TypeError, KeyError):
            raise LinkError(
                f"{self.client.base_url} does not answer as a bridge: check the address"
            ) from None
        if wanted is not None and wanted not in names:
            raise UsageError(f"there is no ring of {wanted!r} here, only: {', '.join(names) or 'none'}")
        if not names:
            raise NotReadyError("the bridge has no ring yet")
        return "/api/ring/" + quote(wanted or names[0], safe="")

    def look(self, path: str, seconds: float) -> tuple[dict[str, Any], dict[str, Any]]:
        """Status and timeline of a ring."""
        return self.get(path), self.get(f"{path}/timeline?seconds={seconds:g}")


def show_ring(
    url: Annotated[
        str | None,
        Parameter(help="Address of the bridge; if not given, that of the bridge that runs here."),
    ] = None,
    *,
    watch: Annotated[bool, Parameter(negative="", help="Go on until Ctrl-C.")] = False,
    png: Annotated[Path | None, Parameter(help="Draw the timeline as a picture into this file.")] = None,
    seconds: Annotated[float, Parameter(help="How far the timeline goes back.")] = 5.0,
    model: Annotated[str | None, Parameter(help="Whose ring; the first if not given.")] = None,
    as_json: Annotated[bool, Parameter(name="--json", negative="", help="Print one JSON object.")] = False,
    api_key: Annotated[str | None, Parameter(help="Key of the bridge, if it wants one.")] = None,
    home: HomeFlag = None,
) -> None:
    """Show a ring: its state, what each stage does with its time, and its last seconds.

    Held is the share of the last ten seconds in which a stage had something to compute, blocked that in which its
    results waited for the link to the next stage, starved the rest.
    """
    if url is None:
        here = running.find(settings.home_directory(home))
        url = (here.base_url if here else "") or DEFAULT_URL
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"{url!r} is no address: give one such as {DEFAULT_URL}")
    if not 0.1 <= seconds <= MAX_SECONDS:
        raise UsageError(f"--seconds {seconds:g}: give 0.1 to {MAX_SECONDS:.0f}")
    if watch and (png is not None or as_json):
        raise UsageError("--watch goes on, --png and --json are for one look: give one of them")
    bridge = Bridge(url, api_key)
    path = bridge.model(model)
    if watch:
        _watch(bridge, path, seconds)
        return
    ring, timeline = bridge.look(path, seconds)
    if png is not None:
        from kvasir_peer.commands.ring_picture import draw

        draw(ring, timeline, seconds, png)
        print(png)
    elif as_json:
        print(json.dumps({"ring": ring, "timeline": timeline}))
    else:
        console = _console()
        console.print(_view(console, ring, timeline, seconds))


def _console() -> Console:
    from rich.console import Console

    return Console(file=sys.stdout, highlight=False)


def _view(console: Console, ring: dict[str, Any], timeline: dict[str, Any], seconds: float) -> Any:
    from kvasir_peer.commands import ring_view

    unicode = (console.encoding or "").lower().startswith("utf")
    blocks = ring_view.BLOCKS if unicode else ring_view.ASCII_BLOCKS
    return ring_view.view(ring, timeline, seconds=seconds, width=console.width, blocks=blocks)


def _watch(bridge: Bridge, path: str, seconds: float) -> None:
    """Look again and again. A bridge that is away for a while does not end it."""
    from rich.live import Live
    from rich.text import Text

    console = _console()
    drawn = _view(console, *bridge.look(path, seconds), seconds)
    try:
        if not console.is_terminal:
            while True:
                console.print(drawn)
                time.sleep(PRINT_SECONDS)
                drawn = _view(console, *bridge.look(path, seconds), seconds)
        with Live(drawn, console=console, auto_refresh=False, screen=True) as live:
            while True:
                live.update(drawn, refresh=True)
                time.sleep(WATCH_SECONDS)
                try:
                    drawn = _view(console, *bridge.look(path, seconds), seconds)
                except LinkError as error:
                    drawn = Text(f"{error}; trying again", "red")
    except KeyboardInterrupt:
        return
