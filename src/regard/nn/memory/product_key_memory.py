"""Product-key memory with slow weights: a large table of learned values that replaces a feed-forward layer and of
which every token reads a few rows (Lample et al. 2019, arXiv:1907.05242; with RMS-normed queries and the gated output
of Memory Layers at Scale, arXiv:2412.09764, as the fast-weight product-key-memory paper, arXiv:2601.00671, builds it).

Of token t with the hidden state h_t:

    q = norm(W_q h + b_q), H heads;   of each head the k best of n^2 slots and their weights (equations 5-8)
    out = W_o (p * silu(W_s h + b_s)) + b_o,   p the sum of all heads' weighted values (equation 9)

Shapes: B batch, T tokens, C model width, H heads, n sub-keys of a half, N = n^2 slots, k slots of a head, Dk and Dv
widths of a key and a value.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...checks import flags, number, one_of, within
from ...grammar import Spec
from ...memory.product_key import product_key_search, slot_weights, weights_spec
from ...memory.stores.slot_sums import slot_sums
from ...precision import autocast
from ..arguments import check_hidden, positive_int
from ..hooks import HookPoint
from ..memories import MemoryLayer, memory_layers
from .fast_weight_config import SlotTable
from .projections import clean_tokens

CALL = "nn.ProductKeyMemory"
QUERY_NORMS: dict[str, type[nn.Module]] = {"rms": nn.RMSNorm, "batch": nn.BatchNorm1d, "none": nn.Identity}


@memory_layers.register("pkm")
class ProductKeyMemory(MemoryLayer):
    """A feed-forward layer that reads a table of n^2 learned values.

    Args:
        hidden_size, sub_keys, value_dim: C, n and Dv.
        key_dim: Dk, for each head; even.
        heads: H; all read the same values.
        top_k: k, slots that a head reads; at most n.
        query_norm: "rms" (over all heads, with a gain), "none", or "batch" (batch norm over all real tokens, as in the
            first paper; not causal in training).
        swilu: gate the output by silu of a projection of the hidden state.
        score: of a half query and a sub-key: "dot" or "idw".
        spec: turns the scores of a head's slots into weights: a normalised, non-negative `Spec` of degree 0.
        bias: of the projections.
        sparse_grad: the gradient of `values` is sparse, for an optimiser that takes it (`optimizer_groups`).
        eps: of the norms.

    Attributes:
        keys: [H, 2, n, Dk/2], uniform in +-1/sqrt(Dk) at first.
        values: [N, Dv], N(0, 1/Dv) at first.
        hook_read: sees p [B, T, Dv].

    Raises:
        ArgumentError: sizes that do not fit, or an unknown score, norm or spec.

    At the default sizes and C = 768 these are 137,630,976 parameters (paper, Table 2, "PKM"); `optimizer_groups` gives
    `values` and `keys` their own learning rate.
    """

    replaces_feed_forward = True
    remembers = False
    honours_segments = True

    def __init__(
        self,
        hidden_size: int,
        *,
        sub_keys: int = 512,
        key_dim: int = 512,
        value_dim: int = 512,
        heads: int = 4,
        top_k: int = 32,
        query_norm: str = "rms",
        swilu: bool = True,
        score: str = "dot",
        spec: str | Spec = "softmax",
        bias: bool = True,
        sparse_grad: bool = False,
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        positive_int(CALL, "hidden_size", hidden_size)
        within(CALL, None, SlotTable, sub_keys, key_dim, value_dim, heads, top_k, score, spec)  # checks them
        number(CALL, "eps", eps, low=0.0, strict=True)
        flags(CALL, swilu=swilu, bias=bias, sparse_grad=sparse_grad)
        one_of(CALL, "query_norm", query_norm, QUERY_NORMS)
        self.hidden_size, self.heads, self.top_k = hidden_size, heads, top_k
        self.score, self.spec, self.sparse_grad = score, weights_spec(CALL, spec), sparse_grad
        self.q_proj = nn.Linear(hidden_size, heads * key_dim, bias=bias)
        self.q_norm = QUERY_NORMS[query_norm](heads * key_dim, eps=eps)
        self.gate_proj = nn.Linear(hidden_size, value_dim, bias=bias) if swilu else None
        self.out_proj = nn.Linear(value_dim, hidden_size, bias=bias)
        self.keys = nn.Parameter(torch.empty(heads, 2, sub_keys, key_dim // 2))
        self.values = nn.Parameter(torch.empty(sub_keys**2, value_dim))
        self.hook_read = HookPoint()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new keys and values."""
        bound = (2 * self.keys.shape[-1]) ** -0.5
        nn.init.uniform_(self.keys, -bound, bound)
        nn.init.normal_(self.values, std=self.values.shape[1] ** -0.5)

    def forward(
        self, hidden: Tensor, mask: Tensor | None = None, state: None = None, segment_ids: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """Read the memory for every token.

        Args:
            hidden: [B, T, C], normed.
            mask: boolean [B, T], true where a token is real; padding gets the output 0. None: all.
            state, segment_ids: not used.

        Returns:
            (output [B, T, C] in the dtype of `hidden`, None). A token that is not finite gets NaN, and no gradient.

        Raises:
            ArgumentError: shapes or dtypes that do not fit.

        Cost: O(T H (n Dk + k Dv)) time beside the projections; O(T H (n + k Dk)) memory: no selected value is stored.
        """
        tokens = clean_tokens(CALL, hidden, mask, self.hidden_size)
        check_hidden(CALL, "hidden", hidden, self.hidden_size, self.q_proj)
        x = tokens.hidden if autocast(hidden.device.type) else tokens.hidden.to(hidden.dtype)
        query = self._normed(self.q_proj(x), tokens.counted).unflatten(-1, (self.heads, -1))
        search = product_key_search(query, self.keys, self.top_k, score=self.score)
        weights = slot_weights(search, self.spec, joint=False)
        read = slot_sums(self.values, search.slots.flatten(2), weights.flatten(2), sparse_grad=self.sparse_grad)
        read = self.hook_read(read.to(x.dtype))
        if self.gate_proj is not None:
            read = read * F.silu(self.gate_proj(x))
        return tokens.shown(self.out_proj(read).to(hidden.dtype)), None

    def _normed(self, query: Tensor, counted: Tensor) -> Tensor:
        if not isinstance(self.q_norm, nn.BatchNorm1d):
            return self.q_norm(query)
        if not self.training:
            return self.q_norm(query.flatten(0, 1)).view_as(query)
        normed = self.q_norm(query[counted]) if counted.sum() > 1 else query[counted] * 0  # one token has no variance
        return torch.zeros_like(query).index_put((counted,), normed)
