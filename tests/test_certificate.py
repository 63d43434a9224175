"""Certificates of ports: what is right is proven, what is wrong fails by its name.

And what nobody looked at is not called proven.
"""

import dataclasses

import numpy as np
import pytest

from concord import porting, spec
from concord.conformance.campaign import Job, Setup
from concord.conformance.mutants.matrix import Finding
from concord.porting import certificate as certificates
from concord.porting.certificate import Asked, certify, files, mutants, runs
from concord.porting.certificate.inputs import DRAWN, inputs_of
from concord.porting.certificate.page import page
from concord.porting.comparison import compare
from concord.spec.errors import SpecError
from tests.test_difference import with_head
from tests.toys.checkpoints import CARRIED, drawn
from tests.toys.disturbed import name_of
from tests.toys.ready import headed
from tests.toys.surroundings import ROOT, toy

SIZES = {
    "vocab_size": 11,
    "d_model": 6,
    "num_heads": 2,
    "d_ff": 7,
    "num_classes": 3,
    "num_layers": 1,
    "max_positions": 5,
}
CONFIG = spec.variant("bert", **SIZES)
WEIGHTS = drawn(CONFIG)
QUERY = "layers.0.attention.query.weight"
RIGHT = toy("NumpyBackend")


def folder(path, form, weights=None):
    porting.write(porting.from_weights(CONFIG, weights or WEIGHTS), path, form)
    return path


def made(source, target, backend=RIGHT, extent="usual"):
    named = (backend,)
    asked = Asked(backends=[*named], home=RIGHT, dtypes=["float32"], extent=extent)
    return certify(source, target, asked, Setup(asked=named))


def claims(source, target, form="torch"):
    """Return what the files of two checkpoints alone prove, by claim."""
    place = ROOT / "tests" / "toys" / "__init__.py"
    sides = [
        dataclasses.replace(files.side_of(place, one), format=form, files={}) for one in (source, target)
    ]
    compared = compare(source, target, sides=files.SIDES)
    return {claim.name: claim for claim in files.claims(source, target, tuple(sides), compared)}


def hunted(config, weights, seed=0):
    """Return what changes of a model are noticed on the sentences."""
    checkpoint, batch = porting.from_weights(config, weights), inputs_of(config, "model", None, 0)
    model = Job("source", "sentences", "float64", "model", config, weights, batch.batches["sentences"])
    side = files.side_of(ROOT / "tests" / "toys" / "__init__.py", checkpoint)
    return mutants.hunt(model, side, checkpoint.tensors, Asked(seed=seed), lambda text: None)


def statuses(found):
    return {claim.name: claim.status for claim in found.claims}


def reason_of(found, name):
    return next(claim.reason for claim in found.claims if claim.name == name)


@pytest.fixture(scope="module")
def right(tmp_path_factory):
    place = tmp_path_factory.mktemp("right")
    return made(folder(place / "a", "concord"), folder(place / "b", "torch-safetensors"))


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    place = tmp_path_factory.mktemp("quick")
    source, target = folder(place / "a", "concord"), folder(place / "b", "torch-safetensors")
    return source, target, made(source, target, extent="quick")


def test_a_right_port_is_proven_and_what_nobody_looked_at_is_not(right):
    found, said = right, statuses(right)
    others = {"labels": "not applicable", "tokenizer": "not applicable", "optimizer step": "unverified"}
    assert {name: status for name, status in said.items() if status != "proven"} == others
    assert said.keys() >= {"same bits", "configuration", "round trip", "outputs", "gradients"}
    assert all(claim.reason for claim in found.claims)
    assert found.exit_code == 0
    judged = {result.case for result in found.report.results} - {"optimizer step"}
    assert set(found.inputs) == {*DRAWN} == judged
    mine, theirs = (
        {name: one.held for name, one in side.parameters.items()} for side in (found.source, found.target)
    )
    assert mine == theirs
    assert mine.keys() == set(WEIGHTS)


