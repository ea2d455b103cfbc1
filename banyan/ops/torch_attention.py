"""Attention in torch: row by row and slow, chosen only by name, to bisect a wrong answer.

`by_phase` lets it attend for the rows of one phase, prefill or decode, next to the device's own
kernel: --prefill-attention-backend and --decode-attention-backend.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from banyan.ops import reference
from banyan.ops.bind import DECODE, Kernel

Attend = Callable[..., Tensor]
PlainPages = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

paged_attention = Kernel(
    supports=lambda spec: None, run=reference.paged_attention, waits=True, sees_ahead=True
)


def by_phase(own: Attend, phase: str, plain: PlainPages | None) -> Attend:
    """`paged_attention` of `ops/api.py` that attends in torch for the rows of one phase.

    Rows of one token decode, longer ones prefill. A step with both runs both kernels over all rows.

    Args:
        own: the device's kernel, for the other phase.
        phase: PREFILL or DECODE.
        plain: turns pages of the kernel's layout into plain ones; None = they are plain.
    """

    def attend(
        q: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        page_tables: Tensor,
        row_starts: Tensor,
        context_lengths: Tensor,
        scale: float,
        window: int,
        soft_cap: float,
        sinks: Tensor | None = None,
        unit: float = 1.0,
        paths: Tensor | None = None,
        ends: Tensor | None = None,
    ) -> Tensor:
        numbers = scale, window, soft_cap
        # Kernels take only what their device can be asked for.
        more = {} if sinks is None else {"sinks": sinks}
        more |= {} if paths is None else {"paths": paths}
        more |= {} if ends is None else {"ends": ends}
        own_more = more if unit == 1.0 else {**more, "unit": unit}
        counts = row_starts.diff().cpu()  # sync: this kernel is for debugging
        is_meant = (counts == 1) if phase == DECODE else (counts > 1)
        rows = page_tables, row_starts, context_lengths
        if not is_meant.any():
            return own(q, k_pages, v_pages, *rows, *numbers, **own_more)
        if plain is not None:
            used, inverse = page_tables.unique(return_inverse=True)
            pages = plain(k_pages[used.long()], v_pages[used.long()])
            tables = inverse.to(page_tables.dtype).view_as(page_tables)
        else:
            pages, tables = (k_pages, v_pages), page_tables
        found = reference.paged_attention(
            q, *pages, tables, row_starts, context_lengths, *numbers, unit=unit, **more
        )
        if is_meant.all():
            return found
        theirs = own(q, k_pages, v_pages, *rows, *numbers, **own_more)
        tokens = is_meant.repeat_interleave(counts.long()).to(q.device)
        return torch.where(tokens[:, None, None], found, theirs)

    return attend
