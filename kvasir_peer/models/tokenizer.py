"""Text to token ids and back, as the model's own GGUF file says.

Three kinds of vocabulary are known (``tokenizer.ggml.model``): byte-level BPE (``gpt2``, merged by the ``tokenizers``
library after the splits of :mod:`.pretokenizers`), SentencePiece's scored BPE with byte fallback (``llama``,
:mod:`.spm`), and BPE over raw text (``gemma4``). Others are refused by name. Ids equal llama.cpp's.
"""

from __future__ import annotations

import codecs
import logging
import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from kvasir_peer.errors import ModelFileError, UsageError
from kvasir_peer.models.pretokenizers import DEFAULT, PreTokenizer, pre_tokenizer
from kvasir_peer.models.spm import SPACE, SentencePieceBpe
from kvasir_peer.models.vocabulary import TokenKind, Vocabulary

if TYPE_CHECKING:
    import tokenizers

log = logging.getLogger(__name__)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: a printable character for each byte, so that any bytes can be written as text."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    rest = (byte for byte in range(256) if chr(byte) not in alphabet)
    alphabet |= {chr(0x100 + n): byte for n, byte in enumerate(rest)}
    return alphabet


BYTE_OF = _byte_alphabet()
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class _Model(Protocol):
    """A fragment of text (no special tokens inside) to ids, and a token's text to its bytes."""

    def encode(self, text: str, at_start: bool) -> list[int]: ...

    def to_bytes(self, text: str) -> bytes: ...


