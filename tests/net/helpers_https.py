"""A small web server with one folder of files, which can be told to misbehave."""

from __future__ import annotations

import datetime
import ipaddress
import re
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


class FileServer:
    """Serves a folder on 127.0.0.1, with Range.

    Attributes:
        ranges: whether Range is answered.
        requests: (path, Range header) of each request.
        misbehave: looked at before each answer: given (request number, handler), returns True when it answered itself.
        change: what is done to a body before it goes out.
        break_after: bytes after which an answer's connection is cut, for the next answers in turn.
        etag: the validator sent, or "".
    """

    def __init__(self, folder: Path, *, ranges: bool = True) -> None:
        self.folder = folder
        self.ranges = ranges
        self.requests: list[tuple[str, str]] = []
        self.misbehave: Callable[[int, BaseHTTPRequestHandler], bool] = lambda number, handler: False
        self.change: Callable[[int, bytes], bytes] = lambda start, body: body
        self.break_after: list[int] = []
        self.etag = '"one"'
        self.url = ""

    @contextmanager
    def running(self, tls: ssl.SSLContext | None = None) -> Iterator[FileServer]:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                outer._answer(self)

            def log_message(self, format: str, *args: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: object, client_address: object) -> None:
                if not isinstance(
                    sys.exception(), ConnectionError | ssl.SSLError
                ):  # those are the client's right
                    super().handle_error(request, client_address)  # type: ignore[arg-type]

        server = Server(("127.0.0.1", 0), Handler)
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{server.server_address[1]}"
        try:
            yield self
        finally:
            server.shutdown()
            thread.join()
            server.server_close()

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        wanted = handler.headers.get("Range", "")
        self.requests.append((handler.path, wanted))
        if self.misbehave(len(self.requests), handler):
            return
        path = self.folder / handler.path.split("?")[0].lstrip("/")
        if not path.is_file():
            handler.send_error(404)
            return
        size = path.stat().st_size
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", wanted) if self.ranges else None
        start, end = (int(match[1]), min(int(match[2]) + 1, size)) if match else (0, size)
        if start >= size:
            handler.send_error(416)
            return
        with path.open("rb") as file:
            file.seek(start)
            body = self.change(start, file.read(end - start))
        handler.send_response(206 if match else 200)
        handler.send_header("Content-Length", str(len(body)))
        if match:
            handler.send_header("Content-Range", f"bytes {start}-{end - 1}/{size}")
        if self.etag:
            handler.send_header("ETag", self.etag)
        handler.end_headers()
        if self.break_after:
            handler.wfile.write(body[: self.break_after.pop(0)])
            handler.wfile.flush()
            handler.close_connection = True
            return
        try:
            handler.wfile.write(body)
        except (BrokenPipeError, ConnectionResetError):
            handler.close_connection = True  # the client has seen enough


def tls_contexts(folder: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """A server's context with a certificate of its own for 127.0.0.1, and a client's that trusts it."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    path = folder / "server.pem"
    path.write_bytes(
        pem
        + key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(path)
    return server, ssl.create_default_context(cadata=pem.decode())
