"""Who may ask, and how much: checks that come before any route, and before any memory is taken for a body.

Two attacks on a server that listens on loopback come from the browser of its own user: a page whose name is made to
resolve to 127.0.0.1 (DNS rebinding), against which the ``Host`` header is checked; and a page that posts a form to
it, against which the routes insist on JSON's content type.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import math
from collections.abc import Collection, Iterable

import trio
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvasir_peer.api.errors import ApiError

MAX_BODY_BYTES = 4 << 20  # a prompt of 128 Ki tokens is some 600 KB of text
BODY_SECONDS = 60.0  # for a body to be there whole; a place is not held for what comes in drops
# What needs no key: whether the server lives, and the dashboard's own files, which hold nothing of the swarm. A
# browser cannot send a key with an address that is typed in; the page asks for one, and sends it with all it reads.
OPEN_PATHS = frozenset(
    (
        "/health",
        "/",
        "/static/dashboard.css",
        "/static/dashboard.js",
        "/static/timeline.js",
        "/static/icon.svg",
    )
)


class BodyTooLarge(ApiError):
    """The request's body is over the limit."""

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"the request has more than {limit} bytes",
            status=413,
            code="request_too_large",
            headers={"Connection": "close"},
        )


class BodyTooSlow(ApiError):
    """The request's body did not come in time."""

    def __init__(self, seconds: float) -> None:
        super().__init__(
            f"the request's body was not there within {seconds:.0f} s",
            status=408,
            code="request_timeout",
            headers={"Connection": "close"},
        )


class Guards:
    """ASGI middleware that refuses what should reach no route.

    Args:
        app: the application behind.
        keys: bearer keys, one of which a client must send; none needed if empty.
        hosts: names that the ``Host`` header may have besides loopback's; None allows all.
        max_body: bytes of a request's body.
        body_seconds: time in which it has to come.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: Iterable[str] = (),
        hosts: Collection[str] | None = (),
        max_body: int = MAX_BODY_BYTES,
        body_seconds: float = BODY_SECONDS,
    ) -> None:
        self._app = app
        # Digests are of one length, so that comparing tells nothing of a key's length either.
        self._digests = tuple(hashlib.sha256(key.encode()).digest() for key in keys)
        self._hosts = None if hosts is None else frozenset(host.lower() for host in hosts)
        self._max_body = max_body
        self._body_seconds = body_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check(scope)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        await self._app(scope, self._limited(receive), send)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        if self._hosts is not None and not self._known_host(headers.get("host", "")):
            raise ApiError(
                f"this server does not answer to the host name {headers.get('host', '')[:100]!r}",
                status=421,
                code="unknown_host",
            )
        if (
            self._digests
            and scope["path"] not in OPEN_PATHS
            and not self._known_key(headers.get("authorization", ""))
        ):
            raise ApiError(
                "no valid API key: send the header 'Authorization: Bearer KEY'",
                status=401,
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        length = headers.get("content-length", "0")
        if not length.isascii() or not length.isdigit() or int(length[:20]) > self._max_body:
            raise BodyTooLarge(self._max_body)

    def _known_host(self, host: str) -> bool:
        """Whether a ``Host`` header (``name``, ``name:port``, ``[v6]:port``) names loopback, or is listed."""
        name = host.lower()
        name = name[: name.find("]") + 1] if name.startswith("[") else name.partition(":")[0]
        if name == "localhost" or (self._hosts is not None and name in self._hosts):
            return True
        try:
            return ipaddress.ip_address(name.strip("[]")).is_loopback
        except ValueError:
            return False

    def _known_key(self, authorization: str) -> bool:
        scheme, _, key = authorization.partition(" ")
        digest = hashlib.sha256(key.strip().encode()).digest()
        # All are compared, so that the time tells not which.
        known = [hmac.compare_digest(digest, other) for other in self._digests]
        return scheme.lower() == "bearer" and any(known)

    def _limited(self, receive: Receive) -> Receive:
        """Count and time the body as it comes, for senders that announce no length or a false one, or dawdle."""
        received = 0
        deadline: float | None = None  # from the first wait on; infinite once the body is there

        async def limited() -> Message:
            nonlocal received, deadline
            message: Message | None = None
            if deadline is None:
                deadline = trio.current_time() + self._body_seconds
            with trio.CancelScope(deadline=deadline):
                message = await receive()
            if message is None:
                raise BodyTooSlow(self._body_seconds)
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                if received > self._max_body:
                    raise BodyTooLarge(self._max_body)
                if not message.get("more_body", False):
                    deadline = math.inf
            return message

        return limited
