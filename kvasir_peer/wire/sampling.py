"""How the tail turns logits into a token: the parameters of one request.

They travel inside the membership of a batch, for each row that wants an output, so they are a wire message:
frozen, small, and checked (:func:`Sampling.check`) before any engine sees them.
"""

from __future__ import annotations

import math

import msgspec

from kvasir_peer.errors import WireError

MAX_LOGIT_BIAS = 300  # entries; what OpenAI's API accepts
MAX_TOP_LOGPROBS = 20  # what OpenAI's API accepts
MAX_TOKEN_ID = (1 << 32) - 1  # what the wire has room for


class Sampling(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """Sampling parameters of one request.

    Attributes:
        temperature: 0 is greedy; logits are divided by it.
        top_k: keep the k best tokens; 0 keeps all.
        top_p: nucleus sampling, in (0, 1]; 1 keeps all.
        min_p: drop tokens whose probability is under ``min_p`` times the best one's; 0 drops none.
        typical_p: locally typical sampling, in (0, 1]; 1 keeps all.
        repetition_penalty: divides (multiplies, when negative) the logits of tokens already seen; 1 is off.
        presence_penalty: subtracted once from each token that was generated before (OpenAI).
        frequency_penalty: subtracted for each time a token was generated before (OpenAI).
        logit_bias: token id to what is added to its logit.
        seed: with the position, the key of the counter-based generator; unsigned, 64 bits.
        logprobs: whether the log-probability of the chosen token is returned.
        top_logprobs: how many best tokens are returned with their log-probabilities.
        prompt_length: tokens of the prompt; what follows counts as generated for the penalties.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int = 0
    logprobs: bool = False
    top_logprobs: int = 0
    prompt_length: int = 0

    def check(self, *, top_logprobs: int = MAX_TOP_LOGPROBS) -> None:
        """Refuse values outside their range.

        Raises:
            WireError: code ``sampling``, naming the first parameter that is wrong.
        """
        ranges = (
            ("temperature", 0.0, 100.0),
            ("top_k", 0, 1 << 31),
            ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0),
            ("typical_p", 0.0, 1.0),
            ("repetition_penalty", 1e-3, 1e3),
            ("presence_penalty", -100.0, 100.0),
            ("frequency_penalty", -100.0, 100.0),
            ("seed", 0, (1 << 64) - 1),
            ("top_logprobs", 0, top_logprobs),
            ("prompt_length", 0, 1 << 31),
        )
        for name, low, high in ranges:
            value = getattr(self, name)
            if not low <= value <= high:  # also false for NaN
                raise WireError("sampling", f"{name} is {value}, outside {low} to {high}")
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise WireError(
                "sampling", f"logit_bias has {len(self.logit_bias)} entries, at most {MAX_LOGIT_BIAS}"
            )
        if self.logit_bias and not 0 <= min(self.logit_bias) <= max(self.logit_bias) <= MAX_TOKEN_ID:
            raise WireError("sampling", "logit_bias names a token that no vocabulary has")
        if not all(math.isfinite(v) for v in self.logit_bias.values()):
            raise WireError("sampling", "logit_bias has a value that is not finite")


GREEDY = Sampling(temperature=0.0)
