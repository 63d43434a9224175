"""Certificates of ports: what is right is proven, what is wrong fails by its name.

And what nobody looked at is not called proven.
"""

import dataclasses

import numpy as np
import pytest
from typer.testing import CliRunner

from concord import porting, spec
from concord.cli import app
from concord.conformance.campaign import Setup
from concord.porting import certificate as certificates
from concord.porting.certificate import Asked, certify, evidence, inputs, ledger, sensitivity
from concord.porting.certificate.page import page
from concord.porting.comparison import compare
from concord.spec.errors import SpecError
from tests.toys.checkpoints import drawn
from tests.toys.ready import headed
from tests.toys.surroundings import ROOT

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
QUERY, KEY, POSITION = (
    "layers.0.attention.query.weight",
    "layers.0.attention.key.weight",
    "embeddings.position.weight",
)
TOY = "tests.toys.numpy_backend:"


def folder(path, form, weights=None):
    porting.write(porting.from_weights(CONFIG, weights or WEIGHTS), path, form)
    return path


def made(source, target, backend="NumpyBackend", extent="usual"):
    named, home = (TOY + backend,), TOY + "NumpyBackend"
    asked = Asked.of(backends=[*named], home=home, dtypes=["float32"], extent=extent)
    return certify(source, target, asked, Setup(asked=named))


def claims(source, target, form="torch", rows=()):
    """Return what the files of two checkpoints alone prove, by claim."""
    sides = [
        certificates.certificate.PortSide(
            "",
            form,
            "",
            one.part,
            {},
            {},
            {name: ledger.digest_of(content) for name, content in one.files.items()},
        )
        for one in (source, target)
    ]
    compared = compare(source, target, sides=ledger.SIDES)
    return {
        item.name: item for item in ledger.items(source, target, (sides[0], sides[1]), rows, (), compared)
    }


def proof(config, weights, seed=0):
    """Return what changes of a model are noticed on the sentences."""
    checkpoint, batch = porting.from_weights(config, weights), inputs.of(config, "model", None, 0)
    model, placed = evidence.JudgedModel(config, weights, "model"), ledger.placements(checkpoint)
    sentences = batch.batches["sentences"]
    return sensitivity.prove(checkpoint, placed, model, sentences, "sentences", seed, lambda text: None)


def statuses(found):
    return {item.name: item.status for item in found.items}


def reason_of(found, name):
    return next(item.reason for item in found.items if item.name == name)


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
    assert all(item.reason for item in found.items)
    assert found.exit_code == 0
    assert "none failed; not verified: optimizer step." in found.verdict
    assert (
        set(found.inputs)
        == {"sentences", "awkward rows", "one token", "longest input"}
        == {run.case for run in found.runs} - {"optimizer step"}
    )
    assert all(
        one.source and one.target and one.source.sha256 == one.target.sha256 for one in found.parameters
    )
    assert {one.name for one in found.parameters} == set(WEIGHTS)


def test_a_wrong_port_fails_by_the_tensors_names():
    nudged = np.nextafter(WEIGHTS[POSITION], np.float32(9))
    wrong = {**WEIGHTS, QUERY: WEIGHTS[KEY], KEY: WEIGHTS[QUERY], POSITION: nudged}
    source, target = porting.from_weights(CONFIG, WEIGHTS), porting.from_weights(CONFIG, wrong)
    rows = ledger.parameters(
        source, target, ledger.placements(source), ledger.placements(target), compare(source, target)
    )
    item = claims(source, target, "concord", rows)["same bits"]
    assert item.status == "failed"
    for said in (f"{QUERY}: it is A's {KEY}, bit for bit", f"{KEY}: ", f"{POSITION}: ", "last digits"):
        assert said in item.reason


