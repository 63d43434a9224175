import dataclasses
import re
import zlib

import numpy as np
import pytest

from concord import spec
from concord.conformance.bugs.bug import Change, fits
from concord.conformance.bugs.catalogue import BUGS
from concord.conformance.bugs.loss import of_targets, smoothed
from concord.conformance.explain.conclusions import conclude
from concord.conformance.explain.hypothesis import Hypothesis, explained_by
from concord.conformance.explain.numbers import KNOWN
from concord.conformance.judging.expectation import JudgedProblem
from concord.conformance.judging.explanation import Explanation
from concord.conformance.judging.verdict import Result, Verdict, divergence_lines
from concord.spec.cases import build_case
from concord.spec.precision import round_to_bits
from tests.toys.rounded import explained, other, run_with, verdict_of, without


def there(place, replacement):
    # Changes a tap in some places only.
    return lambda m: m.where(place(m), replacement(m), m.y)


H0 = "layers.0.attention"

# By bug: the tap, its edit, the clause, and words of the description.
UNSEEN = {
    "one id wrong": (
        "embeddings.token",
        there(lambda m: (m.ids == m.ids[0, 1])[..., None], lambda m: m.y * 0.5),
        "EMB-1",
        "only in id 11 (56 of 770 elements): there it is multiplied by 0.5",
    ),
    "bias in the first head alone": (
        f"{H0}.query",
        there(
            lambda m: np.arange(2)[:, None] == 1,
            lambda m: m.y - m.reshape(m.weight(f"{m.tap}.bias"), (2, 7)),
        ),
        "WGT-2",
        "left out (WGT-2), only in head 1",
    ),
    "value one token late": (
        f"{H0}.value",
        lambda m: m.rearranged(m.y, lambda numbers: np.roll(numbers, 1, 1)),
        "ATT-1",
        "is correct, but each token is taken from another",
    ),
    "mask of one other sample": (
        f"{H0}.masked_scores",
        lambda m: m.masked(m.visible_of(m.real[[0, 1, 1, 3, 4]])),
        "MSK-7",
        "only in sample 2",
    ),
    "empty rows are no numbers": (
        f"{H0}.weights",
        lambda m: m.where(m.real.any(1)[:, None, None, None], m.y, np.nan),
        "MSK-5",
        "only in rows without a visible key (242 of 1210 elements): there it is not a number (NaN)",
    ),
    "padded rows miss the residual": (
        "layers.0.residual2",
        lambda m: m.where(m.real[..., None], m.y, m.beside("feed_forward.outer")),
        "RES-1",
        "a sublayer has no residual (RES-1), only in padded tokens",
    ),
    "last class suppressed": (
        "logits",
        there(lambda m: np.arange(3) == 2, lambda m: m.y - 7.0),
        "HED-3",
        "only in class 2 (5 of 15 elements): there it is 7 too small",
    ),
    "loss half as large again": ("loss", lambda m: m.y * 1.5, "LOS-2", "`loss` is 1.8088 instead of 1.20587"),
    "last sample has no gradient": (
        "logits",
        there(lambda m: np.arange(5)[:, None] == 4, lambda m: m.stop_gradient(m.y)),
        "LOS-1",
        "the derivative of a step between the loss (correct) and `gradients.classifier.bias` (wrong)",
    ),
}

