"""``kvasir-peer chat``, against a small server that speaks OpenAI's stream."""

import json
import os
import pty
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from helpers_unit import environment, kvasir

from kvasir_peer.commands import answers
from kvasir_peer.errors import BusyError, KvasirError, LinkError, NotReadyError, UsageError


class Server(ThreadingHTTPServer):
    """Answers with what was asked, turned round; refuses the first ``refusals`` questions with 503."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked = []
        self.refusals = 0
        self.key = None
        self.models = ["little", "large"]

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def answer(self, status, body, **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def error(self, status, message, **headers):
        self.answer(status, json.dumps({"error": {"message": message}}).encode(), **headers)

    def do_GET(self):
        if self.server.key and self.headers.get("authorization") != f"Bearer {self.server.key}":
            return self.error(401, "a key is needed")
        data = {"data": [{"id": name} for name in self.server.models]}
        return self.answer(200, json.dumps(data).encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append(body)
        if len(self.server.asked) <= self.server.refusals:
            return self.error(503, "1 of 2 stages are here", retry_after="0.5")
        words = body["messages"][-1]["content"][::-1]
        lines = [": a stage is being replaced", ""]
        for letter in words:
            lines += ["data: " + json.dumps({"choices": [{"delta": {"content": letter}}]}), ""]
        lines += [
            "data: " + json.dumps({"choices": [{"delta": {}, "finish_reason": "stop"}]}),
            "",
            "data: [DONE]",
            "",
        ]
        return self.answer(200, "\n".join(lines).encode(), content_type="text/event-stream")


@pytest.fixture
def server():
    with Server() as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def test_one_question(server):
    result = kvasir(
        "chat", server.url, "--prompt", "abc", "--temperature", "0", "--max-tokens", "5", "--system", "Be."
    )
    assert (result.returncode, result.stdout) == (0, "cba\n")
    assert result.stderr == "[a stage is being replaced]\n"
    (body,) = server.asked
    assert body["model"] == "little" and body["temperature"] == 0 and body["max_tokens"] == 5
    assert [message["role"] for message in body["messages"]] == ["system", "user"]


def test_a_model_that_is_not_ready_is_waited_for(server):
    server.refusals = 2
    result = kvasir("chat", server.url, "--prompt", "abc", "--model", "large")
    assert (result.returncode, result.stdout) == (0, "cba\n")
    assert result.stderr.count("[1 of 2 stages are here; asking again in 0.5 s]") == 2
    assert len(server.asked) == 3


def test_waiting_has_an_end(server):
    server.refusals = 100
    result = kvasir("chat", server.url, "--prompt", "abc", "--wait", "0.4")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "kvasir-peer: 1 of 2 stages are here\n"


def test_wrong_use(server):
    result = kvasir("chat", server.url, "--prompt", "abc", "--model", "huge")
    assert result.returncode == 2 and "there is no model 'huge' here, only: little, large" in result.stderr
    server.key = "k" * 20
    result = kvasir("chat", server.url, "--prompt", "abc")
    assert result.returncode == 2 and "--api-key" in result.stderr
    assert kvasir("chat", server.url, "--prompt", "abc", "--api-key", server.key).stdout == "cba\n"
    server.key, server.models = None, []
    result = kvasir("chat", server.url, "--prompt", "abc")
    assert result.returncode == 1 and "no model yet" in result.stderr
    result = kvasir("chat", "http://127.0.0.1:9/v1", "--prompt", "abc")
    assert result.returncode == 1 and "nobody answers" in result.stderr


def test_a_conversation_in_a_terminal(server):
    master, slave = pty.openpty()
    chat = subprocess.Popen(
        [sys.executable, "-m", "kvasir_peer.cli", "chat", server.url],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=environment(TERM="dumb"),
        start_new_session=True,
    )
    os.close(slave)
    shown = ""

    def read_until(pattern):
        nonlocal shown
        while not re.search(pattern, shown, re.DOTALL):
            shown += os.read(master, 4096).decode()
        seen, shown = shown, ""
        return seen

    try:
        assert "/quit" in read_until(r"> $")
        os.write(master, b"abc\n")
        assert "cba" in read_until(r"cba.*> $")
        os.write(master, b"def\n")
        read_until(r"fed.*> $")
        os.write(master, b"/new\n")
        read_until(r"> $")
        os.write(master, b"/what\n")
        assert "/new begins" in read_until(r"Ctrl-C.*> $")
        os.write(master, b"ghi\n")
        read_until(r"ihg.*> $")
        os.write(master, b"/quit\n")
        assert chat.wait(timeout=60) == 0
    finally:
        chat.kill()
        chat.wait()
        os.close(master)
    assert [len(body["messages"]) for body in server.asked] == [1, 3, 1]
    assert server.asked[1]["messages"][1] == {"role": "assistant", "content": "cba"}


def test_stream_lines():
    read = answers.read_line
    assert read("") == [] and read("event: x") == [] and read("data: [DONE]") == [] and read(":") == []
    assert read(": pause\n") == [answers.Remark("pause")]
    assert read('data: {"choices": [{"text": "a", "finish_reason": "length"}]}') == [
        answers.Text("a"),
        answers.End("length"),
    ]
    assert read('data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}') == [
        answers.Usage(3, 4)
    ]
    with pytest.raises(KvasirError, match="the ring is gone"):
        read('data: {"error": {"message": "the ring is gone"}}')
    for wrong in (
        "data: x",
        "data: []",
        'data: {"choices": 3}',
        'data: {"usage": {}, "choices": [{"delta": 3}]}',
    ):
        with pytest.raises(LinkError, match="no completion"):
            read(wrong)


@pytest.mark.parametrize(
    ("status", "headers", "body", "kind", "says", "wait"),
    [
        (503, {"retry-after": "7"}, b'{"error": {"message": "m"}}', NotReadyError, "m", 7.0),
        (503, {}, b"<html>", NotReadyError, "the server answered 503: <html>", 5.0),
        (429, {"retry-after": "soon"}, b"{}", BusyError, "answered 429", 5.0),
        (429, {"retry-after": "1e9"}, b"{}", BusyError, "answered 429", 60.0),
        (401, {}, b'{"error": {"message": "m"}}', UsageError, "--api-key", None),
        (404, {}, b'{"error": {"message": "no model"}}', UsageError, "no model", None),
        (500, {}, b"\xff", KvasirError, "answered 500", None),
    ],
)
def test_refusals(status, headers, body, kind, says, wait):
    error = answers.refusal(status, headers, body)
    assert type(error) is kind and says in str(error)
    assert wait is None or error.retry_after == wait


def test_an_address_without_a_path_is_the_openai_one(server):
    for url in (server.url, server.url.removesuffix("/v1"), server.url.removesuffix("/v1") + "/"):
        result = kvasir("chat", url, "--prompt", "abc")
        assert (result.returncode, result.stdout) == (0, "cba\n"), result.stderr
