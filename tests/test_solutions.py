"""Linear algebra: right algorithms do not diverge at any condition, wrong ones never agree."""

import pytest
import torch
from torch import linalg as L
from torch import nn

from concord.conformance.compare import compare

RIGHT_SIDE = torch.randn(61, 3, generator=torch.Generator().manual_seed(9))


class Of(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.function(x * self.scale)


def matrix(size, condition, symmetric=False, batch=(), seed=1):
    generator = torch.Generator().manual_seed(seed)
    first, second = (
        L.qr(torch.randn(*batch, size, size, generator=generator, dtype=torch.float64))[0] for _ in range(2)
    )
    values = torch.logspace(0, -torch.log10(torch.tensor(condition)).item(), size, dtype=torch.float64)
    x = (first * values) @ (first if symmetric else second).mT
    return ((x + x.mT) / 2 if symmetric else x).float()


def side(x):
    return RIGHT_SIDE[: x.shape[-1]].to(x.dtype)


def by_float64(function):
    return lambda x: function(x.double()).float()


def ridge(x):
    return x + 0.3 * torch.eye(x.shape[-1], dtype=x.dtype)


def half(x):
    return x[..., : x.shape[-1] // 2]


def solved(x):
    return L.solve(x, side(x))


def by_qr(x):
    q, r = L.qr(x)
    return L.solve_triangular(r, q.mT @ side(x), upper=True)


def by_lu(x):
    p, lower, upper = L.lu(x)
    first = L.solve_triangular(lower, p.mT @ side(x), upper=False, unitriangular=True)
    return L.solve_triangular(upper, first, upper=True)


def by_newton(x):
    y = x.mT / (L.matrix_norm(x, 1) * L.matrix_norm(x, torch.inf))[..., None, None]
    for _ in range(60):
        y = y @ (2 * torch.eye(x.shape[-1]) - x @ y)
    return y


def least_squares(x):
    return L.lstsq(half(x), side(x).expand(*x.shape[:-1], 3)).solution


def by_normal_equations(x):
    return L.solve(half(x).mT @ half(x), half(x).mT @ side(x))


def positive(x):
    q, r = L.qr(x)
    signs = torch.sign(torch.diagonal(r, dim1=-2, dim2=-1))
    return q * signs[..., None, :], r * signs[..., None]


def whitened(x, power=-0.5, keep=True):
    values, vectors = L.eigh(x)
    y = vectors * values.clamp(min=1e-9)[..., None, :] ** power
    return y @ vectors.mT if keep else y


def of_rank(x, count=2):
    u, s, v = L.svd(x)
    return (u[..., :count] * s[..., None, :count]) @ v[..., :count, :]


def reflected(x, **options):
    return torch.ormqr(*torch.geqrf(x), side(x).expand(*x.shape[:-1], 3), **options)


def triangle(x):
    return x.triu() + torch.eye(x.shape[-1], dtype=x.dtype)


def backward(x):
    return L.solve_triangular(triangle(x), side(x), upper=True)


def sorted_values(x):
    return L.eigvals(x).abs().sort(-1)[0]


# The right one, others that are right, wrong ones, and whether the matrix is symmetric.
KINDS = {
    "inverse": (
        torch.inverse,
        [lambda x: torch.inverse(x.mT).mT, by_float64(torch.inverse), by_newton],
        [lambda x: torch.inverse(x).mT, lambda x: -torch.inverse(x), lambda x: torch.inverse(ridge(x))],
        False,
    ),
    "solve": (
        solved,
        [by_qr, by_lu, by_float64(solved), lambda x: torch.inverse(x) @ side(x)],
        [lambda x: solved(x.mT), lambda x: solved(ridge(x))],
        False,
    ),
    "cholesky_solve": (
        solved,
        [lambda x: torch.cholesky_solve(side(x), L.cholesky(x))],
        [lambda x: torch.cholesky_solve(side(x), L.cholesky(x).mT), lambda x: solved(ridge(x))],
        True,
    ),
    "cholesky": (
        L.cholesky,
        [by_float64(L.cholesky), lambda x: L.cholesky(x, upper=True).mT],
        [lambda x: L.cholesky(x).mT, lambda x: L.cholesky(ridge(x))],
        True,
    ),
    "least squares": (
        least_squares,
        [by_float64(least_squares), lambda x: L.pinv(half(x)) @ side(x)],
        [lambda x: -least_squares(x)],
        False,
    ),
    "orthogonal": (
        lambda x: L.qr(x)[0],
        [by_float64(lambda x: L.qr(x)[0]), lambda x: positive(x)[0]],
        [lambda x: L.qr(x)[0].mT, lambda x: 1.5 * L.qr(x)[0]],
        False,
    ),
    "triangular": (
        lambda x: L.qr(x)[1],
        [by_float64(lambda x: L.qr(x)[1]), lambda x: positive(x)[1]],
        [lambda x: L.qr(x)[1].mT, lambda x: 1.5 * L.qr(x)[1]],
        False,
    ),
    "reflections": (reflected, [by_float64(reflected)], [lambda x: reflected(x, transpose=True)], False),
    "singular values": (
        L.svdvals,
        [by_float64(L.svdvals), lambda x: L.svd(x.mT)[1]],
        [lambda x: L.svdvals(ridge(x)), lambda x: 2 * L.svdvals(x)],
        False,
    ),
    "singular vectors": (
        lambda x: L.svd(x)[0],
        [by_float64(lambda x: L.svd(x)[0]), lambda x: L.svd(x.mT)[2].mT],
        [lambda x: L.svd(x.mT)[0], lambda x: 2 * L.svd(x)[0]],
        False,
    ),
    "of low rank": (
        of_rank,
        [by_float64(of_rank), lambda x: of_rank(x.mT).mT],
        [lambda x: of_rank(x, 1), lambda x: -of_rank(x)],
        False,
    ),
    "eigenvalues": (
        L.eigvalsh,
        [lambda x: L.eigh(x)[0], by_float64(L.eigvalsh)],
        [lambda x: L.eigvalsh(ridge(x)), lambda x: 2 * L.eigvalsh(x)],
        True,
    ),
    "eigenvectors": (
        lambda x: L.eigh(x)[1],
        [by_float64(lambda x: L.eigh(x)[1]), lambda x: -L.eigh(x)[1]],
        [lambda x: L.eigh(x)[1].mT, lambda x: 3 * L.eigh(x)[1]],
        True,
    ),
    "whitened": (
        whitened,
        [by_float64(whitened)],
        [lambda x: whitened(ridge(x)), lambda x: whitened(x, keep=False), lambda x: 2 * whitened(x)],
        True,
    ),
    "unordered": (
        lambda x: L.eigvals(x).abs(),
        [by_float64(lambda x: L.eigvals(x).abs()), lambda x: L.eigvals(x.mT).abs()],
        [lambda x: 9 * L.eigvals(x).abs()],
        False,
    ),
    "in order": (
        sorted_values,
        [by_float64(sorted_values), lambda x: sorted_values(x.mT)],
        [lambda x: sorted_values(ridge(x)), lambda x: 2 * sorted_values(x)],
        False,
    ),
    "factors": (lambda x: L.lu(x)[2], [by_float64(lambda x: L.lu(x)[2])], [lambda x: L.lu(x.mT)[2]], False),
    "determinant": (
        L.det,
        [by_float64(L.det), lambda x: L.det(x.mT)],
        [lambda x: 1 - L.det(x), lambda x: L.det(ridge(x)) + 1],
        False,
    ),
    "logarithm": (
        lambda x: L.slogdet(x)[1],
        [by_float64(lambda x: L.slogdet(x)[1]), lambda x: L.svdvals(x).log().sum(-1)],
        [lambda x: 2 * L.slogdet(x)[1], lambda x: L.slogdet(ridge(x))[1]],
        False,
    ),
    "exponential": (
        torch.matrix_exp,
        [by_float64(torch.matrix_exp), lambda x: torch.matrix_exp(x / 2) @ torch.matrix_exp(x / 2)],
        [lambda x: torch.matrix_exp(-x), lambda x: x.exp(), lambda x: torch.matrix_exp(x).mT],
        False,
    ),
    "pseudoinverse": (
        lambda x: L.pinv(x[..., :-1]),
        [lambda x: L.pinv(x[..., :-1].mT).mT],
        [lambda x: L.pinv(-x[..., :-1]), lambda x: L.pinv(ridge(x)[..., :-1])],
        False,
    ),
    "substitution": (
        backward,
        [by_float64(backward), lambda x: L.solve(triangle(x), side(x))],
        [lambda x: L.solve_triangular(triangle(x), side(x), upper=True, unitriangular=True)],
        False,
    ),
}

ORDINARY = {(3, 1e4)}

SIZES = pytest.mark.parametrize(
    ("size", "batch", "condition"),
    [
        pytest.param(size, batch, condition, marks=[] if (size, condition) in ORDINARY else pytest.mark.slow)
        for size, batch in ((3, (2,)), (17, ()), (41, ()))
        for condition in (3e0, 1e2, 1e4, 1e6, 1e8)
    ],
)
"""Of conditions that a wrong one has an effect at: of an orthogonal matrix the values are all 1."""


def judged(right, candidate, x):
    return compare(Of(right).eval(), {"output": candidate(x).numpy()}, {"x": x})


@pytest.mark.parametrize("kind", KINDS)
@SIZES
def test_a_right_algorithm_does_not_diverge(kind, size, batch, condition):
    right, others, _, symmetric = KINDS[kind]
    x = matrix(size, condition, symmetric, batch)
    for candidate in others:
        verdict = judged(right, candidate, x)
        assert verdict.status in ("agrees", "undetermined"), verdict
        assert verdict.worst < 0.8


@pytest.mark.parametrize("kind", KINDS)
@SIZES
def test_a_wrong_one_never_agrees(kind, size, batch, condition):
    right, _, wrong, symmetric = KINDS[kind]
    x = matrix(size, condition, symmetric, batch)
    for candidate in wrong:
        verdict = judged(right, candidate, x)
        assert verdict.status in ("diverges", "undetermined"), verdict


def test_normal_equations_square_the_condition():
    assert judged(least_squares, by_normal_equations, matrix(41, 1e5)).status == "diverges"


def test_where_nothing_is_left_the_operation_is_named():
    row = judged(torch.inverse, lambda x: torch.inverse(x.mT).mT, matrix(17, 1e8)).table[0]
    assert row.status == "undetermined"
    assert row.note.startswith("rounding leaves nothing of `inv` (")
    (row,) = judged(lambda x: L.eigh(x)[1], lambda x: -L.eigh(x)[1], matrix(7, 1e2, True)).table
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
    assert (
        judged(torch.inverse, lambda x: right * torch.tensor([1.5, 1])[:, None, None], x).status != "diverges"
    )
    assert (
        judged(torch.inverse, lambda x: right * torch.tensor([1, 1.5])[:, None, None], x).status == "diverges"
    )


@pytest.mark.parametrize(
    "kind", ["inverse", "solve", "singular values", "whitened", "logarithm", "orthogonal"]
)
def test_gradients_flow_through(kind):
    right, others, wrong, symmetric = KINDS[kind]
    x = matrix(7, 1e2, symmetric)
    for candidate in others:
        verdict = compare(Of(right).eval(), Of(candidate).eval(), {"x": x}, gradients=True)
        assert verdict.status in ("agrees", "undetermined"), verdict
    for candidate in wrong:
        verdict = compare(Of(right).eval(), Of(candidate).eval(), {"x": x}, gradients=True)
        assert verdict.status != "agrees", verdict
