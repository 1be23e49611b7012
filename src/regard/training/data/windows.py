"""Windows of a token sequence: sampled for training, in order for evaluation. A sample depends only on (seed, step).

Shapes: n tokens in the text, C the context (tokens per window).
"""

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ...tasks.base import hashed


def window_starts(seed: int, step: int, count: int, positions: int) -> Tensor:
    """Return where the windows of one step begin: int64 [count], uniform over 0 .. positions - 1.

    Depends only on the arguments; the first k entries do not depend on `count`.
    """
    generator = torch.Generator().manual_seed(hashed(f"{seed}:{step}") >> 1)
    # one draw at a time, since a vectorised draw may depend on `count`
    return torch.cat([torch.randint(positions, (1,), generator=generator) for _ in range(count)])


class SampledWindows(Dataset):
    """Map-style dataset with example i of step s at index `s * per_step + i`, to be read in order.

    Items are dicts with `input_ids` and `labels`, both int64 [C]; the model shifts the labels.

    Args:
        tokens: int [n], n > C; context: C.
        steps: number of optimiser steps.
        per_step: examples per step, over all devices and accumulated micro-batches.
        seed: the sampling seed.
    """

    def __init__(self, tokens: Tensor, *, context: int, steps: int, per_step: int, seed: int) -> None:
        self.tokens, self.context, self.per_step, self.steps, self.seed = tokens, context, per_step, steps, seed
        self._latest = (-1, torch.empty(0))

    def __len__(self) -> int:
        return self.steps * self.per_step

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        step, i = divmod(index, self.per_step)
        if self._latest[0] != step:  # drawn once per step
            positions = len(self.tokens) - self.context + 1
            self._latest = (step, window_starts(self.seed, step, self.per_step, positions))
        start = int(self._latest[1][i])
        window = self.tokens[start : start + self.context].long()
        return {"input_ids": window, "labels": window}


def strided_windows(n: int, context: int, stride: int) -> list[tuple[int, int]]:
    """Return windows in which every token of a text but the first is counted exactly once.

    Returns:
        Pairs (start, skip): the window covers tokens start .. start + C - 1, and its first `skip` tokens are not
        counted, since an earlier window counted them (or nothing precedes them). Windows advance by `stride`; the last
        is moved back to end with the text. A text shorter than C is one short window.
    """
    if n <= context:
        return [(0, 1)]
    windows, scored = [(0, 1)], context
    while scored < n:
        start = min(windows[-1][0] + stride, n - context)
        windows.append((start, scored - start))
        scored = start + context
    return windows
