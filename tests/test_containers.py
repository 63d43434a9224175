import os
import pickle
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from concord.porting.containers import HDF5, MSGPACK, PADDLE, SAFETENSORS, TENSORFLOW, TORCH, isolation
from concord.porting.file_tensors import FLOATS, NUMPY, in_memory
from concord.spec.errors import SpecError
from tests.toys.checkpoints import RunsCode, written
from tests.toys.surroundings import python

pytestmark = pytest.mark.xdist_group("files")  # a process for each library reads them all

# The name of a file by container.
WRITTEN = {
    SAFETENSORS: "a.safetensors",
    TORCH: "a.pt",
    PADDLE: "a.pdparams",
    MSGPACK: "a.msgpack",
    TENSORFLOW: "a.ckpt.index",
    HDF5: "a.weights.h5",
}

OFTEN = settings(max_examples=25, deadline=None, derandomize=True, database=None)

SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)

NAMES = st.text("abcdefgh_é", min_size=1, max_size=9)


def named(container):
    return container.name


def tensor(dtype, shape, seed):
    # Any bits, including NaN and infinity.
    count = int(np.prod(shape, dtype=int)) * np.dtype(NUMPY[dtype]).itemsize
    drawn = np.random.default_rng(seed).bytes(count)
    return in_memory(np.frombuffer(drawn, NUMPY[dtype]).reshape(shape), dtype)


@pytest.mark.parametrize("container", WRITTEN, ids=named)
@settings(OFTEN, max_examples=8)
@given(
    st.dictionaries(NAMES, st.builds(tensor, st.sampled_from(FLOATS), SHAPES, st.integers(0, 9)), max_size=5)
)
def test_whatever_is_written_comes_back_bit_for_bit(container, tensors):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / WRITTEN[container]
        container.write(path, tensors)
        assert container.is_one(path)
        actual, expected = (
            {name: (entry.dtype, entry.shape, entry.sha256()) for name, entry in side.items()}
            for side in (container.read(path), tensors)
        )
        assert actual == expected


# Pickles.


@pytest.mark.parametrize("container", [PADDLE, TORCH], ids=named)
def test_a_pickle_that_would_run_something_is_refused_by_name(tmp_path, container):
    trap, path = RunsCode(tmp_path / "made"), tmp_path / WRITTEN[container]
    for content in (trap, [[trap]], {"a": np.zeros(3), "b": trap}):
        path.write_bytes(pickle.dumps(content, 2))
        with pytest.raises(SpecError, match=r"'posix\.mkdir', which no weight file needs"):
            container.read(path)
        assert not (tmp_path / "made").exists()


def test_what_is_wrong_with_a_file_of_pytorchs_is_said(tmp_path):
    path = tmp_path / WRITTEN[TORCH]
    TORCH.write(path, {"a": in_memory(np.arange(1009.0))})
    path.write_bytes(path.read_bytes()[:-997])
    with pytest.raises(SpecError, match="its end is missing; it may be incomplete"):
        TORCH.read(path)
    path.write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(SpecError, match=r"it begins with b'version https://git-lfs.' but must be a PyTorch"):
        TORCH.read(path)


def test_a_process_that_ends_is_followed_by_another(tmp_path):
    path = tmp_path / WRITTEN[MSGPACK]
    MSGPACK.write(path, {"a": in_memory(np.arange(3.0))})
    MSGPACK.read(path)
    process = isolation._processes[os.getpid(), ""]
    process._process.kill()
    process._process.wait()
    with pytest.raises(SpecError, match="no library can read it as a file of tensors: killed by SIGKILL"):
        MSGPACK.read(path)
    assert MSGPACK.read(path)["a"].bits().tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("wrapper", ["state_dict.model", "_orig_mod.module"])
def test_what_wraps_all_weights_is_told_from_their_names(tmp_path, wrapper):
    stored = {f"{wrapper}.{name}": in_memory(np.ones(3)) for name in ("a", "b.c")}
    TORCH.write(tmp_path / "model.pt", {**stored, "optimizer.state.0.exp_avg": in_memory(np.zeros(3))})
    assert set(TORCH.read(tmp_path / "model.pt")) == {"a", "b.c", "optimizer.state.0.exp_avg"}


def test_nothing_is_left_of_the_process_that_read_a_file(tmp_path):
    written("paddle", tmp_path)
    program = f"from pathlib import Path; from concord import porting; porting.read(Path({str(tmp_path)!r}))"
    done = python("-X", "dev", "-c", program)
    assert done.returncode == 0
    assert "ResourceWarning" not in done.stderr
