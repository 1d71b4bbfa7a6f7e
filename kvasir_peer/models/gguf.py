"""A fast and wary reader of GGUF files (versions 2 and 3, little endian).

The format is described at https://github.com/ggml-org/ggml/blob/master/docs/gguf.md::

    "GGUF"  version u32  n_tensors u64  n_keys u64
    n_keys    x  key string, type u32, value
    n_tensors x  name string, n_dims u32, dims u64[n_dims] (fastest first), ggml type u32, offset u64
    padding up to a multiple of general.alignment; from here the offsets count
    tensor data

Reading a header costs one walk over its bytes: string arrays (a vocabulary has 50,000 to 300,000 strings) are
stepped over and decoded only when somebody reads them. Tensors are views of a memory map, never copies.

A model file may come from anywhere, so nothing in it is believed: each count is held against the bytes that are
left before memory is taken for it, and each tensor must lie inside the file, apart from the others. Whatever is
wrong becomes one :class:`~kvasir_peer.errors.ModelFileError` of one line.

A model may be split over several files, ``NAME-00001-of-00003.gguf``; opening any of them opens all.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import NamedTuple, Self, overload

import msgspec
import numpy as np

from kvasir_peer.errors import ModelFileError

# --- ggml types ---------------------------------------------------------------------------------------------------


class BlockLayout(NamedTuple):
    """How a ggml type stores a row: blocks of ``elements`` weights in ``n_bytes`` bytes."""

    name: str
    elements: int
    n_bytes: int


GGML_TYPES: Mapping[int, BlockLayout] = MappingProxyType(
    {
        0: BlockLayout("F32", 1, 4),
        1: BlockLayout("F16", 1, 2),
        2: BlockLayout("Q4_0", 32, 18),
        3: BlockLayout("Q4_1", 32, 20),
        6: BlockLayout("Q5_0", 32, 22),
        7: BlockLayout("Q5_1", 32, 24),
        8: BlockLayout("Q8_0", 32, 34),
        9: BlockLayout("Q8_1", 32, 36),
        10: BlockLayout("Q2_K", 256, 84),
        11: BlockLayout("Q3_K", 256, 110),
        12: BlockLayout("Q4_K", 256, 144),
        13: BlockLayout("Q5_K", 256, 176),
        14: BlockLayout("Q6_K", 256, 210),
        15: BlockLayout("Q8_K", 256, 292),
        16: BlockLayout("IQ2_XXS", 256, 66),
        17: BlockLayout("IQ2_XS", 256, 74),
        18: BlockLayout("IQ3_XXS", 256, 98),
        19: BlockLayout("IQ1_S", 256, 50),
        20: BlockLayout("IQ4_NL", 32, 18),
        21: BlockLayout("IQ3_S", 256, 110),
        22: BlockLayout("IQ2_S", 256, 82),
        23: BlockLayout("IQ4_XS", 256, 136),
        24: BlockLayout("I8", 1, 1),
        25: BlockLayout("I16", 1, 2),
        26: BlockLayout("I32", 1, 4),
        27: BlockLayout("I64", 1, 8),
        28: BlockLayout("F64", 1, 8),
        29: BlockLayout("IQ1_M", 256, 56),
        30: BlockLayout("BF16", 1, 2),
        34: BlockLayout("TQ1_0", 256, 54),
        35: BlockLayout("TQ2_0", 256, 66),
        39: BlockLayout("MXFP4", 32, 17),
        40: BlockLayout("NVFP4", 64, 36),
        41: BlockLayout("Q1_0", 128, 18),
    }
)
"""Every ggml type that may stand in a file, by its id (``enum ggml_type`` of ggml.h).

