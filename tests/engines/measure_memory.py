"""Run as a program: what a torch stack really takes, beside what it says. Prints two numbers of bytes.

Usage: measure_memory.py MODEL FIRST END ROWS CONTEXT
"""

import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import torch
import torch.nn.functional as F

from kvasir_peer.engines.base import Rows, StackSpec
from kvasir_peer.engines.torch_engine import make_stack
from kvasir_peer.models.sources import GgufSource

PROCESS = psutil.Process()


class Peak(threading.Thread):
    """Watches the private memory of this process."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.highest = 0
        self._stopping = threading.Event()

    def run(self) -> None:
        while not self._stopping.wait(0.002):  # seconds
            self.look()

    def look(self) -> None:
        memory = PROCESS.memory_info()
        self.highest = max(self.highest, memory.rss - memory.shared)

    def stop(self) -> None:
        self._stopping.set()
        self.join()
        self.look()


def main(model: str, first: int, end: int, rows: int, context: int) -> None:
    warm = torch.randn(1, 1, 64, 64)
    F.scaled_dot_product_attention(warm, warm, warm)
    begin = PROCESS.memory_info()
    peak = Peak()
    peak.start()
    source = GgufSource(Path(model))
    stack = make_stack(source, StackSpec(first, end, 1, context, rows, threads=1))
    hidden = None if first == 0 else np.ones((rows, stack.shape.n_embd), np.float32)
    for position in range(0, context - rows + 1, rows):
        stack.forward(
            Rows.of([0] * rows, range(position, position + rows), [5] * rows, [True] * rows), hidden
        )
    time.sleep(0.01)  # seconds; one more look
    peak.stop()
    print(peak.highest - (begin.rss - begin.shared), stack.memory().total)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
