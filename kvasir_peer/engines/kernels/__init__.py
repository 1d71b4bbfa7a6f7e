"""Products of activations with block-quantised weights, and attention, in C, for the onnxruntime engine.

``lanes.h`` has the vector instructions, ``panels.h`` says how weights lie, ``pack.c`` lays them so, ``chunks.h`` takes
codes and scales out again, ``multiply.c`` and ``multiply_exact.c`` multiply, ``work.c`` spreads that over threads, as
``attention.c`` does attention. ``onnx_*.c`` make operators of onnxruntime of it all, one a file. Why there is such a
thing: ``docs/decisions/0008-kernels-of-our-own.md``.
"""
