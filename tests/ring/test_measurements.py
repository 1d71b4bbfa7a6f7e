"""What was measured is there again after a restart, within bounds, and whatever the file has become."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import trio

from kvasir_peer.errors import WireError
from kvasir_peer.ring.measurements import (
    KEPT_SECONDS,
    MAX_FILE_BYTES,
    MAX_PASSES,
    MAX_WAYS,
    Measurements,
    MeasurementsFile,
)
from kvasir_peer.ring.offers import LinkTime
from kvasir_peer.ring.volunteering import Measured, Offer

MODEL = "m" * 64
PASSES = Measured(MODEL, 0, 12, 0.012, 0.004)


def offer(measured: Measured | None = None, **more: object) -> Offer:
    values: dict[str, object] = {"memory": 1 << 30, "disk": 1 << 30, "engine": "onnx", "threads": 2, **more}
    return Offer(measured=measured, **values)  # type: ignore[arg-type]


async def test_a_bridge_that_starts_again_knows_passes_and_ways(tmp_path: Path) -> None:
    now = 1000.0
    file = await MeasurementsFile.open(tmp_path / "home" / "measured.json", lambda: now)
    assert file.content.completed("a", offer(), MODEL, now).measured is None
    file.content.completed("a", offer(PASSES), MODEL, now)
    file.content.way("b", "a", LinkTime(0.02, 1e6), now)
    await file.keep()
    again = (await MeasurementsFile.open(tmp_path / "home" / "measured.json", lambda: now)).content
    assert again.ways() == {("a", "b"): LinkTime(0.02, 1e6)}
    assert again.completed("a", offer(), MODEL, now).measured == PASSES
    for other in (offer(engine="torch"), offer(threads=4), offer(device="cuda")):
        assert again.completed("a", other, MODEL, now).measured is None, "it computes otherwise now"
    assert again.completed("a", offer(), "other", now).measured is None
    newer = Measured(MODEL, 0, 12, 0.02, 0.004)
    assert again.completed("a", offer(newer), MODEL, now).measured == newer
    assert again.completed("a", offer(), MODEL, now).measured == newer


async def test_nothing_new_is_not_written_and_a_full_disk_is_no_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "measured.json"
    file = await MeasurementsFile.open(path, lambda: 0.0)
    await file.keep()
    assert not path.exists()
    file.content.completed("a", offer(PASSES), MODEL, 0.0)
    changes = file.content.changes
    file.content.completed("a", offer(PASSES), MODEL, 5.0)
    assert file.content.changes == changes, "a poll says the same again"
    path.mkdir()  # so that nothing can be put in its place
    await file.keep()
    assert "was not written" in caplog.text
    left = await trio.to_thread.run_sync(lambda: [file.name for file in tmp_path.iterdir()])
    assert left == [path.name], "no half of a file is left"


@pytest.mark.parametrize(
    "data",
    [
        b"{",
        b"[]",
        b'{"version": 2}',
        b'{"version": 1, "ways": [{"peer": "a", "link": {"peer": "b", "seconds": -1}, "at": 0}]}',
        b'{"version": 1, "passes": [3]}',
        b" " * (MAX_FILE_BYTES + 1),
    ],
)
async def test_a_file_that_makes_no_sense_is_begun_anew(
    tmp_path: Path, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(WireError):
        Measurements.decode(data, 0.0)
    path = tmp_path / "measured.json"
    path.write_bytes(data)
    file = await MeasurementsFile.open(path, lambda: 0.0)
    assert file.content.ways() == {} and "is begun anew" in caplog.text
    file.content.way("a", "b", LinkTime(0.1), 0.0)
    await file.keep()
    assert Measurements.decode(path.read_bytes(), 0.0).ways() == {("a", "b"): LinkTime(0.1)}


def test_what_is_kept_is_bounded_and_grows_old() -> None:
    kept = Measurements()
    for number in range(MAX_WAYS + 50):
        kept.way("a", f"b{number}", LinkTime(0.1), float(number))
    for number in range(MAX_PASSES + 50):
        kept.completed(f"p{number}", offer(PASSES), MODEL, float(number))
    assert len(kept.ways()) == MAX_WAYS and ("a", "b0") not in kept.ways()
    data = kept.encode(1e5)
    assert len(data) < MAX_FILE_BYTES
    assert len(msgspec.json.decode(data)["passes"]) == MAX_PASSES
    assert Measurements.decode(data, KEPT_SECONDS + 1e6).ways() == {}
    far = Measurements()
    far.way("a", "b", LinkTime(1e9, 1.0), 0.0)
    assert far.ways() == {("a", "b"): LinkTime(60.0, 0.0)}, "as what peers say"
