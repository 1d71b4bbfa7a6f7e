"""What workers are said to have computed is counted once, in bounded memory."""

from __future__ import annotations

from kvasir_peer.experts import tallies
from kvasir_peer.experts.tallies import Tallies


def test_growth_counts_once_within_a_run_and_anew_in_the_next() -> None:
    book = Tallies()
    assert book.more("c", 1, [("a", 10, 2), ("b", 5, 0)]) == [("a", 10, 2), ("b", 5, 0)]
    assert book.more("c", 1, [("a", 14, 2), ("b", 5, 0)]) == [("a", 4, 0)]
    assert book.more("d", 1, [("a", 3, 3)]) == [("a", 3, 3)], "another coordinator counts for itself"
    assert book.more("c", 2, [("a", 6, 1)]) == [("a", 6, 1)], "it was started again"
    assert book.more("c", 2, []) == []
    assert book.more("c", 2, [("a", 2, 0)]) == [("a", 2, 0)], "it had forgotten the worker, and counts anew"


def test_neither_new_runs_nor_new_names_fill_the_memory(monkeypatch) -> None:
    monkeypatch.setattr(tallies, "MAX_COORDINATORS", 4)
    book = Tallies()
    for run in range(1000):
        book.more("c", run, [(f"worker {run} {i}", 1, 0) for i in range(10)])
    assert len(book) == 10
    for i in range(100):
        book.more(f"c{i}", 1, [("a", 1, 0)])
    assert len(book) == 4
