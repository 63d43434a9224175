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
from tests.toys.checkpoints import drawn
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
    found = made(folder(place / "a", "concord"), folder(place / "b", "torch-safetensors"))
    (place / "cert.json").write_text(certificates.text(certificates.recorded(found)))
    return place, found


def test_a_right_port_is_proven_and_what_nobody_looked_at_is_not(right):
    _, found = right
    said = statuses(found)
    others = {"labels": "not applicable", "tokenizer": "not applicable", "optimizer step": "unverified"}
    assert {name: status for name, status in said.items() if status != "proven"} == others
    assert said.keys() >= {"same bits", "configuration", "round trip", "outputs", "gradients"}
    assert all(claim.reason for claim in found.claims)
    assert found.exit_code == 0
    assert "none failed; not verified: optimizer step." in found.verdict
    assert (
        set(found.inputs) == {*DRAWN} == {result.case for result in found.report.results} - {"optimizer step"}
    )
    mine, theirs = found.source.parameters, found.target.parameters
    assert {name: one.held for name, one in mine.items()} == {name: one.held for name, one in theirs.items()}
    assert mine.keys() == set(WEIGHTS)


def test_a_quick_certificate_says_what_it_left_out(tmp_path):
    found = made(folder(tmp_path / "a", "concord"), folder(tmp_path / "b", "torch"), extent="quick")
    said = statuses(found)
    assert {said[name] for name in ("same bits", *runs.FORWARD, "would notice, by bits")} == {"proven"}
    assert (said["all else"], "gradients" in said, found.exit_code) == ("unverified", False, 0)
    assert {(one.case, one.group) for one in found.report.results} == {("sentences", "target")}


def test_a_wrong_port_is_run_if_that_is_asked_for_and_judged_by_the_source(tmp_path):
    source, target = (
        folder(tmp_path / "a", "concord"),
        folder(tmp_path / "b", "paddle", {**WEIGHTS, QUERY: WEIGHTS[QUERY].T.copy()}),
    )
    stopped, whole = made(source, target), made(source, target, extent="all")
    for found, ran in ((stopped, "unverified"), (whole, "failed")):
        said = statuses(found)
        assert [said[name] for name in ("same bits", "outputs", "taps", "round trip")] == [
            *("failed", ran, ran, "proven")
        ]
        assert found.exit_code == 1
        assert found.verdict.startswith("The port is wrong: same bits")
    assert (stopped.report.results, bool(whole.report.results)) == ([], True)
    assert "--all runs it" in reason_of(stopped, "outputs")


def test_a_framework_that_computes_something_else_fails_where_it_does(tmp_path):
    found = made(folder(tmp_path / "a", "concord"), folder(tmp_path / "b", "torch"), toy("ReturnsNaN"))
    said = statuses(found)
    assert [said[name] for name in ("same bits", "outputs", "gradients")] == [
        "proven",
        "failed",
        "unverified",
    ]
    assert found.exit_code == 1
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
    target = porting.from_weights(
        CONFIG,
        {name: array for name, array in WEIGHTS.items() if not name.startswith(("pooler", "classifier"))},
        "encoder",
    )
    porting.write(target, tmp_path / "b", "torch-safetensors")
    found = made(folder(tmp_path / "a", "concord"), tmp_path / "b")
    said = statuses(found)
    assert (said["same bits"], said["configuration"], said["outputs"]) == ("failed", "failed", "unverified")
    assert "pooler.weight: missing in the target" in reason_of(found, "same bits")


LENGTHS = "sentence_bert_config.json"
BESIDE = {
    "vocab.txt": b"[PAD]\na\n",
    "tokenizer.json": b'{"version": 1}',
    "labels.json": b'{"names": ["a", "b", "c"]}',
    LENGTHS: b'{"max_seq_length": 7}',
}


LABELS = ("a", "b", "c")


