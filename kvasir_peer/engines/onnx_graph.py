"""Small ONNX graphs, and the sessions that run them on buffers of ours.

A graph is built node by node; large arrays are handed to onnxruntime as external initializers, so that they are
never copied into a protobuf, and are let go of here as soon as the session has packed them its own way.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import DTypeLike, NDArray
from onnx import TensorProto, helper, numpy_helper

from kvasir_peer.errors import EngineError, UsageError

# Opset 21 is the newest that onnxruntime 1.20, the oldest version we take, knows whole; IR version 10 goes with it.
_OPSET = 21
_IR_VERSION = 10
_MICROSOFT = "com.microsoft"
# Operators of our own (see kernels/onnx_*.c).
_OWN = "kvasir"
# Initializers under this many bytes stay in the graph: an entry of the external table costs more than that.
_INLINE_BYTES = 512
# How long a thread spins for the next operator of a run before it sleeps: longer than most operators that compute on
# one thread, short beside a time slice that somebody else could use. onnxruntime before 1.26 spins to the run's end.
_SPIN_MICROSECONDS = "50"

# What a session of some twenty nodes takes besides its weights, as measured.
SESSION_BYTES = 250_000
# What the C library keeps of the heap that loading and the passes have used, and Python's own objects, as measured;
# and what it keeps besides where weights go through other shapes on their way to onnxruntime, at most.
HEAP_BYTES = 2_000_000
CONTAINER_HEAP_BYTES = 8_000_000

_ELEMENT: Mapping[str, int] = {
    "float32": TensorProto.FLOAT,
    "int32": TensorProto.INT32,
    "int64": TensorProto.INT64,
    "uint8": TensorProto.UINT8,
    "bool": TensorProto.BOOL,
}

Dim = int | str
Array = NDArray[Any]


@dataclass(frozen=True)
class Runtime:
    """How sessions of one engine compute.

    Between two operators of a run threads wait spinning for a moment, which saves waking them up; between two runs
    they sleep, so that engines which share the cores do not take them from one another (but see
    :func:`spinning_threads`).

    Attributes:
        threads: threads of computation in a session.
        provider: name of the onnxruntime execution provider.
    """

    threads: int
    provider: str = "CPUExecutionProvider"

    @classmethod
    def of(cls, threads: int, device: str) -> Runtime:
        """Choose by what a spec says.

        Raises:
            EngineError: onnxruntime has no such execution provider here.
        """
        wanted = "CPUExecutionProvider" if device in ("", "cpu") else device
        available = {name.lower(): name for name in ort.get_available_providers()}
        for name in (wanted, f"{wanted}ExecutionProvider"):
            if name.lower() in available:
                return cls(threads or os.cpu_count() or 1, available[name.lower()])
        raise EngineError(
            f"onnxruntime has no execution provider {device!r} here; it has {', '.join(available.values())}"
        )


@functools.cache
def spinning_threads() -> int:
    """Threads of the one pool whose threads wait spinning, which all sessions of the process share; 0 for none.

    It saves waking threads up at the beginning of each run too, and takes the cores away from everybody else for
    milliseconds after each pass. So it is asked for, by ``KVASIR_ENGINE_SPIN=THREADS``, where a machine has nothing
    else to do.
    """
    text = os.environ.get("KVASIR_ENGINE_SPIN", "0")
    if not text.isdecimal():
        raise UsageError(f"KVASIR_ENGINE_SPIN is {text!r}; give the number of threads that may spin, or 0")
    return int(text)


@functools.cache
def _prepare_process() -> None:
    """Make what all sessions of the process share; onnxruntime takes it before the first session only."""
    if spinning_threads():
        ort.set_global_thread_pool_sizes(spinning_threads(), 1)
    # The arena for scratch memory: one for each session would keep the largest pass of each for ever. No limit,
    # extended by powers of two, onnxruntime's own choice for the rest. Extended by what is asked for, it would grow
    # with each pass that is longer than those before, and never reuse what it had for them.
    configuration = ort.OrtArenaCfg(0, 0, -1, -1)
    memory = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    ort.create_and_register_allocator(memory, configuration)


class Graph:
    """A graph under construction.

    Values are named by strings. Names that the caller gives (inputs, outputs) are kept, all others are made up.
    """

    def __init__(self) -> None:
        self._nodes: list[onnx.NodeProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._inline: list[onnx.TensorProto] = []
        self._external: dict[str, Array] = {}
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._count = 0
        self._library: Path | None = None
        self._resident: dict[str, Array] = {}

    def fresh(self, stem: str) -> str:
        """Return a name that nothing has yet."""
        self._count += 1
        return f"{stem}_{self._count}"

    def input(self, name: str, dims: Sequence[Dim], dtype: DTypeLike = np.float32) -> str:
        """Declare an input; a dimension may be a name."""
        kind = _ELEMENT[np.dtype(dtype).name]
        self._inputs.append(helper.make_tensor_value_info(name, kind, list(dims)))
        return name

    def output(self, value: str, name: str, dims: Sequence[Dim], dtype: DTypeLike = np.float32) -> str:
        """Make a value an output under the given name."""
        kind = _ELEMENT[np.dtype(dtype).name]
        if value != name:
            self._rename(value, name)
        self._outputs.append(helper.make_tensor_value_info(name, kind, list(dims)))
        return name

    def _rename(self, value: str, name: str) -> None:
        """Give a node's result its output name, or pass it through where it is an input or an output already."""
        taken = {info.name for info in (*self._inputs, *self._outputs)}
        if value in taken:
            self._nodes.append(helper.make_node("Identity", [value], [name]))
            return
        for node in self._nodes:
            for names in (node.input, node.output):
                for index, old in enumerate(names):
                    if old == value:
                        names[index] = name

    def op(self, kind: str, *inputs: str, microsoft: bool = False, **attributes: Any) -> str:
        """Add a node with one result; an empty input is one that is left out."""
        return self.ops(kind, 1, *inputs, microsoft=microsoft, **attributes)[0]

    def own(self, library: Path, kind: str, *inputs: str, **attributes: Any) -> str:
        """Add a node with one result, of an operator from a library of ours."""
        return self.owns(library, kind, 1, *inputs, **attributes)[0]

    def owns(self, library: Path, kind: str, count: int, *inputs: str, **attributes: Any) -> list[str]:
        """Add a node with several results, of an operator from a library of ours."""
        names = [self.fresh(kind) for _ in range(count)]
        self._nodes.append(helper.make_node(kind, list(inputs), names, domain=_OWN, **attributes))
        self._library = library
        return names

    def resident(self, array: Array) -> str:
        """Return the name of weights for :meth:`own`, uint8 or float32, which are read in place.

        They are an input that is tied to the array for good: initializers are copied by onnxruntime, even where no
        operator packs them another way.
        """
        name = self.input(self.fresh("panels"), list(array.shape), array.dtype)
        self._resident[name] = np.ascontiguousarray(array)
        return name

    def ops(
        self, kind: str, count: int, *inputs: str, microsoft: bool = False, **attributes: Any
    ) -> list[str]:
        """Add a node with several results."""
        names = [self.fresh(kind) for _ in range(count)]
        self.raw(kind, inputs, names, microsoft=microsoft, **attributes)
        return names

    def raw(
        self,
        kind: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        *,
        microsoft: bool = False,
        **attributes: Any,
    ) -> None:
        """Add a node whose results are named by the caller; an empty name is a result that is left out."""
        domain = _MICROSOFT if microsoft else ""
        self._nodes.append(helper.make_node(kind, list(inputs), list(outputs), domain=domain, **attributes))

    def constant(self, value: Any, dtype: DTypeLike) -> str:
        """Return the name of a small constant; equal ones are kept once."""
        array = np.ascontiguousarray(value, dtype=dtype).reshape(np.shape(value))
        key = (array.dtype.name, array.shape, array.tobytes())
        if key not in self._constants:
            name = self.fresh("const")
            self._inline.append(numpy_helper.from_array(array, name))
            self._constants[key] = name
        return self._constants[key]

    def weight(self, array: Array) -> str:
        """Return the name of an initializer; the array is not copied."""
        name = self.fresh("weight")
        if array.nbytes <= _INLINE_BYTES:
            self._inline.append(numpy_helper.from_array(array, name))
        else:
            self._external[name] = np.ascontiguousarray(array)
        return name

    @property
    def node_kinds(self) -> list[str]:
        """Operator of each node, in order."""
        return [node.op_type for node in self._nodes]

    def model(self) -> bytes:
        """Return the graph as a serialised model, without the large arrays."""
        tensors = list(self._inline)
        for name, array in self._external.items():
            tensor = TensorProto(
                name=name,
                data_type=_ELEMENT[array.dtype.name],
                dims=array.shape,
                data_location=TensorProto.EXTERNAL,
            )
            # The place is never read: the arrays are handed over in memory.
            for key, text in (("location", "memory"), ("offset", "0"), ("length", str(array.nbytes))):
                tensor.external_data.add(key=key, value=text)
            tensors.append(tensor)
        graph = helper.make_graph(self._nodes, "part", self._inputs, self._outputs, tensors)
        model = helper.make_model(
            graph,
            opset_imports=[
                helper.make_opsetid("", _OPSET),
                helper.make_opsetid(_MICROSOFT, 1),
                helper.make_opsetid(_OWN, 1),
            ],
            ir_version=_IR_VERSION,
        )
        return bytes(model.SerializeToString())

    def session(self, runtime: Runtime) -> Session:
        """Load the graph; the large arrays are let go of once they are packed.

        Raises:
            EngineError: onnxruntime refuses it.
        """
        session = Session(self.model(), self._external, runtime, self._library, self._resident)
        self._external = {}
        return session


