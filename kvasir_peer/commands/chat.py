"""``kvasir-peer chat``."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

from cyclopts import Parameter

from kvasir_peer import running, settings
from kvasir_peer.commands import answers
from kvasir_peer.commands.common import HomeFlag
from kvasir_peer.commands.terminal import printable
from kvasir_peer.errors import BusyError, KvasirError, LinkError, NotReadyError, UsageError

if TYPE_CHECKING:
    import httpx

DEFAULT_URL = "http://127.0.0.1:8000/v1"
CONNECT_SECONDS = 10.0
SILENCE_SECONDS = 300.0  # between two lines of an answer; pauses are announced by comments in between

HELP = "Type a message. /new begins a new conversation, /quit (or Ctrl-D) ends; Ctrl-C stops an answer."


class Conversation:
    """A chat with one model: remembers what was said."""

    def __init__(
        self, client: httpx.Client, model: str, *, system: str, options: dict[str, object], patience: float
    ) -> None:
        self._client = client
        self._model = model
        self._options = options
        self._patience = patience
        self._start = [{"role": "system", "content": system}] if system else []
        self.messages = list(self._start)

    def forget(self) -> None:
        """Begin anew."""
        self.messages = list(self._start)

    def ask(self, text: str) -> None:
        """Print the answer to ``text`` as it comes, and remember both."""
        asked = [*self.messages, {"role": "user", "content": text}]
        said: list[str] = []
        try:
            for event in self._answer(asked):
                if isinstance(event, answers.Text):
                    said.append(event.text)
                    print(printable(event.text), end="", flush=True)
                elif isinstance(event, answers.Remark):
                    print(f"[{printable(event.text)}]", file=sys.stderr, flush=True)
                elif isinstance(event, answers.End) and event.reason == "length":
                    print(" […]", end="")
        except KeyboardInterrupt:
            print(" [stopped]", end="")
        finally:
            if said:
                print()
        # An answer that was stopped is kept as far as it came; a question without any answer is not.
        if said:
            self.messages = [*asked, {"role": "assistant", "content": "".join(said)}]

    def _answer(self, messages: list[dict[str, str]]) -> Iterator[answers.Event]:
        """Ask until the bridge takes the request, then yield what it sends."""
        give_up = time.monotonic() + self._patience
        while True:
            try:
                yield from self._try(messages)
            except (NotReadyError, BusyError) as error:
                if time.monotonic() + error.retry_after > give_up:
                    raise
                print(
                    f"[{printable(str(error))}; asking again in {error.retry_after:g} s]",
                    file=sys.stderr,
                    flush=True,
                )
                time.sleep(error.retry_after)
            else:
                return

    def _try(self, messages: list[dict[str, str]]) -> Iterator[answers.Event]:
        body = {"model": self._model, "messages": messages, "stream": True, **self._options}
        with (
            _connection_errors(self._client),
            self._client.stream("POST", "chat/completions", json=body) as got,
        ):
            if got.status_code != 200:
                raise answers.refusal(got.status_code, got.headers, got.read())
            for line in got.iter_lines():
                yield from answers.read_line(line)


@contextlib.contextmanager
def _connection_errors(client: httpx.Client) -> Iterator[None]:
    import httpx

    try:
        yield
    except httpx.ConnectError:
        raise LinkError(f"nobody answers at {client.base_url}: does kvasir-peer bridge run there?") from None
    except httpx.TimeoutException:
        raise LinkError(f"{client.base_url} has been silent for too long") from None
    except httpx.HTTPError as error:
        raise LinkError(f"the connection to {client.base_url} broke: {error}") from None


def _find_model(client: httpx.Client, wanted: str | None) -> str:
    with _connection_errors(client):
        got = client.get("models")
    if got.status_code != 200:
        raise answers.refusal(got.status_code, got.headers, got.content)
    try:
        names = [str(entry["id"]) for entry in got.json()["data"]]
    except (ValueError, TypeError, KeyError):
        raise LinkError(f"{client.base_url} does not answer as an OpenAI server: check the address") from None
    if wanted is not None and wanted not in names:
        raise UsageError(f"there is no model {wanted!r} here, only: {', '.join(names) or 'none'}")
    if not names:
        raise NotReadyError("the server has no model yet")
    return wanted or names[0]


def chat(
    url: Annotated[
        str | None,
        Parameter(name="URL", help="OpenAI base URL; if not given, that of the bridge that runs here."),
    ] = None,
    /,
    *,
    model: Annotated[str | None, Parameter(help="Model to talk to; the first if not given.")] = None,
    prompt: Annotated[str | None, Parameter(help="Ask this one question and end.")] = None,
    system: Annotated[str, Parameter(help="System message that begins the conversation.")] = "",
    temperature: Annotated[float | None, Parameter(help="0 always takes the best token.")] = None,
    max_tokens: Annotated[int | None, Parameter(help="Longest answer, in tokens.")] = None,
    api_key: Annotated[str | None, Parameter(help="Key of the bridge, if it wants one.")] = None,
    wait: Annotated[float, Parameter(help="Longest wait, in seconds, for a model to become ready.")] = 120.0,
    home: HomeFlag = None,
) -> int:
    """Talk to a bridge in the terminal.

    A line is a message; /new begins a new conversation, /quit ends. When the model cannot be served yet, the
    reason is shown and the question asked again.
    """
    import httpx

    if url is None:
        here = running.find(settings.home_directory(home))
        url = (here.base_url if here else "") or DEFAULT_URL
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"{url!r} is no address: give one such as {DEFAULT_URL}")
    if not urlsplit(url).path.strip("/"):
        url = url.rstrip("/") + "/v1"  # what everybody forgets
    options: dict[str, object] = {}
    if temperature is not None:
        options["temperature"] = temperature
    if max_tokens is not None:
        options["max_tokens"] = max_tokens
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = httpx.Timeout(SILENCE_SECONDS, connect=CONNECT_SECONDS)
    with httpx.Client(base_url=url, headers=headers, timeout=timeout, trust_env=False) as client:
        found = _find_model(client, model)
        conversation = Conversation(client, found, system=system, options=options, patience=wait)
        if prompt is not None:
            conversation.ask(prompt)
            return 0
        return _talk(conversation, found)


def _talk(conversation: Conversation, model: str) -> int:
    terminal = sys.stdin.isatty()
    if terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - gives input() a history and line editing
        print(f"{printable(model)}. {HELP}", file=sys.stderr)
    while True:
        try:
            line = input("> " if terminal else "").strip()
        except EOFError:
            if terminal:
                print()
            return 0
        except KeyboardInterrupt:
            print()
            return 0
        if line in ("/quit", "/exit"):
            return 0
        if line == "/new":
            conversation.forget()
        elif line.startswith("/"):
            print(HELP, file=sys.stderr)
        elif line:
            try:
                conversation.ask(line)
            except KvasirError as error:
                if not terminal:
                    raise
                print(f"[{printable(str(error))}]", file=sys.stderr)