@pytest.mark.parametrize(
    ("format", "files", "labels", "statuses", "words"),
    [
        (
            "torch",
            BESIDE,
            LABELS,
            ("proven", "proven"),
            "the same bytes: vocab.txt, tokenizer.json, sentence_bert_config.json",
        ),
        (
            "torch",
            {"tokenizer.json": b'{\n"version": 1}'},
            LABELS,
            ("proven", "failed"),
            "vocab.txt is missing in the target; sentence_bert_config.json is missing in the target",
        ),
        (
            "torch",
            {**BESIDE, LENGTHS: b'{"max_seq_length": 5}'},
            ("a", "c", "b"),
            ("failed", "failed"),
            "sentence_bert_config.json: max_seq_length is 7 in the source and 5 in the target",
        ),
        (
            "hugging-face",
            {name: content for name, content in BESIDE.items() if name != LENGTHS},
            LABELS,
            ("proven", "proven"),
            "the same bytes: vocab.txt, tokenizer.json",
        ),
    ],
)
def test_labels_and_tokenizer_have_to_come_along(format, files, labels, statuses, words):
    plain = porting.from_weights(CONFIG, WEIGHTS)
    source = dataclasses.replace(plain, files=BESIDE, labels=LABELS)
    items = claims(source, dataclasses.replace(plain, files=files, labels=labels), format)
    assert (items["labels"].status, items["tokenizer"].status) == statuses
    assert items["tokenizer"].reason.startswith(words)
    item = claims(plain, dataclasses.replace(plain, files={"tokenizer.json": b"{}"}))["tokenizer"]
    assert (item.status, "tokenizer.json" in item.reason) == ("unverified", True)


def claim(source, target):
    return claims(porting.read(source), porting.read(target))[certificates.certificate.OTHERS]


def test_heads_that_the_family_does_not_have_are_a_claim_of_their_own(tmp_path):
    source = headed(tmp_path / "a")
    porting.write(porting.read(source), tmp_path / "flax", "hugging-face-flax")
    porting.write(porting.read(source), tmp_path / "own", "concord")
    assert claim(source, tmp_path / "flax").status == "proven"
    item = claim(source, tmp_path / "own")
    assert (item.status, "bert.pooler.dense.weight: not compared: is in the source alone" in item.reason) == (
        "unverified",
        True,
    )
    item = claim(source, headed(tmp_path / "b", cls__predictions__bias=np.ones(25, np.float32)))
    assert (item.status, "cls.predictions.bias: all numbers of B are 1" in item.reason) == ("failed", True)


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


def test_tensors_that_are_alike_leave_nothing_to_notice():
    same = {name: np.zeros_like(array) for name, array in WEIGHTS.items()}
    swapped = [one for one in hunted(CONFIG, same) if one.mutant.startswith("swapped")]
    assert [(one.backend, one.status) for one in swapped] == [("bits", "equivalent")] * 17


@pytest.mark.parametrize("variant", spec.variants())
@pytest.mark.parametrize("part", ["model", "encoder", "attention"])
def test_inputs_are_those_that_ports_get_wrong(variant, part):
    config = spec.variant(variant, **{**SIZES, "max_positions": 13})
    given = inputs_of(config, part, None, 0)
    for batch in given.batches.values():
        spec.validate_batch(config, batch, part)
    assert {*given.batches, *given.left_out} == {*DRAWN}
    if part == "attention":
        return
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
    assert given.tried["sentences"] == "2 texts that were given"
    assert (
        "11 tokens"
        in inputs_of(CONFIG, "model", [([*range(1, 10), 1, 2], [0] * 11)], 0).left_out["sentences"]
    )


def test_a_certificate_is_read_back_and_no_byte_may_be_another(right, tmp_path):
    place, found = right
    back = certificates.read(place / "cert.json").outcome
    assert (back.claims, back.mutants, back.source) == (found.claims, found.mutants, found.source)
    assert (back.verdict, back.exit_code) == (found.verdict, found.exit_code)
    content = (place / "cert.json").read_bytes()
    other = tmp_path / "other.json"
    for place_of in range(0, len(content), max(1, len(content) // 97)):
        other.write_bytes(content[:place_of] + bytes([content[place_of] ^ 1]) + content[place_of + 1 :])
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


def test_verifying_makes_it_again(right):
    _, found = right
    with pytest.raises(SpecError, match=r"say --backend tests\.toys"):
        certificates.verify(found)
    problems, again = certificates.verify(found, named=(RIGHT,))
    assert (problems, again.exit_code) == ([], 0)
    proven = tuple(dataclasses.replace(claim, status="proven") for claim in found.claims)
    problems, _ = certificates.verify(dataclasses.replace(found, claims=proven), named=(RIGHT,))
    assert any("optimizer step" in problem and "was proven, is unverified" in problem for problem in problems)


def test_the_commands_reject_altered_files(invoke, tmp_path):
    source, target = folder(tmp_path / "a", "concord"), folder(tmp_path / "b", "torch-safetensors")
    path = target / "certificate.json"
    path.write_text(certificates.text(certificates.recorded(made(source, target, extent="quick"))))

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
