"""Token ids are llama.cpp's, on the vectors that it is tested with itself."""

import functools

import helpers_llama_cpp
import pytest

from kvasir_peer.errors import ModelFileError
from kvasir_peer.models.gguf import GgufFile
from kvasir_peer.models.tokenizer import Tokenizer

BYTE_LEVEL = [
    "command-r",
    "deepseek-coder",
    "falcon",
    "gpt-2",
    "mpt",
    "qwen2",
    "qwen35",
    "refact",
    "starcoder",
    "llama-bpe",
    "deepseek-llm",
]
SENTENCEPIECE = ["llama-spm", "phi-3"]
RAW = ["gemma-4"]


@functools.lru_cache(5)
def opened(name: str) -> Tokenizer:
    with GgufFile.open(helpers_llama_cpp.vocabularies() / f"ggml-vocab-{name}.gguf") as file:
        return Tokenizer.from_gguf(file.metadata)


@pytest.mark.parametrize("name", RAW + BYTE_LEVEL + SENTENCEPIECE)
def test_ids_are_llama_cpps(name: str) -> None:
    tokenizer = opened(name)
    vectors = helpers_llama_cpp.vectors(name)
    assert len(vectors) > 40
    for text, ids in vectors:
        assert tokenizer.encode(text, add_special=False) == ids, text
        if name not in SENTENCEPIECE:
            assert tokenizer.decode(ids) == text
        elif text:
            assert tokenizer.decode(ids) == " " + text


@pytest.mark.parametrize(("name", "kind"), [("bert-bge", "bert"), ("nomic-bert-moe", "t5")])
def test_other_kinds_are_refused_by_name(name: str, kind: str) -> None:
    with pytest.raises(ModelFileError, match=f"'{kind}'"):
        opened(name)


def test_a_file_that_names_no_pre_tokenizer_works_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = opened("gpt-neox")
    assert "tokenizer.ggml.pre" in caplog.text
    assert (
        tokenizer.decode(tokenizer.encode("Once upon a time, 1234!", add_special=False))
        == "Once upon a time, 1234!"
    )


def test_phi3_special_tokens_swallow_the_space_after_them() -> None:
    tokenizer = opened("phi-3")
    user, end = tokenizer.vocabulary.ids["<|user|>"], tokenizer.vocabulary.ids["<|end|>"]
    spaced = tokenizer.encode("<|user|>\n hello<|end|>\n", add_special=False, parse_special=True)
    assert spaced == tokenizer.encode("<|user|>hello<|end|>", add_special=False, parse_special=True)
    assert spaced[0] == user and spaced[-1] == end
    assert end in tokenizer.end_ids


def test_end_tokens_are_found_where_the_file_names_only_one() -> None:
    tokenizer = opened("llama-bpe")
    assert {tokenizer.vocabulary.texts[token] for token in tokenizer.end_ids} == {
        "<|eot_id|>",
        "<|end_of_text|>",
    }
    assert tokenizer.add_bos  # the pre-tokenizer's default; the file does not say


def test_a_long_run_of_spaces_costs_no_square() -> None:
    tokenizer = opened("deepseek-llm")
    text = "x" + " " * 200_000 + "y"
    assert tokenizer.decode(tokenizer.encode(text, add_special=False)) == text
