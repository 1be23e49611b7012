"""Attention to the residuals of a global linear model (`regard.interpolated_attention`) as a token mixer."""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor
from transformers.cache_utils import DynamicLayer

from ....checks import ArgumentError, within
from ....grammar import Spec
from ....nn import Attention
from ....nn.hooks import HookPoint, Seen
from ....recurrent.interpolated import interpolated_attention, require_averages
from ....recurrent.trends import Trend, as_trend
from ..token_mixers import TokenMixer, token_mixers


@token_mixers.register("interpolated")
class InterpolatedMixer(Attention, TokenMixer):
    """Apply `regard.nn.Attention` with `regard.interpolated_attention` in its heads; it returns no attention weights.

    `trend` is the global linear model, a name or text of `regard.recurrent.trends`; `spec` averages its residuals.
    """

    honours_segments = True
    defaults: ClassVar[Mapping[str, Any]] = {"trend": "mesa", "spec": "softmax"}
    cache_layer = DynamicLayer

    def __init__(self, *sizes: int, trend: str | Trend = "mesa", spec: str | Spec = "softmax", **more: Any) -> None:
        super().__init__(*sizes, spec=spec, **more)
        del self.hook_pattern  # the output is not weights @ values, so no hook may be offered for them
        self.__dict__["hook_pattern"] = HookPoint()
        within("InterpolatedMixer", "spec", require_averages, self.spec)
        self.trend = within("InterpolatedMixer", "trend", as_trend, trend)

    @staticmethod
    def build(config: Any, layer_idx: int, options: Mapping[str, Any]) -> TokenMixer:
        sizes = config.hidden_size, config.num_attention_heads
        return InterpolatedMixer(*sizes, **config.attention_options(layer_idx), **options)

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, seen: Seen, output_attentions: bool, local: dict[str, Any]
    ) -> tuple[Tensor, None]:
        """Return [B, H, T, D] and None; observers receive the diagnostics of the weights that average the residuals."""
        if not seen.is_causal:
            grows = "cache has a fixed length, and the trend needs a cache that grows"
            raise ArgumentError(f"InterpolatedMixer: {grows}; use model.model.new_cache().")
        if self.observer is not None:
            super()._attend(query, key, value, seen, False, local)
        given: dict[str, Any] = {n: getattr(seen, n) for n in ("attn_mask", "exclude_self", "segment_ids")}
        given |= {"enable_gqa": self.num_kv_heads != self.num_heads, **self._temper(query, key, seen)}
        return interpolated_attention(query, key, value, self.trend, self.spec, **given), None
