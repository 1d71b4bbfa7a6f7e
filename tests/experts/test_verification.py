"""Liars fall, honest workers never do: statistics over seeded runs."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvasir_peer.experts.verification import (
    SOFT_CHECKS,
    Bounds,
    Exposure,
    Verifier,
    bounds_for,
    differences,
    inspect,
)

WIDTH = 64
RUNS = 100
BOUNDS = bounds_for("f16", "exact")


def honest(rng: np.random.Generator, rows: np.ndarray) -> np.ndarray:
    """What comes back over f16 from another engine."""
    noise = (
        rng.standard_normal(rows.shape).astype(np.float32)
        * 2e-6
        * np.linalg.norm(rows, axis=1, keepdims=True)
        / 8
    )
    return (rows + noise).astype(np.float16).astype(np.float32)


def noise(rng: np.random.Generator, rows: np.ndarray) -> np.ndarray:
    """One part in fifty of noise."""
    scale = np.linalg.norm(rows, axis=1, keepdims=True) / np.sqrt(rows.shape[1])
    return rows + (0.02 * scale * rng.standard_normal(rows.shape)).astype(np.float32)


def zeros(rng: np.random.Generator, rows: np.ndarray) -> np.ndarray:
    return np.zeros_like(rows)


def other_layer(rng: np.random.Generator, rows: np.ndarray) -> np.ndarray:
    """Another layer's weights: rows of the right kind and size, of something else."""
    return rng.standard_normal(rows.shape).astype(np.float32) * rows.std()


LIES = [noise, zeros, other_layer]


def caught_after(seed: int, lie, turns_at: int, limit: int) -> int | None:  # type: ignore[no-untyped-def]
    """Rows from the turn until the worker is caught; None if it was not within ``limit`` rows."""
    rng = np.random.default_rng(seed)
    verifier = Verifier("sampled", seed.to_bytes(8, "little"))
    row = 0
    frames = random.Random(seed)
    while row < turns_at + limit:
        count = frames.choice([1, 1, 2, 4, 8])
        for index in verifier.plan("w", count):
            truth = rng.standard_normal((1, WIDTH)).astype(np.float32)
            lying = row + index >= turns_at
            theirs = honest(rng, lie(rng, truth) if lying else truth)
            if verifier.checked("w", differences(theirs, truth, BOUNDS), BOUNDS).caught:
                assert lying, "an honest row was taken for a lie"
                return int(row + index - turns_at)
        row += count
    return None


@pytest.mark.parametrize("lie", LIES)
def test_one_that_lies_from_the_start_falls_in_its_first_frame(lie) -> None:  # type: ignore[no-untyped-def]
    for seed in range(RUNS):
        rng = np.random.default_rng(seed)
        verifier = Verifier("sampled", b"secret")
        truth = rng.standard_normal((5, WIDTH)).astype(np.float32)
        picked = verifier.plan("w", 5)
        assert list(picked) == [0, 1, 2, 3, 4]
        assert verifier.checked("w", differences(lie(rng, truth), truth, BOUNDS), BOUNDS).caught


@pytest.mark.parametrize("lie", LIES)
def test_one_that_turns_between_its_rows_100_and_900_falls_within_64(lie) -> None:  # type: ignore[no-untyped-def]
    falls = [caught_after(seed, lie, random.Random(seed).randrange(100, 900), 64) for seed in range(RUNS)]
    assert sum(f is not None and f < 64 for f in falls) >= 98


@pytest.mark.parametrize("lie", LIES)
def test_one_that_turns_later_falls_within_250(lie) -> None:  # type: ignore[no-untyped-def]
    falls = [caught_after(seed, lie, random.Random(seed).randrange(1000, 3000), 250) for seed in range(RUNS)]
    assert sum(f is not None and f < 250 for f in falls) >= 98


@pytest.mark.parametrize(
    ("wire", "precision", "noise_level"),
    [("f32", "exact", 1.3e-6), ("f16", "exact", 1.3e-6), ("bf16", "exact", 1.3e-6), ("f16", "fast", 1.2e-2)],
)
def test_an_honest_worker_never_falls(wire: str, precision: str, noise_level: float) -> None:
    bounds = bounds_for(wire, precision)
    rng = np.random.default_rng(7)
    verifier = Verifier("strict", b"secret")
    for _ in range(200):
        truth = rng.standard_normal((50, WIDTH)).astype(np.float32) * np.float32(10.0 ** rng.uniform(-7, 2))
        size = np.linalg.norm(truth, axis=1, keepdims=True) / np.sqrt(WIDTH)
        theirs = truth + (noise_level * size * rng.standard_normal(truth.shape)).astype(np.float32)
        if wire == "f16":
            theirs = theirs.astype(np.float16).astype(np.float32)
        elif wire == "bf16":
            bits = theirs.view(np.uint32)
            theirs = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
        verdict = verifier.checked("w", differences(theirs, truth, bounds), bounds)
        assert not verdict.caught, verdict
        assert verdict.worst < bounds.hard / 3
    assert verifier.record("w").checked == 10_000


