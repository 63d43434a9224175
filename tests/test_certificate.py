from dataclasses import replace

import pytest

from concord import porting, spec
from concord.conformance.run import record
from concord.conformance.run.campaign import Setup
from concord.output_files import KINDS
from concord.porting import certificate as certificates
from concord.porting.certificate import certificate_page, certify, hashes, inputs_of
from concord.porting.texts import Text
from tests.toys.checkpoints import CARRIED, SIZES, WEIGHTS, drawn, saved
from tests.toys.ready import hugging_face
from tests.toys.surroundings import PATIENCE, ROOT, concord, errors, refusal, toy

QUERY = "layers.0.attention.query.weight"
RIGHT = toy("NumpyBackend")

# The command takes long, so one process runs it for all tests.
pytestmark = pytest.mark.xdist_group("certificate")


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    place = tmp_path_factory.mktemp("right")
    sides = saved(place / "a", "concord"), saved(place / "b", "torch-safetensors")
    files = ("-o", place / "cert.json", "--html", place / "cert.html")
    done = concord("certify", *sides, *files, "--backend", RIGHT, patience=5 * PATIENCE)
    assert (done.returncode, errors(done.stderr)) == (0, "")
    assert "padding first, in float32" in done.stderr
    return done.stdout, place


@pytest.fixture(scope="module")
def right(command):
    return record.read(command[1] / "cert.json", KINDS).outcome


def test_the_command_writes_a_certificate_and_its_page(command, right, entered):
    output, place = command
    assert right.summary in " ".join(output.split())
    assert "found, first at layers.0.attention" in output
    assert "Planted bugs" in (place / "cert.html").read_text()
    output, _ = entered("certify", "--verify", place / "cert.json", "--backend", RIGHT)
    assert "no differences" in output


def test_a_right_port_agrees_on_every_input_and_bugs_in_it_are_found(right):
    assert (right.exit_code, right.problems, right.comparison.exit_code) == (0, [], 0)
    assert right.summary.startswith(
        "The target computes what the source computes: 41 of 41 parameters have the same bits"
    )
    runs = {(run.group, run.case): run.status for run in right.report.results}
    assert runs == {(side, case): "agrees" for side in ("source", "target") for case in right.inputs}
    assert any(row.tensor.startswith("gradients.") for row in right.report.results[0].table)
    assert len(right.bugs) > 10
    assert all(bug.found and bug.difference for bug in right.bugs)
    words = " ".join(bug.bug for bug in right.bugs)
    assert all(kind in words for kind in ("transposed", "rounded", "left out", "with heads in the order"))
    blind = [replace(bug, status="agrees") for bug in right.bugs]
    problems = replace(right, bugs=tuple(blind)).problems
    assert problems == ["the judge finds none of the bugs planted in the target's weights"]
    # A bug whose run was not judged is not a missed one.
    ended = replace(right, bugs=tuple(replace(bug, status="timed out") for bug in right.bugs[:5]))
    assert (ended.exit_code, ended.problems) == (3, [])
    assert ended.summary.endswith(f"not everything was judged: {right.bugs[0].bug}: timed out and 4 more.")


def test_a_wrong_port_is_judged_by_the_source_and_named(tmp_path):
    certificate = certify(
        *(
            saved(tmp_path / "a", "concord"),
            saved(tmp_path / "b", "paddle", weights={**WEIGHTS, QUERY: WEIGHTS[QUERY].T.copy()}),
        ),
        names=(RIGHT,),
    )
    assert {(run.group, run.status) for run in certificate.report.results} == {
        ("source", "agrees"),
        ("target", "diverges"),
    }
    first = certificate.report.results[-1]
    assert first.first_divergence.tensor == "layers.0.attention.query"
    assert "transposed" in first.verdict.cause.text
    assert (certificate.exit_code, certificate.bugs) == (1, ())
    assert certificate.summary.startswith(
        "The certificate fails: 40 of 41 parameters have the same bits; transposed: 1"
    )
    assert "transposed: 1" in certificate_page(record.make_record(certificate, certificates.KIND))


@pytest.mark.parametrize(
    ("backend", "exit_code", "said"),
    [
        (toy("ReturnsNaN"), 1, "diverges, first at logits, on sentences, padding first and one token"),
        (toy("SaysUnsupported"), 3, "on sentences: unsupported"),
    ],
)
def test_what_is_computed_wrongly_or_not_at_all_is_not_right(tmp_path, backend, exit_code, said):
    certificate = certify(
        *(saved(tmp_path / "a", "concord"), saved(tmp_path / "b", "torch")), names=(backend,)
    )
    assert (certificate.exit_code, certificate.comparison.exit_code, certificate.bugs) == (exit_code, 0, ())
    assert said in certificate.summary


@pytest.mark.parametrize("variant", spec.variants())
def test_inputs_fit_every_variant(variant):
    config = spec.variant(variant, **{**SIZES, "max_positions": 5})  # fewer than are usually drawn
    batches, meanings = inputs_of(porting.from_weights(config, drawn(config)))
    assert batches.keys() == meanings.keys()
    for batch in batches.values():
        spec.validate_batch(config, batch)
    assert batches["padding first"].required("input_ids")[0, 0] == config.pad_id


def test_texts_need_the_tokenizer_of_the_source(tmp_path):
    sides = saved(tmp_path / "a", "concord"), saved(tmp_path / "b", "torch")
    assert refusal(lambda: certify(*sides, texts=[Text("a")])) == [
        f"{sides[0]} has no tokenizer: it lacks tokenizer.json and vocab.txt"
    ]


def test_texts_take_the_place_of_what_is_drawn(tmp_path):
    batches, meanings = inputs_of(
        porting.read(hugging_face(tmp_path / "a")), [Text("the cat sat"), Text("short")]
    )
    assert batches["sentences"].required("input_ids").tolist() == [[2, 5, 7, 11, 3], [2, 23, 3, 0, 0]]
    assert meanings["sentences"] == "2 texts that you gave"
    assert meanings["one token"] == "one token, drawn at random, no padding"


def test_certificates_among_the_documents_have_their_pages():
    paths = sorted((ROOT / "docs/certificates").glob("*.json"))
    assert paths
    for path in paths:
        document = record.read(path, KINDS)
        assert document.outcome.exit_code == 0
        assert path.with_suffix(".html").read_text() == certificate_page(document)


def test_verifying_makes_it_again_and_names_what_comes_out_otherwise(right):
    assert "give --backend tests.toys" in refusal(certificates.verify, right)[0]
    first, *rest = right.bugs
    problems, again = certificates.verify(
        replace(right, bugs=(replace(first, status="agrees"), *rest)), settings=Setup(), named=(RIGHT,)
    )
    assert problems == [f"bug: {first.bug}: missed before, found now"]
    assert again.summary == right.summary


def test_verifying_names_files_that_were_altered(right, tmp_path, entered):
    source = saved(tmp_path / "a", "concord")
    target = saved(tmp_path / "b", "torch-safetensors", files=CARRIED)
    side = replace(right.target, path=str(target), files=hashes(target))
    path = target / "certificate.json"
    record.write(path, record.make_record(replace(right, target=side, backends=()), certificates.KIND))
    assert "certificate.json" not in hashes(target)
    weights = target / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    (target / "vocab.txt").unlink()
    output, _ = entered("certify", "--verify", path, source, ends=1)
    assert "model.safetensors was altered: its SHA-256 is" in output
    assert "vocab.txt is missing" in output
    assert "2 differences" in output
