"""What tests of expert sharding share: the small model with experts, and orders for it."""

from __future__ import annotations

import json
from pathlib import Path

from kvasir_peer.engines.orders import ArenaShape, GgufWeights, LoadBank, LoadStage
from kvasir_peer.wire.experts import rows_bytes

DATA = Path(__file__).parent.parent / "data"
MODEL = DATA / "stories260K-moe8x2.gguf"
N_LAYER, N_EMBD, VOCAB, N_EXPERT, N_USED = 5, 64, 512, 8, 2
ROWS = 16
ALL_LAYERS = tuple(range(N_LAYER))


def buffer_bytes(rows: int = ROWS) -> int:
    """Bytes of an arena's buffer that holds routed rows as well as a boundary."""
    return rows_bytes(rows, N_USED, N_EMBD, "f32")


def stage_order(**changes: object) -> LoadStage:
    """Load the whole model, as a coordinator does."""
    values: dict[str, object] = {
        "job": 0,
        "weights": GgufWeights(str(MODEL)),
        "engine": "onnx",
        "stage": 0,
        "stages": 1,
        "first": 0,
        "end": N_LAYER,
        "n_layer": N_LAYER,
        "n_embd": N_EMBD,
        "vocab": VOCAB,
        "n_slots": 4,
        "context_length": 256,
        "max_rows": ROWS,
        "dtype": "f32",
        "top_logprobs": 2,
        "precision": "exact",
        "threads": 1,
        "device": "cpu",
        "arena": ArenaShape(8, buffer_bytes()),
    }
    return LoadStage(**{**values, **changes})  # type: ignore[arg-type]


def bank_order(ranges: tuple[tuple[int, int, int], ...], engine: str = "torch") -> LoadBank:
    """Load some experts, as a volunteer does."""
    return LoadBank(
        0,
        GgufWeights(str(MODEL)),
        engine,
        ranges,
        ROWS,
        "exact",
        1,
        "cpu",
        ArenaShape(4, buffer_bytes()),
    )


def cases(min_gap: float = 0.02) -> list[dict]:
    """Greedy continuations that two implementations agree on, far from a tie, with short prompts."""
    found = json.loads((DATA / "expected_greedy.json").read_text())
    return [
        case
        for case in found
        if case["model"] == MODEL.name
        and case["min_top2_logit_gap"] > min_gap
        and len(case["prompt_ids"]) < 16
    ]