def test_a_small_steady_lie_falls_by_its_mean() -> None:
    bounds = Bounds(hard=0.05, soft=0.01)
    verifier = Verifier("strict", b"s")
    for i in range(SOFT_CHECKS - 1):
        assert not verifier.checked("w", [0.02], bounds).caught, i
    assert "on average" in verifier.checked("w", [0.02], bounds).caught
    other = Verifier("strict", b"s")
    for i in range(100):  # the same, now and then, among honest ones
        assert not other.checked("w", [0.02 if i % 8 == 0 else 0.001], bounds).caught


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1.0])
def test_nan_and_large_differences_are_caught_at_once(value: float) -> None:
    assert Verifier("sampled", b"s").checked("w", [0.0, value], BOUNDS).caught


def test_one_row_in_sixteen_then_one_in_sixty_four() -> None:
    verifier = Verifier("sampled", b"secret")
    verifier.plan("w", 8)
    early = [len(verifier.plan("w", 1)) for _ in range(992)]
    assert sum(early) == 62
    verifier.plan("w", 64)
    late = sum(len(verifier.plan("w", 16)) for _ in range(400))
    assert 98 <= late <= 102


def test_a_worker_cannot_know_which_rows_are_checked() -> None:
    def picks(secret: bytes, peer: str = "w") -> list[int]:
        verifier = Verifier("sampled", secret)
        verifier.plan(peer, 1)
        return [i for i in range(640) if len(verifier.plan(peer, 1))]

    a, b = picks(b"one"), picks(b"two")
    assert a == picks(b"one") and a != b
    assert a != picks(b"one", "other")
    places = {(row - 1) % 16 for secret in range(20) for row in picks(bytes([secret + 1]))}
    assert len(places) == 16


def test_frames_of_any_size_are_sampled_alike() -> None:
    verifier = Verifier("sampled", b"secret")
    verifier.plan("w", 3)
    counts = [len(verifier.plan("w", 160)) for _ in range(5)]
    assert all(9 <= c <= 11 for c in counts)


def test_strict_checks_every_row() -> None:
    verifier = Verifier("strict", b"secret")
    for count in (3, 1, 200):
        assert list(verifier.plan("w", count)) == list(range(count))


def test_whoever_comes_back_begins_anew() -> None:
    verifier = Verifier("sampled", b"secret")
    verifier.plan("w", 4)
    assert len(verifier.plan("w", 4)) < 4
    verifier.forget("w")
    assert len(verifier.plan("w", 4)) == 4


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (np.zeros((3, 8), np.float32), "shape"),
        (np.zeros((4, 9), np.float16), "shape"),
        (np.full((4, 8), np.nan, np.float32), "not finite"),
        (np.full((4, 8), np.inf, np.float16), "not finite"),
        (np.full((4, 8), 1000.0, np.float32), "norm"),
    ],
)
def test_what_is_plainly_wrong_is_named(rows: np.ndarray, words: str) -> None:
    assert words in inspect(rows, 4, 8, largest=10.0)


def test_what_is_right_passes() -> None:
    assert inspect(np.ones((4, 8), np.float16), 4, 8, largest=3.0) == ""
    assert inspect(np.full((4, 8), 1e6, np.float32), 4, 8, largest=0.0) == "", "nothing is known yet"
    assert inspect(np.full((4, 8), 3e38, np.float32), 4, 8, largest=0.0) == "", (
        "a norm is not lost to overflow"
    )
    assert inspect(np.zeros((0, 8), np.float32), 0, 8, largest=1.0) == ""


def test_unknown_formats_have_no_bounds() -> None:
    with pytest.raises(KeyError):
        bounds_for("f8", "exact")
    assert bounds_for("f16", "fast").hard > bounds_for("bf16", "exact").hard > bounds_for("f16", "exact").hard


def test_a_caught_workers_requests_go_back_to_its_first_unchecked_row() -> None:
    exposure = Exposure()
    exposure.used("liar", [(1, 10), (2, 7)], checked=[0])
    exposure.used("liar", [(1, 11), (2, 8), (3, 4)])
    exposure.used("good", [(1, 3)])
    exposure.finished(3)
    assert exposure.caught("liar") == {1: 11, 2: 7}
    assert exposure.caught("liar") == {}
    assert exposure.caught("good") == {1: 3}


def test_what_was_computed_again_no_longer_counts() -> None:
    exposure = Exposure()
    exposure.used("a", [(1, 10)])
    exposure.used("b", [(1, 5)])
    exposure.rewound(1, 8)
    assert exposure.caught("a") == {}
    assert exposure.caught("b") == {1: 5}
