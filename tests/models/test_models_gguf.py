"""The GGUF reader: what it reads, against gguf-py; and that nothing in a file can hurt it."""

from __future__ import annotations

import struct
import time
import tracemalloc
from itertools import pairwise
from pathlib import Path

import gguf
import numpy as np
import pytest
from helpers_models import DENSE, MOE, key, raw_gguf, tensor, text, write_model
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvasir_peer.errors import ModelFileError
from kvasir_peer.models.gguf import (
    GGML_TYPES,
    LONG_ARRAY,
    MAX_ARRAY,
    GgufArray,
    GgufFile,
    HeaderIncompleteError,
    parse_header,
    tensor_bytes,
)


@pytest.mark.parametrize("path", [DENSE, MOE], ids=lambda path: path.stem)
def test_reads_what_the_reference_reader_reads(path: Path) -> None:
    reference = gguf.GGUFReader(path)
    with GgufFile.open(path) as model:
        assert model.architecture == "llama"
        assert set(model.metadata) == {name for name in reference.fields if not name.startswith("GGUF.")}
        for name, value in model.metadata.items():
            expected = reference.fields[name].contents()
            assert (list(value) if isinstance(expected, list) else value) == expected
        assert list(model.tensors) == [each.name for each in reference.tensors]
        for each in reference.tensors:
            info = model.tensors[each.name]
            assert info.shape == tuple(reversed(each.shape.tolist()))
            assert (info.type, info.n_bytes, info.offset) == (
                each.tensor_type,
                each.n_bytes,
                each.data_offset,
            )
            assert bytes(model.tensor_view(each.name)) == each.data.tobytes()


