"""Products of activations with block-quantised weights, in C, for the onnxruntime engine.

``lanes.h`` has the vector instructions, ``panels.h`` says how weights lie, ``pack.c`` lays them so, ``chunks.h`` takes
codes and scales out again, ``multiply.c`` multiplies, ``work.c`` spreads that over threads, ``onnx_operators.c`` makes
it operators of onnxruntime. Why there is such a thing: ``docs/decisions/0008-kernels-of-our-own.md``.
"""