def test_a_quick_certificate_says_what_it_left_out(tmp_path):
    found = made(folder(tmp_path / "a", "concord"), folder(tmp_path / "b", "torch"), extent="quick")
    said = statuses(found)
    assert {said[name] for name in ("same bits", *evidence.FORWARD, "would notice, by bits")} == {"proven"}
    assert (said["all else"], "gradients" in said, found.exit_code) == ("unverified", False, 0)
    assert {(run.case, run.side) for run in found.runs} == {("sentences", "target")}


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
    assert (stopped.runs, bool(whole.runs)) == ((), True)
    assert "--all runs it" in reason_of(stopped, "outputs")


def test_a_framework_that_computes_something_else_fails_where_it_does(tmp_path):
    found = made(folder(tmp_path / "a", "concord"), folder(tmp_path / "b", "torch"), "ReturnsNaN")
    said = statuses(found)
    assert [said[name] for name in ("same bits", "outputs", "gradients")] == [
        "proven",
        "failed",
        "unverified",
    ]
    assert found.exit_code == 1
    assert "first logits on sentences: first at logits" in reason_of(found, "outputs")


@pytest.mark.parametrize("backend", ["ExitsAtOnce", "SaysUnsupported"])
def test_what_was_not_computed_is_unverified(tmp_path, backend):
    found = made(folder(tmp_path / "a", "concord"), folder(tmp_path / "b", "torch-safetensors"), backend)
    said = statuses(found)
    assert {said[kind] for kind in evidence.KINDS} == {"unverified"}
    assert (said["same bits"], found.exit_code) == ("proven", 3)
    assert "was not judged" in found.verdict
    assert all(item.reason for item in found.items)


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
    nothing = certificates.certificate.Sensitivity((), {}, 0, "")
    assert "The target is the source" not in certificates.certificate.verdict(
        (dataclasses.replace(item, status="unverified"),), nothing
    )


@pytest.mark.parametrize("variant", spec.variants())
def test_every_change_is_noticed_but_those_that_are_none(variant):
    config = spec.variant(variant, **{**SIZES, "num_layers": 2, "max_positions": 9})
    found = proof(config, drawn(config, seed=5))
    assert [
        (one.kind, one.unseen, one.contradicted) for one in found.tried if one.unseen or one.contradicted
    ] == []
    assert all(one.by_bits == one.made - one.same and one.run == one.made - one.same for one in found.tried)
    assert {item.status for item in sensitivity.items(found)} == {"proven"}
    assert sum(one.by_outputs for one in found.tried) > 50


def test_a_nudged_zero_that_nothing_can_show_has_its_reason():
    name = "layers.0.attention.value.bias"
    found = proof(CONFIG, {**WEIGHTS, name: np.zeros_like(WEIGHTS[name])})
    assert sensitivity.ZERO in found.reasons
    assert [one.unseen for one in found.tried if one.unseen or one.contradicted] == []


def test_a_certificate_that_notices_nothing_fails():
    blind = certificates.certificate.Tried("transposed", 3, 1, 1, 2, 1, 0, unseen=("a",))
    for tried, expected in (
        (blind, ["failed", "unverified"]),
        (dataclasses.replace(blind, contradicted=("b",)), ["failed", "failed"]),
    ):
        items = sensitivity.items(certificates.certificate.Sensitivity((tried,), {}, 0, "sentences"))
        assert [item.status for item in items] == expected


def test_tensors_that_are_alike_leave_nothing_to_notice():
    same = {name: np.zeros_like(array) for name, array in WEIGHTS.items()}
    swapped = next(one for one in proof(CONFIG, same).tried if one.kind.startswith("swapped"))
    assert (swapped.made, swapped.same, swapped.by_bits) == (17, 17, 0)


