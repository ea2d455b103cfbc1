"""The lightning indexer of sparse latent attention (DeepSeek-V3.2-Exp, section 2.1): small heads
score which positions a token attends to.

The score of a position is Σ over heads of weight · relu(q · k). Positive factors that are equal for
all positions are left out, as they do not change the order. Every rank computes the same choice.
"""

from torch import Tensor, nn

from banyan.layers.build import Build
from banyan.layers.cache_spec import CacheTensor
from banyan.layers.linear import ColumnLinear
from banyan.layers.norm import LayerNorm
from banyan.layers.rotary import Angles
from banyan.layers.step_inputs import IndexerOutput
from banyan.layers.weight_slot import RotaryRows, ShardRule
from banyan.model_config.model_config import LatentFacts
from banyan.ops.api import IndexShape
from banyan.ops.pages import stored_width
from banyan.parallel.groups import Group

_WHOLE = {"": ShardRule()}
_EPS = 1e-6


class Indexer(nn.Module):
    def __init__(self, dim: int, facts: LatentFacts, build: Build) -> None:
        super().__init__()
        self.ops, self.heads, self.top = build.ops, facts.index_heads, facts.index_top
        self.pieces = (facts.rope_dim, facts.index_dim - facts.rope_dim)
        turning = RotaryRows(facts.index_dim, 0, facts.rope_dim)
        self.query = ColumnLinear(
            facts.query_rank,
            {"": self.heads * facts.index_dim},
            _WHOLE,
            False,
            Group(),
            build,
            turning={"": turning},
            pieces={"": self.pieces},
        )
        self.key = ColumnLinear(
            dim, {"": facts.index_dim}, _WHOLE, False, Group(), build, turning={"": turning}
        )
        self.key_norm = LayerNorm(facts.index_dim, _EPS, True, build, turning)
        self.weigh = ColumnLinear(dim, {"": self.heads}, _WHOLE, False, Group(), build)

    def forward(self, x: Tensor, squeezed: Tensor, angles: Angles) -> IndexerOutput:
        """x: [tokens, dim]; squeezed: [tokens, query_rank], input of the query projection."""
        turned, plain = self.query(squeezed).split([self.heads * n for n in self.pieces], dim=-1)
        turned = turned.unflatten(-1, (self.heads, self.pieces[0]))
        plain = plain.unflatten(-1, (self.heads, self.pieces[1]))
        key_turned, key = self.key_norm(self.key(x)).split(list(self.pieces), dim=-1)
        turned, key_turned = self.ops.rotary(turned, key_turned.unsqueeze(1), *angles)
        return IndexerOutput(plain, turned, self.weigh(x), key, key_turned.squeeze(1))


def index_shape(facts: LatentFacts) -> IndexShape:
    widths = (facts.index_dim, facts.index_top, facts.rank, facts.rope_dim)
    return IndexShape(facts.index_heads, *widths)


def index_cache(facts: LatentFacts, build: Build) -> dict[str, CacheTensor]:
    """The indexer's keys in the pages: one per token, in two parts or whole."""
    dtype = build.ops.cache_dtype
    if build.ops.joins_index(index_shape(facts)):
        return {"index": CacheTensor((facts.index_dim,), dtype)}
    widths = {"index": facts.index_dim - facts.rope_dim, "index_turned": facts.rope_dim}
    return {name: CacheTensor((stored_width(n, dtype),), dtype) for name, n in widths.items()}