Known here means that its size is known, so that it can be moved and checked; which types can be computed is the
engines' business. Q8_1 is 36 bytes as ggml lays it out (two f16 and 32 codes); gguf-py's table says 40, from the
time when its two scales were f32. No file holds it: it is a type of activations.
"""


def tensor_bytes(shape: Sequence[int], type_id: int) -> int:
    """Bytes that a tensor of numpy ``shape`` takes as ggml type ``type_id``.

    Raises:
        ValueError: the type is unknown, or a row is not a whole number of blocks.
    """
    layout = GGML_TYPES.get(type_id)
    if layout is None:
        raise ValueError(f"ggml type {type_id} is not known")
    if shape[-1] % layout.elements:
        raise ValueError(
            f"a row of {shape[-1]} is not a whole number of {layout.name} blocks of {layout.elements}"
        )
    elements = 1
    for size in shape:
        elements *= size
    return elements // layout.elements * layout.n_bytes


class TensorInfo(msgspec.Struct, frozen=True):
    """Where a tensor lies and what it is.

    Attributes:
        name: GGUF name, such as ``blk.0.attn_q.weight``.
        shape: numpy order, outermost first: a weight is ``[out, in]``, stacked experts are ``[E, out, in]``.
        type: ggml type id, a key of :data:`GGML_TYPES`.
        n_bytes: bytes of its data.
        offset: first byte, counted from the start of its file.
        shard: index of its file among those of a split model; 0 otherwise.
    """

    name: str
    shape: tuple[int, ...]
    type: int
    n_bytes: int
    offset: int
    shard: int = 0


# --- limits: far above any real model, low enough that a hostile header costs little --------------------------------

MAX_TENSORS = 1 << 16  # the largest published models have about 2,000
MAX_KEYS = 1 << 16  # real files have about 50
MAX_ARRAY = 1 << 24  # elements; the largest vocabularies have 300,000 entries
MAX_KEY_BYTES = 65_535  # the format's own limit
MAX_NAME_BYTES = 255  # ggml stops at 63
MAX_DIMS = 4  # GGML_MAX_DIMS
MAX_ALIGNMENT = 1 << 20  # bytes; 32 is usual
MAX_SHARDS = 1 << 12
LONG_ARRAY = 1024  # elements; longer arrays stay raw until they are read

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS: dict[int, struct.Struct] = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    _BOOL: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_DTYPES: dict[int, str] = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    _BOOL: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_FIXED_HEADER = 24  # bytes: magic, version, two counts
_MIN_KEY_BYTES = 8 + 4 + 1  # key length, value type, the smallest value
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8  # name length, n_dims, one dimension, type, offset


class HeaderIncompleteError(Exception):
    """The bytes at hand end inside the header although the file goes on.

    Attributes:
        needed: at least so many bytes from the start of the file are needed.
    """

    def __init__(self, needed: int) -> None:
        super().__init__(f"at least {needed} bytes are needed")
        self.needed = needed


class GgufArray(Sequence[object]):
    """A long metadata array, kept as its raw bytes and decoded as it is read.

    Args:
        kind: GGUF value type of the elements.
        count: number of elements.
        raw: their bytes, as in the file.
    """

    def __init__(self, kind: int, count: int, raw: bytes) -> None:
        self._kind = kind
        self._count = count
        self._raw = raw
        self._starts: np.ndarray | None = None  # strings: [count] offset of each string's length

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[object]:
        if self._kind != _STRING:
            yield from self.numpy().tolist()
            return
        raw, unpack, at = self._raw, _U64.unpack_from, 0
        for _ in range(self._count):
            start = at + 8
            at = start + unpack(raw, at)[0]
            yield raw[start:at].decode("utf-8", "replace")

    @overload
    def __getitem__(self, index: int) -> object: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[object]: ...

    def __getitem__(self, index: int | slice) -> object | Sequence[object]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._count))]
        if not -self._count <= index < self._count:
            raise IndexError(f"index {index} of an array of {self._count}")
        index %= self._count
        return (
            self.numpy()[index].item()
            if self._kind != _STRING
            else self.raw_string(index).decode("utf-8", "replace")
        )

    def raw_string(self, index: int) -> bytes:
        """The bytes of one string, as in the file (which need not be UTF-8)."""
        if self._starts is None:
            starts = np.empty(self._count, np.int64)
            at = 0
            for i in range(self._count):
                starts[i] = at
                at += 8 + _U64.unpack_from(self._raw, at)[0]
            self._starts = starts
        at = int(self._starts[index])
        return self._raw[at + 8 : at + 8 + _U64.unpack_from(self._raw, at)[0]]

    def numpy(self) -> np.ndarray:
        """The numbers as a read-only array ``[len]`` in the file's own type; not for strings."""
        if self._kind == _STRING:
            raise TypeError("an array of strings has no numpy form")
        return np.frombuffer(self._raw, _DTYPES[self._kind])

    def __repr__(self) -> str:
        return f"<GgufArray of {self._count} {'strings' if self._kind == _STRING else _DTYPES[self._kind]}>"


