"""Exact attribution of an ICLM's logits to context tokens, layers and heads.

Without feed-forward layers f of a slot is sum_{l,h,j} A_lh[i,j] P_lh r_j: weights that do not depend on f, times
vectors that each belong to one context token. The last LayerNorm is linear for a fixed divisor s_i, and so is the
output matrix:

    logit_i(v) = sum_{l,h,j} A_lh[i,j] d_v . P_lh r_j / s_i  +  sum_l d_v . m_li / s_i  +  w_v . b,
    d_v = g w_v - mean(g w_v),   g, b gain and bias of the LayerNorm,   m_li output of the feed-forward layer l

(ICLM paper, section 5; direct logit attribution with a fixed divisor.) Only the m_l are not sums over tokens.

Shapes: B batch, T tokens, Q explained positions, L f blocks, H heads, E width of f, Dv channels of a head's value, M
output tokens, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...checks import ArgumentError, is_integer, refuse
from ...nn.arguments import plain_linear
from ..base.base import RegardForCausalLM
from .slots import of_tokens


@dataclass(frozen=True)
class Contributions:
    """The parts of an ICLM's logits. Tensors of size V are computed only when asked for.

    Every method takes `tokens`, those whose logits are explained: integers [M] for all positions, [B, Q, M] for each
    position, or None for the whole vocabulary (M = V). `per_token` then returns B Q T V values: explain few positions,
    or iterate over `vocabulary()`.

    Attributes:
        input_ids: [B, T].
        positions: [Q], the explained positions; their logits predict the next token.
        weights: of every f block, [B, H, Q, T]: column j is the pair whose value is token j.
        values: the values of every f block, [B, H or 1, T, Dv].
        outputs: of every f block, P_h [H, E, Dv].
        added: feed-forward output of every f block, [B, Q, E]; empty without feed-forward layers.
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
        """Return the sum of all parts, [B, Q, M]: the model's logits up to rounding."""
        vectors = sum(self._heads(layer).sum(2) for layer in range(len(self.weights)))
        return self._read(vectors + sum(self.added), tokens) + self.bias(tokens)

    def per_token(self, tokens: Tensor | None = None) -> Tensor:
        """Return what each context token adds over all layers and heads, [B, Q, T, M]; 0 for later tokens."""
        total: Any = 0.0
        for layer, weights in enumerate(self.weights):
            match = self._match(layer, tokens)
            sides = "bqhjm" if match.dim() == 5 else "bhjm"
            total = total + torch.einsum(f"bhqj,{sides}->bqjm", weights, match)
        return total / self.scale[..., None]

    def per_head(self, tokens: Tensor | None = None) -> Tensor:
        """Return what each head of each f block adds over all context tokens, [B, Q, L, H, M]."""
        return torch.stack([self._read(self._heads(layer), tokens) for layer in range(len(self.weights))], 2)

    def per_layer(self, tokens: Tensor | None = None) -> Tensor:
        """Return what the attention of each f block adds, [B, Q, L, M]."""
        return torch.stack([self._read(self._heads(layer).sum(2), tokens) for layer in range(len(self.weights))], 2)

    def parts(self, tokens: Tensor) -> Tensor:
        """Return what each context token adds through each head of each f block, [B, Q, T, L, H, M]."""
        parts = []
        for layer, weights in enumerate(self.weights):
            match = self._match(layer, tokens)
            match = match if match.dim() == 5 else match[:, None]  # [B, Q or 1, H, T, M]
            parts.append((weights.transpose(1, 2)[..., None] * match).transpose(2, 3))
        return torch.stack(parts, 3) / self.scale[..., None, None, None]

    def mlp(self, tokens: Tensor | None = None) -> Tensor:
        """Return what each feed-forward layer on f adds, [B, Q, L or 0, M]; this part is not a sum over tokens."""
        if not self.added:
            count = self.table.shape[0] if tokens is None else tokens.shape[-1]
            return self.scale.new_zeros(*self.scale.shape[:2], 0, count)
        return torch.stack([self._read(x, tokens) for x in self.added], 2)

    def bias(self, tokens: Tensor | None = None) -> Tensor:
        """Return what the bias of the last LayerNorm adds in every context, [M], or [B, Q, M] for such `tokens`."""
        return self._rows(tokens) @ self.offset

    def difference(self, one: Tensor, other: Tensor) -> Tensor:
        """Return what each context token adds to the logit of `one` minus that of `other`, [B, Q, T, M]."""
        return self.per_token(one) - self.per_token(other)

    def per_type(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the distinct context tokens [U], ascending, and what each adds in total, [B, Q, U, M]."""
        types, type_of_token = self.input_ids.unique(return_inverse=True)
        each = self.per_token(tokens)
        index = type_of_token[:, None, :, None].expand(-1, *each.shape[1:2], -1, each.shape[3])
        return types, each.new_zeros(*each.shape[:2], len(types), each.shape[3]).scatter_add(2, index, each)

    def vocabulary(self, size: int = 4096) -> Iterator[Tensor]:
        """Yield all tokens in pieces of at most `size`, to be passed as `tokens`."""
        yield from torch.arange(self.table.shape[0], device=self.table.device).split(size)

    def _rows(self, tokens: Tensor | None) -> Tensor:
        """Return rows of the output matrix: [V, E], [M, E] or [B, Q, M, E]."""
        if tokens is None:
            return self.table
        at = self.scale.shape[:2]
        if not is_integer(tokens) or tokens.dim() == 0 or tokens.shape[:-1] not in ((), at):
            raise refuse("Contributions", "tokens", tokens, f"integers [M] or [{at[0]}, {at[1]}, M]")
        if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.table.shape[0]:
            span, last = f"{int(tokens.min())} to {int(tokens.max())}", self.table.shape[0] - 1
            raise ArgumentError(f"Contributions: tokens holds {span}, expected tokens from 0 to {last}.")
        return self.table[tokens]

    def _directions(self, tokens: Tensor | None) -> Tensor:
        """Return d_v: [V, E], [M, E] or [B, Q, M, E]."""
        rows = self._rows(tokens) * self.gain
        return rows - rows.mean(-1, keepdim=True)

    def _read(self, vectors: Tensor, tokens: Tensor | None) -> Tensor:
        """Return logits [B, Q, ..., M] of vectors [B, Q, ..., E], with the divisor fixed."""
        directions = self._directions(tokens)
        scale = self.scale.view(*self.scale.shape[:2], *[1] * (vectors.dim() - 2))
        if directions.dim() == 2:
            return vectors @ directions.T / scale
        return torch.einsum("bq...e,bqme->bq...m", vectors, directions) / scale

    def _heads(self, layer: int) -> Tensor:
        """Return what each head adds to f, [B, Q, H, E]."""
        return torch.einsum("bhqd,hed->bqhe", self.weights[layer] @ self.values[layer], self.outputs[layer])

    def _match(self, layer: int, tokens: Tensor | None) -> Tensor:
        """Return d_v . P_h r_j: [B, H, T, M], or [B, Q, H, T, M] if each position has its own tokens."""
        back = torch.einsum("...me,hed->...hmd", self._directions(tokens), self.outputs[layer])
        values = self.values[layer].expand(-1, self.outputs[layer].shape[0], -1, -1)
        if back.dim() == 3:
            return torch.einsum("hmd,bhjd->bhjm", back, values)
        return torch.einsum("bqhmd,bhjd->bqhjm", back, values)


def trace(
    model: RegardForCausalLM, input_ids: Tensor, attention_mask: Tensor | None,
    positions: Sequence[int] | Tensor | None, segment_ids: Tensor | None = None,
) -> Contributions:  # fmt: skip
    """Run the model on a text and record the terms of its logits."""
    if not isinstance(input_ids, Tensor) or input_ids.dim() != 2:
        raise refuse("ICLMForCausalLM.contributions", "input_ids", input_ids, "an integer tensor [B, T]")
    chosen = _positions(positions, input_ids)
    inner, tokens = model.model, input_ids.shape[1]
    with _recording(inner) as record:
        inner(input_ids=input_ids, attention_mask=attention_mask, use_cache=False, segment_ids=segment_ids)
    slots = record["slots"][0].token_slots if record["slots"] else None
    attns = [block.attn for block in inner.f]
    # The first slot has no pair, so that its row and column are missing.
    padded = [F.pad(w, (1, 0, 1, 0)) for w in record["weights"]]
    weights = [of_tokens(of_tokens(w, slots, tokens, 3), slots, tokens, 2)[:, :, chosen] for w in padded]
    averaged = [F.pad(a._values(v, v.shape[1]), (0, 0, 1, 0)) for a, v in zip(attns, record["values"], strict=True)]
    values = [of_tokens(v, slots, tokens, 2) for v in averaged]
    _, scale = inner.ln_final.split(record["hidden"][0][:, chosen])
    matrix: Any = lambda layer: plain_linear("contributions", layer, input_ids.device)[0]  # noqa: E731
    plain: Any = lambda x: x.detach().to(scale.dtype)  # noqa: E731
    wide: Any = lambda parts: tuple(map(plain, parts))  # noqa: E731
    return Contributions(
        input_ids=input_ids,
        positions=chosen,
        weights=wide(weights),
        values=wide(values),
        outputs=wide(matrix(a.o_proj).unflatten(1, (a.num_heads, -1)).transpose(0, 1) for a in attns),
        added=wide(of_tokens(x, slots, tokens, 1)[:, chosen] for x in record["added"]),
        scale=scale,
        gain=plain(inner.ln_final.weight),
        offset=plain(inner.ln_final.bias),
        table=plain(matrix(model.lm_head)),
    )


@contextmanager
def _recording(model: Any) -> Iterator[dict[str, list[Any]]]:
    """Record tensors of a model's f blocks, its last norm and its slots."""
    record: dict[str, list[Any]] = {name: [] for name in ("weights", "values", "added", "slots", "hidden")}
    keep_input: Any = lambda name, i: lambda _module, args: record[name].append(args[i])  # noqa: E731
    keep_output: Any = lambda name: lambda _module, _args, out: record[name].append(out)  # noqa: E731
    with ExitStack() as hooks:
        hooks.enter_context(model.ln_final.register_forward_pre_hook(keep_input("hidden", 0)))
        for block in model.f:
            hooks.enter_context(block.attn.register_forward_pre_hook(keep_input("values", 1)))
            hooks.enter_context(block.attn.hook_pattern.register_forward_hook(keep_output("weights")))
            if block.mlp is not None:
                hooks.enter_context(block.mlp.hook_out.register_forward_hook(keep_output("added")))
        if model.start is not None:
            hooks.enter_context(model.start.register_forward_pre_hook(keep_input("slots", 1)))
        yield record


def _positions(given: Sequence[int] | Tensor | None, input_ids: Tensor) -> Tensor:
    """Return positions [Q], counted from 0."""
    tokens = input_ids.shape[-1]
    if given is None:
        return torch.arange(tokens, device=input_ids.device)
    chosen = torch.as_tensor(given, device=input_ids.device)
    ok = chosen.dim() == 1 and not chosen.is_floating_point() and chosen.numel() > 0
    if not ok or int(chosen.min()) < -tokens or int(chosen.max()) >= tokens:
        expected = f"integers [Q] from {-tokens} to {tokens - 1}"
        raise refuse("ICLMForCausalLM.contributions", "positions", given, expected)
    return chosen % tokens