class Tokenizer:
    """The tokenizer of one model. Immutable, safe for use from several threads.

    Attributes:
        vocabulary: the tokens.
        add_bos: whether a prompt begins with the beginning-of-sequence token.
        add_eos: whether a prompt ends with the end-of-sequence token.
    """

    def __init__(
        self, vocabulary: Vocabulary, model: _Model, *, add_bos: bool, add_eos: bool, strip: _Strip
    ) -> None:
        self.vocabulary = vocabulary
        self.add_bos = add_bos and vocabulary.bos is not None
        self.add_eos = add_eos and vocabulary.eos is not None
        self._model = model
        self._strip = strip
        hidden = TokenKind.CONTROL | TokenKind.UNKNOWN
        special = [t for t, kind in enumerate(vocabulary.kinds) if kind & (hidden | TokenKind.USER_DEFINED)]
        special.sort(key=lambda token: -len(vocabulary.texts[token].encode("utf-8", "surrogateescape")))
        self._specials = tuple(
            (vocabulary.texts[token], token, bool(vocabulary.kinds[token] & hidden)) for token in special
        )

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object]) -> Tokenizer:
        """Build the tokenizer that a GGUF file describes.

        Raises:
            ModelFileError: the file has no vocabulary, one of a kind that is not known, or a damaged one.
        """
        kind = metadata.get("tokenizer.ggml.model")
        if kind == "gpt2":
            pre = _pre_tokenizer(metadata)
            vocabulary = Vocabulary.from_gguf(metadata, {"bos": 11, "eos": 11})
            model: _Model = (
                _RawBpe(metadata, vocabulary) if pre.raw_text else _ByteLevelBpe(metadata, vocabulary, pre)
            )
            add_bos = pre.add_bos
        elif kind == "gemma4":
            vocabulary = Vocabulary.from_gguf(metadata, {})
            model = _RawBpe(metadata, vocabulary)
            add_bos = True
        elif kind == "llama":
            vocabulary = Vocabulary.from_gguf(metadata, {"bos": 1, "eos": 2, "unk": 0})
            model = _SentencePiece(vocabulary, prefix=_flag(metadata, "add_space_prefix", True))
            add_bos = True
        elif kind is None:
            raise ModelFileError(
                "the file names no tokenizer (tokenizer.ggml.model); use one that holds a vocabulary"
            )
        else:
            raise ModelFileError(
                f"tokenizers of the kind {kind!r} (tokenizer.ggml.model) are not supported; "
                f"use a model with 'gpt2', 'llama' or 'gemma4'"
            )
        if kind != "gemma4":  # its files say the contrary of what the model was trained with
            add_bos = _flag(metadata, "add_bos_token", add_bos)
        return cls(
            vocabulary,
            model,
            add_bos=add_bos,
            add_eos=_flag(metadata, "add_eos_token", False),
            strip=_Strip.of(metadata, vocabulary),
        )

    def __len__(self) -> int:
        """How many tokens there are."""
        return len(self.vocabulary)

    @property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end a generation: end of sequence, end of turn and the like."""
        return self.vocabulary.end_ids

    @property
    def bos_id(self) -> int | None:
        return self.vocabulary.bos

    @property
    def eos_id(self) -> int | None:
        return self.vocabulary.eos

    @cached_property
    def max_token_characters(self) -> int:
        """Characters of text that one token can stand for at most; a text of n has at least n / this tokens."""
        return max(map(len, self.vocabulary.texts))

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of a text.

        Args:
            text: any text.
            add_special: add what the model wants around a prompt (beginning, end of sequence).
            parse_special: take texts like ``<|im_end|>`` for the control tokens that they name. Right for what a chat
                template wrote, wrong for what a stranger wrote. User-defined tokens are always taken.

        Raises:
            UsageError: the text has half a surrogate pair, which is no character.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"the text is not valid Unicode at character {error.start}") from None
        ids: list[int] = []
        if add_special and self.add_bos and self.vocabulary.bos is not None:
            ids.append(self.vocabulary.bos)
        at_start = True  # of the text, or right after a special token
        for fragment in self._fragments(text, parse_special):
            if isinstance(fragment, int):
                ids.append(fragment)
                at_start = True
            else:
                ids += self._model.encode(fragment, at_start)
                at_start = False
        if add_special and self.add_eos and self.vocabulary.eos is not None:
            ids.append(self.vocabulary.eos)
        return ids

    def token_bytes(self, token: int, *, special: bool = False) -> bytes:
        """Bytes that a token stands for; a control token stands for none unless ``special``.

        Raises:
            UsageError: there is no such token.
        """
        if not 0 <= token < len(self):
            raise UsageError(f"there is no token {token}; the vocabulary has {len(self)}")
        kind, text = self.vocabulary.kinds[token], self.vocabulary.texts[token]
        if kind & (TokenKind.CONTROL | TokenKind.UNKNOWN):
            return text.encode("utf-8", "surrogateescape") if special else b""
        if kind & TokenKind.USER_DEFINED:
            return text.encode("utf-8", "surrogateescape")
        if kind & TokenKind.BYTE:
            match = _BYTE_TOKEN.fullmatch(text)
            return bytes((int(match[1], 16),)) if match else text.encode("utf-8", "surrogateescape")
        if kind & TokenKind.NORMAL:
            return self._model.to_bytes(text)
        return b""  # unused

    def decode(self, tokens: Iterable[int], *, special: bool = False) -> str:
        """The text of tokens, just as their bytes say; what is no UTF-8 becomes U+FFFD."""
        return b"".join(self.token_bytes(token, special=special) for token in tokens).decode(
            "utf-8", "replace"
        )

    def decoder(self, *, special: bool = False) -> IncrementalDecoder:
        """A decoder for tokens that come one by one."""
        return IncrementalDecoder(self, special=special)

    def _fragments(self, text: str, parse_special: bool) -> list[str | int]:
        """Cut out special tokens: the longest ones first, wherever they stand, then shorter ones in what is left."""
        fragments: list[str | int] = [text] if text else []
        characters = set(text)
        for special, token, hidden in self._specials:
            if (hidden and not parse_special) or special[0] not in characters or special not in text:
                continue
            cut: list[str | int] = []
            for fragment in fragments:
                if isinstance(fragment, int):
                    cut.append(fragment)
                    continue
                pieces = fragment.split(special)
                for n, piece in enumerate(pieces):
                    if n > 0:
                        cut.append(token)
                        if token in self._strip.after:
                            piece = piece.lstrip(_C_SPACES)
                    if n < len(pieces) - 1 and token in self._strip.before:
                        piece = piece.rstrip(_C_SPACES)
                    if piece:
                        cut.append(piece)
            fragments = cut
        return fragments


class IncrementalDecoder:
    """Text of tokens that come one by one: a character that is spread over tokens comes out when it is whole."""

    def __init__(self, tokenizer: Tokenizer, *, special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Text that the token completes; may be empty."""
        return self._utf8.decode(self._tokenizer.token_bytes(token, special=self._special))

    @property
    def incomplete(self) -> bool:
        """Whether the tokens so far end within a character."""
        return bool(self._utf8.getstate()[0])

    def finish(self) -> str:
        """What is left when no more tokens come: U+FFFD for a character that never became whole."""
        return self._utf8.decode(b"", final=True)


_C_SPACES = " \t\n\v\f\r"  # what C's isspace() takes


class _Strip:
    """Special tokens that swallow the white space beside them.

    No GGUF key says it; like llama.cpp we know the families that were trained so by their names.
    """

    def __init__(self, before: frozenset[int] = frozenset(), after: frozenset[int] = frozenset()) -> None:
        self.before = before
        self.after = after

    @classmethod
    def of(cls, metadata: Mapping[str, object], vocabulary: Vocabulary) -> _Strip:
        name = str(metadata.get("general.name", "")).lower()
        if "phi-3" in name or "phi3" in name:
            kinds = TokenKind.CONTROL | TokenKind.USER_DEFINED | TokenKind.UNKNOWN
            kept = {vocabulary.ids.get(text) for text in ("<unk>", "<s>", "<|endoftext|>")}
            after = {
                token for token, kind in enumerate(vocabulary.kinds) if kind & kinds and token not in kept
            }
            return cls(after=frozenset(after))
        return cls()


