"""What the engines are compared with: llama.cpp's answers, asked once per test session."""

from collections.abc import Callable

import pytest
import tiny_models
from oracle import Reference, ask_llama_cpp


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    """Name of a tiny model to its file and llama.cpp's answers."""
    folder = tmp_path_factory.mktemp("tiny")
    known: dict[str, Reference] = {}

    def get(name: str) -> Reference:
        if name not in known:
            known[name] = ask_llama_cpp(tiny_models.write_model(tiny_models.BY_NAME[name], folder))
        return known[name]

    return get
