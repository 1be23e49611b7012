"""Which context token, layer and head an ICLM's logits come from: exactly, since f is a sum.

Without a feed-forward layer f of a slot is sum_{l,h,j} A_lh[i,j] P_lh r_j: weights that do not depend on f times
vectors that belong to one context token each. The last LayerNorm is linear once its divisor s_i is given, and so is the
output matrix:

    logit_i(v) = sum_{l,h,j} A_lh[i,j] d_v . P_lh r_j / s_i  +  sum_l d_v . m_li / s_i  +  w_v . b,
    d_v = g w_v - mean(g w_v),   g, b gain and bias of the LayerNorm,   m_li what the feed-forward layer l adds

(ICLM paper, section 5; direct logit attribution with the divisor held fixed.) Only the m_l are not sums over tokens.

Shapes: B batch, T tokens, Q positions explained, L f blocks, H heads, E width of f, Dv channels of a head's value, M
tokens asked about, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...checks import ArgumentError, shape
from ..base.base import RegardForCausalLM
from .slots import Slots, of_tokens


@dataclass(frozen=True)
class Contributions:
    """The parts of an ICLM's logits. Nothing of size V is computed before it is asked for.

    Every method takes `tokens`, those whose logits are explained: integers [M], the same everywhere; [B, Q, M], of
    their own at every position; or None for the whole vocabulary (M = V). The results of `per_token` then have B Q T V
    numbers: explain few positions, or go through `vocabulary()` by pieces.

    Attributes:
        input_ids: [B, T].
        positions: [Q], those explained; the logits there predict the token after them.
        weights: of every f block, [B, H, Q, T]: column j is the pair whose value is token j.
        values: of every f block, what its heads average, [B, H or 1, T, Dv].
        outputs: of every f block, P_h [H, E, Dv].
        added: of every f block what its feed-forward layer adds, [B, Q, E]; empty without them.
        scale: divisor s of the last LayerNorm, [B, Q, 1].
        gain, offset: of the last LayerNorm, [E].
        table: the output matrix, [V, E].
    """

    input_ids: Tensor
    positions: Tensor
    weights: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    added: tuple[Tensor, ...]
    scale: Tensor
    gain: Tensor
    offset: Tensor
    table: Tensor

    def logits(self, tokens: Tensor | None = None) -> Tensor:
        """The sum of all parts, [B, Q, M]: the model's own logits up to rounding."""
        vectors = sum(self._heads(layer).sum(2) for layer in range(len(self.weights)))
        return self._read(vectors + sum(self.added), tokens) + self.bias(tokens)

    def per_token(self, tokens: Tensor | None = None) -> Tensor:
        """What each context token adds, over all layers and heads: [B, Q, T, M]; 0 for tokens not yet seen."""
        total: Any = 0.0
        for layer, weights in enumerate(self.weights):
            match = self._match(layer, tokens)
            sides = "bqhjm" if match.dim() == 5 else "bhjm"
            total = total + torch.einsum(f"bhqj,{sides}->bqjm", weights, match)
        return total / self.scale[..., None]

    def per_head(self, tokens: Tensor | None = None) -> Tensor:
        """What each head of each f block adds, over all context tokens: [B, Q, L, H, M]."""
        found = [self._read(self._heads(layer), tokens) for layer in range(len(self.weights))]
        return torch.stack(found, 2)

    def per_layer(self, tokens: Tensor | None = None) -> Tensor:
        """What the attention of each f block adds: [B, Q, L, M]."""
        found = [self._read(self._heads(layer).sum(2), tokens) for layer in range(len(self.weights))]
        return torch.stack(found, 2)

    def parts(self, tokens: Tensor) -> Tensor:
        """What each context token adds through each head of each f block: [B, Q, T, L, H, M]."""
        found = []
        for layer, weights in enumerate(self.weights):
            match = self._match(layer, tokens)
            match = match if match.dim() == 5 else match[:, None]  # [B, Q or 1, H, T, M]
            found.append((weights.transpose(1, 2)[..., None] * match).transpose(2, 3))
        return torch.stack(found, 3) / self.scale[..., None, None, None]

    def mlp(self, tokens: Tensor | None = None) -> Tensor:
        """What each feed-forward layer on f adds, the part that is no sum over tokens: [B, Q, L or 0, M]."""
        if not self.added:
            count = self.table.shape[0] if tokens is None else tokens.shape[-1]
            return self.scale.new_zeros(*self.scale.shape[:2], 0, count)
        return torch.stack([self._read(x, tokens) for x in self.added], 2)

    def bias(self, tokens: Tensor | None = None) -> Tensor:
        """What the last LayerNorm's bias adds whatever the context, [M] or, for `tokens` [B, Q, M], the same shape."""
        return self._rows(tokens) @ self.offset

    def difference(self, one: Tensor, other: Tensor) -> Tensor:
        """What each context token adds to the logit of `one` less that of `other`, both as `tokens`: [B, Q, T, M]."""
        return self.per_token(one) - self.per_token(other)

    def per_type(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """What all context tokens that are alike add together: (the types [U], ascending; [B, Q, U, M])."""
        types, place = self.input_ids.unique(return_inverse=True)
        each = self.per_token(tokens)
        index = place[:, None, :, None].expand(-1, *each.shape[1:2], -1, each.shape[3])
        total = each.new_zeros(*each.shape[:2], len(types), each.shape[3])
        return types, total.scatter_add(2, index, each)

    def vocabulary(self, size: int = 4096) -> Iterator[Tensor]:
        """All tokens by pieces of at most `size`, to be given as `tokens`."""
        yield from torch.arange(self.table.shape[0], device=self.table.device).split(size)

    def _rows(self, tokens: Tensor | None) -> Tensor:
        """Rows of the output matrix: [V, E], [M, E] or [B, Q, M, E]."""
        if tokens is None:
            return self.table
        batch, positions = self.scale.shape[:2]
        if tokens.dim() not in (1, 3) or tokens.is_floating_point() or tokens.dtype == torch.bool:
            raise ArgumentError(
                f"Contributions: tokens is {tokens.dtype} {shape(tokens)}, expected integers [M] or "
                f"[{batch}, {positions}, M]."
            )
        if tokens.dim() == 3 and tuple(tokens.shape[:2]) != (batch, positions):
            raise ArgumentError(
                f"Contributions: tokens has shape {shape(tokens)}, expected [M] or [{batch}, {positions}, M]."
            )
        if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.table.shape[0]:
            raise ArgumentError(
                f"Contributions: tokens holds {int(tokens.min())} to {int(tokens.max())}, expected tokens from 0 to "
                f"{self.table.shape[0] - 1}."
            )
        return self.table[tokens]

    def _directions(self, tokens: Tensor | None) -> Tensor:
        """d_v: [V, E], [M, E] or [B, Q, M, E]."""
        rows = self._rows(tokens) * self.gain
        return rows - rows.mean(-1, keepdim=True)

    def _read(self, vectors: Tensor, tokens: Tensor | None) -> Tensor:
        """Logits of vectors [B, Q, ..., E] under the fixed divisor: [B, Q, ..., M]."""
        directions = self._directions(tokens)
        scale = self.scale.view(*self.scale.shape[:2], *[1] * (vectors.dim() - 2))
        if directions.dim() == 2:
            return vectors @ directions.T / scale
        return torch.einsum("bq...e,bqme->bq...m", vectors, directions) / scale

    def _heads(self, layer: int) -> Tensor:
        """What each head adds to f, [B, Q, H, E]."""
        averaged = self.weights[layer] @ self.values[layer]
        return torch.einsum("bhqd,hed->bqhe", averaged, self.outputs[layer])

    def _match(self, layer: int, tokens: Tensor | None) -> Tensor:
        """d_v . P_h r_j: [B, H, T, M], or [B, Q, H, T, M] for tokens of their own at every position."""
        back = torch.einsum("...me,hed->...hmd", self._directions(tokens), self.outputs[layer])
        values = self.values[layer].expand(-1, self.outputs[layer].shape[0], -1, -1)
        if back.dim() == 3:
            return torch.einsum("hmd,bhjd->bhjm", back, values)
        return torch.einsum("bqhmd,bhjd->bqhjm", back, values)


def trace(
    model: RegardForCausalLM,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    positions: Sequence[int] | Tensor | None,
    segment_ids: Tensor | None = None,
) -> Contributions:
    """Run the model on a text and keep what its logits are sums of.

    Raises:
        ArgumentError: positions outside the text, and as the model.
    """
    if not isinstance(input_ids, Tensor) or input_ids.dim() != 2:
        came = shape(input_ids) if isinstance(input_ids, Tensor) else type(input_ids).__name__
        raise ArgumentError(f"ICLMForCausalLM.contributions: input_ids is {came}, expected an integer tensor [B, T].")
    chosen = _positions(positions, input_ids)
    seen = _Seen(model, input_ids.shape[1])
    with seen:
        model.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, segment_ids=segment_ids)
    inner = model.model
    attns = [block.attn for block in inner.f]
    # rows and columns of all slots but the first, which has no pair
    weights = [seen.of_tokens(seen.of_tokens(F.pad(w, (1, 0, 1, 0)), 3), 2)[:, :, chosen] for w in seen.weights]
    averaged = [F.pad(a._values(v, v.shape[1]), (0, 0, 1, 0)) for a, v in zip(attns, seen.values, strict=True)]
    values = [seen.of_tokens(v, 2) for v in averaged]
    _, scale = inner.ln_final.split(seen.hidden[:, chosen])
    plain: Any = lambda x: x.detach().to(scale.dtype)  # noqa: E731
    wide: Any = lambda parts: tuple(map(plain, parts))  # noqa: E731
    return Contributions(
        input_ids=input_ids,
        positions=chosen,
        weights=wide(weights),
        values=wide(values),
        outputs=wide(a.o_proj.weight.unflatten(1, (a.num_heads, -1)).transpose(0, 1) for a in attns),
        added=wide(seen.of_tokens(x, 1)[:, chosen] for x in seen.added),
        scale=scale,
        gain=plain(inner.ln_final.weight),
        offset=plain(inner.ln_final.bias),
        table=plain(model.lm_head.weight),
    )


