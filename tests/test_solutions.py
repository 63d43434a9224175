import pytest
import torch
from torch import linalg as L

from concord.conformance.compare import compare
from tests.toys.kinds import Of

RIGHT_SIDE = torch.randn(61, 3, generator=torch.Generator().manual_seed(9))


def matrix(size, condition, symmetric=False, batch=(), seed=1):
    generator = torch.Generator().manual_seed(seed)
    first, second = (
        L.qr(torch.randn(*batch, size, size, generator=generator, dtype=torch.float64))[0] for _ in range(2)
    )
    values = torch.logspace(0, -torch.log10(torch.tensor(condition)).item(), size, dtype=torch.float64)
    x = (first * values) @ (first if symmetric else second).mT
    return ((x + x.mT) / 2 if symmetric else x).float()


def module(function):
    return Of(lambda m, x: function(x), {})


def side(x):
    return RIGHT_SIDE[: x.shape[-1]].to(x.dtype)


def by_float64(function):
    return lambda x: function(x.double()).float()


def ridge(x):
    # Another matrix, which also has other eigenvectors.
    return x + torch.linspace(0.3, 0.6, x.shape[-1], dtype=x.dtype).diag()


def half(x):
    return x[..., : x.shape[-1] // 2]


def solved(x):
    return L.solve(x, side(x))


def by_qr(x):
    q, r = L.qr(x)
    return L.solve_triangular(r, q.mT @ side(x), upper=True)


def least_squares(x):
    return L.lstsq(half(x), side(x).expand(*x.shape[:-1], 3)).solution


def by_normal_equations(x):
    return L.solve(half(x).mT @ half(x), half(x).mT @ side(x))


def orthogonal(x):
    return L.qr(x)[0]


def with_positive_diagonal(x):
    q, r = L.qr(x)
    return q * torch.sign(torch.diagonal(r, dim1=-2, dim2=-1))[..., None, :]


def whitened(x):
    values, vectors = L.eigh(x)
    return (vectors * values.clamp(min=1e-9)[..., None, :] ** -0.5) @ vectors.mT


def left_vectors(x):
    return L.svd(x)[0]


def eigenvectors(x):
    return L.eigh(x)[1]


def reflected(x, **options):
    return torch.ormqr(*torch.geqrf(x), side(x).expand(*x.shape[:-1], 3), **options)


def sizes(x):
    return L.eigvals(x).abs()


# The reference, right algorithms besides its float64 run, wrong ones besides the same of another matrix, and
# whether the matrix is symmetric.
KINDS = {
    "inverse": (torch.inverse, [lambda x: torch.inverse(x.mT).mT], [lambda x: torch.inverse(x).mT], False),
    "solve": (solved, [by_qr, lambda x: torch.inverse(x) @ side(x)], [lambda x: solved(x.mT)], False),
    "cholesky_solve": (
        solved,
        [lambda x: torch.cholesky_solve(side(x), L.cholesky(x))],
        [lambda x: torch.cholesky_solve(side(x), L.cholesky(x).mT)],
        True,
    ),
    "least squares": (least_squares, [lambda x: L.pinv(half(x)) @ side(x)], [], False),
    "orthogonal": (
        orthogonal,
        [with_positive_diagonal],
        [lambda x: orthogonal(x).mT, lambda x: 1.5 * orthogonal(x)],
        False,
    ),
    "reflections": (reflected, [], [lambda x: reflected(x, transpose=True)], False),
    "singular vectors": (
        left_vectors,
        [lambda x: L.svd(x.mT)[2].mT],
        [lambda x: left_vectors(x.mT), lambda x: 2 * left_vectors(x)],
        False,
    ),
    "eigenvectors": (
        eigenvectors,
        [lambda x: -eigenvectors(x)],
        [lambda x: eigenvectors(x).mT, lambda x: 3 * eigenvectors(x)],
        True,
    ),
    "whitened": (whitened, [], [lambda x: 2 * whitened(x)], True),
    "unordered": (sizes, [lambda x: sizes(x.mT)], [lambda x: 9 * sizes(x)], False),
    "in order": (lambda x: sizes(x).sort(-1)[0], [lambda x: sizes(x.mT).sort(-1)[0]], [], False),
    "cholesky": (L.cholesky, [lambda x: L.cholesky(x, upper=True).mT], [], True),
    "singular values": (L.svdvals, [lambda x: L.svd(x.mT)[1]], [], False),
    "factors": (lambda x: L.lu(x)[2], [], [], False),
    "determinant": (L.det, [lambda x: L.det(x.mT)], [], False),
    "logarithm": (lambda x: L.slogdet(x)[1], [lambda x: L.svdvals(x).log().sum(-1)], [], False),
    "exponential": (
        torch.matrix_exp,
        [lambda x: torch.matrix_exp(x / 2) @ torch.matrix_exp(x / 2)],
        [lambda x: torch.matrix_exp(x).mT],
        False,
    ),
    "pseudoinverse": (lambda x: L.pinv(x[..., :-1]), [lambda x: L.pinv(x[..., :-1].mT).mT], [], False),
    "substitution": (
        lambda x: L.solve_triangular(ridge(x).triu(), side(x), upper=True),
        [lambda x: L.solve(ridge(x).triu(), side(x))],
        [lambda x: L.solve_triangular(ridge(x).triu(), side(x), upper=True, unitriangular=True)],
        False,
    ),
}

# Condition numbers at which a wrong algorithm has an effect: for an orthogonal matrix all values are 1.
SIZES = pytest.mark.parametrize(
    ("size", "batch", "condition"),
    [
        (17, (2,), 1e4),
        *(
            pytest.param(size, (), condition, marks=pytest.mark.slow)
            for size in (3, 41)
            for condition in (3e0, 1e2, 1e4, 1e6, 1e8)
        ),
    ],
)


def judged(right, candidate, x):
    return compare(module(right), {"output": candidate(x).numpy()}, {"x": x})


@pytest.mark.parametrize("kind", KINDS)
@SIZES
def test_a_right_algorithm_does_not_diverge_and_a_wrong_one_never_agrees(kind, size, batch, condition):
    right, others, wrong, symmetric = KINDS[kind]
    # In float32 a symmetric matrix of a larger condition need not be positive definite.
    x = matrix(size, min(condition, 1e6) if symmetric else condition, symmetric, batch)
    for candidate in (by_float64(right), *others):
        verdict = judged(right, candidate, x)
        assert verdict.status in ("agrees", "undetermined"), verdict
        assert verdict.worst < 0.8
    for candidate in (lambda x: right(ridge(x)), *wrong):
        verdict = judged(right, candidate, x)
        assert verdict.status in ("diverges", "undetermined"), verdict


def test_normal_equations_square_the_condition():
    assert judged(least_squares, by_normal_equations, matrix(41, 1e5)).status == "diverges"


def test_where_nothing_is_left_the_operation_is_named():
    row = judged(torch.inverse, lambda x: torch.inverse(x.mT).mT, matrix(17, 1e8)).table[0]
    assert row.status == "undetermined"
    assert row.note.startswith("rounding leaves no correct digit of `inv` (")
    (row,) = judged(eigenvectors, lambda x: -eigenvectors(x), matrix(7, 1e2, True)).table
    assert row.note.startswith("rounding decides `eigh` (")


def test_a_model_that_refuses_what_is_not_finite_is_judged():
    def checked(x):
        y = torch.inverse(x)
        if not bool(torch.isfinite(y).all()):
            raise ValueError("not finite")
        return y

    assert judged(checked, lambda x: torch.inverse(x.mT).mT, matrix(7, 1e1)).status == "agrees"
    assert judged(checked, lambda x: -torch.inverse(x), matrix(7, 1e1)).status == "diverges"


def test_a_matrix_of_a_batch_does_not_blind_the_others():
    x = torch.stack([matrix(7, 1e8), matrix(7, 1e1)])
    right = torch.inverse(x)
    for factors, diverges in (([1.5, 1], False), ([1, 1.5], True)):
        wrong = right * torch.tensor(factors)[:, None, None]
        assert (judged(torch.inverse, lambda x, wrong=wrong: wrong, x).status == "diverges") is diverges


@pytest.mark.parametrize("kind", ["inverse", "orthogonal"])
def test_gradients_flow_through(kind):
    right, others, wrong, symmetric = KINDS[kind]
    x = matrix(7, 1e2, symmetric)
    for candidate in (by_float64(right), *others, *wrong):
        inputs = {"x": x.clone().requires_grad_()}
        verdict = compare(module(right), module(candidate), inputs, gradients=True)
        allowed = ("diverges", "undetermined") if candidate in wrong else ("agrees", "undetermined")
        assert verdict.status in allowed, verdict
