"""Training that goes on from a checkpoint: somebody's weights and tokenizer, and one's own samples."""

import json
from functools import partial

import pytest

from concord import porting, spec
from concord.model import reader
from concord.spec.errors import SpecError
from concord.spec.training.recipe import recipe
from concord.training import beginning, checkpoint
from concord.training.plan import TrainingPlan
from tests.toys.checkpoints import in_bytes
from tests.toys.ready import CONFIG, hugging_face
from tests.toys.surroundings import toy

NAMES = {"id2label": {"0": "so so", "1": "no", "2": "yes"}, "label2id": {"so so": 0, "no": 1, "yes": 2}}
HEAD = ["classifier.weight", "classifier.bias"]
RIGHT = toy("Right", "stepping")


def samples(folder, labels=("yes", "no")):
    """Write 31 texts with labels in turn."""
    words = ("the cat sat", "a quick dog ran", "who said rain ?", "look , the bank", "short")
    lines = [f"{words[number % 5]}\t{labels[number % len(labels)]}" for number in range(31)]
    folder.mkdir(exist_ok=True)
    (folder / "train.tsv").write_text("\n".join(["text\tlabel", *lines]) + "\n")
    return folder


def begun(path, data, dtype="float32"):
    origin = reader(path, spelled=False)
    plan = TrainingPlan(backend="torch", data=str(data), epochs=1, batch=5, dtype=dtype, seed=11)
    start, _ = beginning.begin(origin.config, recipe("hugging-face"), plan, origin)
    return origin, start


def drawn(origin, start):
    """Return the parameters that are not the checkpoint's, bit for bit."""
    taken = {name: array.astype(start.weights[name].dtype) for name, array in origin.weights.items()}
    return [name for name, held in in_bytes(start.weights).items() if held != in_bytes(taken).get(name)]


UNNAMED = {**NAMES, "id2label": {str(number): f"LABEL_{number}" for number in range(3)}}


@pytest.mark.parametrize(
    ("stated", "labels", "names", "anew"),
    [
        (NAMES, ("yes", "no"), ("so so", "no", "yes"), []),
        (NAMES, ("a", "b", "c"), ("a", "b", "c"), HEAD),  # a classifier of other classes is drawn anew
        # Classes that nobody has named are numbers.
        (UNNAMED, ("2", "0"), ("0", "1", "2"), []),
    ],
)
def test_a_classifier_goes_on_with_its_weights_where_its_classes_are_those(
    tmp_path, stated, labels, names, anew
):
    origin, start = begun(hugging_face(tmp_path / "bert", **stated), samples(tmp_path / "data", labels))
    assert (start.labels.names, drawn(origin, start)) == (names, anew)
    assert start.config == CONFIG.replace(num_classes=len(names))


def test_an_encoder_gets_a_head(tmp_path):
    path = hugging_face(tmp_path / "bert", "encoder", **NAMES)
    origin, start = begun(path, samples(tmp_path / "data"), "float64")
    assert (origin.part, start.config.num_classes) == ("encoder", 2)
    assert drawn(origin, start) == ["pooler.weight", "pooler.bias", *HEAD]
    assert {array.dtype.name for array in start.weights.values()} == {"float64"}


def test_a_run_goes_on_from_a_checkpoint_and_another_from_the_run(entered, tmp_path):
    path, data, run, second, back = (tmp_path / name for name in ("bert", "data", "run", "second", "back"))
    hugging_face(path, **NAMES)
    samples(data)
    common = f"train --backend {RIGHT} --threads 1 --batch 7 --data {data} --dev {data / 'train.tsv'}"
    _, (said,) = entered(f"{common} {path} --out {run} --steps 4")
    taken = "part model, 41 of 41 parameters taken; nothing drawn anew"
    assert said.startswith(f"{path}: {taken}; 3 classes: so so, no, yes")
    first = checkpoint.read(run, "last")
    assert (first.progress.step, first.recipe) == (4, recipe("hugging-face", total_steps=4))
    _, errors = entered(f"{common} {run} --out {second} --steps 1 --recipe adamw --warmup 0 --seed 5")
    assert errors[0].startswith(f"{run}: {taken}")
    asked = f"--evaluate {data / 'train.tsv'} --json {tmp_path / 'found.json'}"
    entered(f"predict {second} {asked} --backend {toy('NumpyBackend')}")
    assert json.loads((tmp_path / "found.json").read_text())["samples"] == 31
    entered(f"port {second} -o {back} --to hugging-face")
    assert porting.read(back).labels == ("so so", "no", "yes")
    entered("diff", second, back)


def test_lockstep_judges_a_checkpoint_of_ones_own(entered, tmp_path):
    path, data = hugging_face(tmp_path / "bert", "encoder"), samples(tmp_path / "data")
    page = tmp_path / "found.json"
    asked = f"--steps 2 --batch 5 --threads 1 --backend {RIGHT} --json {page}"
    _, errors = entered(f"train --lockstep {path} --data {data} {asked}")
    assert json.loads(page.read_text())["tracks"][0]["steps"] == 2
    assert "37 of 41 parameters taken; drawn anew: pooler.weight, pooler.bias, classifier" in errors[0]


def test_what_a_checkpoint_leaves_no_room_for_is_refused(refused, tmp_path):
    path, data = hugging_face(tmp_path / "bert"), samples(tmp_path / "data")
    refused = partial(refused, f"train --backend torch {path} --out {tmp_path / 'run'}")
    says = "is given but CHECKPOINT is too, which"
    assert refused("--variant", "bert", "--vocabulary", "9", "--data", data) == [
        f"--variant {says} has a model and a tokenizer",
        f"--vocabulary {says} has a model and a tokenizer",
    ]
    assert refused() == [
        "--data is not given: what is the model to be trained on? (--resume DIR goes on with a run)"
    ]
    assert refused("--tokens", "20", "--data", data) == [
        "a sample may have 20 tokens but must have at most 19, as 'max_positions' says"
    ]
    (path / "vocab.txt").unlink()
    assert refused("--data", data) == [f"{path}: has no tokenizer: it lacks tokenizer.json and vocab.txt"]
    assert not (tmp_path / "run").exists()


def test_what_takes_no_texts_is_refused(tmp_path):
    stack = porting.from_weights(CONFIG, spec.initialize(CONFIG, part="stack"), "stack", {"vocab.txt": b"a"})
    porting.write(stack, tmp_path / "stack", "torch-safetensors")
    with pytest.raises(SpecError, match="holds the part 'stack' but must hold one of model, pooled, encoder"):
        reader(tmp_path / "stack", spelled=False)
