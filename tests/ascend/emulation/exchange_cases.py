"""Cases of the operators by which ranks exchange expert rows. They need a second rank, so the
self-check has none of them."""

from collections.abc import Iterator

import torch
from torch import Tensor

from banyan.ascend.ops.operators import Operators
from banyan.ascend.ops.product_contracts import A3
from banyan.ascend.selfcheck.cases import Case, Place
from banyan.ops.experts_api import Ranks
from banyan.platform.expert_exchange import Dispatch

_TOKENS, _WIDTH, _EXPERTS, _PER_TOKEN = 5, 1024, 6, 2
SOMEWHERE = Ranks("somewhere", 0, 2)
"""A group that does not exist: for kernels that compute shapes only."""


def exchange_cases(ranks: Ranks = SOMEWHERE, limits: Dispatch = A3) -> Iterator[Case]:
    for dtype in (torch.bfloat16, torch.float16):
        kind = str(dtype).removeprefix("torch.")
        x = torch.ones(_TOKENS, _WIDTH, dtype=dtype)
        ids = (torch.arange(_TOKENS * _PER_TOKEN) % _EXPERTS).view(_TOKENS, -1).int()
        weights = torch.full(ids.shape, 0.5)

        def there(
            ops: Operators,
            place: Place,
            given: tuple[Tensor, Tensor, Tensor] = (x, ids, weights),
        ) -> list[Tensor]:
            rows, chosen, shares = place(given[0]), place(given[1]), place(given[2])
            sent = ops.experts.dispatch(rows, chosen, shares, ranks, _EXPERTS, limits)
            return [ops.experts.combine(sent.rows, sent, chosen, shares, ranks, _EXPERTS, limits)]

        # Rows that experts leave as they are, with weights of a sum of one.
        for operator in ("npu_moe_distribute_dispatch_v2", "npu_moe_distribute_combine_v2"):
            yield Case(operator, kind, there, lambda x=x: [x.float()], 1e-2)
