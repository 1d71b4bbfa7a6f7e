"""Kvasir peer: people's own machines serve one large language model together."""

import os

# onnxruntime 1.29 and newer write a device id and an event database on import unless this is in the
# environment before that import; a call afterwards comes too late.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

__version__ = "0.1.0"
