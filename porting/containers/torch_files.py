"""PyTorch's files, read with ``weights_only=True``: only builders of arrays run."""

from __future__ import annotations

import argparse
import pickle
import re
import zipfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from concord.porting.file_tensors import NUMPY, Bits, StoredTensor, flat, of_framework
from concord.spec.errors import SpecError, optional
from concord.spec.files import refusing

# Training loops save settings and NumPy arrays with the weights, which PyTorch does not allow by default.
HARMLESS: tuple[Any, ...] = (
    argparse.Namespace,
    np.ndarray,
    np.dtype,
    np.zeros(1).__reduce__()[0],
    np.float64(1).__reduce__()[0],
    *(type(np.dtype(code)) for code in "bBhHiIqQefd?"),
)

# The refused class or function in PyTorch's message.
GLOBAL = re.compile(r"GLOBAL (\S+)")


def load(path: Path) -> Mapping[str, StoredTensor]:
    """A file's tensors, even inside a training loop's state."""
    with optional("a PyTorch file", "torch"):
        import torch

    with path.open("rb") as file:
        begin = file.read(24)
    # PyTorch's own messages about such files do not say what is wrong.
    if not begin.startswith((b"PK", b"\x80")):
        raise SpecError(f"it begins with {begin!r} but must be a PyTorch file" if begin else "it is empty")
    if begin.startswith(b"PK") and not zipfile.is_zipfile(path):
        raise SpecError("its end is missing; it may be incomplete")
    try:
        with torch.serialization.safe_globals(list(HARMLESS)):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        # Remove PyTorch's advice to load with weights_only=False, which would run the file's code.
        reason = " ".join(str(error).partition("WeightsUnpickler error: ")[2].split())
        reason = reason.partition(" Check the documentation")[0]
        if match := GLOBAL.search(str(error)):
            reason = f"it requests {match[1][:100]!r}, which no weight file needs; none of its code was run"
        raise SpecError(reason[:300] or "it is not a pickle of tensors; none of its code was run") from None
    except RuntimeError as error:
        if "TorchScript" in str(error):
            raise SpecError(
                "it is a compiled TorchScript model, which is code; save its state_dict()"
            ) from None
        raise
    return flat(content, _stored)


def _stored(tensor: Any, name: str) -> StoredTensor:
    if isinstance(tensor, (np.ndarray, np.generic)):
        return of_framework(tensor, name)
    dtype, shape = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    if dtype not in NUMPY or str(tensor.layout) != "torch.strided":
        raise SpecError(f"{name[:200]!r} has dtype {dtype}, {tensor.layout}, which is not known")
    return StoredTensor(dtype, shape, partial(_bits, tensor, dtype, shape))


def _bits(tensor: Any, dtype: str, shape: tuple[int, ...]) -> Bits:
    import torch

    # Bytes, since NumPy has no bfloat16. A conjugated or negated view would lose its flag with its dtype.
    flat_bytes = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    return np.asarray(flat_bytes.numpy().view(NUMPY[dtype]).reshape(shape))


def save(path: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """Write tensors as a ``state_dict``."""
    with optional("writing a PyTorch file", "torch"):
        import torch

    with refusing(path):
        torch.save(state(tensors), path)


def state(tensors: Mapping[str, StoredTensor]) -> dict[str, Any]:
    """Copy tensors to PyTorch tensors."""
    import torch

    copies = {}
    for name, tensor in tensors.items():
        copies[name] = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype))
        copies[name].reshape(-1).view(torch.uint8).numpy()[:] = np.frombuffer(tensor.data(), np.uint8)
    return copies
