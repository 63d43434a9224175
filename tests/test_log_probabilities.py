"""Log probabilities of next tokens: of a module, a way, and an engine."""

import json

import pytest
import torch
import torch.nn.functional as F

from concord import compare
from concord.backends.wire import WorkerFailure
from concord.conformance.compare import ITSELF, prepare
from concord.conformance.compare.candidates import load
from concord.conformance.compare.proof import batched
from concord.spec.errors import SpecError
from tests.toys.architectures import GROUPED, inputs_of
from tests.toys.kinds import Of

ROW, NO_LOGITS = "output[log_probabilities]", ["output[logits]"]

INPUTS = inputs_of("llama")

# The library takes long to import, so one process runs all tests that need it.
pytestmark = pytest.mark.xdist_group("transformers")


@pytest.fixture(scope="module")
def decoder():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**GROUPED, "num_hidden_layers": 1}, initializer_range=0.3)
    return transformers.LlamaForCausalLM(config).eval()


def judged(reference, candidate=ITSELF, inputs=INPUTS, **options):
    return compare(reference, candidate, inputs, log_probabilities=True, **options)


def gathered(logits, ids, mask):
    """Log probabilities of next tokens, as in a trainer's loss."""
    losses = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
    return -losses.reshape(ids[:, 1:].shape) * mask[:, 1:] * mask[:, :-1]


def engine(decoder, shift=1):
    def run(**arrays):
        ids, mask = (torch.as_tensor(arrays[name]) for name in ("input_ids", "attention_mask"))
        with torch.inference_mode():
            logits = decoder(input_ids=ids, attention_mask=mask).logits
        return {"log_probabilities": gathered(logits, ids.roll(1 - shift, 1), mask), "logits": logits}

    return run


@pytest.mark.parametrize("way", ["cached", "padded", "padded-left", "bfloat16"])
def test_a_decoder_agrees_with_itself_in_another_way(decoder, way):
    verdict = judged(decoder, way=way)
    assert verdict.passed, verdict
    assert verdict.row(ROW).status == "agrees"


def test_they_take_part_in_gradients(decoder):
    verdict = judged(decoder, way="sdpa", gradients=True)
    assert verdict.passed, verdict
    both, alone = (
        prepare(decoder, inputs=INPUTS, gradients=True, log_probabilities=given).tensors
        for given in (True, False)
    )
    name = "gradients.lm_head.weight"
    assert (both[name] != alone[name]).any()


def test_numbers_of_an_engine_are_judged_as_they_are(decoder):
    right, wrong = (judged(decoder, engine(decoder, shift)) for shift in (1, 0))
    assert right.passed, right
    assert [row.tensor for row in wrong.table if row.status == "diverges"] == [ROW]


def test_an_engine_may_return_nothing_else(decoder):
    numbers = engine(decoder)(**INPUTS)["log_probabilities"]
    for candidate in (
        {"log_probabilities": numbers},
        {ROW: numbers},
        lambda **_: {"log_probabilities": numbers},
    ):
        assert judged(decoder, candidate, declared=NO_LOGITS).passed
    assert judged(decoder, candidate).status == "undetermined", "logits are an output too"
    verdict = judged(decoder, {"log_probabilities": numbers * 1.01}, declared=NO_LOGITS)
    assert (verdict.status, verdict.first) == ("diverges", ROW)
    with pytest.raises(WorkerFailure, match=r"has shape \(3, 11\) but must be \(3, 10\)"):
        judged(decoder, {"log_probabilities": F.pad(numbers, (1, 0))})


def test_half_precision_gives_float32(decoder):
    plain = prepare(decoder, inputs=INPUTS, way="bfloat16", log_probabilities=True).reference.plain
    assert (plain["output[logits]"].dtype, plain[ROW].dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("side", ["right", "left"])
def test_each_text_alone_has_those_of_its_batch(decoder, side):
    ids, mask = INPUTS["input_ids"], INPUTS["attention_mask"]
    inputs = {"input_ids": ids, "attention_mask": mask}
    if side == "left":
        ids, mask = ids.flip(1), mask.flip(1)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    verdicts = [
        verdict for _, verdict in batched(prepare(decoder, None, inputs, log_probabilities=True).reference)
    ]
    assert all(verdict.passed for verdict in verdicts), verdicts
    assert [verdict.row(ROW).size for verdict in verdicts] == [10, 6, 0]


def test_what_is_missing_is_named(decoder):
    with pytest.raises(
        SpecError, match=r"^output\[logits\] \(B, T, vocabulary\) of a torch.nn.Module is missing"
    ):
        judged(decoder.model)
    scores = Of(lambda m, input_ids: {"logits": input_ids[..., None] * torch.ones(7)}, {})
    for ids in (torch.ones(3, 5), torch.ones(5, dtype=torch.long)):
        with pytest.raises(
            SpecError, match=r"^an integer input 'input_ids' \(B, T\) is missing but required"
        ):
            judged(scores, inputs={"input_ids": ids})


def test_a_folder_gives_the_head_if_they_are_requested(decoder, entered, tmp_path, monkeypatch):
    decoder.save_pretrained(tmp_path / "folder")
    kinds = [type(load(str(tmp_path / "folder"), given)).__name__ for given in (False, True)]
    assert kinds == ["LlamaModel", "LlamaForCausalLM"]
    monkeypatch.chdir(tmp_path)
    entered("compare", "folder", "--as", "cached", "--log-probabilities", "--json", "out.json")
    assert ROW in (tmp_path / "out.json").read_text()
    kept = {"reference": "folder", "log_probabilities": "true", "candidates.again.candidate": "folder"}
    lines = [f"{key} = {value if value == 'true' else json.dumps(value)}\n" for key, value in kept.items()]
    (tmp_path / "concord.toml").write_text("".join(lines))
    entered("compare", "--json", "kept.json")
    assert ROW in (tmp_path / "kept.json").read_text()