class _Seen:
    """Listens to the f blocks of a model while it is open."""

    def __init__(self, model: RegardForCausalLM, tokens: int) -> None:
        self.model, self.tokens = model.model, tokens
        self.places: Tensor | None = None
        self.weights: list[Tensor] = []
        self.values: list[Tensor] = []
        self.added: list[Tensor] = []
        self.hidden = torch.empty(0)
        self.handles: list[Any] = []

    def __enter__(self) -> _Seen:
        hold = lambda kept: lambda _module, _args, out: kept.append(out)  # noqa: E731
        for block in self.model.f:
            self.handles.append(block.attn.register_forward_pre_hook(lambda _module, args: self.values.append(args[1])))
            self.handles.append(block.attn.hook_pattern.register_forward_hook(hold(self.weights)))
            if block.mlp is not None:
                self.handles.append(block.mlp.hook_out.register_forward_hook(hold(self.added)))
        if self.model.start is not None:
            self.handles.append(self.model.start.register_forward_pre_hook(self._find))
        self.handles.append(self.model.ln_final.register_forward_pre_hook(self._keep))
        return self

    def of_tokens(self, x: Tensor, axis: int) -> Tensor:
        """Take what the slots of the tokens have of x, which has an axis of slots."""
        return of_tokens(x, self.places, self.tokens, axis)

    def _find(self, _module: Any, args: tuple[Tensor, Slots]) -> None:
        self.places = args[1].places

    def _keep(self, _module: Any, args: tuple[Tensor, ...]) -> None:
        self.hidden = args[0]

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()


def _positions(given: Sequence[int] | Tensor | None, input_ids: Tensor) -> Tensor:
    """Positions [Q] from 0 on."""
    tokens = input_ids.shape[-1]
    if given is None:
        return torch.arange(tokens, device=input_ids.device)
    found = torch.as_tensor(given, device=input_ids.device)
    inside = found.dim() == 1 and not found.is_floating_point() and found.numel() > 0
    if not inside or int(found.min()) < -tokens or int(found.max()) >= tokens:
        raise ArgumentError(
            f"ICLMForCausalLM.contributions: positions is {given!r}, expected integers [Q] from {-tokens} to "
            f"{tokens - 1}."
        )
    return found % tokens
