"""A real chat model, quantised, and llama.cpp's logits on a text of 500 tokens."""

from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from llama_cpp import LlamaCpp, quantize

from kvasir_peer.engines import quants
from kvasir_peer.models.gguf import GgufFile
from kvasir_peer.models.tokenizer import Tokenizer

TEXT_TOKENS = 500
N_LAYER = 30
_TEXT = Path(__file__).resolve().parents[2] / "LICENSE"


@dataclass(frozen=True, eq=False)
class RealText:
    """A model file, tokens of a text, and llama.cpp's logits [tokens, vocabulary] after each."""

    path: Path
    tokens: list[int]
    logits: np.ndarray

    def compare(self, logits: np.ndarray) -> tuple[float, float]:
        """Share of positions with the same best token, and root mean square difference in standard deviations."""
        same = float(np.mean(logits.argmax(1) == self.logits.argmax(1)))
        return same, float(np.sqrt(np.mean((logits - self.logits) ** 2)) / self.logits.std())


def ask_llama_cpp(path: Path) -> RealText:
    """Run the text through llama.cpp."""
    with GgufFile.open(path) as file:
        tokenizer = Tokenizer.from_gguf(file.metadata)
    tokens = tokenizer.encode(_TEXT.read_text(), add_special=False, parse_special=False)[:TEXT_TOKENS]
    with LlamaCpp(path, TEXT_TOKENS, threads=2) as model:
        return RealText(path, tokens, model.logits(tokens))


def write_k_quants(source: Path, folder: Path) -> Path:
    """Requantise the down projections as Q4_K and Q6_K by turns, as Q4_K_M files have them.

    Their rows are 1,536 wide; all other rows are 576, no multiple of 256, and stay as they are.
    """
    reader = gguf.GGUFReader(source)
    path = folder / "SmolLM2-K.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, inner)
    for i, tensor in enumerate(reader.tensors):
        if "ffn_down" not in tensor.name:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
            continue
        shape = tuple(int(n) for n in reversed(tensor.shape))
        target = quants.BY_NAME["Q6_K" if i % 2 else "Q4_K"]
        values = quants.dequantize(tensor.data, tensor.tensor_type, shape)
        raw = quantize(values, target.id, quants.row_bytes(target.id, shape[1]))
        writer.add_tensor(tensor.name, raw, raw_dtype=gguf.GGMLQuantizationType(target.id))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
