"""Chat messages to a prompt, by the Jinja template that the GGUF file holds.

The template is rendered in a separate, limited process (:mod:`.template_worker` says why), which is started with the
template and lives as long as it. A file without a template gets ChatML's if its vocabulary has ChatML's tokens, for
then it was surely trained with them; any other file has no chat, only completions.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvasir_peer.errors import ModelFileError, UsageError

MAX_SOURCE = 1 << 20  # characters; the longest template in use has some 30,000
MAX_OUTPUT = 1 << 24  # characters of a prompt; more fits no context
MAX_SECONDS = 5.0  # a real template takes milliseconds; the rest is for a machine under load
START_SECONDS = 60.0  # until the process has started: a loaded machine imports Jinja slowly
MAX_MEMORY = 1 << 29  # bytes of address space of the process, 30 MiB of which it uses itself

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")

# Roles whose token a template may name as ROLE_token, with the id where the file is silent (SentencePiece's).
_TOKENS = {
    "bos": ("bos_token_id", 1),
    "eos": ("eos_token_id", 2),
    "unk": ("unknown_token_id", 0),
    "pad": ("padding_token_id", None),
}


class ChatTemplate:
    """The chat template of one model. Safe for use from several threads, which wait for each other.

    Args:
        source: the Jinja template.
        tokens: texts of special tokens that the template may name, such as ``bos_token``.
        seconds: how long one prompt may take.

    Raises:
        ModelFileError: the template is too long or no valid Jinja.
    """

    def __init__(
        self, source: str, tokens: Mapping[str, str] | None = None, *, seconds: float = MAX_SECONDS
    ) -> None:
        if len(source) > MAX_SOURCE:
            raise ModelFileError(f"the chat template has {len(source)} characters, more than {MAX_SOURCE}")
        self.source = source
        self._tokens = dict(tokens or {})
        self._seconds = seconds
        self._lock = threading.Lock()
        self._worker: _Worker | None = None
        self._closed = False
        with self._lock:
            self._started()

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object]) -> ChatTemplate | None:
        """The template of a GGUF file, or None where it has none and ChatML's tokens are not in its vocabulary.

        Raises:
            ModelFileError: there is a template, but it is no valid one.
        """
        texts = metadata.get("tokenizer.ggml.tokens")
        if not isinstance(texts, Sequence):
            texts = ()
        source = metadata.get("tokenizer.chat_template")
        if source is None:
            if not all(token in texts for token in _CHATML_TOKENS):
                return None
            source = CHATML
        if not isinstance(source, str):
            raise ModelFileError("tokenizer.chat_template is no string")
        tokens = {}
        sentencepiece = metadata.get("tokenizer.ggml.model") == "llama"
        for role, (key, default) in _TOKENS.items():
            token = metadata.get(f"tokenizer.ggml.{key}", default if sentencepiece else None)
            if isinstance(token, int) and 0 <= token < len(texts):
                tokens[f"{role}_token"] = str(texts[token])
            else:
                tokens[f"{role}_token"] = ""
        return cls(source, tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt for a conversation. Blocks up to the time limit: call it from a thread, not from an event loop.

        Args:
            messages: ``role`` and ``content`` each, and what else the template knows.
            tools: descriptions of functions, as in OpenAI's API.
            add_generation_prompt: end with the beginning of the assistant's turn.

        Raises:
            UsageError: the template refuses these messages (roles that do not alternate, say).
            ModelFileError: the template takes too long, too much memory, or writes too much.
        """
        variables = {
            **self._tokens,
            "messages": list(messages),
            "tools": None if tools is None else list(tools),
            "add_generation_prompt": add_generation_prompt,
        }
        with self._lock:
            worker = self._started()
            answer = worker.ask(
                {"variables": variables, "output": MAX_OUTPUT, "seconds": int(self._seconds) + 1},
                self._seconds,
            )
            if answer is None:
                self._worker = None
                raise ModelFileError(
                    f"the model's chat template took more than {self._seconds:g} s or too much memory; "
                    f"use completions, or a model with another template"
                )
        if (text := answer.get("text")) is not None:
            return text
        message = " ".join(answer["message"].split())[:500]
        if answer["error"] in ("refused", "failed"):
            raise UsageError(f"the model's chat template cannot take these messages: {message}")
        raise ModelFileError(f"the model's chat template cannot be used: {message}")

    def close(self) -> None:
        """End the process; the template cannot be used any more."""
        with self._lock:
            self._closed = True
            if self._worker is not None:
                self._worker.close()
                self._worker = None

    def _started(self) -> _Worker:
        if self._closed:
            raise UsageError("the chat template has been closed")
        if self._worker is None:
            worker = _Worker()
            first = {"template": self.source, "memory": MAX_MEMORY, "seconds": int(self._seconds) + 1}
            answer = worker.ask(first, START_SECONDS)
            if answer is None:
                raise ModelFileError("the model's chat template takes too long or too much memory to compile")
            if "error" in answer:
                worker.close()
                raise ModelFileError(f"the model's chat template is no valid one: {answer['message']}")
            self._worker = worker
        return self._worker


class _Worker:
    """The process that renders, asked one thing at a time."""

    def __init__(self) -> None:
        program = Path(__file__).with_name("template_worker.py")
        kept = ("PATH", "PYTHONPATH", "PYTHONHOME", "SYSTEMROOT", "LD_LIBRARY_PATH", "TZ", "LC_ALL", "LANG")
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in kept if name in os.environ},  # no secrets of ours
            start_new_session=True,  # Ctrl-C in the terminal is the parent's to answer
        )
        self._end = weakref.finalize(self, _end, self._process)
        self._lock = threading.Lock()
        self._busy = False

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, str] | None:
        """The answer, or None if it took too long or the process died of its limits; then it is ended."""
        late = threading.Timer(seconds, self._kill_if_busy)
        late.daemon = True
        self._busy = True
        late.start()
        try:
            answer = self._exchange(json.dumps(request).encode())
        finally:
            with self._lock:
                self._busy = False
            late.cancel()
        if answer is None:
            self.close()
        return answer

    def _kill_if_busy(self) -> None:
        with self._lock:  # not when the answer has just come: the next request would find a dead process
            if self._busy:
                self._process.kill()

    def _exchange(self, body: bytes) -> dict[str, str] | None:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(len(body).to_bytes(4, "big") + body)
            self._process.stdin.flush()
            size = int.from_bytes(self._process.stdout.read(4), "big")
            if not 0 < size <= 12 * MAX_OUTPUT + 4096:  # JSON writes a character as 12 bytes at most
                return None
            answer = self._process.stdout.read(size)
        except OSError:  # the process is gone
            return None
        if len(answer) < size:
            return None
        parsed: dict[str, str] = json.loads(answer)
        return parsed

    def close(self) -> None:
        self._end()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except OSError:  # what was not yet written cannot be any more
                continue
    process.wait()
