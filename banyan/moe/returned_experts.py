"""What answers tell of the experts that tokens chose: those of a step's rows that ask for it."""

import numpy as np
import torch
from torch import Tensor

from banyan.messages.plan import EXPERTS
from banyan.model_config.model_config import ModelConfig
from banyan.moe.expert_watch import ExpertWatch
from banyan.runner.batch import Batch


def told_experts(
    watch: ExpertWatch | None, chosen: np.ndarray, batch: Batch, model_config: ModelConfig
) -> dict[int, Tensor]:
    """Let whoever listens hear of the choices of a step, on every rank that has run it.

    chosen: what it chose in the layers that are here, `ExpertWatch.chosen`.
    returns: of the rows with EXPERTS: index in the plan -> int32 [positions, layers, per_token],
        best first; 0 in layers without experts.
    """
    asks = bool(batch.wanted & EXPERTS)
    if watch is None or not (asks or watch.is_recorded):
        return {}
    mine = watch.own(watch.whole(chosen, batch.positions))
    facts, found = model_config.experts, dict[int, Tensor]()
    assert facts is not None
    sparse = [layer for layer in range(model_config.num_layers) if layer not in facts.dense_layers]
    for at in batch.wanting(EXPERTS):
        skipped = max(0, batch.rows[at].hidden_from - int(batch.starts[at]))
        tokens = slice(int(batch.offsets[at]) + skipped, int(batch.offsets[at + 1]))
        of_row = mine[:, tokens]
        whole = np.zeros((of_row.shape[1], model_config.num_layers, facts.per_token), np.int32)
        whole[:, sparse] = of_row.swapaxes(0, 1)
        found[int(batch.indices[at])] = torch.from_numpy(whole)
    return found