class _ByteLevelBpe:
    """GPT-2's way: bytes written in a printable alphabet, cut into words, merged by ranked pairs."""

    def __init__(self, metadata: Mapping[str, object], vocabulary: Vocabulary, pre: PreTokenizer) -> None:
        from tokenizers import Regex, pre_tokenizers

        self._bpe = _bpe(metadata, vocabulary, ignore_merges=pre.ignore_merges, byte_fallback=False)
        splits = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in pre.splits]
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        self._bpe.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
        # The batch call lets other threads run; the fast one keeps no offsets (tokenizers 0.20).
        self._encode = getattr(self._bpe, "encode_batch_fast", self._bpe.encode_batch)

    def encode(self, text: str, at_start: bool) -> list[int]:
        ids: list[int] = self._encode([text], add_special_tokens=False)[0].ids
        return ids

    def to_bytes(self, text: str) -> bytes:
        parts = (
            bytes((BYTE_OF[character],))
            if character in BYTE_OF
            else character.encode("utf-8", "surrogateescape")
            for character in text
        )
        return b"".join(parts)


class _RawBpe:
    """Merges of ranked pairs over whole lines of raw text, ``▁`` for spaces, ``<0xXX>`` for bytes (Gemma 4)."""

    def __init__(self, metadata: Mapping[str, object], vocabulary: Vocabulary) -> None:
        self._ids = vocabulary.ids
        self._bpe = _bpe(metadata, vocabulary, ignore_merges=False, byte_fallback=True)
        self._encode = getattr(self._bpe, "encode_batch_fast", self._bpe.encode_batch)

    def encode(self, text: str, at_start: bool) -> list[int]:
        ids: list[int] = []
        for line in re.findall(r"[^\n]+|\n+", text.replace(" ", SPACE)):
            newlines = self._ids.get(line) if line[0] == "\n" else None
            ids += self._encode([line], add_special_tokens=False)[0].ids if newlines is None else [newlines]
        return ids

    def to_bytes(self, text: str) -> bytes:
        return text.replace(SPACE, " ").encode("utf-8", "surrogateescape")


class _SentencePiece:
    """SentencePiece's BPE by scores; characters that are no tokens become byte tokens."""

    def __init__(self, vocabulary: Vocabulary, *, prefix: bool) -> None:
        self._prefix = prefix
        self._ids = vocabulary.ids
        self._bpe = SentencePieceBpe(vocabulary.ids, vocabulary.scores)
        self._bytes = tuple(
            vocabulary.ids.get(
                f"<0x{byte:02X}>", vocabulary.ids.get(chr(byte) if byte < 0x80 else "", vocabulary.unk)
            )
            for byte in range(256)
        )

    def encode(self, text: str, at_start: bool) -> list[int]:
        if self._prefix and at_start:
            text = " " + text
        ids: list[int] = []
        for piece in self._bpe.pieces(text.replace(" ", SPACE)):
            token = self._ids.get(piece)
            if token is not None:
                ids.append(token)
            else:
                ids += [token for byte in piece.encode() if (token := self._bytes[byte]) is not None]
        return ids

    def to_bytes(self, text: str) -> bytes:
        return text.replace(SPACE, " ").encode("utf-8", "surrogateescape")


def _bpe(
    metadata: Mapping[str, object], vocabulary: Vocabulary, *, ignore_merges: bool, byte_fallback: bool
) -> tokenizers.Tokenizer:
    import tokenizers

    merges = metadata.get("tokenizer.ggml.merges")
    if merges is None or isinstance(merges, (str, bytes)) or not isinstance(merges, Iterable):
        raise ModelFileError("the file has no tokenizer.ggml.merges, which a BPE tokenizer needs")
    pairs: dict[tuple[str, str], None] = {}  # the first of equal ones counts
    for merge in merges:
        # the left part has at least one character, which may itself be a space
        at = merge.find(" ", 1) if isinstance(merge, str) else -1
        if at < 0:
            raise ModelFileError(f"tokenizer.ggml.merges holds {merge!r}, which is no pair")
        pairs[merge[:at], merge[at + 1 :]] = None
    try:
        model = tokenizers.models.BPE(
            vocab=dict(vocabulary.ids),
            merges=list(pairs),
            ignore_merges=ignore_merges,
            byte_fallback=byte_fallback,
            fuse_unk=False,
        )
    except Exception as error:  # noqa: BLE001  the library raises bare Exception
        raise ModelFileError(f"tokenizer.ggml.merges does not fit the vocabulary: {error}") from None
    return tokenizers.Tokenizer(model)


def _pre_tokenizer(metadata: Mapping[str, object]) -> PreTokenizer:
    name = metadata.get("tokenizer.ggml.pre")
    if name is None or name == "":
        log.warning(
            "the file names no pre-tokenizer (tokenizer.ggml.pre); answers may be worse than they should be"
        )
        return DEFAULT
    if not isinstance(name, str):
        raise ModelFileError("tokenizer.ggml.pre is no string")
    return pre_tokenizer(name)


def _flag(metadata: Mapping[str, object], key: str, default: bool) -> bool:
    value = metadata.get(f"tokenizer.ggml.{key}", default)
    if not isinstance(value, (bool, int)):
        raise ModelFileError(f"tokenizer.ggml.{key} is no truth value")
    return bool(value)
