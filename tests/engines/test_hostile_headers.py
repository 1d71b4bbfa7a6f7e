"""Headers that lie: whatever a file claims, it is understood or refused by name, at once and without memory."""

import functools
import time
import tracemalloc
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import tiny_models
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_peer.engines.architectures import parse
from kvasir_peer.engines.base import BankSpec, StackSpec, estimate_bank, estimate_stack
from kvasir_peer.errors import EngineError, ModelFileError
from kvasir_peer.models.gguf import TensorInfo

SECONDS = 2.0  # a header of a few kilobytes, on a machine that is busy with other tests
MEMORY = 64 << 20  # bytes

_NUMBERS = st.sampled_from([0, -1, 1, 2, 3, 7, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1])
_LIES = (
    _NUMBERS
    | st.integers(-(2**70), 2**70)
    | st.floats(width=32)
    | st.booleans()
    | st.text(max_size=8)
    | st.lists(_NUMBERS, max_size=5)
    | st.just([2] * 4096)
)
_SIZES = st.sampled_from([0, 1, 2, 31, 32, 64, 2**31, 2**40, 2**62])


@functools.cache
def header(name: str) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    model = tiny_models.BY_NAME[name]
    return tiny_models.metadata_of(model), tiny_models.infos_of(tiny_models.tensors_of(model))


@pytest.fixture(scope="module", autouse=True)
def engines() -> None:
    """Import the engines and try their kernels, which takes time and memory once."""
    for engine in ("onnx", "torch"):
        estimate_stack(engine, *header("llama"), StackSpec(0, 1, 1, 1, 1))


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), "four", b"4\xff"])
def test_a_size_that_is_no_number_is_refused_by_name(value: object) -> None:
    metadata, tensors = header("llama")
    with pytest.raises(ModelFileError, match=r"llama\.attention\.head_count is .*, no integer"):
        parse(metadata | {"llama.attention.head_count": value}, tensors)


@pytest.mark.parametrize("name", ["llama", "llama-yarn", "qwen2moe", "gemma3", "gpt-oss", "deepseek-v3"])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_lie_is_understood_or_refused(name: str, data: st.DataObject) -> None:
    metadata, tensors = (dict(part) for part in header(name))
    keys = st.sampled_from(sorted(metadata))
    for key in data.draw(st.lists(keys, max_size=3)):
        metadata[key] = data.draw(_LIES)
    for tensor in data.draw(st.lists(st.sampled_from(sorted(tensors)), max_size=2, unique=True)):
        info = tensors[tensor]
        shape = tuple(data.draw(st.lists(_SIZES, min_size=1, max_size=4)))
        changed = data.draw(st.sampled_from(["shape", "type", "gone", "renamed"]))
        if changed == "shape":
            tensors[tensor] = msgspec.structs.replace(info, shape=shape)
        elif changed == "type":
            tensors[tensor] = msgspec.structs.replace(info, type=data.draw(st.integers(0, 64)))
        else:
            tensors.pop(tensor, None)
            if changed == "renamed":
                tensors[tensor + data.draw(st.text(max_size=3))] = info
    begin = time.monotonic()
    tracemalloc.start()
    try:
        shape_of = parse(metadata, tensors)
        spec = StackSpec(0, shape_of.n_layer, 2, 64, 16)
        for engine in ("onnx", "torch"):
            assert estimate_stack(engine, metadata, tensors, spec).total > 0
            estimate_stack(engine, metadata, tensors, replace(spec, first=shape_of.n_layer - 1))
            for layer in shape_of.layers:
                if layer.moe is not None:
                    bank = BankSpec(((layer.index, 0, layer.moe.n_expert),), 16)
                    assert estimate_bank(engine, metadata, tensors, bank).total > 0
    except (ModelFileError, EngineError) as error:
        assert str(error) and "\n" not in str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < MEMORY
    assert time.monotonic() - begin < SECONDS
