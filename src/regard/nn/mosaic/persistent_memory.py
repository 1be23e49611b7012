"""The persistent memory of Memory Mosaics: kernel regression on learned pairs of keys and values.

It replaces the feed-forward layer (sparse-attention paper, section 2.4; Sukhbaatar et al. 2019).

Shapes: B batch, T tokens, N tokens so far, C model width, H heads, D channels of a head, S slots.
"""

import torch
from torch import Tensor, nn

from ...checks import flags, instance, number, require
from ...grammar import Spec, as_spec
from ...pairwise.attention import attention
from ...recurrent.leaky import LeakyState
from ..arguments import check_heads, positive_ints
from ..hooks import HookPoint
from .contextual_memory import checked_tokens, measures_distance
from .features import GAIN, SCALE_LIMIT, VALUE_START, KeyFeatures, OutputProjection, PerHead, Sharpness

CALL = "nn.PersistentMemory"


class PersistentMemory(PerHead):
    """Attention from every token to S learned slots per head.

    Args:
        hidden_size, num_heads, head_dim, bias, average, key_eps, scale_limit: as in `ContextualMemory`.
        slots: S.
        spec: a normalised `Spec`, or its text. If its scores have a scale, it is beta^2, learned per head, for unit
            queries and free slot keys. Other specs get queries of length beta^2, and `fixed(h=...)` unit queries.
        copies: sets of slots, whose outputs are averaged.
        own_keys: compute keys with a projection and a rate of its own; if False, use `read` instead of `forward`.

    Attributes:
        slot_keys, slot_values: [copies, H, S, D], initially from N(0, 1/D).
        scale: [H], the output is multiplied by exp(10 scale).
        hook_out: sees the output [B, T, C].

    Raises:
        ArgumentError: sizes that do not fit, an unknown spec, or one that is not normalised or needs a probe.
    """

    scale: Tensor

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        slots: int,
        *,
        head_dim: int | None = None,
        spec: str | Spec = "softmax",
        copies: int = 1,
        own_keys: bool = True,
        bias: bool = False,
        average: bool = False,
        key_eps: float = 0.0,
        scale_limit: float = SCALE_LIMIT,
    ) -> None:
        super().__init__()
        flags(CALL, own_keys=own_keys, bias=bias, average=average)
        number(CALL, "key_eps", key_eps, low=0.0)
        number(CALL, "scale_limit", scale_limit)
        self.head_dim = check_heads(CALL, hidden_size, num_heads, num_heads, head_dim)
        positive_ints(CALL, slots=slots, copies=copies)
        self.spec = persistent_spec(CALL, spec)
        self.keys = None
        if own_keys:
            self.keys = KeyFeatures(hidden_size, num_heads, self.head_dim, bias=bias, average=average, eps=key_eps)
        self.sharpness = None if measures_distance(self.spec) else Sharpness(num_heads, scale_limit)
        self.slot_keys = nn.Parameter(torch.empty(copies, num_heads, slots, self.head_dim))
        self.slot_values = nn.Parameter(torch.empty(copies, num_heads, slots, self.head_dim))
        self.add_numbers(num_heads, scale=VALUE_START / GAIN)
        self.out_proj = OutputProjection(num_heads * self.head_dim, hidden_size, bias=bias)
        nn.init.normal_(self.slot_keys, std=self.head_dim**-0.5)
        nn.init.normal_(self.slot_values, std=self.head_dim**-0.5)
        self.hook_out = HookPoint()

    def extra_repr(self) -> str:
        copies, _, slots, _ = self.slot_keys.shape
        return f"slots={slots}, copies={copies}, spec={str(self.spec)!r}"

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        state: LeakyState | None = None,
        *,
        segment_ids: Tensor | None = None,
    ) -> tuple[Tensor, LeakyState]:
        """Read the slots at every token.

        Args:
            hidden_states: [B, T, C].
            attention_mask: boolean [B, N] over all tokens so far, True where one is real; others have no effect.
            state: of the leaky average over the tokens before these, which belong to the first document.
            segment_ids: integers [B or 1, T] of packed documents, which have separate leaky averages.

        Returns:
            Output [B, T, C] and the state after these tokens.

        Raises:
            ArgumentError: a wrong rank, dtype or shape, or `own_keys` is False.

        Cost: O(T S C) and the projections.
        """
        require(self.keys is not None, CALL, "has no keys of its own (own_keys=False); call read(keys).")
        assert self.keys is not None
        if state is not None:
            instance(CALL, "state", state, LeakyState, "a LeakyState or None")
        x, mask = checked_tokens(CALL, hidden_states, attention_mask, segment_ids, state, self.keys)
        keys, after = self.keys(x, mask, state, segment_ids)
        return self.read(keys), after

    def read(self, keys: Tensor) -> Tensor:
        """Return [B, T, C] for unit keys [B, H, T, D]."""
        batch, _, tokens, _ = keys.shape
        # fold batch into tokens, since all of them read the same slots: no slot is copied
        query = keys.transpose(0, 1).flatten(1, 2)[None]
        scale = None
        if self.spec.takes_scale:
            assert self.sharpness is not None
            scale = self.sharpness()[:, None]
        elif self.sharpness is not None:
            query = query * self.sharpness().to(query.dtype)[:, None, None]
        slot_keys, slot_values = self.slot_keys.to(query.dtype), self.slot_values.to(query.dtype)
        pairs = zip(slot_keys, slot_values, strict=True)
        outputs = [attention(query, key[None], value[None], self.spec, scale=scale) for key, value in pairs]
        out = outputs[0] if len(outputs) == 1 else torch.stack(outputs).mean(0)
        out = out * (GAIN * self.scale).exp().to(out.dtype)[:, None, None]
        rows = out[0].unflatten(1, (batch, tokens)).permute(1, 2, 0, 3)
        return self.hook_out(self.out_proj(rows.flatten(2)))


def persistent_spec(call: str, given: str | Spec) -> Spec:
    """Return the spec of a persistent memory, after checking that it is normalised and needs no probe."""
    spec = as_spec(given, call)
    problem = f"spec: {spec} has weights that do not sum to one, or needs a probe learned from the tokens"
    hint = "a persistent memory needs a normalised spec, such as softmax or biweight"
    require(bool(spec.weighting.normalised) and "probe" not in spec.params, call, f"{problem}; {hint}.")
    return spec
