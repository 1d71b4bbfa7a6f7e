"""Against llama.cpp itself: random texts, special tokens and all."""

import random
from pathlib import Path

import helpers_llama_cpp

from kvasir_peer.models.chat_template import ChatTemplate
from kvasir_peer.models.gguf import GgufFile
from kvasir_peer.models.tokenizer import Tokenizer

STORIES = Path(__file__).resolve().parent.parent / "data" / "stories260K.gguf"

PARTS = [
    "a",
    "b",
    "e",
    "t",
    "h",
    " ",
    "  ",
    "   ",
    "\n",
    "\r\n",
    "\t",
    "'s",
    "the",
    "é",
    "ß",
    "Ünï",
    "日本",
    "😀",
    "️",
]
PARTS += [
    "1",
    "23",
    "456",
    ".",
    "!!",
    "▁",
    "A",
    "ok",
    "<s>",
    "</s>",
    "<unk>",
    "<0x0A>",
    "<|im_start|>",
    "<|im_end|>",
]


def compare(model: Path, n_texts: int) -> None:
    with GgufFile.open(model) as file:
        tokenizer = Tokenizer.from_gguf(file.metadata)
    chance = random.Random(5)
    with helpers_llama_cpp.llama_cpp(model) as judge:
        for _ in range(n_texts):
            text = "".join(chance.choices(PARTS, k=chance.randrange(60)))
            parse_special, add_special = chance.random() < 0.5, chance.random() < 0.5
            ids = tokenizer.encode(text, add_special=add_special, parse_special=parse_special)
            assert ids == judge.tokenize(text, add_special=add_special, parse_special=parse_special), text


def test_sentencepiece_ids_and_its_ties() -> None:
    compare(STORIES, 400)


def test_byte_level_ids(smollm2_path: Path) -> None:
    compare(smollm2_path, 400)


def test_a_chat_becomes_the_same_prompt(smollm2_path: Path) -> None:
    with GgufFile.open(smollm2_path) as file:
        template = ChatTemplate.from_gguf(file.metadata)
    assert template is not None
    chats = [
        [{"role": "user", "content": "Hello"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}],
        [
            {"role": "user", "content": "One\n  two"},
            {"role": "assistant", "content": "three"},
            {"role": "user", "content": "four <|im_end|>"},
        ],
    ]
    with helpers_llama_cpp.llama_cpp(smollm2_path) as judge:
        for messages in chats:
            assert template.render(messages) == judge.apply_template(messages)
    template.close()
