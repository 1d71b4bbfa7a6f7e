"""The tokens that a GGUF file lists: their texts, kinds and scores, and which of them have a meaning of their own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntFlag

from kvasir_peer.errors import ModelFileError

MAX_TOKENS = 1 << 21  # tokens; the largest vocabulary in use has 2^18
MAX_TOKEN_BYTES = 1 << 16  # bytes of one token's text; real ones stay under some hundred


class TokenKind(IntFlag):
    """What a token is, as flags: the file has one number of 0 to 6 a token, but some tokens are two things."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 4
    USER_DEFINED = 8
    UNUSED = 16
    BYTE = 32


_KINDS = (
    TokenKind.UNDEFINED,
    TokenKind.NORMAL,
    TokenKind.UNKNOWN,
    TokenKind.CONTROL,
    TokenKind.USER_DEFINED,
    TokenKind.UNUSED,
    TokenKind.BYTE,
)

# Texts that end a turn, or a generation, in the models that have them (llama.cpp, llama-vocab.cpp). Files often name
# one end token only, and chat models end a turn with another.
_END_OF_TURN = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "<｜end▁of▁sentence｜>",
    "<end_of_utterance>",
)
_END_OF_GENERATION = frozenset(
    (
        *_END_OF_TURN,
        "<|return|>",
        "<|call|>",
        "<|flush|>",
        "<|calls|>",
        "</s>",
        "<|eom_id|>",
        "[EOS]",
        "<eos>",
        "<turn|>",
        "<|tool_response>",
        "[e~[",
        # fill-in-the-middle models go on with another file after these
        "<|fim_pad|>",
        "<fim-pad>",
        "<fim_pad>",
        "<PAD>",
        "[PAD]",
        "<|fim_repo|>",
        "<|repo_name|>",
        "<fim-repo>",
        "<REPO>",
        "<reponame>",
        "<|file_sep|>",
    )
)
# Texts that are control tokens whatever the file says of their kind.
_CONTROL = frozenset(
    (
        "<|fim_prefix|>",
        "<fim-prefix>",
        "<fim_prefix>",
        "<｜fim▁begin｜>",
        "<PRE>",
        "▁<PRE>",
        "<|fim_suffix|>",
        "<fim-suffix>",
        "<fim_suffix>",
        "<｜fim▁hole｜>",
        "<SUF>",
        "▁<SUF>",
        "<|fim_middle|>",
        "<fim-middle>",
        "<fim_middle>",
        "<｜fim▁end｜>",
        "<MID>",
        "▁<MID>",
    )
)
_ENDS = frozenset(
    ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
)  # roles whose token ends a generation
_SHOWN = frozenset(
    ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")
)  # gpt-oss: part of the answer


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a model.

    Attributes:
        texts: text of each token id, as the file has it (byte-level BPE: in GPT-2's alphabet).
        kinds: kind of each token id.
        scores: score of each token id (SentencePiece), zeros where the file has none.
        ids: text to id.
        bos, eos, unk, pad: ids of the special tokens, None where there is none.
        end_ids: tokens that end a generation.
    """

    texts: tuple[str, ...]
    kinds: tuple[TokenKind, ...]
    scores: tuple[float, ...]
    ids: Mapping[str, int]
    bos: int | None
    eos: int | None
    unk: int | None
    pad: int | None
    end_ids: frozenset[int]

    def __len__(self) -> int:
        return len(self.texts)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object], defaults: Mapping[str, int]) -> Vocabulary:
        """Read the tokens from a file's metadata.

        Args:
            metadata: the GGUF keys and values.
            defaults: ids of ``bos``, ``eos`` and ``unk`` where the file is silent.

        Raises:
            ModelFileError: a list is missing, too short, too long, or of another type than it has to be.
        """
        texts = _texts(metadata)
        kinds = _kinds(metadata, len(texts))
        ids = {text: token for token, text in enumerate(texts)}
        if len(ids) != len(texts):
            twice = next(text for token, text in enumerate(texts) if ids[text] != token)
            raise ModelFileError(f"tokenizer.ggml.tokens holds {twice!r} twice; convert the model again")

        special = {
            role: _special(metadata, key, len(texts), defaults.get(role))
            for role, key in (
                ("bos", "bos_token_id"),
                ("eos", "eos_token_id"),
                ("unk", "unknown_token_id"),
                ("pad", "padding_token_id"),
                ("eot", "eot_token_id"),
                ("eom", "eom_token_id"),
                ("fim_pad", "fim_pad_token_id"),
                ("fim_rep", "fim_rep_token_id"),
                ("fim_sep", "fim_sep_token_id"),
            )
        }
        for text in _END_OF_GENERATION | _CONTROL:
            token = ids.get(text)
            # Some converters forget the kind; llama.cpp overrides it too.
            if token is not None and not kinds[token] & TokenKind.CONTROL:
                kinds[token] |= TokenKind.CONTROL
        end_ids = {ids[text] for text in _END_OF_GENERATION if text in ids}
        end_ids |= {token for role, token in special.items() if role in _ENDS and token is not None}
        for text in _SHOWN & ids.keys():
            kinds[ids[text]] = TokenKind.USER_DEFINED

        has = {texts[token] for token in end_ids}
        if "<|end|>" in has and (
            has >= {"<|return|>", "<|call|>"} or (has & {"<|call|>", "<|calls|>"} and "<|flush|>" in has)
        ):
            # gpt-oss and Solar end each part of an answer with <|end|>, and the answer with another token
            end_ids.discard(ids["<|end|>"])
            kinds[ids["<|end|>"]] = TokenKind.USER_DEFINED
        if "</s>" in has and "<|tool_response>" in has:
            end_ids.discard(ids["</s>"])  # Gemma 4: markup that the model may write
            kinds[ids["</s>"]] = TokenKind.NORMAL
        return cls(
            texts=texts,
            kinds=tuple(kinds),
            scores=_scores(metadata, len(texts)),
            ids=ids,
            bos=special["bos"],
            eos=special["eos"],
            unk=special["unk"],
            pad=special["pad"],
            end_ids=frozenset(end_ids),
        )


def _array(metadata: Mapping[str, object], key: str) -> Sequence[object] | None:
    value = metadata.get(key)
    if value is None:
        return None
    if isinstance(value, (str, bytes)) or not hasattr(value, "__len__") or not hasattr(value, "__iter__"):
        raise ModelFileError(f"{key} is no array; the file is damaged or made by another convention")
    if len(value) > MAX_TOKENS:
        raise ModelFileError(f"{key} has {len(value)} entries, more than {MAX_TOKENS}")
    tolist = getattr(value, "tolist", None)
    return tolist() if tolist is not None else list(value)


def _texts(metadata: Mapping[str, object]) -> tuple[str, ...]:
    values = _array(metadata, "tokenizer.ggml.tokens")
    if not values:
        raise ModelFileError("the file has no tokenizer.ggml.tokens; it holds no vocabulary")
    texts: list[str] = []
    for token, text in enumerate(values):
        if not isinstance(text, str):
            raise ModelFileError(f"tokenizer.ggml.tokens[{token}] is no string")
        if len(text) > MAX_TOKEN_BYTES:
            raise ModelFileError(f"tokenizer.ggml.tokens[{token}] has {len(text)} characters")
        texts.append(text or f"[EMPTY_{token}]")
    return tuple(texts)


def _kinds(metadata: Mapping[str, object], n_tokens: int) -> list[TokenKind]:
    values = _array(metadata, "tokenizer.ggml.token_type")
    if values is None:
        return [TokenKind.NORMAL] * n_tokens
    if len(values) < n_tokens:
        raise ModelFileError(f"tokenizer.ggml.token_type has {len(values)} entries for {n_tokens} tokens")
    return [
        _KINDS[value] if isinstance(value, int) and 0 <= value < len(_KINDS) else TokenKind.UNDEFINED
        for value in values[:n_tokens]
    ]


def _scores(metadata: Mapping[str, object], n_tokens: int) -> tuple[float, ...]:
    values = _array(metadata, "tokenizer.ggml.scores")
    if values is None:
        return (0.0,) * n_tokens
    if len(values) < n_tokens:
        raise ModelFileError(f"tokenizer.ggml.scores has {len(values)} entries for {n_tokens} tokens")
    try:
        scores = tuple(map(float, values[:n_tokens]))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise ModelFileError("tokenizer.ggml.scores holds what is no number") from None
    if any(map(math.isnan, scores)):
        raise ModelFileError("tokenizer.ggml.scores holds what is no number")
    return scores


def _special(metadata: Mapping[str, object], key: str, n_tokens: int, default: int | None) -> int | None:
    """Id of a special token; ids outside the vocabulary stand for "none" in the files of some converters."""
    value = metadata.get(f"tokenizer.ggml.{key}")
    if value is None:
        value = default
    try:
        token: int | None = None if value is None else int(value)  # type: ignore[call-overload]
    except (TypeError, ValueError):
        raise ModelFileError(f"tokenizer.ggml.{key} is no token id") from None
    if token is not None and 0 <= token < n_tokens:
        return token
    if default is not None and 0 <= default < n_tokens:
        return default
    return None
