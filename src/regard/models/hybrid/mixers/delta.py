"""DeltaNet (Yang et al. 2024, arXiv:2406.06484): a linear memory that is corrected by the delta rule."""

from torch import Tensor, nn

from ....recurrent.arguments import l2_normalized
from ....recurrent.delta import delta_rule
from ....recurrent.states import State
from ..token_mixers import Heads, RecurrentMixer, gates, token_mixers


@token_mixers.register("deltanet")
class DeltaNet(RecurrentMixer):
    """A linear memory that makes one gradient step for every pair, with a step size for each token.

    `regard.delta_rule` on keys of length one.
    """

    def make(self, hidden_size: int) -> None:
        self.write = nn.Linear(hidden_size, self.num_heads, bias=False)

    def recall(self, heads: Heads) -> tuple[Tensor, State]:
        beta = gates(self.write(heads.hidden)).sigmoid()
        return delta_rule(l2_normalized(heads.query), l2_normalized(heads.key), heads.value, beta, **heads.how)
