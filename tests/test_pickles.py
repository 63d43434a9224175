"""Pickles of PyTorch and PaddlePaddle: read without being run, and refused by name where they would run something."""

from __future__ import annotations

import collections
import io
import pickle
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from concord.porting.containers import paddle, torch
from concord.porting.faults.files import Runs
from concord.porting.located import Refused, answer, understood
from concord.porting.pickles.machine import Machine
from concord.porting.pickles.tensors import tensors
from concord.porting.stored import in_memory
from concord.spec.errors import SpecError

ARRAYS = {
    "a": np.arange(15, dtype=np.float32).reshape(3, 5),
    "b.c": np.arange(7, dtype=np.float64),
    "d": np.float16([[0.5]]),
    "e": np.zeros((0, 3), np.float32),
    "f": np.array(7),
}


@pytest.fixture(autouse=True)
def here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read in this process, which is quicker; one test reads as everybody does."""
    if "archive" not in request.node.name:
        for container in (torch, paddle):
            monkeypatch.setattr(container, "located", lambda path, look: understood(answer(path, look), path))


@pytest.mark.parametrize(("container", "name"), [(torch, "model.pt"), (paddle, "model.pdparams")])
def test_tensors_come_back_bit_for_bit(tmp_path: Path, container: Any, name: str) -> None:
    stored = {key: in_memory(np.asarray(array)) for key, array in ARRAYS.items()} | {
        "g": in_memory(np.arange(99, dtype=np.uint16), "bfloat16")
    }
    container.write(tmp_path / name, stored)
    assert container.is_one(tmp_path / name)
    found = container.read(tmp_path / name)
    assert {key: (one.dtype, one.shape, one.sha256()) for key, one in found.items()} == {
        key: (one.dtype, one.shape, one.sha256()) for key, one in stored.items()
    }


@pytest.mark.parametrize("protocol", range(6))
def test_arrays_are_found_in_every_protocol(protocol: int, tmp_path: Path) -> None:
    arrays = {**ARRAYS, "fortran": np.asfortranarray(np.random.default_rng(0).standard_normal((11, 13)))}
    path = tmp_path / "model.pdparams"
    path.write_bytes(pickle.dumps({**arrays, "some": "text", "number": 3}, protocol))
    found = paddle.read(path)
    assert {name: one.bits().tobytes() for name, one in found.items()} == {
        name: array.tobytes() for name, array in arrays.items()
    }


@pytest.mark.parametrize("place", ["entry", "key of a list", "instead of a tensor", "archive"])
def test_a_pickle_that_would_run_something_is_refused_by_name(tmp_path: Path, place: str) -> None:
    made, path = tmp_path / "made", tmp_path / "model.pt"
    trap = Runs(made)
    content = pickle.dumps(
        {
            "entry": {"a": np.zeros(3), "b": trap},
            "key of a list": [[trap]],
            "instead of a tensor": trap,
            "archive": {"a": trap},
        }[place],
        2,
    )
    if place == "archive":
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr("archive/data.pkl", content)
        content = buffer.getvalue()
    path.write_bytes(content)
    with pytest.raises(
        SpecError, match=r"'posix\.mkdir', which no file of weights needs; nothing of it was run"
    ):
        torch.read(path)
    assert not made.exists()


def test_a_class_of_ones_own_is_refused_by_name() -> None:
    module = types.ModuleType("somebodys")
    module.Net = type("Net", (), {"__module__": "somebodys"})
    sys.modules["somebodys"] = module
    try:
        content = pickle.dumps({"model": module.Net()})
    finally:
        del sys.modules["somebodys"]
    with pytest.raises(Refused, match=r"asks for 'somebodys\.Net'|asks for 'copyreg"):
        tensors(Machine(content).run())


def rebuilt(
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    begin: int = 0,
    count: int = 6,
    kind: str = "FloatStorage",
) -> bytes:
    """Return an archive with one tensor, of six numbers, that is said to be otherwise."""
    head = (
        pickle.PROTO
        + b"\x02"
        + pickle.EMPTY_DICT
        + torch.text("a")
        + torch.named("torch._utils", "_rebuild_tensor_v2")
        + pickle.MARK
    )
    storage = (
        pickle.MARK
        + torch.text("storage")
        + torch.named("torch", kind)
        + torch.text("0")
        + torch.text("cpu")
        + torch.number(count)
        + pickle.TUPLE
        + pickle.BINPERSID
    )
    content = (
        head
        + storage
        + torch.number(begin)
        + torch.numbers(shape)
        + torch.numbers(stride)
        + pickle.NEWFALSE
        + pickle.EMPTY_DICT
        + pickle.TUPLE
        + pickle.REDUCE
    )
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", content + pickle.SETITEM + pickle.STOP)
        archive.writestr("archive/data/0", np.arange(6, dtype=np.float32).tobytes())
    return buffer.getvalue()


def test_strides_and_offsets_are_those_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(rebuilt((2, 2), (1, 3), begin=1))
    assert torch.read(path)["a"].bits().tolist() == [[1.0, 4.0], [2.0, 5.0]]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (rebuilt((2, 3), (3, 1), begin=1), "reaches beyond its storage"),
        (rebuilt((7,), (0,)), "reaches beyond its storage"),
        (rebuilt((2, 3), (3, 1), count=1 << 30, begin=1 << 20), "reaches beyond its storage"),
        (rebuilt((1 << 41,), (1,)), "shape, stride or offset that is none"),
        (rebuilt((2,), (1, 1)), "shape, stride or offset that is none"),
        (rebuilt((2,), (1,), kind="QInt8Storage"), "of no known dtype"),
        (b"", "empty"),
        (b"PK\x03\x04" + bytes(50), "BadZipFile"),
        (pickle.PROTO + b"\x02" + pickle.BINUNICODE + b"\xff\xff\xff\xff", "cut off"),
        (pickle.PROTO + b"\x02" + pickle.MARK, "cut off"),
        (pickle.PROTO + b"\x02" + pickle.EXT1 + b"\x01.", "opcode"),
        (b"\x80\x02]" + b"(" + b"2" * 10 + b".", "stack"),
    ],
    ids=lambda value: value if isinstance(value, str) else "file",
)
def test_a_spoilt_file_is_refused_in_a_line(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "model.pt"
    path.write_bytes(content)
    with pytest.raises(SpecError, match=said) as caught:
        torch.read(path)
    assert len(caught.value.problems) == 1


def test_a_pickle_that_holds_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(Refused, match="deep"):
        tensors(Machine(pickle.dumps(loop)).run())
    assert tensors(Machine(pickle.dumps(collections.OrderedDict(a=3))).run()) == []


def test_what_a_training_loop_keeps_beside_the_weights_is_told_from_them(tmp_path: Path) -> None:
    stored = {f"state_dict.{name}": in_memory(np.asarray(array)) for name, array in ARRAYS.items()}
    torch.write(tmp_path / "model.pt", {**stored, "optimizer.state.0.exp_avg": in_memory(np.zeros(3))})
    assert set(torch.read(tmp_path / "model.pt")) == {*ARRAYS, "optimizer.state.0.exp_avg"}
