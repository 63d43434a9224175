"""File types: how to recognise, read and write them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from concord.porting.containers import isolation
from concord.porting.file_tensors import StoredTensor
from concord.spec.errors import SpecError, refuse
from concord.spec.files import MOST_PROBLEMS, read_json

# Hugging Face's cache stores files here; its ``snapshots/<revision>/`` folders link to them.
BLOBS = "blobs"

# Training loops store all weights under one of the first three, next to other state. PyTorch prefixes every
# name with one of the others: DataParallel, torch.compile, FSDP.
WRAPPERS = ("state_dict", "model_state_dict", "model", "module", "_orig_mod", "_fsdp_wrapped_module")

BESIDE = ("optimizer", "scheduler", "ema", "epoch")  # prefixes of that other state


def unwrapped(tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Strip nested prefixes of all weights."""
    for wrapper in WRAPPERS:
        inner = {name for name in tensors if name.startswith(f"{wrapper}.")}
        if inner and all(name in inner or name.startswith(BESIDE) for name in tensors):
            return unwrapped(
                {
                    name.removeprefix(f"{wrapper}.") if name in inner else name: tensor
                    for name, tensor in tensors.items()
                }
            )
    return tensors


def stays(path: Path, folder: Path) -> bool:
    """Whether a file is in its folder, or links to the folder's cache."""
    try:
        path.exists()
        root, target = folder.resolve(), path.resolve()
    except (OSError, RuntimeError):  # too long a name; circular links
        return False
    return target.is_relative_to(root) or target.parent == root.parent.parent / BLOBS


def inside(folder: Path, name: str, where: str) -> Path:
    """Resolve a relative name from a file, and refuse one that leaves the folder."""
    parts = PurePosixPath(name).parts
    path = folder.joinpath(*parts)
    if (
        PurePosixPath(name).is_absolute()
        or ".." in parts
        or not name.isprintable()
        or not stays(path, folder)
    ):
        raise SpecError(f"{where} names {name[:80]!r} but all its files must be in {folder}")
    return path


# An index says which of several adjacent files contains each tensor.
INDEX = ".index.json"


@dataclass(frozen=True)
class Container:
    """A file type for named tensors."""

    name: str
    backend: str  # backend of such files, unless the format names one
    load: Callable[[Path], Mapping[str, StoredTensor]] | None  # None: write-only
    save: Callable[..., None]  # may write more than one file
    endings: tuple[str, ...] = ()
    framework: str = ""  # the extra that installs the imports of both functions
    lacks: tuple[str, ...] = ()  # dtypes
    looks: Callable[[Path], bool] | None = None  # recognises a path if its name is insufficient
    isolated: bool = True  # read in a separate process

    def is_one(self, path: Path) -> bool:
        """Whether a path is such a file, or an index of several."""
        if self.looks:
            return self.looks(path)
        return path.name.removesuffix(INDEX).endswith(self.endings) and path.is_file()

    def write(self, path: Path, tensors: Mapping[str, StoredTensor], **about: Any) -> None:
        """Write tensors; ``about`` must be JSON, to be sent between processes."""
        refuse(
            [
                f"{name!r} has dtype {tensor.dtype}, which {self.name} files cannot hold"
                for name, tensor in tensors.items()
                if tensor.dtype in self.lacks
            ]
        )
        if self.framework:
            isolation.write(self.save, path, tensors, self.framework, **about)
        else:
            self.save(path, tensors, **about)

    def read(self, path: Path) -> dict[str, StoredTensor]:
        """Tensors of a file, or of all files of an index, by name without wrapper prefixes.

        Raises:
            SpecError: if a file is corrupt, would run code, or takes too much time or memory.
        """
        return unwrapped(self._several(path) if path.name.endswith(INDEX) else self._one(path))

    def _one(self, path: Path) -> dict[str, StoredTensor]:
        if self.load is None:
            raise SpecError(f"{path}: {self.name} is write-only; read the checkpoint that it was made from")
        return isolation.read(self.load, path, self.framework) if self.isolated else dict(self.load(path))

    def _several(self, path: Path) -> dict[str, StoredTensor]:
        content = read_json(path)
        places = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
            raise SpecError(f"{path}: 'weight_map' must name the file that holds each tensor")
        files = {name: inside(path.parent, name, str(path)) for name in sorted({*places.values()})}
        tensors: dict[str, StoredTensor] = {}
        problems: list[str] = []
        for name, file in files.items():
            shard = self._one(file)
            names = {tensor for tensor, place in places.items() if place == name}
            problems += [
                f"{path} says that {tensor!r} is in {name} but it is not"
                for tensor in sorted(names - set(shard))
            ]
            problems += [
                f"{file} has {tensor!r} but the index does not say so"
                for tensor in sorted(set(shard) - names)
            ]
            tensors.update(shard)
        refuse(problems[:MOST_PROBLEMS])
        return {name: tensors[name] for name in places}
