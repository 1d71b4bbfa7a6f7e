"""The market's routes as a volunteer, a coordinator or a dispatching stage calls them."""

from __future__ import annotations

import base64
import binascii
import logging
from collections.abc import Callable, Iterable
from itertools import islice
from typing import TYPE_CHECKING, NoReturn, TypeVar

import msgspec
import trio

from kvasir_peer.agent.chunk_transfer import PeerSource, WebSource
from kvasir_peer.errors import KvasirError, LinkError, RefusedError
from kvasir_peer.experts.dispatch_map import DispatchMap, decode_map
from kvasir_peer.experts.patience import Patience
from kvasir_peer.experts.volunteering import (
    Ask,
    Coverage,
    DispatchReport,
    Given,
    Heard,
    Join,
    Joined,
    MapAnswer,
    Source,
    Wiring,
)

if TYPE_CHECKING:
    import httpx

logger = logging.getLogger(__name__)

MAP_WAIT = 40.0  # seconds that a request for a newer map is held
ANSWER_SECONDS = 20.0  # on top of a request's wait: a relayed path with weights under way
MAX_SOURCES = 16  # of those that a bridge names, so many are tried

T = TypeVar("T")


def download_sources(named: Iterable[Source]) -> list[PeerSource | WebSource]:
    """What a bridge names, as a download takes it."""
    return [
        WebSource(source.url) if source.url else (source.peer, source.addresses)
        for source in islice(named, MAX_SOURCES)
    ]


class MarketClient:
    """Calls one bridge.

    Args:
        client: of the bridge, over libp2p: the caller is this peer.
        bridge: its peer id.
        verify: checks the bridge's signature.
    """

    def __init__(
        self, client: httpx.AsyncClient, bridge: str, verify: Callable[[str, bytes, bytes], bool]
    ) -> None:
        self.http = client
        self.bridge = bridge
        self._verify = verify

    async def ask(self, body: Ask) -> Given:
        """``POST /api/expert-volunteer``. Raises LinkError, RefusedError."""
        return await self._call("POST", "/api/expert-volunteer", body, body.wait, Given)

    async def cover(self, body: Coverage) -> Wiring:
        """``POST /api/expert-coverage``. Raises LinkError, RefusedError."""
        return await self._call("POST", "/api/expert-coverage", body, body.wait, Wiring)

    async def join(self, body: Join) -> Joined:
        """``POST /api/coordinator``. Raises LinkError, RefusedError."""
        return await self._call("POST", "/api/coordinator", body, body.wait, Joined)

    async def report(self, body: DispatchReport) -> None:
        """``POST /api/dispatcher``. Raises LinkError, RefusedError."""
        await self._call("POST", "/api/dispatcher", body, 0.0, Heard)

    async def dispatch_map(self, model: str, after: int, wait: float) -> DispatchMap | None:
        """The map of a model (name or manifest id) if it is newer than ``after``, waiting for one.

        Raises:
            LinkError: the bridge can't be reached. RefusedError: it has no such model.
            PlanError: the map is not the bridge's.
        """
        path = f"/api/dispatch-map?model={model}&after={after}&wait={wait}"
        answer = await self._call("GET", path, None, wait, MapAnswer)
        if answer.version <= after:
            return None
        try:
            data = base64.b64decode(answer.map, validate=True)
        except binascii.Error as error:
            raise LinkError(f"the bridge's dispatch map does not parse: {error}") from None
        return decode_map(data, self.bridge, self._verify)

    async def follow_map(self, model: str, after: int, take: Callable[[DispatchMap], None]) -> NoReturn:
        """Hand over each map of a model that is newer than version ``after``, until cancelled."""
        patience = Patience()
        while True:
            try:
                found = await self.dispatch_map(model, after, MAP_WAIT)
            except KvasirError as error:
                logger.info("the dispatch map could not be read: %s", error)
                await patience.pause()
                continue
            patience.succeeded()
            if found is not None:
                after = found.version
                take(found)

    async def _call(
        self, method: str, path: str, body: msgspec.Struct | None, wait: float, kind: type[T]
    ) -> T:
        import httpx

        content = msgspec.json.encode(body) if body is not None else None
        try:
            with trio.fail_after(wait + ANSWER_SECONDS):
                answer = await self.http.request(
                    method, path, content=content, timeout=httpx.Timeout(wait + ANSWER_SECONDS)
                )
        except (httpx.HTTPError, trio.TooSlowError, LinkError) as error:
            raise LinkError(f"the bridge could not be asked: {str(error) or type(error).__name__}") from error
        if answer.status_code in (401, 403):
            raise RefusedError(f"the bridge refuses this peer: {answer.text[:300]}")
        if answer.status_code != 200:
            raise LinkError(f"the bridge answered {answer.status_code}: {answer.text[:200]}")
        try:
            return msgspec.json.decode(answer.content, type=kind)
        except msgspec.DecodeError as error:
            raise LinkError(f"the bridge's answer does not parse: {error}") from error
