"""The sampler of a slot table: every parameter reaches the op, and rows do not touch each other."""

import numpy as np
import torch

from banyan.messages.plan import Join
from banyan.messages.sampling_params import SamplingParams
from banyan.model_config.model_config import FULL
from banyan.ops.bind import bind
from banyan.runner.kvstore import GroupLayout
from banyan.runner.sampler import Sampled, Sampler
from banyan.runner.slots import SlotTable

VOCAB = 1000


def random_logits(seed: int, spread: float = 2.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(VOCAB) * spread).astype(np.float32)


def sampler_with(params: list[SamplingParams], prompt: list[int], output: list[int]) -> Sampler:
    """A sampler whose slots 1, 2 … hold the same tokens with different parameters."""
    group = GroupLayout(FULL, 0, 8, 4)
    table = SlotTable(len(params), 64, VOCAB, (group,), torch.device("cpu"))
    tokens = np.array(prompt + output, np.int32).tobytes()
    table.join([Join(i + 1, tokens, len(prompt), p) for i, p in enumerate(params)])
    ops = bind("cpu", torch.device("cpu"), torch.float32, frozenset(), 16)
    return Sampler(table, VOCAB, ops)


def sample(sampler: Sampler, logits: torch.Tensor, slots: list[int], position: int) -> Sampled:
    return sampler.sample(logits, np.array(slots), np.full(len(slots), position), {})


def choose(params: SamplingParams, logits: np.ndarray, mask: bytes | None = None) -> int:
    sampler = sampler_with([params], [1, 2, 3], [4, 4])
    sampled = sampler.sample(
        torch.from_numpy(logits)[None],
        np.array([1]),
        np.array([5]),
        {} if mask is None else {0: mask},
    )
    assert not sampled.faults(sampled.best)
    return int(sampled.tokens[0])


def test_greedy_takes_the_best_token_after_bias_penalty_and_mask():
    logits = random_logits(5)
    order = np.argsort(-logits)
    best, second, third = order[:3].tolist()
    plain = SamplingParams(max_new_tokens=9, temperature=0.0)
    assert choose(plain, logits) == best
    assert choose(SamplingParams(max_new_tokens=9, temperature=0.7, top_k=1), logits) == best
    biased = SamplingParams(max_new_tokens=9, temperature=0.0, logit_bias={third: 50.0})
    assert choose(biased, logits) == third
    stopped = SamplingParams(
        max_new_tokens=9, temperature=0.0, min_new_tokens=3, stop_ids=(best, second)
    )
    assert choose(stopped, logits) == third
    free = SamplingParams(
        max_new_tokens=9, temperature=0.0, min_new_tokens=2, stop_ids=(best, second)
    )
    assert choose(free, logits) == best
    allowed = np.ones(VOCAB, bool)
    allowed[best] = False
    assert choose(plain, logits, np.packbits(allowed, bitorder="little").tobytes()) == second


def test_a_penalty_acts_on_output_tokens_and_repetition_on_the_prompt_too():
    logits = np.zeros(VOCAB, np.float32)
    logits[4], logits[2], logits[9] = 3.0, 2.5, 2.0
    free = {"max_new_tokens": 9, "temperature": 0.0}
    assert choose(SamplingParams(**free, frequency_penalty=0.4), logits) == 2
    assert choose(SamplingParams(**free, presence_penalty=0.4), logits) == 4
    assert choose(SamplingParams(**free, repetition_penalty=2.0), logits) == 9


def test_no_edit_reaches_the_logits_that_are_scored():
    logits = torch.from_numpy(random_logits(6))[None]
    before = logits.clone()
    params = SamplingParams(max_new_tokens=9, min_new_tokens=9, stop_ids=(1,), logit_bias={5: 3.0})
    sampler = sampler_with([params], [1, 2], [3])
    sampler.sample(logits, np.array([1]), np.array([3]), {0: b"\xff" * 125})
    assert torch.equal(logits, before)


def test_a_row_gives_the_same_token_alone_and_among_others():
    params = [
        SamplingParams(max_new_tokens=9, seed=i, temperature=0.5 + i / 8, top_p=0.9, top_k=i or -1)
        for i in range(16)
    ]
    logits = torch.from_numpy(np.stack([random_logits(i) for i in range(16)]))
    sampler = sampler_with(params, [1, 2], [3])
    together = sample(sampler, logits, list(range(1, 17)), 3).tokens.tolist()
    alone = [int(sample(sampler, logits[i : i + 1], [i + 1], 3).tokens) for i in range(16)]
    assert together == alone


def test_the_token_depends_on_the_seed_and_on_the_position():
    logits = torch.from_numpy(random_logits(1, 0.5))[None]
    params = [SamplingParams(max_new_tokens=9, seed=s) for s in range(30)]
    sampler = sampler_with(params, [1, 2], [3])
    by_seed = {int(sample(sampler, logits, [s + 1], 3).tokens) for s in range(30)}
    by_position = {int(sample(sampler, logits, [1], p).tokens) for p in range(3, 33)}
    assert len(by_seed) > 20 and len(by_position) > 20