class Session:
    """A loaded graph.

    Args:
        model: a serialised model.
        external: its large arrays by name.
        runtime: threads and provider.
        library: with operators of ours, or None where the model has none.
        resident: inputs that are tied to arrays for good.

    Raises:
        EngineError: onnxruntime refuses the model.
    """

    def __init__(
        self,
        model: bytes,
        external: Mapping[str, Array],
        runtime: Runtime,
        library: Path | None = None,
        resident: Mapping[str, Array] | None = None,
    ) -> None:
        _prepare_process()
        options = ort.SessionOptions()
        if spinning_threads():
            options.use_per_session_threads = False
        else:
            options.intra_op_num_threads = runtime.threads
            options.inter_op_num_threads = 1
            # Threads wait spinning inside of a run only, and not for long.
            options.add_session_config_entry("session.intra_op.allow_spinning", "1")
            options.add_session_config_entry("session.force_spinning_stop", "1")
            options.add_session_config_entry("session.intra_op.spin_duration_us", _SPIN_MICROSECONDS)
        options.add_session_config_entry("session.use_env_allocators", "1")
        # A pattern is one block for a whole run, of another size for each number of rows, beside what the first such
        # run took piece by piece.
        options.enable_mem_pattern = False
        options.log_severity_level = 3
        self._resident = dict(resident or {})
        if external:
            values = [ort.OrtValue.ortvalue_from_numpy(array) for array in external.values()]
            options.add_external_initializers(list(external), values)
        providers = [runtime.provider]
        if runtime.provider != "CPUExecutionProvider":
            providers.append("CPUExecutionProvider")
        try:
            if library is not None:
                options.register_custom_ops_library(str(library))
            self._session = ort.InferenceSession(model, options, providers=providers)
        except Exception as error:
            # onnxruntime raises its own classes, which have no common base but Exception.
            raise EngineError(f"onnxruntime refuses a graph: {' '.join(str(error).split())[:300]}") from error
        self._outputs = [output.name for output in self._session.get_outputs()]
        # The object inside, where it is found: the public method looks at all names each time.
        self._run = getattr(self._session, "_sess", self._session).run

    def bind(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> Bound:
        """Tie inputs and outputs to arrays of ours."""
        return Bound(self._session, inputs, outputs, self._resident)

    def run(self, inputs: Mapping[str, Array]) -> list[Array]:
        """Run once and return all outputs in arrays of their own.

        Raises:
            EngineError: an operator failed.
        """
        try:
            return list(self._run(self._outputs, {**inputs, **self._resident}, None))
        except Exception as error:
            raise EngineError(f"onnxruntime failed: {' '.join(str(error).split())[:300]}") from error


class Bound:
    """A session tied to arrays: run it as often as wanted, it reads and writes them in place.

    The arrays are kept alive here; onnxruntime knows their addresses only.

    Args:
        session: to run.
        inputs: what it reads, by name.
        outputs: what it writes.
        resident: further inputs, which never change.
    """

    __slots__ = ("_binding", "_keep", "_resident", "_run")

    def __init__(
        self,
        session: ort.InferenceSession,
        inputs: Mapping[str, Array],
        outputs: Mapping[str, Array],
        resident: Mapping[str, Array],
    ) -> None:
        binding = session.io_binding()
        for name, array in (*inputs.items(), *resident.items()):
            binding.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        for name, array in outputs.items():
            binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        # The public method asks for graph capture of GPUs each time, which costs as much as the call itself; the
        # objects inside are called directly where they are found.
        inner = getattr(session, "_sess", None)
        inside = getattr(binding, "_iobinding", None)
        self._binding = binding
        if inner is not None and inside is not None:
            self._run = functools.partial(inner.run_with_iobinding, inside, None)
        else:
            self._run = functools.partial(session.run_with_iobinding, binding)
        self._keep = (inputs, outputs)
        self._resident = resident

    def output(self, name: str, array: Array) -> None:
        """Tie an output to another array for the next run, which the caller keeps alive that long."""
        self._binding.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)

    def keep(self) -> dict[str, Array]:
        """Copies of what it will read, for :meth:`restore` when others have used the same arrays meanwhile."""
        return {name: array.copy() for name, array in self._keep[0].items()}

    def restore(self, kept: Mapping[str, Array]) -> None:
        """Put back what :meth:`keep` has copied."""
        for name, array in self._keep[0].items():
            np.copyto(array, kept[name])

    def __call__(self) -> None:
        """Run.

        Raises:
            EngineError: an operator failed.
        """
        try:
            self._run()
        except Exception as error:
            raise EngineError(f"onnxruntime failed: {' '.join(str(error).split())[:300]}") from error
