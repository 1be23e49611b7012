"""Errata of the sparse-attention paper and of its published programs."""

from functools import partial

import torch
from torch import Tensor

import regard

from ._listing import Numbers, erratum, normal

here = partial(erratum, "Sparse attention as compact-kernel regression")


def bend(z: Tensor, p: Tensor, power: float) -> float:
    """Return how far p^(1/power) is from a linear function of z on the support of the first row, relatively."""
    z, root = z[0][p[0] > 0], p[0][p[0] > 0] ** (1 / power)
    x = torch.stack([torch.ones_like(z), z], 1)
    return float((x @ torch.linalg.lstsq(x, root[:, None]).solution[:, 0] - root).norm() / root.norm())


@here("caption of figure 1")
def caption() -> Numbers:
    """Found: 4/3- and 1.5-entmax mirror biweight (r = 2) and triweight (r = 3). Correct: 1.5-entmax is r = 2, the
    biweight kernel; 4/3-entmax is r = 3, the triweight kernel, as proposition 1 says."""
    z = normal(64, 64)
    p = regard.entmax(z, alpha=1.5)
    return {"bend of (1.5-entmax)^(1/3)": bend(z, p, 3), "of its square root": bend(z, p, 2)}


@here("proposition 1")
def powers_below_one() -> Numbers:
    """Found: the identity needs r >= 1. Correct: it holds for every r > 0."""
    z = 0.2 * normal(64, 64)
    return {"bend of (α-entmax)^(1/r) at r = 0.5, α = 3": bend(z, regard.entmax(z, alpha=3.0), 0.5)}


@here("published program of the synthetic tasks, normalised ReLU")
def bandwidth_of_normalised_relu() -> Numbers:
    """Found: h = 1/β is learned. Correct: β is in the keys already and is divided out again: h stays between 1 and √2
    for every β >= 1."""
    # weights relu(2 β⁴ s + 1 − 2 β²), s the cosine: 0 at s = threshold, and h² = 2 (1 − s)
    numbers: dict[str, float] = {}
    for beta in (2.0, 20.0):
        threshold = (2 * beta**2 - 1) / (2 * beta**4)
        numbers |= {f"h at β = {beta:g}": (2 * (1 - threshold)) ** 0.5, f"1/β at β = {beta:g}": 1 / beta}
    return numbers


@here("published program of the language models, normalised ReLU")
def normalised_relu_without_bandwidth() -> Numbers:
    """Found: weights 2s/h² + 1 − 2/h² (equation 11). Correct: weights relu(s) over their sum: h = √2 for ever, and no
    gradient reaches β."""
    s = normal(64, 64).tanh()
    released = s.relu() / s.relu().sum(-1, keepdim=True)
    wide, one = (regard.normrelu(2 * s / h**2, bias=1 - 2 / h**2) - released for h in (2**0.5, 1.0))
    far = "distance of the weights from equation 11 at h = √2"
    return {far: float(wide.abs().max()), "at h = 1": float(one.abs().max())}


@here("published program of the language models, mask of uniform, normalised ReLU and ReLUmax weights")
def mask_of_the_row_before() -> Numbers:
    """Found: query t sees the keys j < t. Correct: rows 1, 2, … use the mask of rows 0, 1, …: the latest key is hidden,
    and query 1 sees nothing."""
    visible = torch.ones(16, 16).tril(-1)
    released = torch.cat([visible[:1], visible[:-1]])
    return {"keys that query 1 sees": float(released[1].sum()), "as defined": float(visible[1].sum())}


@here("published program, uniform weights of the nearest keys")
def uniform_nearest_keys() -> Numbers:
    """Found: keys are learned. Correct: a 0/1 mask passes no gradient to the scores, so projections of keys, rates and
    β keep their first values."""
    z = normal(64, 64).requires_grad_()
    chosen = torch.zeros_like(z).scatter(-1, z.topk(8).indices, 1 / 8)
    value = normal(1, 64)[0]
    return {"operations through which gradients reach the scores": float((chosen @ value).requires_grad)}


@here("published program of the synthetic tasks, ReLUmax")
def relumax_with_temperature_twice() -> Numbers:
    """Found: weights relu(β² (s − m) + b), m the largest cosine (equation 21). Correct: β is in the keys already and is
    multiplied again: relu(β⁴ (s − m) + 1)."""
    s = normal(1, 64).tanh()
    near = lambda power: float(((2.0**power * (s - s.max()) + 1) > 0).sum())  # noqa: E731
    return {"of 64 keys, with weight at β = 2": near(4), "as defined, b = 1": near(2)}


@here("tables 2 and 7, exact match")
def exact_match_of_letters() -> Numbers:
    """Found: an answer counts where all of it is right. Correct: each token is predicted after the right ones, and of
    MQMTAR only the letters of the values are compared."""
    answer, letters = torch.tensor([2, 5, 6] * 4 + [261]), torch.tensor([False, True, True] * 4 + [False])
    right = torch.where(letters, answer, 0) == answer  # no separator and no end
    return {"as released": float(right[letters].all()), "of all tokens": float(right.all())}


@here("appendix B, RegBench")
def total_variation() -> Numbers:
    """Found: total variation distance. Correct: the program sums |p − q| without the factor ½."""
    p, q = normal(64, 18).softmax(-1), normal(64, 18).flip(0).softmax(-1)
    distance = (p - q).abs().sum(-1).mean()
    return {"as released": float(distance), "total variation": float(distance / 2)}


@here("program behind RegBench")
def automata_in_a_set() -> Numbers:
    """Found: a set of automata holds each one once. Correct: the class has __hash__ but no __eq__, so that equal
    automata are kept."""

    class Automaton:
        def __init__(self, edges: tuple[tuple[int, str, int], ...]) -> None:
            self.edges = edges

        def __hash__(self) -> int:
            return hash(self.edges)

    edges = ((0, "a", 1), (1, "b", 0))
    return {"kept of 2 equal automata": float(len({Automaton(edges), Automaton(edges)}))}


@here("table 4")
def validation_stories() -> Numbers:
    """Found: 2.2 k validation stories with 4,749,107 tokens. Correct: about 22 k stories: a story has 216 tokens."""
    return {"tokens per story, validation": 4_749_107 / 2.2e3, "training": 474.7e6 / 2.2e6}


@erratum("regard", "former documentation: distance of entmax with α = 1 + 1/n from softmax")
def distance_from_softmax() -> Numbers:
    """Found: ‖entmax − softmax‖₁ < 3/n. Correct: the factor grows with the entropy of the row: n ‖·‖₁ tends to E_q |x²
    − E_q x²| / 2, x = −log q, q = softmax."""
    n, distances = 100, {}
    for length in (16, 8192):
        z = normal(64, length)
        gap = (regard.entmax(z, alpha=1 + 1 / n) - z.softmax(-1)).abs().sum(-1).mean()
        distances[f"n ‖·‖₁ at {length} keys"] = float(n * gap)
    return distances
