"""Sampler: logits of the rows that sample become tokens.

Rows that take the best raw logit are chosen on the device. A row that needs more is chosen on the
host, on its own: what happens to it cannot touch another row, neither its value nor its failure.
Order per row: penalties, mask, logit_bias, temperature, then top_k, top_p and min_p jointly.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from banyan.runner.sampling.draw import best_token, check_best, draw, uniform
from banyan.runner.sampling.masks import banned
from banyan.runner.sampling.penalties import penalise
from banyan.runner.slots import SlotTable


@dataclass(frozen=True)
class Choice:
    """One row to sample. `position` is where the token goes; `mask` is None without a grammar."""

    slot: int
    position: int
    mask: bytes | None = None


@dataclass(frozen=True)
class Sampled:
    """Outcome of one sampling.

    Attributes:
        tokens: [rows] int64, on the device; 0 for failed rows.
        best: [rows] fp32 largest logit, where rows were chosen on the device; else None.
        failed: index among the sampled rows -> text.
    """

    tokens: Tensor
    best: Tensor | None = None
    failed: dict[int, str] = field(default_factory=dict)

    def faults(self) -> dict[int, str]:
        """Rows that could not be chosen, with the reason. Waits for the device."""
        if self.best is None:
            return self.failed
        faults = dict(self.failed)
        best = self.best.cpu().numpy()  # sync: the step's end
        for i in np.flatnonzero(~np.isfinite(best)):
            try:
                check_best(float(best[i]))
            except ValueError as error:
                faults[int(i)] = str(error)
        return faults


class Sampler:
    """Chooses tokens with the parameters of the slot table."""

    def __init__(self, table: SlotTable, vocab_size: int) -> None:
        self._table = table
        self._vocab_size = vocab_size

    def sample(self, logits: Tensor, choices: list[Choice]) -> Sampled:
        """Choose one token per row.

        logits: [rows, vocab] fp32, left as they are.
        """
        if self._are_plain(choices):
            best, tokens = logits.max(-1)
            return Sampled(tokens, best)
        host = logits.cpu().numpy()  # sync: rows are chosen one by one on the host
        tokens = np.zeros(len(choices), np.int64)
        failed: dict[int, str] = {}
        for i, choice in enumerate(choices):
            try:
                tokens[i] = self._choose(host[i], choice)
            except Exception as error:  # whatever it is, it is this row's alone
                failed[i] = f"sampling failed: {error}"
        return Sampled(torch.from_numpy(tokens).to(logits.device), failed=failed)

    def _are_plain(self, choices: list[Choice]) -> bool:
        """Does every row take the best of its raw logits?"""
        if any(c.mask is not None for c in choices):
            return False
        params = self._table.params[[c.slot for c in choices]]
        lengths = np.array([c.position for c in choices]) - params["prompt_len"]
        plain = params["greedy"] & ~params["edited"] & (lengths >= params["min_new"])
        return bool(plain.all())

    def _choose(self, logits: np.ndarray, choice: Choice) -> int:
        params = self._table.params[choice.slot]
        logits = self._edit(logits, choice, params)
        token = best_token(logits)
        if params["greedy"]:
            return token
        return draw(
            logits,
            float(params["temperature"]),
            int(params["top_k"]),
            float(params["top_p"]),
            float(params["min_p"]),
            uniform(int(params["seed"]), choice.position),
        )

    def _edit(self, logits: np.ndarray, choice: Choice, params: np.void) -> np.ndarray:
        """The row's logits with everything that moves single tokens applied, in a copy if any."""
        is_short = choice.position - params["prompt_len"] < params["min_new"]
        if not (params["edited"] or is_short or choice.mask is not None):
            return logits
        logits = logits.copy()
        sampling = self._table.join_of(choice.slot).sampling
        if params["edited"]:
            tokens = self._table.tokens_of(choice.slot, choice.position)
            penalise(
                logits,
                tokens,
                int(params["prompt_len"]),
                sampling.frequency_penalty,
                sampling.presence_penalty,
                sampling.repetition_penalty,
            )
        if is_short:
            logits[list(sampling.stop_ids)] = -np.inf
        if choice.mask is not None:
            logits[banned(choice.mask, self._vocab_size)] = -np.inf
        for token, bias in sampling.logit_bias.items():
            logits[token] += bias
        return logits
