"""Programs of other projects for the interoperability tests: where they come from, and how they are run."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import http.server
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import trio

ROOT = Path(__file__).resolve().parents[2]
SOURCES = Path(__file__).resolve().parent / "js"
WORKSPACE = ROOT / ".cache" / "interop"

INSTALL_SECONDS = 300.0
PATIENCE = 60.0  # for one line of a program on a busy machine
OLDEST_NODE = 20


def give_up(reason: str) -> None:
    """Leave the test out where something is missing on a machine of one's own; fail in CI, which has everything."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


def js_workspace() -> Path:
    """A folder with the JavaScript sources, the packages that they need, and the page's bundle."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        give_up("node and npm are missing (Debian: apt-get install nodejs npm)")
    version = subprocess.run(
        ["node", "--version"], capture_output=True, text=True, timeout=30, check=True
    ).stdout
    if int(version.lstrip("v").split(".")[0]) < OLDEST_NODE:
        give_up(f"node is {version.strip()}, {OLDEST_NODE} or newer is needed")
    WORKSPACE.mkdir(parents=True, exist_ok=True)
    with (WORKSPACE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Made anew only when something has changed: another worker's programs may be reading it.
        sources = sorted(SOURCES.iterdir())
        wanted = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
        stamp = WORKSPACE / "made"
        if not stamp.is_file() or stamp.read_text() != wanted:
            for source in sources:
                shutil.copyfile(source, WORKSPACE / source.name)
            # No package's own script runs; none of these needs one.
            flags = ("--ignore-scripts", "--prefer-offline", "--no-audit", "--no-fund")
            _tool(["npm", "ci", *flags], "the npm packages could not be installed")
            bundle = ("page.js", "--bundle", "--format=esm", "--minify", "--outfile=page.bundle.js")
            _tool(["node_modules/.bin/esbuild", *bundle], "the page could not be bundled")
            stamp.write_text(wanted)
    return WORKSPACE


def _tool(command: Sequence[str], failure: str) -> None:
    done = subprocess.run(
        command,
        cwd=WORKSPACE,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=INSTALL_SECONDS,
    )
    if done.returncode:
        give_up(f"{failure}: {done.stdout.strip()[-500:]}")


class Program:
    """A process that says in lines what it does; it and its children end with :meth:`end`."""

    def __init__(self, name: str, command: Sequence[str | Path], **environment: str) -> None:
        self.name = name
        self.lines: list[str] = []
        self._news: queue.Queue[str | None] = queue.Queue()
        self._process = subprocess.Popen(
            list(map(str, command)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append(line.rstrip("\n"))
            self._news.put(line.rstrip("\n"))
        self._news.put(None)

    @property
    def output(self) -> str:
        """Everything said so far."""
        return "\n".join(self.lines)

    def wait_for(self, *starts: str) -> str:
        """The first further line that begins with one of these."""
        while True:
            try:
                line = self._news.get(timeout=PATIENCE)
            except queue.Empty:
                raise AssertionError(f"{self.name} did not say {starts}:\n{self.output}") from None
            if line is None:
                raise AssertionError(f"{self.name} ended with {self._process.wait()}:\n{self.output}")
            if line.startswith(starts):
                return line

    async def hear(self, *starts: str) -> str:
        """As :meth:`wait_for`, in trio."""
        return await trio.to_thread.run_sync(partial(self.wait_for, *starts), abandon_on_cancel=True)

    def end(self) -> None:
        """Kill it and its children."""
        with contextlib.suppress(ProcessLookupError):  # it may have ended by itself
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join(5)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


@contextmanager
def program(name: str, command: Sequence[str | Path], **environment: str) -> Iterator[Program]:
    """A program that runs until the end of the block."""
    running = Program(name, command, **environment)
    try:
        yield running
    finally:
        running.end()


@contextmanager
def our_relay(home: Path) -> Iterator[dict[str, str]]:
    """``kvasir-relay`` on loopback; its address for TCP and for WebSocket."""
    listen = ("--listen", "/ip4/127.0.0.1/tcp/0", "--listen", "/ip4/127.0.0.1/tcp/0/ws")
    command = (sys.executable, "-m", "kvasir_relay", "--home", home, *listen)
    path = os.pathsep.join([str(ROOT), str(ROOT / "relay")])
    with program("kvasir-relay", command, PYTHONPATH=path, PYTHONUNBUFFERED="1") as relay:
        yield {"tcp": relay.wait_for("/ip4/"), "websocket": relay.wait_for("/ip4/")}


@contextmanager
def js_relay(workspace: Path) -> Iterator[dict[str, str]]:
    """js-libp2p's relay on loopback; its address for TCP and for WebSocket."""
    with program("js relay", ("node", workspace / "relay.js")) as relay:
        relay.wait_for("ready")
        addresses = [line.split()[1] for line in relay.lines if line.startswith("listening ")]
        yield {
            "tcp": next(address for address in addresses if "/ws/" not in address),
            "websocket": next(address for address in addresses if "/ws/" in address),
        }


def find_chromium() -> str:
    """The browser's program."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if (found := shutil.which(name)) is not None:
            return found
    give_up("chromium is missing (Debian: apt-get install chromium)")
    raise AssertionError("give_up does not return")


def chromium(page: str, profile: Path) -> tuple[str, ...]:
    """The command line of a browser without a window that opens ``page`` and speaks to nobody else."""
    return (
        find_chromium(),
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-dev-shm-usage"),
        *("--no-first-run", "--disable-background-networking", "--disable-component-update"),
        *("--disable-sync", "--disable-extensions", "--no-proxy-server", "--enable-logging=stderr"),
        f"--user-data-dir={profile}",
        page,
    )


class PageServer:
    """Serves the bundled page on loopback, and hears what it says.

    Attributes:
        url: of the page.
    """

    def __init__(self, workspace: Path) -> None:
        self.said: queue.Queue[str] = queue.Queue()
        html = b"<!doctype html><meta charset=utf-8><script type=module src=/page.js></script>"
        script = (workspace / "page.bundle.js").read_bytes()
        said = self.said

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                is_script = self.path == "/page.js"
                self._answer(script if is_script else html, "text/javascript" if is_script else "text/html")

            def do_POST(self) -> None:
                said.put(self.rfile.read(int(self.headers["Content-Length"])).decode())
                self._answer(b"", "text/plain")

            def _answer(self, body: bytes, kind: str) -> None:
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments: object) -> None:
                """Say nothing."""

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    async def hear(self, start: str, context: Callable[[], str]) -> str:
        """What the page says next, which must begin with ``start``; ``context`` explains a failure."""
        try:
            get = partial(self.said.get, timeout=PATIENCE)
            text = await trio.to_thread.run_sync(get, abandon_on_cancel=True)
        except queue.Empty:
            raise AssertionError(f"the page did not say {start!r}:\n{context()}") from None
        assert text.startswith(start), f"{text}\n{context()}"
        return text

    def close(self) -> None:
        """Serve no more."""
        self._server.shutdown()
        self._server.server_close()
