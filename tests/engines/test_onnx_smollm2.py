"""The onnxruntime engine on a real quantised model, beside llama.cpp."""

import numpy as np
import pytest
from driving import prefill
from kinds import ONNX, stages
from llama_cpp import LlamaCpp
from smollm2 import TEXT_TOKENS, RealText

from kvasir_peer.engines.base import Precision
from kvasir_peer.models.gguf import GgufFile
from kvasir_peer.models.tokenizer import Tokenizer

PROMPTS = (
    "The capital of France is",
    "<|im_start|>user\nWhat is the boiling point of water?<|im_end|>\n<|im_start|>assistant\n",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n",
    "1 2 3 4 5 6",
)


@pytest.mark.parametrize(
    ("which", "precision"), [("real_text", "fast"), ("real_text", "exact"), ("real_text_k", "fast")]
)
def test_a_text_is_predicted_as_by_llama_cpp(
    which: str, precision: Precision, products: str, request: pytest.FixtureRequest
) -> None:
    """Both round activations to 8 bits, each in its own way, so logits are compared statistically."""
    text: RealText = request.getfixturevalue(which)
    with stages(
        ONNX,
        text.path,
        [0, 11, -1],
        n_slots=1,
        context_length=TEXT_TOKENS,
        max_rows=TEXT_TOKENS,
        precision=precision,
        threads=0,
    ) as stacks:
        logits = prefill(stacks, text.tokens)
    same, difference = text.compare(logits)
    assert same >= 0.95
    assert difference <= 0.05


def test_the_first_token_of_five_prompts_is_llama_cpps(real_text: RealText) -> None:
    with GgufFile.open(real_text.path) as file:
        tokenizer = Tokenizer.from_gguf(file.metadata)
    expected, got = [], []
    with (
        LlamaCpp(real_text.path, 64) as llama,
        stages(ONNX, real_text.path, [0, 15, -1], n_slots=1, context_length=64, precision="fast") as stacks,
    ):
        for prompt in PROMPTS:
            tokens = tokenizer.encode(prompt, add_special=False, parse_special=True)
            expected.append(llama.logits(tokens))
            got.append(prefill(stacks, tokens, chunk=8))
            assert got[-1][-1].argmax() == expected[-1][-1].argmax(), prompt
    # Over all positions of the prompts: the noise of single rows is uneven, in llama.cpp too.
    theirs, ours = np.concatenate(expected), np.concatenate(got)
    assert ((ours - theirs) ** 2).mean() ** 0.5 <= 0.06 * theirs.std()