def test_a_quick_certificate_says_what_it_left_out(quick):
    *_, found = quick
    said = statuses(found)
    assert {said[name] for name in ("same bits", *runs.FORWARD, "would notice, by bits")} == {"proven"}
    assert (said["all else"], "gradients" in said, found.exit_code) == ("unverified", False, 0)
    assert {(one.case, one.group) for one in found.report.results} == {("sentences", "target")}


def test_a_wrong_port_is_run_if_that_is_asked_for_and_judged_by_the_source(tmp_path):
    source, wrong = folder(tmp_path / "a", "concord"), {**WEIGHTS, QUERY: WEIGHTS[QUERY].T.copy()}
    target = folder(tmp_path / "b", "paddle", wrong)
    stopped, whole = made(source, target), made(source, target, extent="all")
    for found, ran in ((stopped, "unverified"), (whole, "failed")):
        said = statuses(found)
        assert (said["same bits"], said["round trip"], found.exit_code) == ("failed", "proven", 1)
        assert said["outputs"] == said["taps"] == ran
        assert found.verdict.startswith("The port is wrong: same bits")
    assert (stopped.report.results, bool(whole.report.results)) == ([], True)
    assert "--all runs it" in reason_of(stopped, "outputs")


def test_a_framework_that_computes_something_else_fails_where_it_does(tmp_path):
    found = made(folder(tmp_path / "a", "concord"), folder(tmp_path / "b", "torch"), toy("ReturnsNaN"))
    said = statuses(found)
    assert (said["same bits"], said["outputs"], found.exit_code) == ("proven", "failed", 1)
    assert said["gradients"] == "unverified"
    assert "first logits on sentences: first at logits" in reason_of(found, "outputs")


@pytest.mark.parametrize("backend", [name_of("exits with a code"), toy("SaysUnsupported")])
def test_what_was_not_computed_is_unverified(tmp_path, backend):
    found = made(folder(tmp_path / "a", "concord"), folder(tmp_path / "b", "torch-safetensors"), backend)
    said = statuses(found)
    assert {said[kind] for kind in runs.KINDS} == {"unverified"}
    assert (said["same bits"], found.exit_code) == ("proven", 3)
    assert "was not judged" in found.verdict
    assert all(claim.reason for claim in found.claims)


def test_a_part_that_is_missing_in_the_target_fails(tmp_path):
    weights = {name: WEIGHTS[name] for name in spec.parameters(CONFIG, "encoder")}
    porting.write(porting.from_weights(CONFIG, weights, "encoder"), tmp_path / "b", "torch-safetensors")
    found = made(folder(tmp_path / "a", "concord"), tmp_path / "b")
    said = statuses(found)
    assert (said["same bits"], said["configuration"], said["outputs"]) == ("failed", "failed", "unverified")
    assert "pooler.weight: missing in the target" in reason_of(found, "same bits")


BESIDE = {**CARRIED, "sentence_bert_config.json": b'{"max_seq_length": 7}'}
PLAIN = porting.from_weights(CONFIG, WEIGHTS)


@pytest.mark.parametrize(
    ("wrong", "labels", "others"),
    [
        (None, ("a", "b", "c"), {}),
        ("labels", ("a", "c", "b"), {}),
        ("tokenizer", ("a", "b", "c"), {"vocab.txt": None}),
        ("tokenizer", ("a", "b", "c"), {"sentence_bert_config.json": b'{"max_seq_length": 5}'}),
    ],
)
def test_labels_and_tokenizer_have_to_come_along(wrong, labels, others):
    source = dataclasses.replace(PLAIN, files=BESIDE, labels=("a", "b", "c"))
    files = {name: content for name, content in {**BESIDE, **others}.items() if content}
    found = claims(source, dataclasses.replace(PLAIN, files=files, labels=labels))
    for name in ("labels", "tokenizer"):
        assert found[name].status == ("failed" if name == wrong else "proven")


def test_what_a_format_has_no_place_for_or_the_source_lacks_is_no_failure():
    source = dataclasses.replace(PLAIN, files=BESIDE)
    target = {name: content for name, content in BESIDE.items() if name != "sentence_bert_config.json"}
    found = claims(source, dataclasses.replace(PLAIN, files=target), "hugging-face")["tokenizer"]
    assert found.status == "proven"
    found = claims(PLAIN, dataclasses.replace(PLAIN, files={"tokenizer.json": b"{}"}))["tokenizer"]
    assert (found.status, "tokenizer.json" in found.reason) == ("unverified", True)


