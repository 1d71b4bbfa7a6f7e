"""From logits to tokens, at the tail of a ring: deterministic by seed and position.

The order of operations on a row's logits is: logit bias; repetition penalty; presence and frequency penalties;
temperature; then, each on what the one before has kept and with probabilities that sum to 1 again, top-k,
typical, top-p, min-p; then one draw. Temperature comes before the cuts, as in OpenAI's API and in vLLM (llama.cpp
has it last by default).

Each row is treated by itself, with operations over the vocabulary, so its token does not depend on what else is
in the batch. The draw is a counter-based one: Philox keyed by the request's seed, at the row's position, so a
row that is computed again after a rewind, on whatever machine, draws the same number.

Log-probabilities are those of the model: of the logits before bias, penalties and temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvasir_peer.engines.base import F32, I32
from kvasir_peer.errors import EngineError
from kvasir_peer.wire.sampling import Sampling

F64 = NDArray[np.float64]

# Second half of Philox's key: keeps this use of a seed apart from any other.
_DOMAIN = 0x6B76617369722D31
# Candidates that are sorted at first for top-p; most nuclei are smaller, and the whole vocabulary is slow to sort.
_FIRST_CANDIDATES = 512


@dataclass(frozen=True)
class Sampled:
    """One token.

    Attributes:
        token: its id.
        logprob: log-probability of it, where it was asked for; else 0.
        top: the best tokens with their log-probabilities, best first, as many as were asked for.
    """

    token: int
    logprob: float = 0.0
    top: tuple[tuple[int, float], ...] = ()


def sample(
    logits: F32, params: Sequence[Sampling], positions: Sequence[int] | I32, histories: Sequence[I32]
) -> list[Sampled]:
    """Choose the next token of each row.

    Args:
        logits: float32 [m, vocabulary].
        params: of each row.
        positions: of each row; the chosen token will stand one after it.
        histories: int32, the tokens of each row's request up to and including the row's own.

    Raises:
        EngineError: numbers of rows that differ, or logits that are not numbers.
    """
    m = len(logits)
    if not m == len(params) == len(positions) == len(histories):
        raise EngineError(
            f"{m} rows of logits, {len(params)} parameters, {len(positions)} positions, "
            f"{len(histories)} histories"
        )
    if m == 0:
        return []
    broken = np.isnan(logits).any(-1) | ~np.isfinite(logits).any(-1)
    if broken.any():
        row = int(np.flatnonzero(broken)[0])
        raise EngineError(f"the logits at position {positions[row]} are not numbers: the model overflowed")
    best = logits.argmax(-1)
    return [
        _sample_row(logits[i], int(best[i]), params[i], int(positions[i]), histories[i]) for i in range(m)
    ]


def _sample_row(logits: F32, best: int, params: Sampling, position: int, history: I32) -> Sampled:
    if _is_plain(params):
        token = best
    else:
        adjusted = _adjust(logits.astype(np.float64), params, history)
        if params.temperature == 0.0:
            token = int(adjusted.argmax())
        else:
            token = _draw(adjusted / params.temperature, params, position)
    if not (params.logprobs or params.top_logprobs):
        return Sampled(token)
    logprobs = _log_softmax(logits.astype(np.float64))
    top = _best(logprobs, params.top_logprobs)
    return Sampled(token, float(logprobs[token]), tuple((int(i), float(logprobs[i])) for i in top))


def _is_plain(params: Sampling) -> bool:
    """Whether the best logit is the answer as it stands."""
    return (
        params.temperature == 0.0
        and params.repetition_penalty == 1.0
        and params.presence_penalty == 0.0
        and params.frequency_penalty == 0.0
        and not params.logit_bias
    )


def _adjust(logits: F64, params: Sampling, history: I32) -> F64:
    """Add bias and penalties, in place."""
    n = len(logits)
    for token, bias in params.logit_bias.items():
        if 0 <= token < n:
            logits[token] += bias
    if params.repetition_penalty != 1.0:
        seen = _unique(history, n)[0]
        values = logits[seen]
        logits[seen] = np.where(
            values > 0, values / params.repetition_penalty, values * params.repetition_penalty
        )
    if params.presence_penalty or params.frequency_penalty:
        generated, counts = _unique(history[params.prompt_length :], n)
        logits[generated] -= params.presence_penalty + params.frequency_penalty * counts
    return logits


def _unique(tokens: I32, n: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Distinct tokens that are in the vocabulary, and how often each occurs."""
    distinct, counts = np.unique(np.asarray(tokens, np.int64), return_counts=True)
    inside = (distinct >= 0) & (distinct < n)
    return distinct[inside], counts[inside].astype(np.int64)


