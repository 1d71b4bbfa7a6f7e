"""The tokenizer's own promises, on small vocabularies made here, and what it refuses."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_peer.errors import ModelFileError, UsageError
from kvasir_peer.models.pretokenizers import PRE_TOKENIZERS
from kvasir_peer.models.tokenizer import BYTE_OF, Tokenizer
from kvasir_peer.models.vocabulary import MAX_TOKENS

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def byte_level(pre: str = "smollm", **more: Any) -> dict[str, Any]:
    """All bytes, one merge, and special tokens at the end."""
    tokens = [*BYTE_OF, "he", "<|im_start|>", "<|im_end|>", "<tool>", "<unused>"]
    kinds = [NORMAL] * 257 + [CONTROL, CONTROL, USER_DEFINED, UNUSED]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": ["h e"],
        "tokenizer.ggml.bos_token_id": 257,
        "tokenizer.ggml.eos_token_id": 258,
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


def sentencepiece(**more: Any) -> dict[str, Any]:
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "a",
        "b",
        "ab",
        "▁a",
        "▁ab",
    ]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-9.0, -8.0, -7.0, -1.0, -2.0, -3.0],
        "tokenizer.ggml.token_type": [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * 6,
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }


@pytest.fixture(scope="module")
def small() -> Tokenizer:
    return Tokenizer.from_gguf(byte_level())


@given(text=st.text())
@settings(deadline=None)
def test_any_text_comes_back(small: Tokenizer, text: str) -> None:
    assert small.decode(small.encode(text, add_special=False)) == text


# gemma4 cuts raw text; its own vocabulary is among llama.cpp's test vectors
@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS.keys() - {"gemma4"}))
def test_every_pre_tokenizer_cuts_and_loses_nothing(pre: str) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level(pre))
    text = "He's ÄPFEL-12345 (日本語) don't\r\n\n  \tx  'LL aÉ\u0301 /*!?*/ 1 000\u3000한국어 " + "🎉" * 3
    assert tokenizer.decode(tokenizer.encode(text, add_special=False)) == text


def test_special_tokens_are_text_unless_asked_for(small: Tokenizer) -> None:
    assert small.encode("<|im_end|>", add_special=False, parse_special=True) == [258]
    ids = small.encode("<|im_end|>", add_special=False)
    assert 258 not in ids and small.decode(ids) == "<|im_end|>"
    assert 259 in small.encode("a<tool>b", add_special=False)  # user-defined ones are always taken


def test_control_tokens_have_no_text_of_their_own(small: Tokenizer) -> None:
    assert small.decode([257, 256, 258]) == "he"
    assert small.decode([257, 256, 258], special=True) == "<|im_start|>he<|im_end|>"
    assert small.token_bytes(260) == b""  # unused


def test_what_goes_around_a_prompt() -> None:
    both = Tokenizer.from_gguf(byte_level(add_bos_token=True, add_eos_token=True))
    assert both.encode("he") == [257, 256, 258]
    assert both.encode("") == [257, 258]
    assert both.encode("he", add_special=False) == [256]
    neither = Tokenizer.from_gguf(byte_level(add_bos_token=False))
    assert neither.encode("he") == [256]


def test_sentencepiece_merges_by_score_and_falls_back_to_bytes() -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece())
    ids = tokenizer.vocabulary.ids
    assert tokenizer.encode("ab") == [1, ids["▁ab"]]
    assert tokenizer.encode("é", add_special=False) == [ids["▁"], ids["<0xC3>"], ids["<0xA9>"]]
    assert tokenizer.decode([1, ids["▁ab"], ids["<0xC3>"], ids["<0xA9>"]]) == " abé"
    bare = Tokenizer.from_gguf(sentencepiece(add_space_prefix=False))
    assert bare.encode("ab", add_special=False) == [ids["ab"]]


def test_characters_come_out_when_they_are_whole(small: Tokenizer) -> None:
    decoder = small.decoder()
    text = [decoder.push(token) for token in small.encode("a😀b", add_special=False)]
    assert text == ["a", "", "", "", "😀", "b"]
    assert decoder.finish() == ""
    half = small.decoder()
    assert [half.push(token) for token in small.encode("😀", add_special=False)[:2]] == ["", ""]
    assert half.finish() == "�"


def test_text_and_tokens_that_are_none(small: Tokenizer) -> None:
    with pytest.raises(UsageError, match="character 1"):
        small.encode("a\ud800")
    with pytest.raises(UsageError, match="261"):
        small.token_bytes(261)
    with pytest.raises(UsageError, match="-1"):
        small.token_bytes(-1)


def without(metadata: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in metadata.items() if name != f"tokenizer.ggml.{key}"}


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({}, "tokenizer.ggml.model"),
        (byte_level(model="rwkv"), "rwkv"),
        (byte_level(model=7), "7"),
        (byte_level(pre="kimi-k9"), "kimi-k9"),
        (byte_level(pre=3), "tokenizer.ggml.pre"),
        (without(byte_level(), "tokens"), "tokenizer.ggml.tokens"),
        (byte_level(tokens="abc"), "tokenizer.ggml.tokens"),
        (byte_level(tokens=[]), "tokenizer.ggml.tokens"),
        (byte_level(tokens=["a", 1]), r"tokens\[1\]"),
        (byte_level(tokens=["a", "a"], token_type=[1, 1]), "'a' twice"),
        (byte_level(tokens=range(MAX_TOKENS + 1)), str(MAX_TOKENS)),
        (byte_level(token_type=[1]), "token_type has 1"),
        (without(byte_level(), "merges"), "merges"),
        (byte_level(merges=["he"]), "'he'"),
        (byte_level(merges=[5]), "5"),
        (byte_level(merges=["h q"]), "merges"),
        (byte_level(add_bos_token="yes"), "add_bos_token"),
        (byte_level(bos_token_id="x"), "bos_token_id"),
        (sentencepiece(scores=[0.0]), "scores has 1"),
        (sentencepiece(scores=["x"] * 265), "scores"),
        (sentencepiece(scores=[float("nan")] * 265), "scores"),
    ],
)
def test_what_does_not_fit_is_named(metadata: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelFileError, match=named) as caught:
        Tokenizer.from_gguf(metadata)
    assert "\n" not in str(caught.value)


def test_ids_out_of_the_vocabulary_mean_none() -> None:
    tokenizer = Tokenizer.from_gguf(
        byte_level(bos_token_id=4_294_967_295, eos_token_id=-1, add_bos_token=True)
    )
    assert tokenizer.bos_id == 11  # GPT-2's default, as llama.cpp has it
    assert Tokenizer.from_gguf(sentencepiece(padding_token_id=4_294_967_295)).vocabulary.pad is None


def test_kinds_of_tokens_that_converters_forget() -> None:
    tokens = [*BYTE_OF, "he", "<|end|>", "<|return|>", "<|call|>", "<|channel|>"]
    tokenizer = Tokenizer.from_gguf(
        byte_level(tokens=tokens, token_type=[NORMAL] * 261, eos_token_id=258, bos_token_id=258)
    )
    assert tokenizer.end_ids == {258, 259}  # <|end|> ends a part only
    assert tokenizer.decode([259]) == "" and tokenizer.decode([257, 260]) == "<|end|><|channel|>"


def test_the_longest_token_bounds_a_texts_length(small: Tokenizer) -> None:
    assert small.max_token_characters == len("<|im_start|>")