def test_heads_that_the_family_does_not_have_are_a_claim_of_their_own(tmp_path):
    source = headed(tmp_path / "a")
    porting.write(porting.read(source), tmp_path / "flax", "hugging-face-flax")
    porting.write(porting.read(source), tmp_path / "own", "concord")
    headed(tmp_path / "b", cls__predictions__bias=np.ones(25, np.float32))
    for target, status, reason in (
        ("flax", "proven", ""),
        ("own", "unverified", ": not compared: is in the source alone; likewise "),
        ("b", "failed", "cls.predictions.bias: all numbers of B are 1"),
    ):
        found = claims(porting.read(source), porting.read(tmp_path / target))
        claim = found[certificates.certificate.OTHERS]
        assert (claim.status, reason in claim.reason) == (status, True)


def test_an_untied_output_that_is_lost_is_a_failure(tmp_path):
    source, target = with_head(tmp_path / "a", False, True), with_head(tmp_path / "b", None, False)
    found = claims(porting.read(source), porting.read(target))
    said = "tie_word_embeddings is False in the source and True in the target"
    assert (found["configuration"].status, found["configuration"].reason) == ("failed", said)
    others = found[certificates.certificate.OTHERS]
    assert others.status == "failed"
    assert "cls.predictions.decoder.weight: is in the source alone" in others.reason


@pytest.mark.parametrize("variant", spec.variants())
def test_every_change_is_noticed_but_those_that_are_none(variant):
    config = spec.variant(variant, **{**SIZES, "num_layers": 2, "max_positions": 9})
    found = hunted(config, drawn(config, seed=5))
    assert not [one for one in found if one.status in ("missed", "alarm")]
    by_bits, by_outputs = ([one for one in found if one.backend == by] for by in ("bits", "outputs"))
    assert len(by_outputs) == sum(one.status == "found" for one in by_bits)
    assert {claim.status for claim in mutants.claims(found, 0)} == {"proven"}
    assert sum(one.status == "found" for one in by_outputs) > 50


def test_a_nudged_zero_that_nothing_can_show_has_its_reason():
    name = "layers.0.attention.value.bias"
    found = hunted(CONFIG, {**WEIGHTS, name: np.zeros_like(WEIGHTS[name])})
    assert mutants.ZERO in {one.detail for one in found}
    assert not [one for one in found if one.status in ("missed", "alarm")]


def test_tensors_that_are_alike_leave_nothing_to_notice():
    same = {name: np.zeros_like(array) for name, array in WEIGHTS.items()}
    swapped = [one for one in hunted(CONFIG, same) if one.mutant.startswith("swapped")]
    assert [(one.backend, one.status) for one in swapped] == [("bits", "equivalent")] * 17


@pytest.mark.parametrize(
    ("bits", "outputs", "expected"),
    [
        ("missed", "found", ["failed", "proven"]),
        ("found", "missed", ["proven", "unverified"]),
        ("found", "alarm", ["proven", "failed"]),
        ("equivalent", None, ["not applicable", "not applicable"]),
    ],
)
def test_a_certificate_that_notices_nothing_fails(bits, outputs, expected):
    found = [Finding("transposed", "bits", bits, "a")]
    found += [Finding("transposed", "outputs", outputs, "a")] if outputs else []
    assert [claim.status for claim in mutants.claims(found, 0)] == expected


@pytest.mark.parametrize("variant", spec.variants())
def test_inputs_are_those_that_ports_get_wrong(variant):
    config = spec.variant(variant, **{**SIZES, "max_positions": 13})
    given = inputs_of(config, "model", None, 0)
    for batch in given.batches.values():
        spec.validate_batch(config, batch)
    assert {*given.batches, *given.left_out} == {*DRAWN}
    named = ("awkward rows", "padding first", "longest input")
    awkward, first, longest = (given.batches[name].required("input_ids") for name in named)
    assert sorted((awkward != config.pad_id).sum(1).tolist())[:2] == [0, 1]
    words = [word for word in range(config.vocab_size) if word != config.pad_id]
    assert {*awkward[0]} == {words[0], words[-1]}
    assert first[0, 0] == config.pad_id
    assert longest.shape[1] == config.max_positions - config.position_start