class GgufHeader(NamedTuple):
    """What one file's header says; the tensors' offsets are absolute and checked against the file's size."""

    version: int
    metadata: dict[str, object]
    tensors: tuple[TensorInfo, ...]
    data_start: int
    file_size: int


class _Cursor:
    """Reads forward over the bytes at hand; knows the difference between too few bytes and a file that ends."""

    def __init__(self, data: memoryview, file_size: int, where: str) -> None:
        self.data = data
        self.file_size = file_size
        self.where = where
        self.at = 0

    def error(self, what: str) -> ModelFileError:
        return ModelFileError(f"{self.where}: {what}")

    def need(self, count: int, what: str) -> None:
        if count > self.file_size - self.at:
            raise self.error(
                f"truncated or damaged: {what} at byte {self.at:,} would go on past the end of the file "
                f"({self.file_size:,} bytes); get the file again"
            )
        if count > len(self.data) - self.at:
            raise HeaderIncompleteError(self.at + count)

    def u32(self, what: str) -> int:
        self.need(4, what)
        (value,) = _U32.unpack_from(self.data, self.at)
        self.at += 4
        return int(value)

    def u64(self, what: str) -> int:
        self.need(8, what)
        (value,) = _U64.unpack_from(self.data, self.at)
        self.at += 8
        return int(value)

    def string(self, what: str, limit: int | None = None) -> bytes:
        length = self.u64(what)
        if limit is not None and length > limit:
            raise self.error(f"damaged: {what} is {length:,} bytes long, at most {limit:,} are allowed")
        self.need(length, what)
        start = self.at
        self.at += length
        return bytes(self.data[start : self.at])

    def name(self, what: str, limit: int) -> str:
        raw = self.string(what, limit)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self.error(f"damaged: {what} {_shown(raw)} is not UTF-8") from None

    def skip_strings(self, count: int, what: str) -> None:
        self.need(8 * count, what)
        data, unpack, at = self.data, _U64.unpack_from, self.at
        try:
            for _ in range(count):
                at += 8 + unpack(data, at)[0]
        except (struct.error, OverflowError):
            at += 8  # the length itself lies outside of the bytes at hand
        if at > len(data):
            self.need(at - self.at, what)
        self.at = at

    def value(self, key: str) -> object:
        kind = self.u32(f"the type of {key}")
        if kind == _STRING:
            return self.string(f"the value of {key}").decode("utf-8", "replace")
        if kind == _ARRAY:
            return self._array(key)
        scalar = _SCALARS.get(kind)
        if scalar is None:
            raise self.error(f"damaged: {key} has value type {kind}, which does not exist")
        self.need(scalar.size, f"the value of {key}")
        (value,) = scalar.unpack_from(self.data, self.at)
        self.at += scalar.size
        return value

    def _array(self, key: str) -> object:
        what = f"the array {key}"
        kind = self.u32(what)
        count = self.u64(what)
        if count > MAX_ARRAY:
            raise self.error(f"damaged: {key} claims {count:,} elements, at most {MAX_ARRAY:,} are allowed")
        if kind == _ARRAY:
            raise self.error(f"{key} is an array of arrays, which no model uses")
        if kind != _STRING and kind not in _SCALARS:
            raise self.error(f"damaged: {key} holds value type {kind}, which does not exist")
        start = self.at
        if kind == _STRING:
            self.skip_strings(count, what)
        else:
            n_bytes = count * _SCALARS[kind].size
            self.need(n_bytes, what)
            self.at += n_bytes
        array = GgufArray(kind, count, bytes(self.data[start : self.at]))
        return array if count > LONG_ARRAY else list(array)


def _shown(name: str | bytes) -> str:
    """A name out of a file, safe to print: quoted, escaped, cut."""
    return ascii(name[:64])


