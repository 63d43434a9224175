"""The models of the four frameworks, called, saved and loaded without the harness."""

import importlib.util
import json

import pytest

from concord.backends.worker import environment
from tests.toys.surroundings import EACH_BACKEND_ANEW, ROOT, python

GIVEN = """
import json, sys
import numpy as np
from concord import spec

sizes = {"vocab_size": 23, "max_positions": 13, "d_model": 10, "num_heads": 2, "d_ff": 17, "num_layers": 1}
config = spec.variant("bert", **sizes, num_classes=3)
weights, batch = spec.initialize(config, seed=3), spec.example_batch(config, 7, 11, seed=5)
ids, segments = batch.input_ids, batch.segment_ids
found = {}

def compare(first, second):
    return bool(np.array_equal(np.asarray(first), np.asarray(second)))
"""

PROGRAMS = {
    "torch": """
import copy, torch
from concord.backends.torch.model import TextClassifier
from concord.backends.torch.backend import Adapter

assert torch.backends.mha.get_fastpath_enabled(), "importing sets no switch"
import concord.backends.torch.backend
assert torch.backends.mha.get_fastpath_enabled(), "importing sets no switch"
model = TextClassifier(config).eval()
Adapter().load(model, config, weights, "model")
given = torch.from_numpy(ids), torch.from_numpy(segments)
with torch.no_grad():
    logits = model(*given)
    found["copied"] = compare(copy.deepcopy(model)(*given), logits)
    torch.save(model.state_dict(), sys.argv[1])
    other = TextClassifier(config).eval()
    found["was another"] = not compare(other(*given), logits)
    other.load_state_dict(torch.load(sys.argv[1], weights_only=True))
    found["loaded"] = compare(other(*given), logits)
found["names are canonical"] = set(model.state_dict()) == set(spec.parameters(config))
""",
    "tf": """
import keras
from concord.backends.tf.model import TextClassifier
from concord.backends.tf import library
from concord.backends.tf.backend import Adapter

given = {"input_ids": ids, "segment_ids": segments}
for made in (TextClassifier, library.TextClassifier):
    model = made(config)
    model.build()
    Adapter().load(model, config, weights, "model")
    logits = model(given)
    other = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(model))
    found["was another"] = not compare(other(given), logits)
    other.set_weights(model.get_weights())
    found[f"serialized {made.__module__}"] = type(other) is made and compare(other(given), logits)
    model.save(sys.argv[1] + ".keras")
    loaded = keras.saving.load_model(sys.argv[1] + ".keras")
    found[f"loaded {made.__module__}"] = compare(loaded(given), logits)
unbuilt = TextClassifier(config)
unbuilt(given)
names = [[variable.path.partition("/")[2] for variable in one.weights] for one in (unbuilt, model)]
found["built by a call"] = names[0] == names[1]
half = TextClassifier(config, dtype="bfloat16")
half.build()
found["dtype reaches each weight"] = {str(variable.dtype) for variable in half.weights} == {"bfloat16"}
before = model.get_weights()
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer=keras.optimizers.SGD(0.5), loss=loss)
model.fit(given, batch.labels, batch_size=3, epochs=2, verbose=0)
pairs = zip(model.weights, before, model.get_weights(), strict=True)
moved = {variable.path: not compare(old, new) for variable, old, new in pairs}
# The gradient of a key's bias is rounding alone (GRD-4).
found["fitted"] = all(has for path, has in moved.items() if not path.endswith("key/bias"))
found["predicts"] = model.predict(given, batch_size=3, verbose=0).shape == (7, 3)
""",
    "paddle": """
import paddle
from concord.backends.paddle.model import TextClassifier
from concord.backends.paddle.backend import Adapter

model = TextClassifier(config)
model.eval()
Adapter().load(model, config, weights, "model")
given = paddle.to_tensor(ids), paddle.to_tensor(segments)
with paddle.no_grad():
    logits = model(*given)
    paddle.save(model.state_dict(), sys.argv[1])
    other = TextClassifier(config)
    other.eval()
    found["was another"] = not compare(other(*given), logits)
    missing, unexpected = other.set_state_dict(paddle.load(sys.argv[1]))
    found["loaded"] = not missing and not unexpected and compare(other(*given), logits)
found["names are canonical"] = set(model.state_dict()) == set(spec.parameters(config))
""",
    "jax": """
import jax, jax.numpy as jnp
from flax import nnx
from concord.backends.jax.model import TextClassifier
from concord.backends.jax.backend import Adapter

model = TextClassifier(config, rngs=nnx.Rngs(0))
again, another = (TextClassifier(config, rngs=nnx.Rngs(seed)) for seed in (0, 1))
given = jnp.asarray(ids), jnp.asarray(segments)
same, other = compare(model(*given), again(*given)), compare(model(*given), another(*given))
found["drawn from rngs"] = same and not other
Adapter().load(model, config, weights, "model")
logits = model(*given)
graph, state = nnx.split(model)
doubled = jax.tree.map(lambda leaf: leaf * 2, state)
found["merged"] = compare(nnx.merge(graph, state)(*given), logits)
found["merged with other weights"] = not compare(nnx.merge(graph, doubled)(*given), logits)
nnx.update(another, state)
found["updated"] = compare(another(*given), logits)
half = TextClassifier(config, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
dtypes = {leaf.dtype.name for leaf in jax.tree.leaves(nnx.state(half))}
found["param_dtype reaches each weight"] = dtypes == {"bfloat16"}
""",
}


@pytest.mark.parametrize("backend", EACH_BACKEND_ANEW)
def test_model_lives_outside_the_harness(backend, tmp_path):
    if importlib.util.find_spec({"tf": "tensorflow"}.get(backend, backend)) is None:
        pytest.skip(f"{backend} is not installed")
    program = GIVEN + PROGRAMS[backend] + "print(json.dumps(found))"
    settings = {**environment("cpu", 1), "PYTHONPATH": str(ROOT)}
    done = python("-c", program, tmp_path / "model", patience=240, **settings)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout.splitlines()[-1])
    assert len(results) >= 3
    assert [name for name, value in results.items() if value is not True] == []