def test_texts_take_the_place_of_what_is_drawn():
    given = inputs_of(CONFIG, "model", [([3, 4, 5], [0, 0, 1]), ([6], [0])], 0)
    assert given.batches["sentences"].required("input_ids").tolist() == [[3, 4, 5], [6, 0, 0]]
    longer = inputs_of(CONFIG, "model", [([3] * 11, [0] * 11)], 0)
    assert "11 tokens" in longer.left_out["sentences"]


def test_a_certificate_is_read_back_and_no_byte_may_be_another(right, tmp_path):
    path, other = tmp_path / "cert.json", tmp_path / "other.json"
    path.write_text(certificates.text(certificates.recorded(right)))
    back = certificates.read(path).outcome
    assert (back.claims, back.mutants, back.source) == (right.claims, right.mutants, right.source)
    assert (back.verdict, back.exit_code) == (right.verdict, right.exit_code)
    content = path.read_bytes()
    for at in range(0, len(content), len(content) // 29):
        other.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(SpecError):
            certificates.read(other)
    other.write_bytes(content.replace(b'"kind"', b' "kind"', 1))
    with pytest.raises(SpecError, match="not laid out as it was written"):
        certificates.read(other)
    other.write_bytes(b'{"kind": "check"}')
    with pytest.raises(SpecError, match="holds no certificate"):
        certificates.read(other)


def test_certificates_among_the_documents_are_whole_and_have_their_pages():
    paths = sorted((ROOT / "docs/certificates").glob("*.json"))
    assert paths
    for path in paths:
        made = certificates.read(path)
        assert made.outcome.exit_code == 0
        assert path.with_suffix(".html").read_text() == page(made)


def test_verifying_makes_it_again_and_names_each_claim_that_comes_out_otherwise(right):
    with pytest.raises(SpecError, match=r"say --backend tests\.toys"):
        certificates.verify(right)
    proven = tuple(dataclasses.replace(claim, status="proven") for claim in right.claims)
    problems, again = certificates.verify(dataclasses.replace(right, claims=proven), named=(RIGHT,))
    others = [claim for claim in right.claims if claim.status != "proven"]
    assert len(problems) == len(others)
    for problem, claim in zip(problems, others, strict=True):
        assert claim.name in problem
        assert f"was proven, is {claim.status}" in problem
    assert statuses(again) == statuses(right)


def test_the_commands_reject_altered_files(invoke, quick):
    source, target, found = quick
    path = target / "certificate.json"
    path.write_text(certificates.text(certificates.recorded(found)))

    def verified(*more):
        code, output, errors = invoke("certify", "--verify", path, "--files", *more)
        return code, " ".join([*output.splitlines(), *errors])

    code, said = verified()
    assert code == 0
    assert "files have the bytes that it states; nothing was computed" in said
    content = path.read_bytes()
    path.write_bytes(content.replace(b"unverified", b"provenprov", 1))
    assert (verified()[0], "its digest is" in verified()[1]) == (2, True)
    path.write_bytes(content)
    weights = target / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    assert (verified()[0], "model.safetensors was altered" in verified()[1]) == (1, True)
    (target / "model.safetensors").unlink()
    (target / "extra.bin").write_bytes(b"")
    said = verified(source, target)[1]
    assert "model.safetensors is gone" in said
    assert "extra.bin was not there" in said


def test_a_certificate_is_written_beside_the_weights_alone(entered, tmp_path):
    source, target = folder(tmp_path / "a", "concord"), folder(tmp_path / "b", "torch-safetensors")
    entered("certify", source, target, "--certificate", target / "proof.json", ends=2)
    assert not (target / "proof.json").exists()
