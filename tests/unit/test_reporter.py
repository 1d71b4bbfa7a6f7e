"""Lines of progress for people: often enough to watch on a terminal, seldom enough for a log."""

import io

import pytest

from kvasir_peer.commands import common
from kvasir_peer.progress import Progress


class Stream(io.StringIO):
    def __init__(self, terminal):
        super().__init__()
        self.terminal = terminal

    def isatty(self):
        return self.terminal


@pytest.fixture
def fetched(monkeypatch):
    """Lines printed, and records passed on, of a download of 12 s that is reported ten times a second."""

    def run(terminal):
        stream, now, others = Stream(terminal), [1000.0], []
        monkeypatch.setattr("sys.stderr", stream)
        monkeypatch.setattr(common.time, "monotonic", lambda: now[0])
        report = common.Reporter(json_lines=False, also=others.append)
        for done in range(121):
            report(Progress("fetch", "layers 0 to 9", done * 1_000_000, 120_000_000, "bytes"))
            now[0] += 0.1
        report(Progress("load", "layers 0 to 9"))
        return stream.getvalue().splitlines(), others

    return run


def test_a_log_gets_a_line_of_a_download_every_five_seconds_and_the_last(fetched):
    lines, others = fetched(terminal=False)
    *first, last, loading = lines
    assert 2 <= len(first) <= 3 and first[0] == "fetch: layers 0 to 9 (0.0 of 120.0 MB)"
    assert last == "fetch: layers 0 to 9 (120.0 of 120.0 MB)"
    assert loading == "load: layers 0 to 9"
    assert len(others) > 20, "what `kvasir-peer status` shows is as fresh as before"


def test_a_terminal_gets_two_a_second(fetched):
    lines, others = fetched(terminal=True)
    assert 20 <= len(lines) <= 27 and len(others) == len(lines)