def _not_gguf(head: bytes) -> str:
    """What a file is that does not start with the magic, where it can be told."""
    if head[:4] in (b"lmgg", b"tjgg", b"fmgg", b"algg"):
        return "not a GGUF but an older GGML file; convert it with llama.cpp"
    if head.startswith(b"version https://git-lfs"):
        return "not a GGUF but a Git LFS pointer: the model itself was not downloaded; run git lfs pull"
    if head.lstrip()[:9].lower() in (b"<!doctype", b"<html><he") or head.lstrip()[:5].lower() == b"<html":
        return "not a GGUF but a web page: the download went to a login or an error page"
    if head[:4] == b"PK\x03\x04":
        return "not a GGUF but a zip archive (a PyTorch file or a wheel?); give the GGUF itself"
    if head[8:9] == b"{":
        return "not a GGUF but probably a safetensors file; convert it with llama.cpp"
    return "not a GGUF (it does not start with the bytes 'GGUF')"


def parse_header(data: bytes | memoryview | mmap.mmap, file_size: int, where: str) -> GgufHeader:
    """Read the header of one GGUF file from its first bytes.

    Args:
        data: the file from its start: all of it, or so much as is at hand.
        file_size: bytes of the whole file.
        where: the file's name for messages.

    Raises:
        ModelFileError: what is wrong with the file, in one line.
        HeaderIncompleteError: ``data`` ends inside the header and the file goes on.
    """
    with memoryview(data) as view:
        return _parse(_Cursor(view, file_size, where))


