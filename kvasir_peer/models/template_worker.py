"""Renders a chat template in a process of its own; started by path, imports nothing of the package.

A template is a program that came with the model file. Jinja's sandbox keeps it from Python's attributes, but not from
running for ever (nested loops) or from eating all memory (a list that doubles), and neither can be bounded from
inside a process that has other things to do. Here the memory is limited by the operating system, and the parent kills
this process when an answer is late.

Messages are JSON with a length of 4 bytes in front (big endian), requests on standard input, answers on standard
output. The first request is ``{"template": str, "memory": bytes, "seconds": CPU seconds}``; later ones are
``{"variables": {...}, "output": characters, "seconds": CPU seconds}``. Answers are ``{"text": str}`` or ``{"error":
kind, "message": str}`` with the kind ``syntax``, ``refused`` (the template called ``raise_exception``), ``failed``,
``size`` or ``memory``.
"""

from __future__ import annotations

import datetime
import json
import sys
from typing import Any, BinaryIO

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

try:
    import resource
except ImportError:  # Windows has no such limits; there the parent's deadline alone holds
    resource = None  # type: ignore[assignment]


class Refused(Exception):
    """The template called raise_exception."""


class Generation(Extension):
    """``{% generation %} ... {% endgeneration %}`` marks what the model wrote, for training; here it is transparent."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def raise_exception(message: object) -> None:
    raise Refused(str(message))


def strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def tojson(value: object, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """As in Hugging Face's templates: unlike Jinja's own filter it escapes nothing for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def environment() -> ImmutableSandboxedEnvironment:
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation], autoescape=False
    )
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = strftime_now
    env.filters["tojson"] = tojson
    return env


def render(template: jinja2.Template, variables: dict[str, Any], limit: int) -> dict[str, str]:
    pieces: list[str] = []
    size = 0
    try:
        for piece in template.generate(**variables):
            size += len(piece)
            if size > limit:
                return {"error": "size", "message": f"it writes more than {limit} characters"}
            pieces.append(piece)
        return {"text": "".join(pieces)}
    except Refused as error:
        return {"error": "refused", "message": str(error)}
    except MemoryError:
        return {"error": "memory", "message": "it takes too much memory"}
    except Exception as error:  # noqa: BLE001  a template is a program: anything may be raised
        return {"error": "failed", "message": f"{type(error).__name__}: {error}"}


def compiled(source: str) -> jinja2.Template | dict[str, str]:
    try:
        return environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        return {"error": "syntax", "message": f"{error.message} in line {error.lineno}"}
    except MemoryError:
        return {"error": "memory", "message": "it takes too much memory"}
    except Exception as error:  # noqa: BLE001  the compiler evaluates constant expressions: anything may be raised
        return {"error": "syntax", "message": f"{type(error).__name__}: {error}"}


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    def receive() -> Any:
        header = requests.read(4)
        return json.loads(requests.read(int.from_bytes(header, "big"))) if len(header) == 4 else None

    def send(answer: dict[str, str]) -> None:
        body = json.dumps(answer).encode()
        answers.write(len(body).to_bytes(4, "big") + body)
        answers.flush()

    first = receive()
    if first is None:
        return
    limit_memory(first["memory"])
    limit_cpu(first["seconds"])
    template = compiled(first["template"])
    send(template if isinstance(template, dict) else {"text": ""})
    while isinstance(template, jinja2.Template) and (request := receive()) is not None:
        limit_cpu(request["seconds"])
        send(render(template, request["variables"], request["output"]))


def limit_memory(size: int) -> None:
    if resource is not None:
        resource.setrlimit(resource.RLIMIT_AS, (size, size))


def limit_cpu(seconds: int) -> None:
    """End this process should it still compute after so many more seconds, also when the parent is gone."""
    if resource is not None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + seconds + 1, hard))


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