@pytest.mark.parametrize("variant", spec.variants())
@pytest.mark.parametrize("part", ["model", "encoder", "attention"])
def test_inputs_are_those_that_ports_get_wrong(variant, part):
    config = spec.variant(variant, **{**SIZES, "max_positions": 13})
    given = inputs.of(config, part, None, 0)
    for batch in given.batches.values():
        spec.validate_batch(config, batch, part)
    if part == "attention":
        assert "sentences" in given.left_out
        return
    ids = given.batches["awkward rows"].input_ids
    assert ids is not None
    real = ids != config.pad_id
    assert sorted(real.sum(1).tolist())[:2] == [0, 1]
    assert not real[3, 0]
    assert len(set(ids[1][real[1]])) == 1
    longest = given.batches["longest input"].input_ids
    assert longest is not None
    assert longest.shape[1] == config.max_positions - config.position_start


def test_texts_take_the_place_of_what_is_drawn():
    given = inputs.of(CONFIG, "model", [([3, 4, 5], [0, 0, 1]), ([6], [0])], 0)
    assert given.batches["sentences"].required("input_ids").tolist() == [[3, 4, 5], [6, 0, 0]]
    assert given.tried["sentences"] == "2 texts that were given"
    assert (
        "11 tokens"
        in inputs.of(CONFIG, "model", [([*range(1, 10), 1, 2], [0] * 11)], 0).left_out["sentences"]
    )


def test_a_certificate_is_read_back_and_no_byte_may_be_another(right, tmp_path):
    place, found = right
    _, back = certificates.read(place / "cert.json")
    assert back == found
    assert (back.parameters, back.sensitivity) == (found.parameters, found.sensitivity)
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
        data, found = certificates.read(path)
        assert found.exit_code == 0
        assert path.with_suffix(".html").read_text() == page(data)


def test_verifying_makes_it_again(right):
    _, found = right
    with pytest.raises(SpecError, match=r"say --backend tests\.toys"):
        certificates.verify(found)
    toy = (TOY + "NumpyBackend",)
    again = certificates.verify(found, named=toy)
    assert (again.problems, again.exit_code) == ((), 0)
    forged = dataclasses.replace(
        found, items=tuple(dataclasses.replace(item, status="proven") for item in found.items)
    )
    assert any(
        "optimizer step" in problem and "was proven, is unverified" in problem
        for problem in certificates.verify(forged, named=toy).problems
    )


def test_the_commands_reject_altered_files(right, tmp_path):
    run, (_, found) = CliRunner(), right
    source, target = folder(tmp_path / "a", "concord"), folder(tmp_path / "b", "torch-safetensors")
    path = target / "certificate.json"
    moved = dataclasses.replace(
        found,
        source=dataclasses.replace(found.source, path=str(source)),
        target=dataclasses.replace(found.target, path=str(target)),
    )
    path.write_text(certificates.text(certificates.recorded(moved)))

    def verified(*more):
        outcome = run.invoke(app, ["certify", "--verify", str(path), "--files", *more])
        return outcome.exit_code, outcome.output.replace("\n", " ")

    code, said = verified()
    assert code == 0
    assert "files have the bytes that it states; nothing was computed" in said
    content = path.read_bytes()
    path.write_bytes(content.replace(b"unverified", b"provenprov", 1))
    assert (verified()[0], "its digest is" in verified()[1]) == (1, True)
    path.write_bytes(content)
    weights = target / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    assert (verified()[0], "model.safetensors was altered" in verified()[1]) == (1, True)
    (target / "model.safetensors").unlink()
    (target / "extra.bin").write_bytes(b"")
    said = verified(str(source), str(target))[1]
    assert "model.safetensors is gone" in said
    assert "extra.bin was not there" in said


def test_a_certificate_is_written_beside_the_weights_alone(tmp_path):
    source, target = folder(tmp_path / "a", "concord"), folder(tmp_path / "b", "torch-safetensors")
    outcome = CliRunner().invoke(
        app, ["certify", str(source), str(target), "--certificate", str(target / "proof.json")]
    )
    assert outcome.exit_code == 2 or isinstance(outcome.exception, SpecError)
    assert not (target / "proof.json").exists()
