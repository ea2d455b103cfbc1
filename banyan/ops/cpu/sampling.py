"""Sampling and log-probabilities in compiled code: all rows of a step in one call.

Tokens equal the definition in ops/sampling.py bit for bit, in every instruction set. The rows'
parameters are in host memory. `sample` can be recorded if they stay at their addresses, which they
do for rows without masks and addends.
"""

import torch
from torch import Tensor

from banyan.ops.bind import Kernel, OpSpec
from banyan.ops.cpu.library import Library
from banyan.ops.sampling import SampleRows


class Sampling:
    """The ops on the threads of one library."""

    def __init__(self, library: Library) -> None:
        self._library = library

    def sample(self, logits: Tensor, rows: SampleRows) -> tuple[Tensor, Tensor]:
        count, vocab = logits.shape
        tokens = self._library.empty((count,), torch.int64)
        best = self._library.empty((count,))
        masks, addends = rows.masks, rows.addends
        self._library.call(
            "bn_sample",
            count,
            logits.data_ptr(),
            logits.stride(0),
            vocab,
            _address(rows.params),
            _address(rows.positions),
            _address(rows.slots),
            rows.history.data_ptr(),
            rows.history.stride(0),
            _address(masks.bits) if masks else 0,
            _address(masks.of_row) if masks else 0,
            masks.bits.shape[1] if masks else 0,
            _address(addends.offsets) if addends else 0,
            _address(addends.ids) if addends else 0,
            _address(addends.values) if addends else 0,
            tokens.data_ptr(),
            best.data_ptr(),
        )
        return tokens, best

    def logprobs(
        self,
        logits: Tensor,
        rows: Tensor,
        temperatures: Tensor,
        tokens: Tensor,
        top: int,
        picked: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        count, vocab, num_picked = len(rows), logits.shape[1], picked.shape[1]
        logprobs = self._library.empty((count,))
        top_ids = self._library.empty((count, top), torch.int32)
        top_logprobs = self._library.empty((count, top))
        picked_logprobs = self._library.empty((count, num_picked))
        self._library.call(
            "bn_logprobs",
            count,
            logits.data_ptr(),
            logits.stride(0),
            vocab,
            _address(rows),
            _address(temperatures),
            tokens.data_ptr(),
            top,
            _address(picked),
            num_picked,
            logprobs.data_ptr(),
            top_ids.data_ptr(),
            top_logprobs.data_ptr(),
            picked_logprobs.data_ptr(),
        )
        return logprobs, top_ids, top_logprobs, picked_logprobs


def _address(x: Tensor) -> int:
    assert x.is_contiguous()
    return x.data_ptr()


def _supports(spec: OpSpec) -> str | None:
    if spec.device.type != "cpu":
        return f"tensors are on {spec.device.type}"
    return spec.toolkit.absence or None


sample = Kernel(supports=_supports, make=lambda library: Sampling(library).sample)
logprobs = Kernel(supports=_supports, make=lambda library: Sampling(library).logprobs)
