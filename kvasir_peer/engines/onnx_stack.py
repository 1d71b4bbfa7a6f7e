"""A stack of layers in onnxruntime."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvasir_peer.engines import quants
from kvasir_peer.engines.architectures import LayerShape, ModelShape
from kvasir_peer.engines.base import (
    ExpertBank,
    ExpertWork,
    LayerStack,
    MemoryEstimate,
    Rows,
    StackSpec,
    Steps,
)
from kvasir_peer.engines.heap import trim_heap
from kvasir_peer.engines.onnx_attention import Attentions
from kvasir_peer.engines.onnx_bank import OnnxBank
from kvasir_peer.engines.onnx_containers import Kernels, container
from kvasir_peer.engines.onnx_graph import Bound, Runtime, Session
from kvasir_peer.engines.onnx_parts import Part, Parts, Port, heads_of
from kvasir_peer.engines.onnx_row_attention import RowAttentions
from kvasir_peer.engines.onnx_whole import WholePass
from kvasir_peer.engines.rope import RopeTable
from kvasir_peer.models.sources import TensorSource

F32 = NDArray[np.float32]
Array = NDArray[Any]

# Numbers of rows whose bindings are kept; each costs a few kilobytes per layer.
_KEPT_WIDTHS = 32
# Matrices that are small beside a layer: routers, which are float32 in files.
_SMALL_SUFFIXES = ("ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight")


@dataclass(frozen=True)
class StackStatistics:
    """What a stack has done since it was loaded.

    Attributes:
        passes: calls of forward or steps.
        rows: rows of all passes.
        part_runs: runs of parts; each part (and so each linear in it) runs once per pass.
        attention_calls: calls of attention, one per run of rows and layer.
    """

    passes: int
    rows: int
    part_runs: int
    attention_calls: int


@dataclass(eq=False)
class _LoadedPart:
    session: Session
    inputs: list[Port]
    outputs: list[Port]


@dataclass(eq=False)
class _Bindings:
    """Parts tied to buffers, for one number of rows."""

    parts: list[Bound]
    hidden: F32  # what the first part reads
    final: F32  # where the last hidden state of the body stands
    attention: F32  # result of the last attention
    values: dict[str, Array]

    @property
    def routed(self) -> F32:
        return self.values["routed"]

    def work(self, layer: LayerShape) -> ExpertWork:
        values = self.values
        return ExpertWork(layer.index, values["x"], values["ids"], values["weights"])


class OnnxStack(LayerStack):
    """Layers [first, end) as parts, attentions and a bank of experts.

    Args:
        shape: the model.
        source: the weights.
        spec: which layers, how many slots.
        memory: what was estimated.
        kernels: what onnxruntime can do here.
        bank: experts of these layers, or None where there are none.
        progress: called with the bytes of each tensor that was taken in.
    """

    def __init__(
        self,
        shape: ModelShape,
        source: TensorSource,
        spec: StackSpec,
        *,
        memory: MemoryEstimate,
        kernels: Kernels,
        bank: OnnxBank | None,
        progress: Callable[[str], None],
    ) -> None:
        self.shape = shape
        self.spec = spec
        self._memory = memory
        self._bank = bank
        self._head = spec.first == 0
        self._tail = spec.end == shape.n_layer
        self._passes = 0
        self._rows = 0
        self._part_runs = 0
        self._longest = 0  # rows of a pass
        self._runtime = Runtime.of(spec.threads, spec.device)
        self._load(source, kernels, progress)
        layers = shape.layers[spec.first : spec.end]
        self._attended = heads_of(layers[-1], source.tensors).attended
        # Parts after the last attention; their rows are others at the tail, where only some want an output.
        self._n_last = 1 if layers[-1].moe is None else 2
        self._buffers, self._last_buffers = (
            self._allocate(parts) if parts else {}
            for parts in (self._parts[: -self._n_last], self._parts[-self._n_last :])
        )
        self._attentions.use(self._buffers)
        self._bodies: OrderedDict[int, _Bindings] = OrderedDict()
        self._lasts: OrderedDict[int, _Bindings] = OrderedDict()

    # ------------------------------------------------------------------------------------------ loading

    def _load(self, source: TensorSource, kernels: Kernels, progress: Callable[[str], None]) -> None:
        shape, spec = self.shape, self.spec
        maker = Parts(shape, source, spec.precision, kernels, progress)
        self._embedding: NDArray[Any] | None = None
        self._look_up: Session | None = None
        embeds = self._head and maker.embeds()
        if self._head and not embeds:
            info = source.tensors["token_embd.weight"]
            self._embedding = np.array(source.read("token_embd.weight")).reshape(info.shape[0], -1)
            self._embedding_type = info.type
            progress("token_embd.weight")
        factors = maker.vector("rope_freqs.weight") if shape.has("rope_freqs.weight") else None
        sizes = (spec.n_slots, spec.context_length, spec.max_rows, self._runtime)
        self._attentions: Attentions | RowAttentions
        if kernels.panels is None:
            self._attentions = Attentions(*sizes)
        else:
            self._attentions = RowAttentions(kernels.panels, *sizes)
        layers = shape.layers[spec.first : spec.end]
        for layer in layers:
            sinks = maker.vector(layer.name("attn_sinks.weight")) if layer.has("attn_sinks.weight") else None
            table = RopeTable(layer.attention.rope, factors)
            self._attentions.add(layer.attention, maker.heads(layer), table, sinks)
        self._whole: WholePass | None = None
        if isinstance(self._attentions, RowAttentions) and self._can_be_whole(source, kernels):
            self._whole = WholePass(
                maker,
                shape,
                spec,
                self._attentions,
                self._bank,
                self._runtime,
                embeds=embeds,
            )
        self._parts: list[_LoadedPart] = []
        if self._whole is not None and self._bank is None:
            return  # nobody will ever ask for the parts
        if embeds:
            self._look_up = maker.embedding().session(self._runtime)
        self._take(maker.entry(layers[0]))
        for layer, following in zip(layers, (*layers[1:], None), strict=True):
            for part in maker.between(layer, following, self._tail):
                self._take(part)

    def _can_be_whole(self, source: TensorSource, kernels: Kernels) -> bool:
        """Whether one more graph of all layers costs no memory for weights: all large ones are read in place."""
        if self._bank is None:
            return True  # it is the only graph then
        layers = self.shape.layers[self.spec.first : self.spec.end]
        names = self.shape.stage_tensors(self.spec.first, self.spec.end)
        small = {layer.name(suffix) for layer in layers for suffix in _SMALL_SUFFIXES}
        large = [
            source.tensors[name]
            for name in names
            if len(source.tensors[name].shape) > 1 and name not in small
        ]
        return all(layer.attention.mla is None for layer in layers) and all(
            container(info.type, self.spec.precision, kernels) == "panels"
            for info in large
            if not (info.name == "token_embd.weight" and info.name != self.shape.output_name)
        )

    def _take(self, part: Part) -> None:
        self._parts.append(_LoadedPart(part.graph.session(self._runtime), part.inputs, part.outputs))

    def _allocate(self, parts: list[_LoadedPart]) -> dict[str, Array]:
        """Make one flat buffer for each value that crosses a border, wide enough for all parts."""
        widths: dict[str, tuple[int, Any]] = {
            "hidden": (self.shape.n_embd, np.float32),
            "attention": (self._attended, np.float32),
        }
        for part in parts:
            for port in (*part.inputs, *part.outputs):
                if port.name not in ("logits", "next"):
                    width, _ = widths.get(port.name, (0, None))
                    widths[port.name] = (max(width, port.width), port.dtype)
        rows = self.spec.max_rows
        buffers: dict[str, Array] = {
            name: np.zeros(rows * width, dtype) for name, (width, dtype) in widths.items()
        }
        # The hidden state goes back and forth between two buffers, since a part reads one and writes the other.
        buffers["next"] = np.zeros_like(buffers["hidden"])
        return buffers

    # ------------------------------------------------------------------------------------------ running

    def forward(self, rows: Rows, hidden: F32 | None) -> F32:
        if self._whole is not None:
            return self._run_whole(self._whole, rows, hidden)
        steps = self._run(rows, hidden, alone=True)
        try:
            work = next(steps)
            while True:
                assert self._bank is not None
                work = steps.send(self._bank.compute(work.layer, work.x, work.ids, work.weights))
        except StopIteration as stop:
            return stop.value

    def steps(self, rows: Rows, hidden: F32 | None) -> Steps:
        return self._run(rows, hidden, alone=False) if self._parts else self._no_steps(rows, hidden)

    def _no_steps(self, rows: Rows, hidden: F32 | None) -> Steps:
        """Run where there are no experts that could be left to the caller."""
        yield from ()
        return self.forward(rows, hidden)

    def _run_whole(self, whole: WholePass, rows: Rows, hidden: F32 | None) -> F32:
        """Run all layers as one graph."""
        self.check(rows, hidden)
        self._passes += 1
        self._rows += len(rows)
        self._part_runs += 1
        if hidden is not None:
            np.copyto(whole.hidden(len(rows)), hidden)
        elif not whole.embeds:
            self._embed(rows.tokens, whole.hidden(len(rows)))
        return whole.run(rows)

    def _run(self, rows: Rows, hidden: F32 | None, *, alone: bool) -> Steps:
        """Do what :meth:`steps` does; ``alone`` says that no other pass is computed before the sums come back."""
        self.check(rows, hidden)
        n = len(rows)
        self._passes += 1
        self._rows += n
        bindings = self._body(n)
        if hidden is None:
            self._embed(rows.tokens, bindings.hidden)
        else:
            np.copyto(bindings.hidden, hidden)
        attentions = self._attentions
        prepared: list[Any] = attentions.prepare(rows)
        body = iter(bindings.parts)
        next(body)()
        layers = self.shape.layers[self.spec.first : self.spec.end]
        for index, layer in enumerate(layers[:-1]):
            attentions.layer(index, prepared)
            next(body)()
            if layer.moe is not None:
                part = next(body)
                # Other passes may be computed in the same buffers until the sums come back.
                kept = None if alone else part.keep()
                sums = yield bindings.work(layer)
                if kept is not None:
                    part.restore(kept)
                    prepared = attentions.prepare(rows)
                np.copyto(bindings.routed, sums)
                part()
        attentions.layer(len(layers) - 1, prepared)
        return (yield from self._finish(rows, bindings, alone=alone))

    def _finish(self, rows: Rows, body: _Bindings, *, alone: bool) -> Steps:
        """Run what comes after the last attention; at the tail only for the rows that want an output."""
        wanted = np.flatnonzero(rows.wants_output) if self._tail else None
        n = len(rows) if wanted is None else len(wanted)
        self._part_runs += len(body.parts) + (self._n_last if n else 0)
        width = self.shape.n_vocab if self._tail else self.shape.n_embd
        result = np.empty((n, width), np.float32)
        if n == 0:
            return result
        last = self._last(n)
        if wanted is None:
            np.copyto(last.hidden, body.final)
            np.copyto(last.attention, body.attention)
        else:
            np.take(body.final, wanted, axis=0, out=last.hidden)
            np.take(body.attention, wanted, axis=0, out=last.attention)
        last.parts[-1].output("logits" if self._tail else "next", result)
        last.parts[0]()
        if len(last.parts) > 1:
            kept = None if alone else last.parts[1].keep()
            sums = yield last.work(self.shape.layers[self.spec.end - 1])
            if kept is not None:
                last.parts[1].restore(kept)
            np.copyto(last.routed, sums)
            last.parts[-1].output("logits" if self._tail else "next", result)
            last.parts[1]()
        return result

    def _embed(self, tokens: NDArray[np.int32], out: F32) -> None:
        if self._look_up is not None:
            np.copyto(out, self._look_up.run({"tokens": tokens[:, None]})[0])
            return
        assert self._embedding is not None
        rows = quants.dequantize(self._embedding[tokens], self._embedding_type, out.shape, threads=1)
        np.multiply(rows, np.float32(self.shape.embedding_scale), out=out)

    # ------------------------------------------------------------------------------------------ bindings

    def _body(self, n: int) -> _Bindings:
        """Tie all parts before the last attention to the buffers, for n rows."""
        found = self._bodies.get(n)
        if found is None:
            if n > self._longest:
                # What operators took for shorter passes lies in pieces, of which a longer one can use none.
                self._longest = n
                trim_heap()
            found = self._bodies[n] = self._bind(self._parts[: -self._n_last], n, self._buffers)
            if len(self._bodies) > _KEPT_WIDTHS:
                self._bodies.popitem(last=False)
        self._bodies.move_to_end(n)
        return found

    def _last(self, n: int) -> _Bindings:
        """Tie the parts after the last attention to buffers of their own, for n rows."""
        found = self._lasts.get(n)
        if found is None:
            found = self._lasts[n] = self._bind(self._parts[-self._n_last :], n, self._last_buffers)
            if len(self._lasts) > _KEPT_WIDTHS:
                self._lasts.popitem(last=False)
        self._lasts.move_to_end(n)
        return found

    def _bind(self, parts: list[_LoadedPart], n: int, buffers: dict[str, Array]) -> _Bindings:
        def view(name: str, port: Port) -> Array:
            return buffers[name][: n * port.width].reshape(n, port.width)

        read, write = "hidden", "next"
        hidden = Port("hidden", self.shape.n_embd)
        bound = []
        for part in parts:
            inputs = {p.name: view(read if p.name == "hidden" else p.name, p) for p in part.inputs}
            outputs = {
                p.name: view(write if p.name == "next" else p.name, p)
                for p in part.outputs
                if p.name in buffers
            }
            bound.append(part.session.bind(inputs, outputs))
            if "next" in outputs:
                read, write = write, read
        attended = self._attended
        views: dict[str, Array] = {
            port.name: view(port.name, port)
            for part in parts
            for port in (*part.inputs, *part.outputs)
            if port.name in buffers
        }
        return _Bindings(
            parts=bound,
            hidden=view("hidden", hidden),
            final=view(read, hidden),
            attention=view("attention", Port("attention", attended)),
            values=views,
        )

    # ------------------------------------------------------------------------------------------ the rest

    def memory(self) -> MemoryEstimate:
        return self._memory

    def local_bank(self) -> ExpertBank | None:
        return self._bank

    def statistics(self) -> StackStatistics:
        """Return what has been done so far."""
        return StackStatistics(self._passes, self._rows, self._part_runs, self._attentions.calls)

    def close(self) -> None:
        if self._bank is not None:
            self._bank.close()
        if self._whole is not None:
            self._whole.close()
            self._whole = None
        self._bodies.clear()
        self._lasts.clear()
        self._parts.clear()
        self._buffers.clear()
        self._last_buffers.clear()
        self._attentions.close()
        self._embedding = self._look_up = None
        trim_heap()
