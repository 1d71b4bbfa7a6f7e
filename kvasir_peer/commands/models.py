"""``kvasir-peer models``: what GGUF files hold, and the weights that this peer keeps on disk."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from kvasir_peer import running, settings
from kvasir_peer.commands.common import HomeFlag, Reporter
from kvasir_peer.errors import ModelFileError, UsageError, WireError
from kvasir_peer.progress import Progress

if TYPE_CHECKING:
    from kvasir_peer.models.manifest import Manifest

MANIFEST_FOLDER = "manifests"
NAME_CHARACTERS = 12  # of a manifest's id: enough to tell any two models of one machine apart


@dataclass(frozen=True, slots=True)
class _Kept:
    """A model of which there are weights on disk."""

    file: Path
    manifest: Manifest
    held: dict[bytes, int]  # chunks on disk: hash to size

    @property
    def layers(self) -> str:
        """Layers of which anything is held, such as ``0-9``."""
        found = sorted(
            int(page.name.removeprefix("blk."))
            for page in self.manifest.pages.values()
            if page.name.startswith("blk.")
            and any(chunk.hash in self.held for tensor in page.tensors for chunk in tensor.chunks())
        )
        runs: list[list[int]] = []
        for layer in found:
            if runs and runs[-1][1] == layer - 1:
                runs[-1][1] = layer
            else:
                runs.append([layer, layer])
        return ", ".join(f"{first}-{last}" if first != last else str(first) for first, last in runs)


def _kept(home: Path) -> list[_Kept]:
    from kvasir_peer.models.manifest import Manifest
    from kvasir_peer.models.store import ChunkReader

    reader = ChunkReader(home / settings.STORE_FOLDER)
    found: dict[str, _Kept] = {}
    for file in sorted((home / MANIFEST_FOLDER).glob("*")):
        try:
            manifest = Manifest.decode(file.read_bytes())
        except (OSError, WireError):
            continue  # a cut or foreign file: it describes nothing, and whoever needs it fetches it again
        held = {
            chunk.hash: chunk.size
            for page in manifest.pages.values()
            for tensor in page.tensors
            for chunk in tensor.chunks()
            if reader.has(chunk.hash)
        }
        if held:
            found[manifest.id] = _Kept(file, manifest, held)
    return list(found.values())


def list_models(*, home: HomeFlag = None) -> None:
    """List the models of which this peer has weights on disk."""
    found = _kept(settings.home_directory(home))
    if not found:
        print("no weights on disk")
        return
    print(f"{'model':<32} {'id':<{NAME_CHARACTERS}} {'on disk':>12} {'of':>12}  layers")
    for kept in found:
        held, total = sum(kept.held.values()), kept.manifest.n_bytes
        print(
            f"{kept.manifest.root.name[:32]:<32} {kept.manifest.id[:NAME_CHARACTERS]} "
            f"{held / 1e6:>9.1f} MB {total / 1e6:>9.1f} MB  {kept.layers}"
        )


def remove_model(
    name: Annotated[str, Parameter(name="MODEL", help="Name, or first characters of the id.")],
    /,
    *,
    home: HomeFlag = None,
) -> None:
    """Remove a model's weights from disk; what other models share with it stays."""
    from kvasir_peer.models.store import ChunkStore

    folder = settings.home_directory(home)
    found = _kept(folder)
    chosen = [kept for kept in found if name == kept.manifest.root.name or kept.manifest.id.startswith(name)]
    if not name or len(chosen) != 1:
        known = ", ".join(
            f"{kept.manifest.root.name} ({kept.manifest.id[:NAME_CHARACTERS]})" for kept in found
        )
        problem = "more than one model matches" if name and chosen else "there is no model"
        raise UsageError(f"{problem} {name!r}; on disk: {known or 'none'}")
    kept = chosen[0]
    shared = {digest for other in found if other is not kept for digest in other.held}
    with running.run_from(folder, "models rm"), ChunkStore(folder / settings.STORE_FOLDER, 1 << 62) as store:
        removed = 0
        for digest, size in kept.held.items():
            if digest not in shared:
                store.remove(digest)
                removed += size
        kept.file.unlink(missing_ok=True)
    print(f"removed {kept.manifest.root.name}: {removed / 1e6:.1f} MB")


def show_model(
    file: Annotated[Path, Parameter(name="FILE", help="GGUF file; any part of a split one.")], /
) -> None:
    """Show what a GGUF file holds, and whether it can be served."""
    from kvasir_peer.engines import architectures
    from kvasir_peer.models.gguf import GGML_TYPES, GgufFile

    with GgufFile.open(file.expanduser()) as gguf:
        metadata, tensors = gguf.metadata, gguf.tensors
        lines = [
            f"file          {gguf.path}",
            f"name          {metadata.get('general.name', '')}",
            f"architecture  {gguf.architecture}",
            f"size          {gguf.n_bytes / 1e6:.1f} MB in {len(tensors)} tensors",
        ]
        counts: Counter[str] = Counter()
        sizes: Counter[str] = Counter()
        parameters = 0
        for tensor in tensors.values():
            kind = GGML_TYPES[tensor.type].name
            counts[kind] += 1
            sizes[kind] += tensor.n_bytes
            elements = 1
            for length in tensor.shape:
                elements *= length
            parameters += elements
        lines.append(f"parameters    {parameters / 1e6:,.1f} million")
        lines += [
            f"type          {kind}: {counts[kind]} tensors, {size / 1e6:.1f} MB"
            for kind, size in sizes.most_common()
        ]
        lines.append(f"chat template {'yes' if metadata.get('tokenizer.chat_template') else 'no'}")
        try:
            shape = architectures.parse(metadata, tensors)
        except ModelFileError as error:
            lines.append(f"can be served no: {error}")
        else:
            lines.append(f"layers        {shape.n_layer}, width {shape.n_embd}, vocabulary {shape.n_vocab}")
            experts = {layer.moe.n_expert for layer in shape.layers if layer.moe is not None}
            if experts:
                lines.append(f"experts       {max(experts)} in each layer that has them")
            lines.append(f"context       {shape.context_length} positions")
            lines.append(f"can be served yes, by 2 to {min(shape.n_layer, settings.MAX_STAGES)} stages")
    print("\n".join(lines))


def split_experts(
    source: Annotated[Path, Parameter(name="IN", help="GGUF of a dense model: llama, qwen2 or qwen3.")],
    target: Annotated[Path, Parameter(name="OUT", help="GGUF to write.")],
    /,
    *,
    experts: Annotated[
        int, Parameter(help="Experts of each layer: 2, 4, 8 …; half are used for a row.")
    ] = 16,
    all_experts: Annotated[
        bool,
        Parameter(negative="", help="No choice: every row uses all experts, each of them once in the file."),
    ] = False,
    seed: Annotated[int, Parameter(help="Of the router's random vectors.")] = 0,
) -> None:
    """Re-lay a dense model's feed-forward neurons as experts, so that volunteers can share it.

    The result computes what the dense model computes; nothing is requantised.
    """
    from kvasir_peer.models import split_experts as tool

    source, target = source.expanduser(), target.expanduser()
    if target.exists():
        raise UsageError(f"{target} exists already: remove it, or give another name")
    if seed < 0:
        raise UsageError(f"--seed {seed}: give 0 or more")
    report = Reporter(json_lines=False)
    tool.split_experts(
        source,
        target,
        experts=experts,
        routed=not all_experts,
        seed=seed,
        progress=lambda done, total: report(Progress("manifest", f"writing {target}", done, total, "bytes")),
    )