def test_block_sizes_are_those_of_ggml() -> None:
    theirs = {int(kind): (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    ours = {kind: tuple(layout) for kind, layout in GGML_TYPES.items()}
    # gguf-py says 40 bytes for Q8_1; ggml's block_q8_1 is two f16 and 32 codes. It never stands in a file.
    assert {k: v for k, v in ours.items() if k in theirs and k != 9} == {
        k: v for k, v in theirs.items() if k in ours and k != 9
    }
    assert theirs.keys() >= {0, 1, 2, 8, 14, 30}  # the comparison is not empty


def test_tensor_bytes_refuses_half_blocks() -> None:
    assert tensor_bytes((3, 64), 2) == 3 * 2 * 18
    with pytest.raises(ValueError, match="whole number of Q4_0 blocks"):
        tensor_bytes((3, 33), 2)


def test_version_2_is_read(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf")
    data = bytearray(path.read_bytes())
    data[4] = 2
    path.write_bytes(data)
    with GgufFile.open(path) as model:
        assert model.metadata["llama.block_count"] == 3


def test_long_arrays_are_decoded_as_they_are_read(tmp_path: Path) -> None:
    count = LONG_ARRAY + 5
    strings = [f"wörd {i}" for i in range(count)]
    path = tmp_path / "m.gguf"
    path.write_bytes(
        raw_gguf(
            [
                key("s", 9, struct.pack("<IQ", 8, count) + b"".join(text(s) for s in strings)),
                key("f", 9, struct.pack(f"<IQ{count}f", 6, count, *range(count))),
                key("b", 9, struct.pack("<IQ3B", 7, 3, 1, 0, 1)),
                key("bad", 9, struct.pack("<IQ", 8, 1) + text(b"\xff\xfe")),
            ],
            [],
        )
    )
    with GgufFile.open(path) as model:
        words, numbers = model.metadata["s"], model.metadata["f"]
    # Both stay readable after the file is closed.
    assert isinstance(words, GgufArray) and isinstance(numbers, GgufArray)
    assert list(words) == strings and len(words) == count
    assert words[7] == strings[7] and words[-1] == strings[-1] and words[2:4] == strings[2:4]
    assert words.raw_string(1) == "wörd 1".encode()
    assert list(numbers) == list(range(count)) and numbers[3] == 3.0
    assert numbers.numpy().dtype == np.float32 and not numbers.numpy().flags.writeable
    with pytest.raises(IndexError):
        words[count]
    with pytest.raises(TypeError):
        words.numpy()
    assert model.metadata["b"] == [True, False, True]
    assert model.metadata["bad"] == ["\ufffd\ufffd"]


def test_a_large_vocabulary_costs_little(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", n_vocab=100_000)
    spent = []
    for _ in range(5):
        start = time.thread_time()  # processor time: other work on the machine doesn't count
        GgufFile.open(path).close()
        spent.append(time.thread_time() - start)
    assert min(spent) < 0.05


def test_views_outlive_the_file(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf")
    model = GgufFile.open(path)
    view = model.tensor_view("output_norm.weight")
    before = bytes(view)
    model.close()
    assert bytes(view) == before and view.readonly
    with pytest.raises(ValueError, match="closed"):
        model.tensor_view("output_norm.weight")
    with pytest.raises(KeyError):
        model.tensor_view("nothing")


# --- split models ---


def test_any_part_opens_the_whole_model(tmp_path: Path) -> None:
    single = write_model(tmp_path / "single.gguf")
    first = write_model(tmp_path / "model.gguf", shard_tensors=4)
    parts = sorted(tmp_path.glob("model-*.gguf"))
    assert len(parts) == 3 and first == parts[0]
    for part in parts:
        with GgufFile.open(part) as model, GgufFile.open(single) as whole:
            assert model.paths == tuple(parts)
            assert model.tensors.keys() == whole.tensors.keys()
            assert {info.shard for info in model.tensors.values()} == {0, 1, 2}
            assert model.metadata["llama.block_count"] == 3
            for name in whole.tensors:
                assert model.tensor_view(name) == whole.tensor_view(name)


def test_missing_parts_are_named(tmp_path: Path) -> None:
    first = write_model(tmp_path / "model.gguf", shard_tensors=4)
    (tmp_path / "model-00002-of-00003.gguf").unlink()
    with pytest.raises(ModelFileError, match=r"3 files and 1 of them .*: model-00002-of-00003\.gguf$"):
        GgufFile.open(first)


def test_a_part_under_another_name_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "model.gguf", shard_tensors=4)
    lone = (tmp_path / "model-00001-of-00003.gguf").rename(tmp_path / "lone.gguf")
    with pytest.raises(ModelFileError, match="a part of a model in 3 files, but not named so"):
        GgufFile.open(lone)


def test_parts_in_the_wrong_order_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "model.gguf", shard_tensors=4)
    two, three = (tmp_path / f"model-0000{n}-of-00003.gguf" for n in (2, 3))
    two.rename(tmp_path / "aside")
    three.rename(two)
    (tmp_path / "aside").rename(three)
    with pytest.raises(ModelFileError, match="its header says 'part 3 of 3', its name says part 2 of 3"):
        GgufFile.open(three)


@pytest.mark.parametrize("name", ["m-00000-of-00002.gguf", "m-00003-of-00002.gguf", "m-00001-of-99999.gguf"])
def test_part_numbers_that_make_no_sense_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(DENSE.read_bytes())
    with pytest.raises(ModelFileError, match="makes no sense"):
        GgufFile.open(tmp_path / name)


# --- what is wrong is said in one line ---

ARCHITECTURE = key("general.architecture", 8, text("llama"))
HUGE = 1 << 62

BAD = {
    "empty": (b"", "empty file, not a GGUF"),
    "text": (b"hello, this is a text file and no model", "not a GGUF"),
    "short": (b"GGUF\x03\0\0\0", "truncated or damaged"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "Git LFS pointer"),
    "html": (b"<!DOCTYPE html><html><body>Sign in</body></html>", "a web page"),
    "zip": (b"PK\x03\x04" + bytes(60), "zip archive"),
    "safetensors": (struct.pack("<Q", 40) + b'{"a":{"dtype":"F32"}}' + bytes(40), "safetensors"),
    "ggml": (b"tjgg" + bytes(60), "older GGML"),
    "big endian": (raw_gguf([], [], 32, endian=">"), "big-endian"),
    "version 1": (raw_gguf([], [], 32, version=1), "version 1 can't be read"),
    "version 9": (raw_gguf([], [], 32, version=9), "version 9 can't be read"),
    "tensor count": (raw_gguf([], [], 64, n_tensors=HUGE), "claims 4,611,686,018,427,387,904 tensors"),
    "key count": (raw_gguf([], [], 64, n_keys=HUGE), "claims 4,611,686,018,427,387,904 keys"),
    "many tensors": (raw_gguf([], [], 3_000_000, n_tensors=70_000), "claims 70,000 tensors"),
    "key length": (raw_gguf([struct.pack("<Q", HUGE)], [], 64, n_keys=1), "key number 0 is 4,611"),
    "key text": (raw_gguf([text(b"\xff") + struct.pack("<II", 4, 1)], []), "is not UTF-8"),
    "key twice": (raw_gguf([ARCHITECTURE, ARCHITECTURE], []), "'general.architecture' stands twice"),
    "value type": (raw_gguf([key("k", 13, b"1234")], [], 32), "value type 13, which does not exist"),
    "value length": (raw_gguf([key("k", 8, struct.pack("<Q", HUGE))], [], 32), "past the end of the file"),
    "array count": (raw_gguf([key("k", 9, struct.pack("<IQ", 4, HUGE))], [], 64), "claims 4,611"),
    "array outside": (
        raw_gguf([key("k", 9, struct.pack("<IQ", 12, MAX_ARRAY))], [], 64),
        "past the end of the file",
    ),
    "array type": (raw_gguf([key("k", 9, struct.pack("<IQ", 77, 1))], [], 64), "value type 77"),
    "array of arrays": (raw_gguf([key("k", 9, struct.pack("<IQ", 9, 1))], [], 64), "array of arrays"),
    "strings outside": (
        raw_gguf(
            [key("k", 9, struct.pack("<IQ", 8, 2) + text("a") + struct.pack("<Q", (1 << 64) - 1))], [], 64
        ),
        "past the end of the file",
    ),
    "strings one too many": (
        raw_gguf([key("k", 9, struct.pack("<IQ", 8, 3) + text(b"x" * 30) + struct.pack("<Q", 31))], []),
        "past the end of the file",
    ),
    "alignment": (raw_gguf([key("general.alignment", 4, struct.pack("<I", 33))], []), "not a power of two"),
    "alignment type": (raw_gguf([key("general.alignment", 8, text("32"))], []), "not a power of two"),
    "alignment zero": (raw_gguf([key("general.alignment", 4, bytes(4))], []), "not a power of two"),
    "dims": (raw_gguf([], [tensor("t", [1] * 5)], 64), "has 5 dimensions"),
    "no dims": (raw_gguf([], [tensor("t", [])], 64), "has 0 dimensions"),
    "empty dim": (raw_gguf([], [tensor("t", [0, 4])], 64), "an empty dimension"),
    "type": (raw_gguf([], [tensor("t", [32], kind=4)], 64), "ggml type 4, which this version does not know"),
    "blocks": (raw_gguf([], [tensor("t", [33], kind=2)], 64), "not a whole number of Q4_0 blocks"),
    "overflow": (
        raw_gguf([], [tensor("t", [HUGE, HUGE, HUGE])], 64),
        "truncated or damaged: tensor 't' ends at",
    ),
    "outside": (raw_gguf([], [tensor("t", [64])], 255), "truncated or damaged: tensor 't' ends at"),
    "offset outside": (
        raw_gguf([], [tensor("t", [1], offset=1 << 63)], 64),
        "truncated or damaged: tensor 't'",
    ),
    "misaligned": (raw_gguf([], [tensor("t", [1], offset=4)], 64), "off the alignment of 32"),
    "overlap": (
        raw_gguf([], [tensor("a", [16]), tensor("b", [8], offset=32)], 64),
        "tensors 'a' and 'b' overlap",
    ),
    "tensor twice": (raw_gguf([], [tensor("a", [8]), tensor("a", [8], offset=32)], 64), "'a' stands twice"),
    "name length": (raw_gguf([], [tensor("n" * 256, [8])], 64), "at most 255 are allowed"),
    "name text": (raw_gguf([], [text(b"\xff") + struct.pack("<IQIQ", 1, 8, 0, 0)], 64), "is not UTF-8"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_gets_one_clear_line(tmp_path: Path, name: str) -> None:
    data, expected = BAD[name]
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelFileError) as caught:
        GgufFile.open(path)
    message = str(caught.value)
    assert expected in message
    assert message.startswith(f"{path}: ") and "\n" not in message and len(message) < 400
    assert caught.value.exit_status == 2


def test_a_path_that_is_no_file_gets_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"no such file$"):
        GgufFile.open(tmp_path / "absent.gguf")
    with pytest.raises(ModelFileError, match="a directory"):
        GgufFile.open(tmp_path)
    with pytest.raises(ModelFileError, match="can't be opened"):
        GgufFile.open(tmp_path / ("x" * 300))


def test_a_real_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    data = DENSE.read_bytes()
    path = tmp_path / "cut.gguf"
    for size in (*range(0, 2000, 131), len(data) // 2, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(ModelFileError):
            GgufFile.open(path)


def test_names_from_a_file_cannot_break_the_line(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(raw_gguf([], [tensor("a\n\x1b[31m\u2028b", [0])], 64))
    with pytest.raises(ModelFileError) as caught:
        GgufFile.open(path)
    assert str(caught.value).isprintable()


def test_no_architecture_is_said_when_it_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(raw_gguf([], []))
    with GgufFile.open(path) as model, pytest.raises(ModelFileError, match="names no architecture"):
        _ = model.architecture


def test_a_header_is_read_from_just_so_many_bytes_as_it_needs() -> None:
    data = DENSE.read_bytes()
    whole = parse_header(data, len(data), "m")
    have = 0
    for _ in range(2000):
        try:
            header = parse_header(data[:have], len(data), "m")
        except HeaderIncompleteError as error:
            assert have < error.needed <= whole.data_start
            have = error.needed
        else:
            break
    else:
        pytest.fail("the header is never complete")
    assert header == whole


# --- random damage ---

SMALL = raw_gguf(
    [
        ARCHITECTURE,
        key("llama.block_count", 4, struct.pack("<I", 1)),
        key("tokens", 9, struct.pack("<IQ", 8, 4) + b"".join(text(t) for t in ("a", "bc", "", "def"))),
        key("scores", 9, struct.pack("<IQ4f", 6, 4, 0, 1, 2, 3)),
        key("flag", 7, b"\1"),
        key("half", 12, struct.pack("<d", 0.5)),
    ],
    [
        tensor("token_embd.weight", [32, 4]),
        tensor("blk.0.w", [32], 2, 512),
        tensor("output.weight", [4, 2], 0, 544),
    ],
    576,
)
NUMBERS = st.sampled_from([0, 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1]) | st.integers(
    0, 2**64 - 1
)


def test_the_small_file_is_whole() -> None:
    assert len(parse_header(SMALL, len(SMALL), "m").tensors) == 3


@settings(max_examples=300, deadline=None)
@given(
    bytes_at=st.lists(st.tuples(st.integers(0, len(SMALL) - 1), st.integers(0, 255)), max_size=6),
    numbers_at=st.lists(st.tuples(st.integers(0, len(SMALL) - 8), NUMBERS), max_size=2),
    cut=st.none() | st.integers(0, len(SMALL)),
)
@example(bytes_at=[], numbers_at=[(8, 2**16)], cut=None)
def test_damage_is_refused_or_read_and_never_takes_memory(
    bytes_at: list[tuple[int, int]], numbers_at: list[tuple[int, int]], cut: int | None
) -> None:
    data = bytearray(SMALL)
    for at, value in bytes_at:
        data[at] = value
    for at, number in numbers_at:
        data[at : at + 8] = struct.pack("<Q", number)
    del data[cut if cut is not None else len(data) :]
    tracemalloc.start()
    try:
        header = parse_header(bytes(data), len(data), "m")
    except ModelFileError as error:
        assert str(error).isprintable()
    else:
        spans = sorted((info.offset, info.offset + info.n_bytes) for info in header.tensors)
        assert all(header.data_start <= start < end <= len(data) for start, end in spans)
        assert all(a[1] <= b[0] for a, b in pairwise(spans))
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 64 * len(SMALL)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=300))
def test_garbage_behind_the_magic_is_refused(data: bytes) -> None:
    data = b"GGUF\x03\0\0\0" + data
    try:
        parse_header(data, len(data), "m")
    except ModelFileError as error:
        assert str(error).isprintable()


@settings(max_examples=100, deadline=None)
@given(st.integers(0, len(SMALL)), NUMBERS.filter(lambda n: n >= len(SMALL)))
def test_a_prefix_asks_for_more_and_never_for_nothing(size: int, file_size: int) -> None:
    try:
        header = parse_header(SMALL[:size], file_size, "m")
    except HeaderIncompleteError as error:
        assert size < error.needed <= file_size
    else:
        assert header.data_start <= size + 31
