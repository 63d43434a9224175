import dataclasses

import pytest

from concord import spec
from concord.backends.interface import Unsupported
from concord.conformance.explain.family_judge import judge
from concord.conformance.judging.expectation import JudgedTraining
from concord.conformance.lockstep.envelope import of_training
from concord.spec.training.recipe import RATES, Recipe
from concord.spec.training.trajectory import Training
from tests.toys.surroundings import EACH_BACKEND

# Sizes and batches of the training-bug runs, so that JAX reuses what it compiled for them.
CONFIG = spec.variant(
    "bert-pytorch",
    d_model=6,
    num_heads=2,
    d_ff=11,
    num_layers=1,
    vocab_size=17,
    max_positions=7,
    num_classes=3,
)

SECTIONS = {"losses", "gradients", "parameters"}

RECIPES = {
    "adamw": {
        "algorithm": "adam",
        "weight_decay": 0.1,
        "decay_form": "times_rate",
        "undecayed": ("bias", "gamma", "beta"),
        "clipping": "global_norm",
        "clip_at": 0.5,
    },
    "tf1": {
        "algorithm": "adam",
        "epsilon_placement": "uncorrected",
        "clipping": "global_norm",
        "clip_at": 0.7,
        "embedding_gradients": "slices",
    },
    "coupled": {
        "algorithm": "adam",
        "weight_decay": 0.1,
        "decay_form": "coupled",
        "amsgrad": True,
        "clipping": "value",
        "clip_at": 0.02,
    },
    "lazy": {
        "algorithm": "adam",
        "bias_correction": False,
        "embedding_updates": "lazy",
        "clipping": "tensor_norm",
        "clip_at": 0.3,
    },
    "momentum": {
        "algorithm": "sgd",
        "momentum": 0.9,
        "nesterov": True,
        "schedule": "linear",
        "warmup_steps": 1,
        "total_steps": 5,
    },
    "displacement": {
        "algorithm": "sgd",
        "momentum": 0.9,
        "momentum_form": "displacement",
        "schedule": "cosine",
        "total_steps": 4,
        "first_step": 0,
    },
    "dampened": {
        "algorithm": "sgd",
        "momentum": 0.9,
        "dampening": 0.3,
        "weight_decay": 0.01,
        "decay_form": "alone",
    },
    "rmsprop": {
        "algorithm": "rmsprop",
        "beta2": 0.9,
        "epsilon": 1e-3,
        "epsilon_placement": "inside",
        "clipping": "group_norm",
        "clip_at": 0.4,
        "undecayed": ("bias",),
    },
    "centered": {
        "algorithm": "rmsprop",
        "beta2": 0.9,
        "epsilon": 1e-3,
        "epsilon_placement": "uncorrected",
        "centered": True,
    },
}


def training(name, **fields):
    # Two batches in each step, but one in the last.
    recipe = Recipe(
        **{
            **{"learning_rate": 0.01, "accumulation": 2, "accumulation_mean": "samples"},
            **RECIPES[name],
            **fields,
        }
    )
    batches = [
        spec.example_batch(CONFIG, batch=size, tokens=5, seed=number, padding="ragged")
        for number, size in enumerate((5, 2, 5, 2, 5))
    ]
    return Training(recipe, [batches[:2], batches[2:4], batches[4:]], reported=(0, 1, 2))


def verdict_of(run, plan, dtype="float32", config=CONFIG):
    weights = spec.initialize(config, seed=3)

    def expected(deviations):
        return of_training(JudgedTraining(config, weights, plan, dtype=dtype, deviations=deviations))

    return judge(config, weights, plan.steps[0][0], run, expectation=expected)


def trained(open_worker, backend, plan, dtype="float32", config=CONFIG, **settings):
    problem = (config, spec.initialize(config, seed=3), plan.steps[0][0])
    # JAX compiles a whole step sooner than each of its operations.
    settings = {"execution": "compiled" if backend == "jax" else "eager", **settings}
    return open_worker(backend).run(*problem, dtype=dtype, taps=False, training=plan, **settings)


def judged(verdict):
    # Sections with at least one judged tensor.
    return {row.tensor.split(".")[2] for row in verdict.table if row.status == "agrees"}


@pytest.mark.clause("OPT-2", "OPT-3", "OPT-4", "OPT-5", "OPT-6", "OPT-7", "OPT-8", "OPT-10")
@pytest.mark.in_turn
@pytest.mark.parametrize("backend", EACH_BACKEND)
@pytest.mark.parametrize(
    ("name", "dtype"), [(name, ("float64", "float32")[place % 2]) for place, name in enumerate(RECIPES)]
)
def test_training_follows_the_recipe_step_by_step(open_worker, backend, name, dtype):
    plan = training(name)
    verdict = verdict_of(trained(open_worker, backend, plan, dtype), plan, dtype)
    assert verdict.passed, verdict.first_divergence
    assert judged(verdict) >= SECTIONS
    assert ("norm" in judged(verdict)) == (plan.recipe.clipping == "global_norm")


# With options that library layers support.
LIBRARY = CONFIG.replace(mask_fill="add", norm_epsilon_placement="inside", norm_variance="biased")


@pytest.mark.parametrize("backend", EACH_BACKEND)
def test_library_layers_train_and_drop_what_they_show(open_worker, backend):
    plan = training("adamw", dropout_embeddings=0.2, dropout_head=0.3)
    verdict = verdict_of(
        trained(open_worker, backend, plan, config=LIBRARY, implementation="library"), plan, config=LIBRARY
    )
    assert verdict.passed, verdict.first_divergence
    assert judged(verdict) >= SECTIONS


@pytest.mark.xdist_group("torch")
@pytest.mark.parametrize(
    ("implementation", "rate", "said"),
    [
        ("library", 0.1, "cannot apply dropout to layers.0.attention.weights in its implementation"),
        ("library:onednn", 0.0, "reordered weights computes none"),
    ],
)
def test_what_library_layers_keep_to_themselves_is_not_trained_silently(
    open_worker, implementation, rate, said
):
    plan = training("adamw", dropout_weights=rate)
    with pytest.raises(Unsupported, match=said):
        trained(open_worker, "torch", plan, config=LIBRARY, implementation=implementation)


@pytest.mark.parametrize("sooner", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("backend", EACH_BACKEND)
def test_every_framework_drops_the_same_elements(open_worker, backend, sooner):
    execution = "compiled" if (backend == "jax") == sooner else "eager"
    plan = training("adamw", **{name: 0.1 + 0.03 * place for place, name in enumerate(RATES)})
    plan = dataclasses.replace(plan, seed=2**40 + 11, steps=plan.steps[:2], reported=(0, 1))
    verdict = verdict_of(trained(open_worker, backend, plan, execution=execution), plan)
    assert verdict.passed, verdict.first_divergence
