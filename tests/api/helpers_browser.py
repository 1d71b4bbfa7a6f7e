"""A real Chromium without a screen, driven through its debugging pipe (file descriptors 3 and 4, NUL after each)."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import itertools
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",  # its own does not work for root, or inside another one
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
ANSWER_SECONDS = 60.0
END_SECONDS = 5.0


def chromium() -> str:
    """Path of the browser. On a machine of one's own a test is left out where there is none; in CI there must be."""
    for name in (os.environ.get("KVASIR_TEST_CHROMIUM", ""), *NAMES):
        if name and (path := shutil.which(name)):
            return path
    if os.environ.get("CI"):
        pytest.fail("there is no Chromium: .ci/run installs it")
    pytest.skip("needs Chromium (apt-get install chromium), or its path in KVASIR_TEST_CHROMIUM")


class Page:
    """One tab.

    Attributes:
        problems: what the console and the network complained about.
        requests: addresses that the page asked for.
    """

    def __init__(self, send: trio.abc.SendStream, receive: trio.abc.ReceiveStream) -> None:
        self._send, self._receive = send, receive
        self._ids = itertools.count(1)
        self._answers: dict[int, tuple[trio.Event, dict[str, Any]]] = {}
        self._session = ""
        self.problems: list[str] = []
        self.requests: list[str] = []

    async def listen(self) -> None:
        """Take what the browser says, until it ends."""
        rest = b""
        async for data in self._receive:
            *messages, rest = (rest + data).split(b"\0")
            for message in map(json.loads, messages):
                if "id" in message:
                    done, answer = self._answers.pop(message["id"])
                    answer.update(message)
                    done.set()
                else:
                    self._heard(message["method"], message["params"])

    def _heard(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            said = " ".join(str(arg.get("value", arg)) for arg in params["args"])
            if not said.startswith(
                "Canvas2D:"
            ):  # the browser's advice on speed to whoever reads a canvas back: us
                self.problems.append(said)
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            entry = params["entry"]
            self._note(f"{entry['text']} {entry.get('url', '')}".strip())
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def _note(self, problem: str) -> None:
        # The browser's advice on speed to whoever reads a canvas back, as these tests do, is no problem of the page.
        if not problem.startswith("Canvas2D:"):
            self.problems.append(problem)

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A command of the DevTools protocol."""
        number, done, answer = next(self._ids), trio.Event(), {}
        self._answers[number] = (done, answer)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        await self._send.send_all(json.dumps(message).encode() + b"\0")
        with trio.fail_after(ANSWER_SECONDS):
            await done.wait()
        assert "error" not in answer, answer
        return answer["result"]

    async def open(self, width: int, height: int, *, dark: bool, mobile: bool) -> None:
        """Make the tab."""
        target = await self.call("Target.createTarget", url="about:blank")
        attached = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        await self.resize(width, height, mobile=mobile)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def resize(self, width: int, height: int, *, mobile: bool = False) -> None:
        """Give the tab another size, in CSS pixels."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if mobile else 1,
            mobile=mobile,
        )

    async def goto(self, url: str) -> None:
        """Load an address."""
        answer = await self.call("Page.navigate", url=url)
        assert not answer.get("errorText"), answer
        await self.wait_for("document.readyState === 'complete'")

    async def evaluate(self, script: str) -> Any:
        """The value of an expression; promises are awaited."""
        answer = await self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True, userGesture=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def wait_for(self, condition: str, seconds: float = 30.0) -> Any:
        """Wait until an expression is true, and give its value."""
        with trio.move_on_after(seconds):
            while True:
                if value := await self.evaluate(condition):
                    return value
                await trio.sleep(0.05)
        text = await self.evaluate("document.body.innerText")
        raise AssertionError(f"never true: {condition}\nproblems: {self.problems}\nthe page says:\n{text}")

    async def type(self, text: str) -> None:
        """Type into what has the focus."""
        await self.call("Input.insertText", text=text)

    async def press(self, key: str, code: int) -> None:
        """Press and let go a key."""
        for kind in ("keyDown", "keyUp"):
            more = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            await self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=code,
                **more,
            )

    async def move(self, x: float, y: float) -> None:
        """Move the pointer."""
        await self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    async def screenshot(self, path: Path, *, whole: bool = True) -> None:
        """A picture of the page."""
        answer = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        await trio.Path(path).write_bytes(base64.b64decode(answer["data"]))


@contextlib.asynccontextmanager
async def open_page(
    width: int = 1360, height: int = 900, *, dark: bool = False, mobile: bool = False
) -> AsyncIterator[Page]:
    """A tab in a browser of its own, both gone at the end."""
    program = chromium()
    command_read, command_write = os.pipe()
    answer_read, answer_write = os.pipe()
    # Above 10, so that none of them is 3 or 4 already.
    inner = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (command_read, answer_write)]
    os.close(command_read)
    os.close(answer_write)

    def place() -> None:
        os.dup2(inner[0], 3)
        os.dup2(inner[1], 4)

    with tempfile.TemporaryDirectory(prefix="kvasir-browser-", ignore_cleanup_errors=True) as profile:
        process = await trio.lowlevel.open_process(
            [program, *FLAGS, f"--user-data-dir={profile}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=place,
            close_fds=False,
        )
        for fd in inner:
            os.close(fd)
        page = Page(trio.lowlevel.FdStream(command_write), trio.lowlevel.FdStream(answer_read))
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(page.listen)
                await page.open(width, height, dark=dark, mobile=mobile)
                yield page
                nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True):
                process.terminate()
                with trio.move_on_after(END_SECONDS):
                    await process.wait()
                if process.returncode is None:
                    process.kill()
                    await process.wait()
