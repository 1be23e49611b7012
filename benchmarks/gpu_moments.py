"""Compare ways to sum the covariance of a decoding step of local linear attention: `python benchmarks/gpu_moments.py`.

Most of the step's time on a GPU goes into sum w (k - o)(k - o)', D^2 products a key, for bfloat16 keys on tensor cores.
Fewer bfloat16 terms take less time. This script measures their errors, without a GPU: the products of a tile
of keys are summed in float64 and rounded to float32.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor

STORED = Path(__file__).resolve().parent / "results" / "gpu-moments.md"
KEYS, DIM, TILE, RIDGE, DRAWS = 4096, 128, 64, 0.1, 4
FORMS = {  # name: (bfloat16 terms, whether w is shared out to both factors, whether each tile has a centre of its own)
    "two terms": (2, False, False), "one term": (1, False, False), "one term, symmetric": (1, True, False),
    "one term, symmetric, centred by tile": (1, True, True), "two terms, centred by tile": (2, False, True),
}  # fmt: skip


def single(x: Tensor) -> Tensor:
    """Round to float32."""
    return x.float().double()


def half(x: Tensor) -> Tensor:
    """Round to bfloat16."""
    return x.to(torch.bfloat16).double()


def product(k: Tensor, w: Tensor, o: Tensor, terms: int, symmetric: bool) -> Tensor:
    """Return sum w (k - o)(k - o)' of keys [K, D], for weights [K] and a centre [D], as it is multiplied."""
    if symmetric:
        u = half(single(w.sqrt()[:, None] * single(k - o)))
        return single(u.mT @ u)
    apart = single(w[:, None] * single(k - o))
    large = half(apart)
    used = large + half(apart - large) * (terms - 1)
    return single(used.mT @ k - used.sum(0)[:, None] * o)


def moments(k: Tensor, w: Tensor, form: str) -> tuple[Tensor, Tensor]:
    """Return mean [D] and covariance [D, D] of keys [K, D] with weights [K]."""
    terms, symmetric, by_tile = FORMS[form]
    mass, mean, total = w.new_zeros(()), torch.zeros_like(k[0]), k.new_zeros(2 * k.shape[1:])
    if not by_tile:
        o = single(k[:TILE].mean(0))
        for keys, own in zip(k.split(TILE), w.split(TILE), strict=True):
            total = single(total + product(keys, own, o, terms, symmetric))
        shift = single((w[:, None] * (k - o)).sum(0) / w.sum())
        return o + shift, single(total / w.sum() - shift[:, None] * shift)
    for keys, own in zip(k.split(TILE), w.split(TILE), strict=True):
        part = own.sum()
        o = single((own[:, None] * keys).sum(0) / part.clamp(min=1e-300))
        way, both = o - mean, mass + part
        total = single(total + product(keys, own, o, terms, symmetric) + mass * part / both * way[:, None] * way)
        mean, mass = single(mean + way * (part / both)), both
    return mean, total / mass


def output(q: Tensor, v: Tensor, k: Tensor, p: Tensor, mean: Tensor, spread: Tensor) -> Tensor:
    """Return the prediction at q [D] from keys [K, D] with weights p [K] that sum to one."""
    ridge = RIDGE * torch.eye(DIM, dtype=torch.float64)
    t = torch.linalg.solve((spread + spread.mT) / 2 + ridge, q - mean)
    return (p * (1 + (k - mean) @ t)) @ v


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape)


FAMILIES = {
    "normal": lambda: normal(KEYS, DIM),
    "normal, deviations 1 to 0.01": lambda: normal(KEYS, DIM) * torch.logspace(0, -2, DIM),
    "normal around a mean of deviation 3": lambda: normal(KEYS, DIM) + 3 * normal(DIM),
    "rank 8 and noise 0.05": lambda: normal(KEYS, 8) @ normal(8, DIM) + 0.05 * normal(KEYS, DIM),
    "normal, deviation 3": lambda: 3 * normal(KEYS, DIM),
}


def errors(family: str) -> dict[str, float]:
    """Return form to the largest relative error of the output over draws; "rounded output" is that of bfloat16."""
    worst = dict.fromkeys([*FORMS, "rounded output"], 0.0)
    torch.manual_seed(0)
    for _ in range(DRAWS):
        k, v = half(FAMILIES[family]()), half(normal(KEYS, DIM))
        q = half(normal(DIM) * k.std(0) + k.mean(0))
        score = k @ q / DIM**0.5
        w, p = single((score - score.max()).exp()), score.softmax(0)
        mean = (p[:, None] * k).sum(0)
        exact = output(q, v, k, p, mean, (p[:, None] * (k - mean)).mT @ (k - mean))
        found = {form: output(q, v, k, p, *moments(k, w, form)) for form in FORMS} | {"rounded output": half(exact)}
        for form, out in found.items():
            worst[form] = max(worst[form], float((out - exact).norm() / exact.norm()))
    return worst


def table() -> str:
    """Return the errors as a page."""
    rows = {family: errors(family) for family in FAMILIES}
    names = [*FORMS, "rounded output"]
    lines = [f"| keys | {' | '.join(names)} |", "|---|" + "---:|" * len(names)]
    lines += [f"| {family} | {' | '.join(f'{found[name]:.0e}' for name in names)} |" for family, found in rows.items()]
    return (
        "# How moments are summed in a decoding step of local linear attention\n\n"
        "Written by `python benchmarks/gpu_moments.py --write`, on a machine without a GPU. Numbers: the largest "
        f"relative error of the output over {DRAWS} draws, {KEYS} keys of {DIM} features, tiles of {TILE}, ridge "
        f"{RIDGE}, scale 1/√D. The kernels take two terms, which cost twice the products of one. Rounded output: of "
        "rounding the exact output to bfloat16.\n\n" + "\n".join(lines) + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {STORED}")
    text = table()
    print(text)
    if parser.parse_args().write:
        STORED.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
