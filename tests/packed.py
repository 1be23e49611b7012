"""Documents packed into rows, in every way in which callers say so, and the same documents alone."""

from copy import deepcopy
from itertools import pairwise

import torch
import torch.nn.functional as F

LENGTHS = ((5, 1, 7), (2, 3, 8))
"""Of the documents of each row: the shortest cannot fill a convolution, the longest closes chunks, and a document
begins at 5 in both rows."""


def documents(vocabulary=29, lengths=LENGTHS, seed=0):
    """The documents of each row, tokens [n]."""
    draw = torch.Generator().manual_seed(seed)
    return [[torch.randint(1, vocabulary, (n,), generator=draw) for n in row] for row in lengths]


def packed_rows(rows):
    """Tokens [B, T] and segment ids [B, T] of rows of equal length in all."""
    ids = [torch.cat([torch.full_like(text, i) for i, text in enumerate(row)]) for row in rows]
    return torch.stack([torch.cat(row) for row in rows]), torch.stack(ids)


def positions(rows):
    """Position ids [B, T] that begin again with every document."""
    return torch.stack([torch.cat([torch.arange(len(text)) for text in row]) for row in rows])


def alone(run, rows):
    """`run` of each document as a row of its own, [1, n, ...], laid side by side again: [B, T, ...]."""
    return torch.stack([torch.cat([run(text[None])[0] for text in row]) for row in rows])


def runs(ids):
    """(row, slice) of every run of equal ids [B, T]."""
    for row, line in enumerate(ids.tolist()):
        edges = [0, *(t for t in range(1, len(line)) if line[t] != line[t - 1]), len(line)]
        yield from ((row, slice(a, b)) for a, b in pairwise(edges))


def descended(model, rows, count, rate):
    """The model after `count` steps of plain gradient descent on documents [1, n], each by itself, and the losses: the
    mean over the documents' tokens but their first ones."""
    model, losses = deepcopy(model).train(), []
    for _ in range(count):
        model.zero_grad()
        each = [F.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="none") for ids in rows]
        loss = torch.cat(each).mean()
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p -= rate * p.grad
    return model, losses
