"""A kind of file: how it is known, and who reads and writes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from concord.porting.containers import isolation
from concord.porting.file_tensors import StoredTensor
from concord.spec.errors import SpecError, refuse
from concord.spec.files import MOST_PROBLEMS, read_json

BLOBS = "blobs"
"""The folder of Hugging Face's cache that keeps what ``snapshots/<revision>/*`` beside it are links to."""

WRAPPERS = ("state_dict", "model_state_dict", "model", "module", "_orig_mod", "_fsdp_wrapped_module")
"""What training loops keep all weights under, beside what else they keep, and what PyTorch puts before the
name of each where a model was wrapped: parallel, compiled, sharded."""

BESIDE = ("optimizer", "scheduler", "ema", "epoch")
"""How the names of that begin."""


def unwrapped(tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return tensors without the names that wrap all weights, one in another."""
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
    """Say whether a file of a folder lies in it.

    Or is a link to the blobs of the cache that the folder belongs to.
    """
    try:
        path.exists()
        here, there = folder.resolve(), path.resolve()
    except (OSError, RuntimeError):  # a name that is too long; links in a circle
        return False
    return there.is_relative_to(here) or there.parent == here.parent.parent / BLOBS


def inside(folder: Path, name: str, where: str) -> Path:
    """Return a file of a folder by a name that a file gives.

    Raises:
        SpecError: if the name leads out of the folder, or is none that a file can have.
    """
    parts = PurePosixPath(name).parts
    path = folder.joinpath(*parts)
    if (
        PurePosixPath(name).is_absolute()
        or ".." in parts
        or not name.isprintable()
        or not stays(path, folder)
    ):
        raise SpecError(f"{where}: names {name[:80]!r} but all its files must lie in {folder}")
    return path


INDEX = ".index.json"
"""How the name of an index ends that says which tensor is in which of several files beside it."""


@dataclass(frozen=True)
class Container:
    """A kind of file: tensors by their own names, whatever they mean.

    Attributes:
        name: of the kind.
        backend: that such files are made for, where their format does not say so itself.
        load: reads one; None: such files are written alone.
        save: writes tensors, one by one, into a folder that is being written, which may get more than one
            file.
        endings: of the names of such files.
        framework: that both import, by the extra that it comes with; empty: none.
        lacks: dtypes that such files do not have.
        looks: says of a path whether it is one, where its name does not.
        isolated: whether files are read in a process of their own.
    """

    name: str
    backend: str
    load: Callable[[Path], Mapping[str, StoredTensor]] | None
    save: Callable[..., None]
    endings: tuple[str, ...] = ()
    framework: str = ""
    lacks: tuple[str, ...] = ()
    looks: Callable[[Path], bool] | None = None
    isolated: bool = True

    def is_one(self, path: Path) -> bool:
        """Say whether a file is of this kind, or the index of several, by its name."""
        if self.looks:
            return self.looks(path)
        return path.name.removesuffix(INDEX).endswith(self.endings) and path.is_file()

    def write(self, path: Path, tensors: Mapping[str, StoredTensor], **about: Any) -> None:
        """Write tensors.

        Args:
            about: what ``save`` takes besides, as JSON has it.

        Raises:
            SpecError: if they cannot be written, this kind of file has no such dtype, or the framework is not
                installed.
        """
        refuse(
            [
                f"{name!r} has dtype {tensor.dtype}, which files of the kind {self.name} do not have"
                for name, tensor in tensors.items()
                if tensor.dtype in self.lacks
            ]
        )
        if self.framework:
            isolation.write(self.save, path, tensors, self.framework, **about)
        else:
            self.save(path, tensors, **about)

    def read(self, path: Path) -> dict[str, StoredTensor]:
        """Return the tensors of a file, or of all files that an index names.

        Their numbers are read when they are asked for. Their names are without what wraps all of them.

        Raises:
            SpecError: if it is no whole file of this kind, would have code run, or takes more than any file
                of weights; if the files of an index lie elsewhere, lack a tensor or have others.
        """
        return unwrapped(self._several(path) if path.name.endswith(INDEX) else self._one(path))

    def _one(self, path: Path) -> dict[str, StoredTensor]:
        if self.load is None:
            raise SpecError(f"{path}: {self.name} is written alone; read the checkpoint that it was made of")
        return isolation.read(self.load, path, self.framework) if self.isolated else dict(self.load(path))

    def _several(self, path: Path) -> dict[str, StoredTensor]:
        content = read_json(path)
        places = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
            raise SpecError(f"{path}: 'weight_map' must say for each tensor which file has it")
        files = {name: inside(path.parent, name, str(path)) for name in sorted({*places.values()})}
        found: dict[str, StoredTensor] = {}
        problems: list[str] = []
        for name, file in files.items():
            tensors = self._one(file)
            said = {tensor for tensor, shard in places.items() if shard == name}
            problems += [
                f"{path}: says that {tensor!r} is in {name} but it is not"
                for tensor in sorted(said - set(tensors))
            ]
            problems += [
                f"{file}: has {tensor!r} but the index does not say so"
                for tensor in sorted(set(tensors) - said)
            ]
            found.update(tensors)
        refuse(problems[:MOST_PROBLEMS])
        return {tensor: found[tensor] for tensor in places}