# Bugs that one tensor reveals by itself: the tap, its edit, the clause, and words of the explanation.
READ = {
    "corner one too early": (
        f"{H0}.masked_scores",
        lambda m: m.masked(m.visible & (np.tri(11, k=-1) > 0)),
        "MSK-4",
        "is explained by a mask that also hides a query's own key and later keys",
    ),
    "last real key hidden": (
        f"{H0}.masked_scores",
        lambda m: m.masked(m.visible_of(m.real & (np.cumsum(m.real[:, ::-1], 1)[:, ::-1] > 1))),
        "MSK-1",
        "is explained by a mask that also hides the last real token",
    ),
    "mask one place on": (
        f"{H0}.masked_scores",
        lambda m: m.masked(m.visible_of(np.roll(m.real, 1, -1))),
        "MSK-1",
        "is explained by a mask shifted by 1 to the right",
    ),
    "keys for values": (
        f"{H0}.context",
        lambda m: m.context(m.used_weights, m.beside("key")),
        "ATT-6",
        f"is explained by `{H0}.key` used in place of `{H0}.value`",
    ),
    "no projection": (
        f"{H0}.output",
        lambda m: m.x * 1.0,
        "ATT-6",
        f"is explained by `{H0}.output` being equal to its step's input, as if the step were left out",
    ),
    "softmax over heads": (f"{H0}.weights", lambda m: m.softmax(m.unnormalised, 1), "ATT-5", "over heads"),
    "another activation": (
        "layers.0.feed_forward.activation",
        lambda m: m.x * m.sigmoid(m.x),
        "FFN-2",
        "is explained by SiLU instead of erf GELU",
    ),
    "last token": ("pooling", lambda m: m.x[:, 10], "HED-1", "is explained by token 10 of every sample"),
    "samples weighted": (
        "pooling",
        lambda m: m.y * m.constant(np.arange(1.0, 6)[:, None], m.y),
        "HED-1",
        "is multiplied by a factor for each sample: 2, 3, 4, 5",
    ),
    "other labels": (
        "losses",
        lambda m: of_targets(m, np.eye(3)[(m.labels + 1) % 3]),
        "LOS-1",
        "is explained by the losses of the labels 2, 0, 1, 2, … instead of 1, 2, 0, 1, …",
    ),
    "blind rows halved": (
        f"{H0}.weights",
        there(lambda m: ~m.visible.any(-1, keepdims=True), lambda m: m.y * 0.5),
        "MSK-5",
        "only in rows without a visible key (242 of 1210 elements): there it is 0.0454545 throughout",
    ),
    "blocks of keys": (
        f"{H0}.masked_scores",
        lambda m: m.masked(m.visible & (np.arange(11)[:, None] // 4 == np.arange(11) // 4)),
        "MSK-4",
        "keys outside a query's block of 4",
    ),
    "signs lost": (
        f"{H0}.value",
        lambda m: m.abs(m.y),
        "ATT-1",
        "is explained by values without their sign",
    ),
    "few decimals": (
        "embeddings.position",
        lambda m: m.y + m.constant(np.round(m.y.tensor.value, 4) - m.y.tensor.value, m.y),
        "POS-4",
        "is explained by values rounded to 4 decimals",
    ),
    "few bits": (
        "layers.0.norm1",
        lambda m: m.y + m.constant(round_to_bits(m.y.tensor.value, 10) - m.y.tensor.value, m.y),
        "PRC-2",
        "is explained by values with 10 significant bits",
    ),
    "a factor and zeros": (
        "layers.0.feed_forward.activation",
        lambda m: m.where(np.arange(17) == 3, m.y * 0.0, m.y * 0.9),
        "FFN-2",
        "is zero in 55 elements, and multiplied by 0.9 in the others",
    ),
    "samples less one": (
        "loss",
        lambda m: m.y * 1.25,
        "LOS-2",
        "a sum of losses divided by 4 instead of 5",
    ),
    "one element": (
        "logits",
        there(lambda m: np.arange(15).reshape(5, 3) == 7, lambda m: m.y + 0.5),
        "HED-3",
        "only in sample 2, class 1 (1 of 15 elements): there it is 0.67259 instead of 0.17259",
    ),
}


def explained_edit(case, tap, edit):
    return verdict_of(case, run_with(Change(taps=(tap,), edit=edit), case), end_to_end=False).explained()


@pytest.mark.parametrize("name", [*UNSEEN, *READ])
def test_an_unforeseen_bug_is_placed_and_described(name):
    tap, edit, clause, words = (UNSEEN | READ)[name]
    explanation = explained_edit(build_case("bert", "ragged"), tap.replace(".0.", ".*."), edit).explanation
    first = "gradients.classifier.bias" if "gradient" in name else tap
    assert (explanation.tensor, explanation.clause) == (first, clause)
    assert words in "; ".join(explanation.lines)
    assert not [note for note in explanation.notes if " failed: " in note]
    assert name in READ or (explanation.description and not explanation.confident)


def test_an_option_that_the_rest_of_the_layer_contradicts_holds_in_one_tensor_alone():
    def unnormed(m):
        entered = m.now["embeddings.sum" if m.layer == 0 else "layers.0.residual2"]
        return m.reshape(m.linear(m.tap, entered), m.y.shape)

    case = build_case("bert-pytorch", "ragged")
    cause = verdict_of(case, run_with(Change(taps=("*.value",), edit=unnormed), case)).explained().cause
    assert not cause.confident
    assert cause.text == (
        "`layers.0.attention.value` may be explained by norm_placement = post instead of pre (NRM-1), "
        "but only here: with that cause, `layers.0.norm1` would be wrong too"
    )


# The variant that has the number, where it is not BERT.
NUMBERED = {
    "embeddings.token": "nndl-paddle",
    "embeddings.position": "vanilla-encoder",
    "pooling": "sentence-bert",
    "normalized": "sentence-bert",
    "gelu_tanh": "bert-pytorch",
    "relu": "vanilla-encoder",
}


@pytest.mark.parametrize("number", KNOWN, ids=lambda number: number.text)
def test_a_number_of_a_step_is_recovered_whatever_it_is(number):
    case = build_case(NUMBERED.get(number.activation or number.taps[0], "bert"), "ragged")
    random = np.random.default_rng(zlib.crc32(number.text.encode()))
    right = number.right(case.config) if callable(number.right) else number.right
    value = (right or 0.05) * random.uniform(1.1, 1.3)
    tap = next(tap for tap in spec.taps(case.config) if fits(tap, number.taps))
    explanation = explained_edit(case, tap, lambda m: number.edit(m, value)).explanation
    assert (explanation.tensor, explanation.clause) == (tap, number.clause)
    before, after = number.text.split("{}")
    match = re.search(rf"{re.escape(before)}(\S+)( instead of \S+)?{re.escape(after)}", explanation.text)
    assert f"{float(match.group(1)):.3g}" == f"{value:.3g}"
    assert not explanation.confident


@pytest.mark.parametrize(("axis", "clause"), [(1, "MSK-7"), (2, "MSK-4"), (3, "MSK-1")])
def test_what_a_mask_depends_on_says_which_clause_it_breaks(axis, clause):
    # Keys are hidden at random, alike along all axes but one.
    case, random = build_case("bert", "ragged"), np.random.default_rng(0)
    shape = [5, 1, 1, 11]
    shape[axis] = (5, 2, 11, 11)[axis]
    shown = random.random(shape) < 0.7
    verdict = explained_edit(case, f"{H0}.masked_scores", lambda m: m.masked(m.visible & shown))
    assert verdict.clause == clause
    assert verdict.cause is None


@pytest.mark.parametrize("name", ["token", "position", "segment"])
def test_other_rows_of_a_table_are_named_and_no_vector_that_is_none_of_them(name):
    random = np.random.default_rng(7)
    case, tap = build_case("bert", "ragged"), f"embeddings.{name}"
    count = len(case.weights[f"{tap}.weight"])
    rows, mask = random.integers(count, size=(5, 11)), random.random((5, 11)) < 0.3

    def looked_up(m):
        return m.where(mask[..., None], m.rows_of(name, rows), m.y)

    cause = explained_edit(case, tap, looked_up).cause
    assert (cause.hypothesis, cause.confident) == ("other_rows", True)
    place = random.choice(np.argwhere(mask))
    stray = np.zeros((5, 11, 14))
    stray[(*place, 5)] = 0.25
    assert explained_edit(case, tap, lambda m: looked_up(m) + m.constant(stray, m.y)).cause is None


@pytest.mark.parametrize(
    ("tap", "own"), [("layers.0.norm1", "NRM-2"), (f"{H0}.weights", "ATT-5"), ("layers.0.residual2", "RES-1")]
)
def test_small_errors_are_rounding_only_if_they_are_random(tap, own):
    for error, clause in ((np.asarray, "PRC-2"), (abs, own)):  # of both signs, or of one

        def edit(m, error=error):
            y = np.asarray(m.y.tensor.value, np.float64)
            noise = error(np.random.default_rng(5).standard_normal(y.shape))
            return m.y + m.constant(1e-4 * y * noise, m.y)

        assert explained_edit(build_case("bert", "ragged"), tap, edit).clause == clause


@pytest.mark.parametrize("tap", ["*.value", "*attention.output", "*.norm2"])
def test_padded_rows_that_are_zeroed_break_the_clause_of_padded_rows(tap):
    case = build_case("distilbert", "equal")

    def zeroed(m):
        real = m.real.reshape(*m.real.shape, *[1] * (len(m.y.shape) - 2))
        return m.where(real, m.y, 0.0)

    verdict = explained_edit(case, tap, zeroed)
    assert verdict.clause == "MSK-4"
    assert "only in padded tokens" in (text := verdict.explanation.description)
    assert text.endswith("there it is zero")


@pytest.mark.parametrize("share", [0.05, 0.3, 1.5])
def test_gradients_that_are_flushed_to_zero_are_not_rounded_and_not_missing(share):
    # The limit may hide a few numbers, most of a gradient, or all of one.
    case = build_case("bert", "ragged")
    right = run_with(Change(), case)
    limit = share * abs(right.gradients["pooler.bias"]).max()
    gradients = {name: np.where(abs(g) < limit, 0, g).astype(g.dtype) for name, g in right.gradients.items()}
    explanation = explained(case, dataclasses.replace(right, gradients=gradients)).explanation
    assert (explanation.clause, explanation.hypothesis) == ("GRD-1", "flushed")


@pytest.mark.parametrize(("share", "cause"), [(0.0, "no_gradient"), (0.5, None)])
def test_a_gradient_that_is_partly_zero_is_not_missing(share, cause):
    case, random = build_case("bert", "ragged"), np.random.default_rng(1)
    name = "gradients.layers.1.feed_forward.outer.weight"
    named = explained(
        case, other(run_with(Change(), case), name, lambda g: g * (random.random(g.shape) < share))
    ).cause
    assert (named.hypothesis if named else None) == cause


@pytest.mark.parametrize(("count", "declared"), [(19, ""), (14 * 28, "uncomputed_padding")])
def test_few_wrong_elements_of_padded_rows_are_not_rows_that_nobody_computes(count, declared):
    case = build_case("bert", "ragged")
    padded = np.argwhere(np.broadcast_to((case.batch.input_ids == 0)[..., None], (5, 11, 14)))
    wrong = np.zeros((5, 11, 14), np.float32)
    wrong[tuple(padded[:: len(padded) // count].T)] = 0.3

    assert (
        explained_edit(case, "layers.1.feed_forward.outer", lambda m: m.y + m.constant(wrong, m.y)).undeclared
        == declared
    )


# All cases of a backend together.


def result_of(name, status, verdict):
    return Result("toy", "bert", name, "float32", status, verdict=verdict)


def results_of(change, *scenarios):
    results = []
    for scenario in scenarios:
        case = build_case("bert", scenario)
        verdict = verdict_of(case, run_with(change, case), end_to_end=False)
        results.append(result_of(case.name, verdict.status, verdict))
    return results


def test_a_cause_that_other_cases_refute_is_not_named():
    # In a batch of one, each head of a sample is that head of the whole batch, so one case cannot tell.
    results = results_of(BUGS["score_scale_missing"].change, "ragged", "full", "equal")
    results, (conclusion,) = conclude(results)
    assert "scores are not divided by sqrt(K) (ATT-4) fits 3 of them" in conclusion.text
    assert {result.verdict.cause.hypothesis for result in results} == {"score_scale_missing"}


def of_shape(status, samples, tokens):
    # Right, or wrong in the scores, on a batch of this size.
    case = build_case("bert", "full")
    batch = spec.example_batch(case.config, samples, tokens, padding="none")
    explanation = Explanation("layers.0.attention.scores", ("ATT-4",)) if status == "diverges" else None
    return result_of(
        f"{samples}x{tokens}",
        status,
        Verdict([], explanation, case=JudgedProblem(case.config, case.weights, batch)),
    )


@pytest.mark.parametrize(
    ("wrong", "right", "said"),
    [
        ([(1, 5), (1, 7)], [(2, 3), (3, 11)], "there is one sample"),
        ([(1, 1)], [(2, 3), (3, 7)], "there is one sample; only where there is one token"),
    ],
)
def test_the_plainest_condition_is_named_and_every_one_that_is_as_plain(wrong, right, said):
    runs = [of_shape("diverges", *shape) for shape in wrong] + [of_shape("agrees", *shape) for shape in right]
    _, (conclusion,) = conclude(runs)
    assert conclusion.text.partition("it is wrong only where ")[2] == said


def epsilons(case, *numbers):
    # Judged by logits only: each epsilon explains them. Without any epsilon, the run agrees.
    those = [Hypothesis("norm_epsilon", f"norm_epsilon = {epsilon:g}", "NRM-2") for epsilon in numbers]
    explanation = explained_by("logits", those, False) if those else None
    return result_of(case, "diverges" if those else "agrees", Verdict([], explanation))


def test_runs_together_say_what_most_of_them_do_and_of_a_precision_only_what_another_shows():
    wrong, right = [epsilons("tiny", 1e-10, 1e-6), epsilons("long", 1e-6)], epsilons("full")
    other = dataclasses.replace(right, dtype="float64")
    first, second, third = (conclude([*wrong, *more])[1][0].text for more in ((), (right,), (other,)))
    assert first == second
    assert first.endswith("; norm_epsilon = 1e-06 (NRM-2) fits 2 of them")
    assert third.endswith("it is wrong only where the precision is float32")


def test_a_neighbour_that_would_show_elsewhere_is_not_named():
    # One case has the wrong step of a known bug, but other cases, where it would show, are right.
    results = [
        *results_of(BUGS["gelu_quick"].change, "ragged"),
        *results_of(Change(), "full", "equal", "offset"),
    ]
    assert results[0].verdict.explained().cause.confident
    results, (conclusion,) = conclude(results)
    assert results[0].verdict.cause is None
    assert "gelu" not in conclusion.text


def test_a_smoothed_loss_is_not_blamed_on_steps_before_the_correct_logits():
    case = build_case("bert", "peaked")
    run = run_with(Change(taps=("losses",), edit=lambda m: smoothed(m, 0.1)), case)
    verdict = explained(case, dataclasses.replace(run, taps={}))  # a run without activations
    assert (verdict.first_divergence.tensor, verdict.clause, verdict.cause) == ("loss", "LOS-2", None)


# The next step.


def lines_of(tensor, *missing):
    # Noise in one tensor, while others are missing.
    case, random = build_case("bert", "ragged"), np.random.default_rng(5)

    def noisy(x):
        return x + np.float32(1e-3) * abs(x).max() * random.standard_normal(x.shape, dtype=np.float32)

    verdict = verdict_of(case, without(other(run_with(Change(), case), tensor, noisy), *missing))
    return divergence_lines(result_of(case.name, verdict.status, verdict))


def test_the_next_step_is_named():
    assert lines_of("layers.1.norm1", *("layers.1.attention.output", "layers.1.residual1", "layers.0.norm1"))[
        -1
    ].endswith(
        "return layers.1.attention.output too (2 activations missing between "
        "layers.1.attention.context (correct) and layers.1.norm1, which is wrong)"
    )
    lines = lines_of("layers.1.norm1")
    assert lines[-1].startswith("  next: compare this step with SPEC ")
    assert "the forward pass agrees" not in "\n".join(lines)


def test_that_only_gradients_diverge_is_said_first():
    first, second, *_, last = lines_of("gradients.layers.1.norm1.weight")
    assert first.endswith(": the forward pass agrees; only the gradients diverge")
    assert second.startswith("  first at gradients.layers.1.norm1.weight")
    assert "--forward-only" in last