def _log_softmax(logits: F64) -> F64:
    shifted = logits - logits.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))


def _best(values: F64, count: int) -> NDArray[np.int64]:
    """Indices of the largest values, best first; of equal ones the lower index first."""
    count = min(count, len(values))
    if count == 0:
        return np.empty(0, np.int64)
    if count < len(values):
        # All that are as good as the last one that fits, so that ties do not depend on the partition.
        edge = np.partition(values, len(values) - count)[len(values) - count]
        candidates = np.flatnonzero(values >= edge)
    else:
        candidates = np.arange(len(values))
    order = np.argsort(-values[candidates], kind="stable")[:count]
    return candidates[order]


def _draw(logits: F64, params: Sampling, position: int) -> int:
    # Ids of the tokens that are still in, ascending; their logits, by which they are ranked (probabilities of
    # near logits are equal numbers); and their probabilities up to a common factor.
    ids = np.arange(len(logits))
    weights = np.exp(logits - logits.max())
    if 0 < params.top_k < len(ids):
        kept = np.sort(_best(logits, params.top_k))
        ids, logits, weights = ids[kept], logits[kept], weights[kept]
    if params.typical_p < 1.0:
        kept = np.sort(_typical(weights, params.typical_p))
        ids, logits, weights = ids[kept], logits[kept], weights[kept]
    if params.top_p < 1.0:
        kept = np.sort(_nucleus(logits, weights, params.top_p))
        ids, weights = ids[kept], weights[kept]
    if params.min_p > 0.0:
        kept = np.flatnonzero(weights >= params.min_p * weights.max())
        ids, weights = ids[kept], weights[kept]
    sums = np.cumsum(weights)
    index = int(np.searchsorted(sums, uniform(params.seed, position) * sums[-1], side="right"))
    # Rounding can leave the draw past the end; tokens of no weight are never chosen.
    return int(ids[min(index, int(np.flatnonzero(weights)[-1]))])


def _nucleus(logits: F64, weights: F64, p: float) -> NDArray[np.int64]:
    """The fewest tokens, best first, whose probabilities sum to p or more; at least one."""
    total = weights.sum()
    count = _FIRST_CANDIDATES
    while True:
        order = _best(logits, count)
        sums = np.cumsum(weights[order])
        if sums[-1] >= p * total or count >= len(weights):
            return order[: int(np.searchsorted(sums, p * total)) + 1]
        count *= 8


def _typical(weights: F64, p: float) -> NDArray[np.int64]:
    """Tokens whose surprise is nearest to the expected one, until they sum to p (arXiv 2202.00666)."""
    probabilities = weights / weights.sum()
    with np.errstate(divide="ignore"):
        surprise = -np.log(probabilities)
    inside = np.flatnonzero(probabilities > 0)
    entropy = float((probabilities[inside] * surprise[inside]).sum())
    order = inside[np.argsort(np.abs(surprise[inside] - entropy), kind="stable")]
    sums = np.cumsum(probabilities[order])
    return order[: int(np.searchsorted(sums, p)) + 1]


def uniform(seed: int, position: int) -> float:
    """The draw of a position: uniform in [0, 1), the same on every machine.

    Args:
        seed: of the request, unsigned, 64 bits.
        position: of the row, not negative.
    """
    # Philox4x64-10 (Salmon et al., 2011); the position is the second word of the counter, for numpy counts the
    # first one up.
    bits = np.random.Philox(key=np.array([seed, _DOMAIN], np.uint64), counter=[0, position, 0, 0])
    return (int(bits.random_raw()) >> 11) * 2.0**-53
