"""What workers are said to have computed is counted once, in bounded memory."""

from __future__ import annotations

from kvasir_peer.experts import tallies
from kvasir_peer.experts.tallies import Tallies, decode_tallies, encode_tallies


def test_growth_counts_once_within_a_run_and_anew_in_the_next() -> None:
    book: Tallies[str] = Tallies()
    assert book.more("c", 1, {"a": 10, "b": 5, "none": 0}) == {"a": 10, "b": 5}
    assert book.more("c", 1, {"a": 14, "b": 5}) == {"a": 4}
    assert book.more("d", 1, {"a": 3}) == {"a": 3}, "another dispatcher counts for itself"
    assert book.more("c", 2, {"a": 6}) == {"a": 6}, "it was started again"
    assert book.more("c", 2, {}) == {}
    assert book.more("c", 2, {"a": 2}) == {"a": 2}, "it had forgotten the worker, and counts anew"
    assert book.more("c", 2, {"a": 1}) == {"a": 1}


def test_neither_new_runs_nor_new_names_fill_the_memory(monkeypatch) -> None:
    monkeypatch.setattr(tallies, "MAX_DISPATCHERS", 4)
    book: Tallies[str] = Tallies()
    for run in range(1000):
        book.more("c", run, {f"worker {run} {i}": 1 for i in range(10)})
    assert len(book) == 10
    for i in range(100):
        book.more(f"c{i}", 1, {"a": 1})
    assert len(book) == 4


def test_a_bridge_that_is_started_again_counts_nothing_twice() -> None:
    book: Tallies[tuple[str, str]] = Tallies()
    book.more("c", 7, {("w", "rows"): 10, ("w", "checked"): 2})
    again = decode_tallies(encode_tallies(book))
    assert again.more("c", 7, {("w", "rows"): 13, ("w", "checked"): 2}) == {("w", "rows"): 3}
    assert decode_tallies(None).more("c", 7, {("w", "rows"): 1}) == {("w", "rows"): 1}
    assert len(decode_tallies(b"\xc1 no msgpack")) == 0
