"""Kinds of files: whatever is written comes back, and whatever bytes there are, they are read or refused in a line."""

from __future__ import annotations

import json
import pickle
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from concord.porting import registry
from concord.porting.containers import bundle, h5, msgpack, paddle, safetensors, torch
from concord.porting.containers.bundle import index
from concord.porting.located import answer, located, understood
from concord.porting.pickles import machine
from concord.porting.pickles.reader import look
from concord.porting.stored import FLOATS, NUMPY, in_memory
from concord.spec.errors import SpecError

WRITTEN = {
    safetensors: "a.safetensors",
    torch: "a.pt",
    paddle: "a.pdparams",
    msgpack: "a.msgpack",
    bundle: "a.ckpt.index",
    h5: "a.weights.h5",
}
"""What writes files, and how their names end."""

OFTEN = settings(max_examples=25, deadline=None, derandomize=True, database=None)

RARELY = settings(OFTEN, max_examples=8)

SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)

NAMES = st.text("abcdefgh_é", min_size=1, max_size=9)


@pytest.fixture(autouse=True, scope="module")
def here() -> Any:
    """Look at files in this process, which is quicker."""
    with pytest.MonkeyPatch.context() as patch:
        for container in {form.container for form in registry.FORMATS.values()}:
            if hasattr(container, "located"):
                patch.setattr(container, "located", lambda path, look: understood(answer(path, look), path))
        yield


def tensor(dtype: str, shape: tuple[int, ...], seed: int) -> Any:
    """Return a tensor of any bits, NaN and infinity too."""
    count = int(np.prod(shape, dtype=int)) * np.dtype(NUMPY[dtype]).itemsize
    return in_memory(
        np.frombuffer(np.random.default_rng(seed).bytes(count), NUMPY[dtype]).reshape(shape), dtype
    )


@pytest.mark.parametrize("container", WRITTEN, ids=lambda container: container.__name__.rpartition(".")[2])
@RARELY
@given(
    st.dictionaries(NAMES, st.builds(tensor, st.sampled_from(FLOATS), SHAPES, st.integers(0, 9)), max_size=5)
)
def test_whatever_is_written_comes_back_bit_for_bit(container: Any, tensors: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / WRITTEN[container]
        container.write(path, tensors)
        found = container.read(path)
        assert {name: (one.dtype, one.shape, one.sha256()) for name, one in found.items()} == {
            name: (one.dtype, one.shape, one.sha256()) for name, one in tensors.items()
        }


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**65), 2**65)
    | st.text(max_size=9)
    | st.sampled_from(["F32", "U8", "dtype", "shape", "data_offsets"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets", "a"]), inner, max_size=4)
    ),
    max_leaves=12,
)


def refused_or_read(container: Any, name: str, content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / name).write_bytes(content)
        problems: list[str] = []
        try:
            for stored in container.read(Path(folder) / name).values():
                stored.sha256()
        except SpecError as error:
            problems = error.problems
        assert all("\n" not in line and name in line for line in problems)
        assert [path.name for path in Path(folder).iterdir()] == [name]


@OFTEN
@given(st.dictionaries(st.text(max_size=5), JSON, max_size=4), st.binary(max_size=40))
def test_any_header_is_read_or_refused(header: dict[str, Any], data: bytes) -> None:
    text = json.dumps(header).encode()
    refused_or_read(safetensors, "a.safetensors", len(text).to_bytes(8, "little") + text + data)


CODES = st.lists(
    st.integers(0x80, 0xFF).map(lambda code: bytes([code])) | st.binary(max_size=6), max_size=30
).map(b"".join)


@OFTEN
@given(CODES)
def test_any_msgpack_is_read_or_refused(content: bytes) -> None:
    refused_or_read(msgpack, "a.msgpack", b"\x81\xa1a" + content)


OPCODES = st.lists(
    st.sampled_from(sorted(machine._STEPS))
    | st.binary(max_size=5)
    | st.sampled_from([b"torch._utils\n_rebuild_tensor_v2\n", b"\x01\x00\x00\x00", pickle.MARK * 3]),
    max_size=60,
).map(b"".join)


@OFTEN
@given(OPCODES)
def test_any_pickle_is_read_or_refused(content: bytes) -> None:
    refused_or_read(torch, "a.pt", pickle.PROTO + b"\x02" + content + pickle.STOP)


@OFTEN
@given(st.dictionaries(st.binary(max_size=4), st.binary(max_size=30), max_size=6))
def test_any_entries_of_an_index_are_read_or_refused(entries: dict[bytes, bytes]) -> None:
    refused_or_read(bundle, "a.ckpt.index", index.table(entries))


def test_no_pickle_is_opened_by_whoever_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened_here(*_: object) -> None:
        raise AssertionError("a pickle is opened in this process")

    monkeypatch.setattr(machine.Machine, "__init__", opened_here)
    for container in (torch, paddle):
        path = tmp_path / WRITTEN[container]
        container.write(path, {"a": in_memory(np.arange(3.0))})
        with pytest.raises(AssertionError, match="in this process"):
            look(path)
        monkeypatch.setattr(container, "located", located)
        assert container.read(path)["a"].bits().tolist() == [0.0, 1.0, 2.0]
