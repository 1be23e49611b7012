"""Independent answers: numpy in extended precision, written from the definitions, importing nothing of regard.

Legend: z scores of one row [n] or of rows [..., n]; p weights of the same shape.
"""

import numpy as np

WIDE = np.longdouble


def power(a: np.ndarray, r: float) -> np.ndarray:
    """[a]_+^r."""
    a = np.maximum(a, 0)
    return a if r == 1 else a * a if r == 2 else a**r


def entmax_row(z: np.ndarray, alpha: float, steps: int = 200, wide: type = WIDE) -> tuple[np.ndarray, np.floating]:
    """(p, tau) of one row by bisection on sum [z/r - tau]_+^r = 1, r = 1/(alpha - 1), tau in
    [max/r - 1, max/r - n^(-1/r)], in extended precision unless `wide` is given; -inf scores get 0."""
    z = np.asarray(z).astype(wide)
    r = 1 / (wide(alpha) - 1)
    top = z.max()
    x = (z - top) / r
    live = x[x > -1]  # the others are below every threshold of the bracket
    low, high = wide(-1), -(wide(len(live)) ** (-1 / r))
    for _ in range(steps):
        middle = (low + high) / 2
        if middle in (low, high):
            break  # adjacent numbers: further halving changes nothing
        if power(live - middle, r).sum() >= 1:
            low = middle
            live = live[live > low]  # the rest can no longer count
        else:
            high = middle
    return power(x - low, r), low + top / r


def entmax_rows(z: np.ndarray, alpha: float, wide: type = WIDE) -> np.ndarray:
    """`entmax_row` along the last axis."""
    z = np.asarray(z)
    rows = [entmax_row(row, alpha, wide=wide)[0] for row in z.reshape(-1, z.shape[-1])]
    return np.array(rows, dtype=wide).reshape(z.shape)


def softmax(z: np.ndarray) -> np.ndarray:
    """exp(z) / sum exp(z) along the last axis."""
    z = np.asarray(z).astype(WIDE)
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def shares(w: np.ndarray) -> np.ndarray:
    """w / sum w along the last axis."""
    return w / w.sum(-1, keepdims=True)


def rectified(z: np.ndarray, theta: np.ndarray, r: float) -> np.ndarray:
    """[z - theta]_+^r, normalised."""
    return shares(np.maximum(np.asarray(z).astype(WIDE) - theta, 0) ** WIDE(r))


def entmax_derivatives(z: np.ndarray, alpha: float, g: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(p, dL/dz, dL/dalpha [rows]) of entmax for rows [rows, n] and L = sum g p, by p = a^r and the implicit threshold:
    dp_i/dz_j = s_i (delta_ij - s_j / S) with s = p^(2 - alpha) and S = sum s. The threshold is found from the lowest
    score with weight, by 120 bisections."""
    z, g, less = z.astype(WIDE), g.astype(WIDE), WIDE(alpha) - 1
    r, x = 1 / less, z.astype(WIDE) * less
    ranked = -np.sort(-x, -1)
    held = np.stack([power(x - ranked[:, j : j + 1], r).sum(-1) < 1 for j in range(x.shape[-1])], -1)
    lowest = np.where(held, ranked, np.inf).min(-1, keepdims=True)
    inside = x >= lowest
    above = np.where(inside, x - lowest, 0)
    bend = max(less, 1)  # the unknown is the lowest weight where r < 1, else its root
    low, high = np.zeros_like(lowest), np.ones_like(lowest)
    for _ in range(120):
        middle = (low + high) / 2
        enough = np.where(inside, (above + middle**bend) ** r, 0).sum(-1, keepdims=True) >= 1
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    a = np.where(inside, above + high**bend, 0)
    p = a**r
    s = np.where(inside, np.where(inside, p, 1) ** (1 - less), 0)
    g = g - np.take_along_axis(g, s.argmax(-1)[:, None], -1)
    away = g - (s * g).sum(-1, keepdims=True) / s.sum(-1, keepdims=True)
    log = np.log(np.where(a > 0, a, 1))
    return p, s * away, -r * r * (p * (log - 1) * away).sum(-1)
