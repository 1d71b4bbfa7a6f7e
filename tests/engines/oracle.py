"""What llama.cpp makes of a tiny model, in the form that tests compare with."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tiny_models
from llama_cpp import LlamaCpp

PROMPT_TOKENS = 40
GREEDY_TOKENS = 32
SMALLEST_GAP = 2e-3  # a hundred times what engines differ by


@dataclass(frozen=True, eq=False)
class Reference:
    """A tiny model and what llama.cpp makes of it.

    Attributes:
        path: the GGUF file.
        prompt: token ids.
        logits: float32 [prompt, vocabulary], after each token of the prompt.
        greedy: tokens that continue the prompt.
        gap: the smallest distance between the two best logits on the way.
    """

    path: Path
    prompt: list[int]
    logits: np.ndarray
    greedy: list[int]
    gap: float

    def distance(self, logits: np.ndarray) -> float:
        """The largest difference from llama.cpp's logits, in their standard deviations."""
        return float(np.abs(logits - self.logits).max() / self.logits.std())


def ask_llama_cpp(path: Path) -> Reference:
    """Ask for the first random prompt whose greedy continuation comes near no tie."""
    with LlamaCpp(path, tiny_models.CONTEXT) as model:
        for seed in range(1, 100):
            prompt = np.random.default_rng(seed).integers(0, tiny_models.VOCABULARY, PROMPT_TOKENS).tolist()
            logits = model.logits(prompt)
            greedy, gap = model.greedy(prompt, GREEDY_TOKENS)
            if gap > SMALLEST_GAP:
                return Reference(path, prompt, logits, greedy, gap)
    raise AssertionError(f"all prompts come near a tie in {path.name}")
