"""What onnxruntime can do on this machine, found by running small kernels and comparing them with numpy.

Versions of onnxruntime differ in which operators they have, processors in which kernels are used, and a kernel that
computes something else is worse than one that is missing. So each operator that the engine builds on is tried once
per process before it is trusted (:mod:`kvasir_peer.engines.onnx_trials`); where one fails, the engine takes another
way (see ``Kernels``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvasir_peer.engines import onnx_trials, panels
from kvasir_peer.engines.base import F32, Precision
from kvasir_peer.engines.kernels.library import Missing, find_library
from kvasir_peer.engines.onnx_containers import Kernels
from kvasir_peer.engines.onnx_graph import Runtime
from kvasir_peer.errors import EngineError

# Root-mean-square deviation that is taken for rounding, as a part of the result's own root mean square. Rounding
# activations to int8 costs about 1 %.
_INT8_TOLERANCE = 0.03
_FLOAT_TOLERANCE = 1e-4
_EXACT_TOLERANCE = 3e-6
_INSTEAD_OF_PANELS = "onnxruntime's own operators are used, which need more time and memory"


@dataclass(frozen=True)
class Trial:
    """What came of one kernel.

    Attributes:
        name: of the kernel.
        works: whether it ran and agrees with numpy.
        deviation: root-mean-square deviation relative to numpy's result; nan where it did not run.
        remark: why it does not work and what is done instead, or "".
    """

    name: str
    works: bool
    deviation: float
    remark: str


@dataclass(frozen=True)
class Report:
    """What was found.

    Attributes:
        version: of onnxruntime.
        provider: execution provider that was tried.
        trials: one per kernel.
        kernels: what the engine will use.
    """

    version: str
    provider: str
    trials: tuple[Trial, ...]
    kernels: Kernels

    def lines(self) -> list[str]:
        """Return the report for people, one kernel a line."""
        head = f"onnxruntime {self.version}, {self.provider}"
        return [head] + [
            f"  {t.name}: {'works' if t.works else 'does not work'}"
            + (f", deviation {t.deviation:.1e}" if np.isfinite(t.deviation) else "")
            + (f" ({t.remark})" if t.remark else "")
            for t in self.trials
        ]


def probe(device: str = "cpu") -> Report:
    """Try all kernels; the result is kept for the life of the process.

    Args:
        device: ``cpu``, or the name of an execution provider.

    Raises:
        EngineError: onnxruntime has no such execution provider here.
    """
    return _probe(Runtime.of(1, device).provider)


def usable_kernels(device: str) -> Kernels:
    """Return what the engine may use.

    Raises:
        EngineError: attention, without which nothing can be computed, does not work here.
    """
    report = probe(device)
    for trial in report.trials:
        if not trial.works and trial.name.startswith("GroupQueryAttention"):
            raise EngineError(
                f"{trial.name} of onnxruntime {report.version} does not work here ({trial.remark}); "
                "install a newer onnxruntime, or take the torch engine"
            )
    return report.kernels


@functools.cache
def _probe(provider: str) -> Report:
    import onnxruntime

    runtime = Runtime(1, provider)
    trials: list[Trial] = []

    def attempt(name: str, instead: str, tolerance: float, work: Callable[[], tuple[F32, F32]]) -> bool:
        try:
            got, expected = work()
        except EngineError as error:
            trials.append(Trial(name, False, float("nan"), f"{error}; {instead}"))
            return False
        deviation = float(np.sqrt(np.mean((got - expected) ** 2) / np.mean(expected**2)))
        works = bool(np.isfinite(deviation) and deviation < tolerance)
        trials.append(Trial(name, works, deviation, "" if works else f"its results are wrong; {instead}"))
        return works

    def product(bits: int, block: int, level: int) -> bool:
        tolerance = _INT8_TOLERANCE if level == 4 else _FLOAT_TOLERANCE
        return attempt(
            f"MatMulNBits, {bits} bits, blocks of {block}, level {level}",
            "such weights are dequantised",
            tolerance,
            lambda: onnx_trials.try_product(runtime, bits, block, level),
        )

    codes4 = all([product(4, block, level) for block in (16, 32) for level in (0, 4)])
    codes8 = all([product(8, block, 4) for block in (16, 32)])
    experts = all(
        [
            attempt(
                f"QMoE, {bits} bits, router weights",
                "experts are computed one by one",
                _INT8_TOLERANCE,
                functools.partial(onnx_trials.try_experts, runtime, bits),
            )
            for bits in (4, 8)
        ]
    )
    library = _try_panels(attempt, runtime)
    if isinstance(library, Missing):
        trials.append(
            Trial("kernels of our own", False, float("nan"), f"{library.reason}; {_INSTEAD_OF_PANELS}")
        )
        library = None
    for name, n_slots, n_rows in (("one row in each of three slots", 3, 1), ("five rows after seven", 1, 5)):
        attempt(
            f"GroupQueryAttention, {name}",
            "nothing else will do",
            _FLOAT_TOLERANCE,
            functools.partial(onnx_trials.try_attention, runtime, n_slots, n_rows),
        )
    return Report(
        onnxruntime.__version__,
        provider,
        tuple(trials),
        Kernels(codes4=codes4, codes8=codes8, experts=experts, panels=library),
    )


_Attempt = Callable[[str, str, float, Callable[[], tuple[F32, F32]]], bool]


def _try_panels(attempt: _Attempt, runtime: Runtime) -> Path | Missing | None:
    """Return the library of C kernels, if all of them work; why there is none; or None where one does not work."""
    if runtime.provider != "CPUExecutionProvider":
        return Missing(f"they are for the processor, not for {runtime.provider}")
    library = find_library()
    if isinstance(library, Missing):
        return library
    tries: list[tuple[str, float, Callable[[], tuple[F32, F32]]]] = []
    products: tuple[tuple[Precision, float], ...] = (("fast", _INT8_TOLERANCE), ("exact", _EXACT_TOLERANCE))
    for precision, tolerance in products:
        linears = functools.partial(onnx_trials.try_linears, runtime, library.path, precision)
        forward = functools.partial(onnx_trials.try_forward, runtime, library.path, precision)
        tries.append((f"{len(panels.TYPES)} types, {precision}", tolerance, linears))
        tries.append((f"experts, {precision}", tolerance, forward))
    attention = functools.partial(onnx_trials.try_row_attention, runtime, library.path)
    embedding = functools.partial(onnx_trials.try_embedding, runtime, library.path)
    tries.append(("attention", _FLOAT_TOLERANCE, attention))
    tries.append(("embedding", _FLOAT_TOLERANCE, embedding))
    works = [
        attempt(f"kernels of our own ({library.instructions}), {what}", _INSTEAD_OF_PANELS, tolerance, work)
        for what, tolerance, work in tries
    ]
    return library.path if all(works) else None