def _parse(cursor: _Cursor) -> GgufHeader:
    where = cursor.where
    if cursor.file_size < _FIXED_HEADER:
        head = bytes(cursor.data[:_FIXED_HEADER])
        if head[:4] != b"GGUF":
            raise ModelFileError(f"{where}: {_not_gguf(head) if head else 'empty file, not a GGUF'}")
    elif len(cursor.data) < _FIXED_HEADER:
        raise HeaderIncompleteError(_FIXED_HEADER)
    elif bytes(cursor.data[:4]) != b"GGUF":
        raise ModelFileError(f"{where}: {_not_gguf(bytes(cursor.data[:64]))}")
    cursor.at = 4
    version = cursor.u32("the version")
    if version and not version & 0xFFFF:
        raise ModelFileError(
            f"{where}: a big-endian GGUF; only little-endian files can be read, convert it first"
        )
    if version not in (2, 3):
        raise ModelFileError(
            f"{where}: GGUF version {version} can't be read (2 and 3 can); convert it with llama.cpp"
        )
    n_tensors = cursor.u64("the number of tensors")
    n_keys = cursor.u64("the number of keys")
    for count, limit, least, what in (
        (n_keys, MAX_KEYS, _MIN_KEY_BYTES, "keys"),
        (n_tensors, MAX_TENSORS, _MIN_TENSOR_BYTES, "tensors"),
    ):
        if count > limit or count * least > cursor.file_size:
            raise ModelFileError(
                f"{where}: truncated or damaged: the header claims {count:,} {what}, "
                f"the file has {cursor.file_size:,} bytes; get the file again"
            )

    metadata: dict[str, object] = {}
    for index in range(n_keys):
        key = cursor.name(f"key number {index}", MAX_KEY_BYTES)
        if key in metadata:
            raise ModelFileError(f"{where}: damaged: the key {_shown(key)} stands twice in the header")
        metadata[key] = cursor.value(_shown(key))

    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 0 < alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise ModelFileError(
            f"{where}: damaged: general.alignment is {_shown(str(alignment))}, not a power of two"
        )

    # Each: name, shape, type, n_bytes, offset in the data section.
    found = [_tensor(cursor, index) for index in range(n_tensors)]
    data_start = -(-cursor.at // alignment) * alignment
    tensors = tuple(_placed(found, data_start, alignment, cursor))
    return GgufHeader(version, metadata, tensors, data_start, cursor.file_size)


def _tensor(cursor: _Cursor, index: int) -> TensorInfo:
    """One tensor description; its offset still counts from the start of the data section."""
    name = cursor.name(f"the name of tensor number {index}", MAX_NAME_BYTES)
    shown = _shown(name)
    n_dims = cursor.u32(f"tensor {shown}")
    if not 1 <= n_dims <= MAX_DIMS:
        raise cursor.error(f"damaged: tensor {shown} has {n_dims} dimensions, 1 to {MAX_DIMS} are allowed")
    dims = [cursor.u64(f"tensor {shown}") for _ in range(n_dims)]
    type_id = cursor.u32(f"tensor {shown}")
    offset = cursor.u64(f"tensor {shown}")
    if 0 in dims:
        raise cursor.error(f"damaged: tensor {shown} has an empty dimension")
    if type_id not in GGML_TYPES:
        raise cursor.error(f"tensor {shown} has ggml type {type_id}, which this version does not know")
    shape = tuple(reversed(dims))
    try:
        n_bytes = tensor_bytes(shape, type_id)
    except ValueError as error:
        raise cursor.error(f"damaged: tensor {shown}: {error}") from None
    return TensorInfo(name=name, shape=shape, type=type_id, n_bytes=n_bytes, offset=offset)


def _placed(
    found: list[TensorInfo], data_start: int, alignment: int, cursor: _Cursor
) -> Iterator[TensorInfo]:
    """The tensors with absolute offsets, after a look whether they lie in the file and apart from each other."""
    names: set[str] = set()
    for info in found:
        if info.name in names:
            raise cursor.error(f"damaged: tensor {_shown(info.name)} stands twice in the header")
        names.add(info.name)
        if info.offset % alignment:
            raise cursor.error(
                f"damaged: tensor {_shown(info.name)} starts at {info.offset:,}, off the alignment of {alignment}"
            )
        end = data_start + info.offset + info.n_bytes
        if end > cursor.file_size:
            raise cursor.error(
                f"truncated or damaged: tensor {_shown(info.name)} ends at byte {end:,}, but the file has "
                f"{cursor.file_size:,} bytes; get the file again"
            )
    by_offset = sorted(found, key=lambda info: info.offset)
    for before, after in itertools.pairwise(by_offset):
        if before.offset + before.n_bytes > after.offset:
            raise cursor.error(f"damaged: tensors {_shown(before.name)} and {_shown(after.name)} overlap")
    for info in found:
        yield msgspec.structs.replace(info, offset=data_start + info.offset)


# --- split models -------------------------------------------------------------------------------------------------

_SHARD_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


def shard_names(name: str) -> list[str] | None:
    """The file names of all shards of the split model that ``name`` is one of; None when it isn't named so.

    Raises:
        ModelFileError: the name's numbers make no sense.
    """
    match = _SHARD_NAME.fullmatch(name)
    if match is None:
        return None
    number, count = int(match["number"]), int(match["count"])
    if not 1 <= number <= count <= MAX_SHARDS:
        raise ModelFileError(
            f"{name}: part {number} of {count} makes no sense; rename the parts as they were made"
        )
    return [f"{match['stem']}-{i + 1:05d}-of-{count:05d}.gguf" for i in range(count)]


def join_headers(
    headers: Sequence[GgufHeader], names: Sequence[str]
) -> tuple[dict[str, object], dict[str, TensorInfo]]:
    """Metadata and tensors of a model whose files, in order, have these headers.

    Raises:
        ModelFileError: the files aren't all parts, in order, of one model.
    """
    for index, (header, name) in enumerate(zip(headers, names, strict=True)):
        count = header.metadata.get("split.count", 1)
        number = header.metadata.get("split.no", 0)
        if len(headers) == 1 and isinstance(count, int) and count > 1:
            raise ModelFileError(
                f"{name}: a part of a model in {count} files, but not named so; "
                f"name the parts NAME-00001-of-{count:05d}.gguf and so on"
            )
        if len(headers) > 1 and (count != len(headers) or number != index):
            said = f"part {number + 1} of {count}" if isinstance(number, int) else "no part of a split model"
            raise ModelFileError(
                f"{name}: its header says {_shown(said)}, its name says part {index + 1} of {len(headers)}"
            )
    metadata = dict(headers[0].metadata)
    tensors: dict[str, TensorInfo] = {}
    for index, (header, name) in enumerate(zip(headers, names, strict=True)):
        for info in header.tensors:
            if info.name in tensors:
                raise ModelFileError(
                    f"{name}: tensor {_shown(info.name)} is in another part of the model too"
                )
            tensors[info.name] = msgspec.structs.replace(info, shard=index) if index else info
    expected = metadata.get("split.tensors.count")
    if len(headers) > 1 and isinstance(expected, int) and expected != len(tensors):
        raise ModelFileError(f"{names[0]}: the parts hold {len(tensors)} tensors, the header says {expected}")
    return metadata, tensors


def architecture_of(metadata: Mapping[str, object], where: str) -> str:
    """``general.architecture``, such as ``llama``.

    Raises:
        ModelFileError: the metadata doesn't name one.
    """
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or not architecture:
        raise ModelFileError(f"{where}: the header names no architecture (general.architecture)")
    return architecture


class GgufFile:
    """An open GGUF model; use :meth:`open`. All its files stay mapped until :meth:`close`.

    Attributes:
        paths: its files in order; one, unless the model is split.
        metadata: keys and values; arrays are sequences, long ones a :class:`GgufArray`. Stays readable after close.
        tensors: by name.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = tuple(paths)
        self._maps: list[mmap.mmap] = []
        self._stamps: list[tuple[int, int]] = []
        headers = []
        try:
            for path in self.paths:
                headers.append(self._map(path))
            metadata, tensors = join_headers(headers, [str(path) for path in self.paths])
        except BaseException:
            self.close()
            raise
        self.metadata: Mapping[str, object] = MappingProxyType(metadata)
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(tensors)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Open a model by the path of its file, or of any file of a split model.

        Raises:
            ModelFileError: it is missing, or not a GGUF, or damaged; one line that says which.
        """
        path = Path(path)
        names = shard_names(path.name)
        if names is None:
            return cls([path])
        missing = [name for name in names if not (path.parent / name).exists()]
        if missing:
            raise ModelFileError(
                f"{path}: the model is in {len(names)} files and {len(missing)} of them "
                f"are not in {path.parent}: {', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}"
            )
        return cls([path.parent / name for name in names])

    def _map(self, path: Path) -> GgufHeader:
        try:
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_size == 0:
                    raise ModelFileError(f"{path}: empty file, not a GGUF")
                mapped = mmap.mmap(file.fileno(), status.st_size, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise ModelFileError(f"{path}: no such file") from None
        except IsADirectoryError:
            raise ModelFileError(f"{path}: a directory; give the path of a GGUF file in it") from None
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ModelFileError(f"{path}: can't be opened: {reason}") from None
        self._maps.append(mapped)
        self._stamps.append((status.st_size, status.st_mtime_ns))
        return parse_header(mapped, status.st_size, str(path))

    @property
    def path(self) -> Path:
        """The (first) file."""
        return self.paths[0]

    @property
    def architecture(self) -> str:
        """``general.architecture``; raises :class:`ModelFileError` where the file names none."""
        return architecture_of(self.metadata, str(self.path))

    @property
    def stamps(self) -> tuple[tuple[int, int], ...]:
        """Size in bytes and modification time in nanoseconds of each file, when it was opened."""
        return tuple(self._stamps)

    @property
    def n_bytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(info.n_bytes for info in self.tensors.values())

    def tensor_view(self, name: str) -> memoryview:
        """The bytes of a tensor, read-only, straight from the map: touching them may wait for the disk.

        Raises:
            KeyError: the model has no such tensor.
            ValueError: the model is closed.
        """
        info = self.tensors[name]
        if not self._maps:
            raise ValueError(f"{self.path} is closed")
        return memoryview(self._maps[info.shard])[info.offset : info.offset + info.n_bytes]

    def release(self) -> None:
        """Give the mapped pages back: they leave this process's memory, and come again from disk when touched."""
        for mapped in self._maps:
            mapped.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Unmap the files. Views that are still held keep their map alive until they go."""
        maps, self._maps = self._maps, []
        for mapped in maps:
            with contextlib.suppress(BufferError):
                mapped.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
