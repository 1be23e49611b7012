"""Errata of Local Linear Attention (arXiv 2510.01450) and of its published program, in dense float64."""

from functools import partial

import torch
from torch import Tensor

import regard

from ._listing import Numbers, erratum, normal

here = partial(erratum, "Local Linear Attention")


def weights(q: Tensor, k: Tensor) -> Tensor:
    """Return w_ij = exp(q_i . k_j / sqrt(d)) for j <= i, else 0."""
    return (q @ k.T / q.shape[1] ** 0.5).exp().tril()


def total(x: Tensor) -> Tensor:
    """Return the sums of rows, [T, 1]."""
    return x.sum(1, keepdim=True)


def statistics(w: Tensor, q: Tensor, k: Tensor, ridge: Tensor | float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return z [T, T, d], omega [T, 1], mu [T, d] and Sigma [T, d, d] of equation 7; `ridge` is lambda or [T, 1]."""
    z = k[None] - q[:, None]
    ridge = torch.as_tensor(ridge, dtype=q.dtype).expand(len(q), 1)[..., None]
    sigma = torch.einsum("ij,ija,ijb->iab", w, z, z) + ridge * torch.eye(q.shape[1], dtype=q.dtype)
    return z, total(w), torch.einsum("ij,ija->ia", w, z), sigma


def predict(w: Tensor, q: Tensor, k: Tensor, v: Tensor, ridge: Tensor | float) -> Tensor:
    """Return equation 8."""
    z, omega, mu, sigma = statistics(w, q, k, ridge)
    rho = torch.linalg.solve(sigma, mu)
    return w * (1 - torch.einsum("ija,ia->ij", z, rho)) / (omega - total(mu * rho)) @ v


def error(actual: Tensor, expected: Tensor) -> float:
    """Return the relative error in the Frobenius norm."""
    return float((actual - expected).norm() / expected.norm())


@here("equation 6")
def ridge_factor() -> Numbers:
    """Found: ½ Σ w‖v − b − W z‖² + λ‖W‖² leads to equations 7 and 8. Correct: it leads to them with 2λ for λ."""
    q, k, v = normal(3, 24, 4)
    w, ridge, exact = weights(q, k), 0.5, torch.zeros_like(v)
    for i in range(len(q)):  # least squares: rows of data, then one row per entry of W
        rows = (w[i] / 2).sqrt()[:, None] * torch.cat([torch.ones(len(k), 1), k - q[i]], 1)
        penalty = torch.diag(torch.tensor([0.0] + [ridge**0.5] * q.shape[1], dtype=q.dtype))[1:]
        target = torch.cat([(w[i] / 2).sqrt()[:, None] * v, torch.zeros(q.shape[1], v.shape[1])])
        exact[i] = torch.linalg.lstsq(torch.cat([rows, penalty]), target).solution[0]
    printed, correct = (predict(w, q, k, v, factor * ridge) for factor in (1, 2))
    return {"error of equation 8 with λ": error(printed, exact), "with 2λ": error(correct, exact)}


@here("section 3.2, equation 13, algorithms 1 and 2")
def homogeneity() -> Numbers:
    """Found: equation 8 is homogeneous in w, so that the row's largest score may be subtracted. Correct: only if λ
    scales with w, as the published program's λω does."""
    q, k, v = normal(3, 24, 4)
    w = weights(q, k)
    low = w / w.amax(1, keepdim=True)
    return {
        "change of the output with λ": error(predict(low, q, k, v, 0.5), predict(w, q, k, v, 0.5)),
        "with λω": error(predict(low, q, k, v, 0.5 * total(low)), predict(w, q, k, v, 0.5 * total(w))),
    }


@here("published program, backward pass")
def gradient_of_the_ridge() -> Numbers:
    """Found: the gradient takes ω in its ridge λω as a constant. Correct: ω depends on q and k; the missing term is λ
    tr(dL/dΣ)."""
    q, k, v = (x.requires_grad_() for x in normal(3, 128, 64))
    g = normal(3, 128, 64, seed=1)[0]

    def gradients(constant: bool) -> tuple[Tensor, ...]:
        w = weights(q, k)
        omega = total(w).detach() if constant else total(w)
        return torch.autograd.grad((predict(w, q, k, v, 10 * omega) * g).sum(), (q, k))

    exact, released = gradients(False), gradients(True)
    out = regard.local_linear_attention(*(x[None, None] for x in (q, k, v)), ridge=10.0, is_causal=True)[0, 0]
    regards = torch.autograd.grad((out * g).sum(), (q, k))
    dq, dk = map(error, released, exact)
    return {"error of dq as released": dq, "of dk": dk, "of dq in regard": error(regards[0], exact[0])}


@here("equations 42, 43 and 50")
def signs_of_the_backward_pass() -> Numbers:
    """Found: ½ (z·u)(z·ρ) stands outside of W ∘ (…), and Δ_Q = Δ_W + Δ_Z. Correct: it belongs inside, and Δ_Q = Δ_W −
    Δ_Z, as in equation 36."""
    q, k, v = (x.requires_grad_() for x in normal(3, 24, 4))
    g = normal(3, 24, 4, seed=1)[0]
    w = weights(q, k)
    exact = torch.autograd.grad((predict(w, q, k, v, 0.5) * g).sum(), q)[0]
    q, k, v, w, h = q.detach(), k.detach(), v.detach(), w.detach(), q.shape[1] ** 0.5
    z, omega, mu, sigma = statistics(w, q, k, 0.5)
    rho = torch.linalg.solve(sigma, mu)
    along = lambda x: torch.einsum("ija,ia->ij", z, x)  # noqa: E731
    delta, gamma = omega - total(mu * rho), g @ v.T
    s, c = w * (1 - along(rho)) / delta, gamma * w / delta
    beta = total(gamma * s) / delta
    u = torch.linalg.solve(sigma, torch.einsum("ij,ija->ia", c, z))
    dmu = -u + 2 * beta * rho
    inner, last = -beta + along(dmu) - along(dmu) * along(rho) / 2, along(u) * along(rho) / 2
    path = -total(c) * rho + omega * dmu - total(w * along(dmu)) * rho + total(w * along(rho)) * u
    printed = (gamma * s + w * inner + last) @ k / h + path
    correct = (gamma * s + w * (inner + last)) @ k / h - path
    return {"error of dq as printed": error(printed, exact), "as corrected": error(correct, exact)}


@here("algorithm 2, line 9")
def product_in_conjugate_gradients() -> Numbers:
    """Found: P_Q = brsum(Y ∘ Q) in the product with Σ. Correct: P_Q = brsum(P ∘ Q), of the search direction, as in the
    published program."""
    q, k, _ = normal(3, 24, 4)
    w = weights(q, k)
    _, omega, mu, sigma = statistics(w, q, k, 0.5)
    raw, p = w @ k, normal(3, 24, 4, seed=1)[0]  # p is a search direction; Y is the right-hand side mu

    def product(along: Tensor) -> Tensor:
        return (w * (p @ k.T)) @ k - along * raw - total(p * raw) * q + omega * along * q + 0.5 * p

    exact = (sigma @ p[..., None])[..., 0]
    printed, correct = (product(total(x * q)) for x in (mu, p))
    return {"error of Σp as printed": error(printed, exact), "as corrected": error(correct, exact)}


@here("appendix E.1, block-diagonal LLA")
def block_diagonal() -> Numbers:
    """Found: Σ of equation 7 is replaced by its diagonal blocks. Correct: they make the denominator δ of equation 8
    negative; take the blocks of the covariance around the mean key."""
    q, k, _ = normal(3, 256, 16)
    w = weights(q, k)
    w, ridge, late = w / total(w), 0.1, slice(32, None)
    mask = torch.block_diag(*[torch.ones(4, 4, dtype=q.dtype)] * 4)
    _, omega, mu, sigma = statistics(w, q, k, ridge)
    rho = torch.linalg.solve(sigma * mask, mu)
    printed = omega - total(mu * rho)
    spread = (sigma - mu[:, :, None] * mu[:, None]) * mask
    correct = 1 / (1 + total(mu * torch.linalg.solve(spread, mu)))
    share = lambda x: float((x[late] <= 0).double().mean())  # noqa: E731
    return {"share of rows with δ <= 0": share(printed), "with the covariance": share(correct)}


@here("README of the published program")
def limit_of_the_bandwidth() -> Numbers:
    """Found: an infinite bandwidth recovers MesaNet. Correct: it gives ridge regression with a free intercept, which
    MesaNet does not have."""
    q, k, v = normal(3, 24, 4)
    flat = torch.ones(len(q), len(k), dtype=q.dtype).tril()
    predicted = predict(flat, q, k, v, 0.5)[8:]
    mesa = regard.mesa_attention(q[None, None], k[None, None], v[None, None], ridge=0.5)[0][0, 0, 8:]
    free = []
    for i in range(8, len(q)):
        mean, y = k[: i + 1].mean(0), v[: i + 1]
        x = k[: i + 1] - mean
        free.append(y.mean(0) + (q[i] - mean) @ torch.linalg.solve(x.T @ x + 0.5 * torch.eye(4), x.T @ y))
    regression = error(predicted, torch.stack(free))
    return {"distance from MesaNet": error(predicted, mesa), "from ridge regression with an intercept": regression}


@here("section 2.1 and equation 14")
def two_bandwidths() -> Numbers:
    """Found: one bandwidth h = 2√d, for exp(−‖k − q‖² / h) and for exp(q·k / h). Correct: the second needs h = √d, and
    keys of equal length, to have the same weights."""
    q, k, v = (torch.nn.functional.normalize(x, dim=1) for x in normal(3, 24, 4))
    root = q.shape[1] ** 0.5
    mean = lambda z: z.exp().tril() / z.exp().tril().sum(1, keepdim=True) @ v  # noqa: E731
    exact = mean(-torch.cdist(q, k).square() / (2 * root))
    twice, once = (mean(q @ k.T / h) for h in (2 * root, root))
    return {"error with h = 2√d": error(twice, exact), "with h = √d": error(once, exact)}
