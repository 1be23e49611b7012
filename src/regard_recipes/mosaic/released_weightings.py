"""Normalised ReLU and ReLUmax as the released programs of the sparse-attention paper computed them.

The fast program, which trained the language models, hides one pair too many from every row but the first, gives
normalised ReLU no bandwidth and ReLUmax a margin that is not learned; the regular one applies the temperature twice.
With cosines s, the largest of a row m, and the learned sharpness beta^2:

| form    | normalised ReLU                     | ReLUmax                        | row t sees pairs |
|---------|-------------------------------------|--------------------------------|------------------|
| fast    | relu(s) / sum, that is h = sqrt 2   | relu(beta^2 (s - m) + 1) / sum | j <= t - 2       |
| mended  | the same                            | the same                       | j <= t - 1       |
| regular | relu(2 beta^4 s + 1 - 2 beta^2)/sum | relu(beta^4 (s - m) + 1) / sum | j <= t - 1       |
| defined | relu(2 s / h^2 + 1 - 2 / h^2) / sum | relu(beta^2 (s - m) + b) / sum | j <= t - 1       |

(equations 11 and 21; `regard` computes the last row.) "mended" is the fast form with the right mask, to separate the
two faults. `use_released` puts a form into a Memory Mosaic, for comparison only: dense and without diagnostics.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from regard.nn.mosaic.contextual_memory import ContextualMemory

RULES = ("normrelu", "relumax")
FORMS = ("fast", "mended", "regular")
LEAST_SUM = 1e-6  # rows are divided by at least this


def weigh(rule: str, form: str, cosines: Tensor, sharpness: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights of one of `RULES` in one of `FORMS`, [B, H, T, P], from cosines of T tokens with P pairs, of
    which the last token comes after the last pair, and beta^2 [H]; and boolean [B, H, T], True in rows where no pair
    has weight by itself: the weights of the visible pairs are then equal, without a gradient to the cosines, and 0
    where no pair is visible."""
    tokens, pairs = cosines.shape[-2:]
    row = torch.arange(tokens, device=cosines.device)[:, None] + pairs - tokens
    seen = torch.arange(pairs, device=cosines.device) <= row - int(form == "fast")
    square = sharpness.to(cosines.dtype)[:, None, None] ** (2 if form == "regular" else 1)
    if rule == "relumax":
        scores = (square * cosines).masked_fill(~seen, -torch.inf)
        top = pad(scores, (0, 1), value=-torch.inf).amax(-1, keepdim=True)  # -inf where no pair is visible
        raw = (scores - torch.where(top == -torch.inf, 0, top) + 1).relu()
    elif form == "regular":  # masked pairs have cosine 0, so that for beta^2 < 1/2 they have weight
        raw = ((2 * square * cosines).masked_fill(~seen, 0) + 1 - 2 * square.sqrt()).relu()
    else:
        raw = cosines.relu() * seen
    raw = raw * (row >= 0)  # rows without a pair were never written
    total = raw.sum(-1, keepdim=True)
    even = seen.to(raw.dtype) / seen.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(total == 0, even, raw / total.clamp(min=LEAST_SUM)), total[..., 0] == 0


class ReleasedMemory(ContextualMemory):
    """A contextual memory with the weights of a released program, `rule` and `form` as in `weigh`. `fallen` [B, H, T]
    says in which rows of the last call no pair had weight by itself."""

    rule: str
    form: str
    fallen: Tensor

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, segment_ids: Tensor | None, dense: bool
    ) -> tuple[Tensor, Tensor | None]:
        assert mask is segment_ids is None
        assert self.sharpness is not None
        cosines = (query @ key.mT).to(torch.promote_types(query.dtype, torch.float32))
        weights, fallen = weigh(self.rule, self.form, cosines, self.sharpness())
        self.fallen = fallen.detach()
        return weights.to(value.dtype) @ value, None


def use_released(model: nn.Module, rule: str, form: str) -> None:
    """Give every contextual memory of a model, whose spec is "softmax", the weights of a released program."""
    for module in model.modules():
        if isinstance(module, ContextualMemory):
            module.__class__ = ReleasedMemory
            module.rule, module.form = rule, form
