"""How byte-level BPE cuts a text into words before it merges: the table behind ``tokenizer.ggml.pre``.

A GGUF file names its pre-tokenizer, it does not hold it. Each name stands for a list of regular expressions that
are applied one after the other: every expression splits what the one before left, its matches and the gaps between
them both become words. The expressions are those of the models' own ``tokenizer.json`` files as llama.cpp's
``llama-vocab.cpp`` lists them. Where llama.cpp replaces an expression by a coarser one because ``std::regex`` cannot
say it (Tekken, GPT-4o), the model's own expression stands here: it is what the model was trained with.

They are written for Oniguruma, the engine of the ``tokenizers`` library.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvasir_peer.errors import ModelFileError

_CONTRACTION = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_LLAMA3 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _TAIL
_QWEN2 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _TAIL
_ASCII_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_CASED_WORDS = _CASED % ("", "")
_CASED_WORDS_CONTRACTED = _CASED % (_CONTRACTION + "?", _CONTRACTION + "?")
_GPT4O = _CASED_WORDS_CONTRACTED + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _TAIL
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    _ASCII_PUNCTUATION + r"[A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|" + _TAIL,
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
# The letters of cased scripts, as deepseek-llm lists them.
_DEEPSEEK_LETTERS = (
    r"A-Za-z\x{B5}\x{C0}-\x{D6}\x{D8}-\x{F6}\x{F8}-\x{1BA}\x{1BC}-\x{1BF}\x{1C4}-\x{293}\x{295}-\x{2AF}"
    r"\x{370}-\x{373}\x{376}\x{377}\x{37B}-\x{37D}\x{37F}\x{386}\x{388}-\x{38A}\x{38C}\x{38E}-\x{3A1}"
    r"\x{3A3}-\x{3F5}\x{3F7}-\x{481}\x{48A}-\x{52F}\x{531}-\x{556}\x{10A0}-\x{10C5}\x{13A0}-\x{13F5}"
    r"\x{13F8}-\x{13FD}\x{1C90}-\x{1CBA}\x{1CBD}-\x{1CBF}\x{1D00}-\x{1D2B}\x{1D6B}-\x{1D77}"
    r"\x{1D79}-\x{1D9A}\x{1E00}-\x{1F15}\x{1F18}-\x{1F1D}\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}"
    r"\x{1F50}-\x{1F57}\x{1F59}\x{1F5B}\x{1F5D}\x{1F5F}-\x{1F7D}\x{1F80}-\x{1FB4}\x{1FB6}-\x{1FBC}"
    r"\x{1FBE}\x{1FC2}-\x{1FC4}\x{1FC6}-\x{1FCC}\x{1FD0}-\x{1FD3}\x{1FD6}-\x{1FDB}\x{1FE0}-\x{1FEC}"
    r"\x{1FF2}-\x{1FF4}\x{1FF6}-\x{1FFC}\x{2102}\x{2107}\x{210A}-\x{2113}\x{2115}\x{2119}-\x{211D}"
    r"\x{2124}\x{2126}\x{2128}\x{212A}-\x{212D}\x{212F}-\x{2134}\x{2139}\x{213C}-\x{213F}"
    r"\x{2145}-\x{2149}\x{214E}\x{2183}\x{2184}\x{2C00}-\x{2C7B}\x{2C7E}-\x{2CE4}\x{2CEB}-\x{2CEE}"
    r"\x{2CF2}\x{2CF3}\x{A640}-\x{A66D}\x{A680}-\x{A69B}\x{A722}-\x{A76F}\x{A771}-\x{A787}"
    r"\x{A78B}-\x{A78E}\x{AB70}-\x{ABBF}\x{FB00}-\x{FB06}\x{FB13}-\x{FB17}\x{FF21}-\x{FF3A}"
    r"\x{FF41}-\x{FF5A}\x{10400}-\x{1044F}\x{104B0}-\x{104D3}\x{104D8}-\x{104FB}\x{10C80}-\x{10CB2}"
    r"\x{10CC0}-\x{10CF2}\x{118A0}-\x{118DF}\x{1E900}-\x{1E943}"
)


@dataclass(frozen=True)
class PreTokenizer:
    """What a name in ``tokenizer.ggml.pre`` means.

    Attributes:
        splits: regular expressions, applied in order.
        ignore_merges: a word that is a token as it stands is not merged up from its bytes.
        add_bos: the beginning-of-sequence token is added where the file does not say.
        raw_text: words are merged as UTF-8 with ``▁`` for spaces and ``<0xXX>`` for unknown bytes, as
            SentencePiece has it, and not as GPT-2's byte alphabet.
    """

    splits: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    raw_text: bool = False


DEFAULT = PreTokenizer(
    (
        r"[\p{P}\$\+<=>\^~\|]+",
        _GPT2,
        r"\p{N}+",
        r"[0-9][0-9][0-9]",
    )
)

_BY_NAMES: dict[tuple[str, ...], PreTokenizer] = {
    ("default",): DEFAULT,
    ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"): PreTokenizer(
        (_LLAMA3,), ignore_merges=True, add_bos=True
    ),
    ("dbrx", "smaug-bpe", "chatglm-bpe"): PreTokenizer((_LLAMA3,)),
    ("glm4", "glm5"): PreTokenizer((_LLAMA3,), ignore_merges=True),
    ("jais-2",): PreTokenizer(
        (
            _CONTRACTION
            + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
            + "".join(rf"\s{{{n}}}(?!\S)|" for n in (512, 256, 128, 64, 32, 16, 8, 4))
            + r"\s{1,2}(?!\S)|\s{1}",
        )
    ),
    ("deepseek-llm",): PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?[{_DEEPSEEK_LETTERS}]+",
            r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
            r"(?<!\s)\s+$",  # the look-behind keeps a long run of spaces from costing its square
            r"[一-龥ࠀ-一가-퟿]+",
            r"\p{N}+",
        )
    ),
    ("deepseek-coder",): PreTokenizer(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}"),
    ),
    ("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"): PreTokenizer(_DEEPSEEK3),
    ("youtu",): PreTokenizer(
        (
            r"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
            _CASED_WORDS_CONTRACTED + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _TAIL,
        ),
        ignore_merges=True,
    ),
    ("falcon",): PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    (
        "starcoder",
        "refact",
        "command-r",
        "smollm",
        "codeshell",
        "exaone",
        "minerva-7b",
        "mellum2",
    ): PreTokenizer((r"\p{N}", _GPT2)),
    (
        "gpt-2",
        "phi-2",
        "mpt",
        "olmo",
        "jais",
        "trillion",
        "granite-docling",
        "exaone4",
        "gigachat",
        "a.x-4.0",
        "mellum",
        "modern-bert",
        "jina-es",
        "jina-de",
        "jina-v2-es",
        "jina-v2-de",
    ): PreTokenizer((_GPT2,)),
    (
        "qwen2",
        "deepseek-r1-qwen",
        "stablelm2",
        "hunyuan",
        "solar-open",
        "megrez",
        "kormo",
        "grok-2",
    ): PreTokenizer((_QWEN2,)),
    ("qwen35",): PreTokenizer(
        (_CONTRACTION + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _TAIL,)
    ),
    ("poro-chat", "bloom", "gpt3-finnish"): PreTokenizer((_BLOOM,)),
    ("viking",): PreTokenizer((_BLOOM, r"\p{N}")),
    ("tekken",): PreTokenizer(
        (_CASED_WORDS + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _TAIL,), ignore_merges=True, add_bos=True
    ),
    ("gpt-4o", "llama4", "kanana2", "minimax-m2", "talkie"): PreTokenizer((_GPT4O,)),
    ("tiny_aya", "cohere2moe"): PreTokenizer((r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O)),
    ("bailingmoe", "bailingmoe2", "llada-moe"): PreTokenizer(
        (
            r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
            r"|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    ("seed-coder",): PreTokenizer(
        (_CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|" + _TAIL,)
    ),
    ("exaone-moe",): PreTokenizer(
        (
            _CONTRACTION
            + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?"
            + r"|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    ("ufakzeka",): PreTokenizer(
        (r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _TAIL,),
    ),
    ("laguna",): PreTokenizer((r"[^\n]+|[\n]+", _QWEN2)),
    ("minicpm5",): PreTokenizer(
        (
            r"\p{N}{1,3}",
            _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _TAIL,
        ),
        ignore_merges=True,
    ),
    # Merging runs over the whole line: only runs of newlines are cut out.
    ("gemma4",): PreTokenizer((r"[^\n]+|[\n]+",), add_bos=True, raw_text=True),
}

PRE_TOKENIZERS: dict[str, PreTokenizer] = {name: pre for names, pre in _BY_NAMES.items() for name in names}


def pre_tokenizer(name: str) -> PreTokenizer:
    """The pre-tokenizer of a name.

    Raises:
        ModelFileError: the name is not in the table; a guess would cut words otherwise than in training.
    """
    try:
        return PRE_TOKENIZERS[name]
    except KeyError:
        raise ModelFileError(
            f"the pre-tokenizer {name!r} (tokenizer.ggml.pre) is unknown to this version; "
            f"use a model of another family or a newer kvasir-peer"
        ) from None
