"""llama.cpp as the judge: its tokenizer test vectors, and the program itself.

The vectors (vocabularies with texts and the ids that they become) are in the source archive of llama-cpp-python. They
are fetched from the package index that pip is set up for, once, into ``.cache/``, and never shipped.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE, VERSION = "llama-cpp-python", "0.3.36"
ARCHIVE_SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
CACHE = ROOT / ".cache" / "llama-cpp-vocab" / VERSION
SEPARATOR = "\n__ggml_vocab_test__\n"

# `pip download` would build the package to learn its dependencies, which takes a C++ compiler and minutes. pip's own
# finder and session do the part that is wanted, with the index, the proxy and the certificates that pip is set up for.
FETCH = """
import sys
from pip._internal.commands import create_command

package, version, target = sys.argv[1:]
command = create_command("download")
options, _ = command.parse_args(["--no-deps", "--no-binary", package, f"{package}=={version}"])
with command.main_context():
    session = command.get_default_session(options)
    finder = command._build_package_finder(options, session)
    found = [c for c in finder.find_all_candidates(package) if str(c.version) == version]
    if not found:
        sys.exit(f"the package index has no source archive of {package} {version}")
    with session.get(found[0].link.url_without_fragment, stream=True) as response, open(target, "wb") as file:
        response.raise_for_status()
        for block in response.iter_content(1 << 20):
            file.write(block)
"""


def vocabularies() -> Path:
    """The folder with llama.cpp's ``ggml-vocab-*.gguf`` and their ``.inp`` and ``.out``, fetched if need be.

    Without a package index at hand the test is skipped with that reason; in CI it fails.
    """
    if CACHE.is_dir():
        return CACHE
    CACHE.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE.parent) as folder:
        archive = Path(folder, "archive.tar.gz")
        fetched = subprocess.run(
            [sys.executable, "-c", FETCH, PACKAGE, VERSION, str(archive)],
            capture_output=True,
            text=True,
            check=False,
        )
        if fetched.returncode != 0:
            last = (fetched.stderr.strip().splitlines() or ["no reason given"])[-1]
            reason = f"cannot fetch llama.cpp's tokenizer test vectors: {last}"
            if os.environ.get("CI"):
                pytest.fail(reason)
            pytest.skip(reason)
        with archive.open("rb") as file:
            assert hashlib.file_digest(file, "sha256").hexdigest() == ARCHIVE_SHA256, (
                "not the archive that was expected"
            )
        unpacked = Path(folder, "vocab")
        unpacked.mkdir()
        with tarfile.open(archive, "r|gz") as members:
            for member in members:
                name = Path(member.name).name
                if "/llama.cpp/models/ggml-vocab-" in member.name and member.isfile():
                    content = members.extractfile(member)
                    assert content is not None
                    (unpacked / name).write_bytes(content.read())
        try:
            unpacked.rename(CACHE)
        except OSError:  # another test process was quicker
            assert CACHE.is_dir()
    return CACHE


def vectors(name: str) -> list[tuple[str, list[int]]]:
    """Texts and their ids for one vocabulary."""
    path = vocabularies() / f"ggml-vocab-{name}.gguf"
    texts = Path(f"{path}.inp").read_bytes().decode().split(SEPARATOR)
    if not texts[-1]:
        texts.pop()
    ids = [[int(token) for token in line.split()] for line in Path(f"{path}.out").read_text().splitlines()]
    return list(zip(texts, ids, strict=True))


class LlamaCpp:
    """llama.cpp's server with one model, asked over HTTP on loopback."""

    def __init__(self, address: str) -> None:
        self._address = address

    def post(self, path: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            self._address + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as response:
            return json.load(response)

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        body = {"content": text, "add_special": add_special, "parse_special": parse_special}
        tokens: list[int] = self.post("/tokenize", body)["tokens"]
        return tokens

    def apply_template(self, messages: list[dict[str, str]]) -> str:
        prompt: str = self.post("/apply-template", {"messages": messages})["prompt"]
        return prompt


@contextmanager
def llama_cpp(model: Path) -> Iterator[LlamaCpp]:
    """Run llama.cpp with a model as long as the block lasts."""
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(model)
    parameters.n_ctx = 128
    parameters.warmup = False
    parameters.verbosity = 0
    parameters.cpuparams.n_threads = 1
    server = xllamacpp.Server(parameters)
    try:
        yield LlamaCpp(server.listening_address)
    finally:
        del server
