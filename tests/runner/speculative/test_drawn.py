"""What is drawn with each kind of drafter has the distribution of the model: many seeds behind one
prompt, against the chances that transformers tells."""

import os
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from banyan.layers.build import Build
from banyan.messages.plan import SAMPLE, Row
from banyan.messages.sampling_params import SamplingParams
from banyan.model_config.checkpoint import read_model_config
from banyan.model_config.model_config import FULL
from banyan.models.weights.loader import load_model
from banyan.ops.bind import bind, open_toolkit
from banyan.ops.sampling import support
from banyan.runner.kvstore import GroupLayout
from banyan.runner.runner import ModelRunner
from banyan.runner.runner_config import RunnerConfig
from banyan.runner.speculative.draft_runner import DraftModel
from banyan.runner.speculative.ngram import Ngram
from banyan.runner.speculative.standalone import ModelDrafter
from tests.models.drafting import PlainMTP, tiny_blocks, tiny_eagle3, tiny_mtp, tiny_next
from tests.runner.speculative import test_dflash as test_block
from tests.runner.speculative.test_eagle import (
    CPU,
    EAGLE,
    MAX_LENGTH,
    NUM_PAGES,
    prompt_of,
    runner_of,
)
from tests.support.runner_driver import PAGE, Driver, Request

DRAWS = 100_000
"""Of tokens that follow the first one."""
SLOTS, DRAFTS, LENGTH = 24, 3, 4
WAYS, HEAT = 3, 3.0
pytestmark = pytest.mark.skipif(
    os.environ.get("DRAFTS") != "all", reason="make test-drafts runs it"
)


def opened_beside(kind: str, folder: Path) -> tuple[SimpleNamespace, ModelRunner]:
    """NGRAM, or a model of one layer less as STANDALONE."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    widths = {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    widths |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1}
    plain, small = (
        LlamaForCausalLM(LlamaConfig(**widths, num_hidden_layers=layers)).eval()
        for layers in (2, 1)
    )
    plain.save_pretrained(folder)
    small.load_state_dict(plain.state_dict(), strict=False)
    small.save_pretrained(folder / "small")
    model_config, draft = read_model_config(str(folder)), read_model_config(str(folder / "small"))
    toolkit = open_toolkit("cpu", 1, {})
    ops = bind(
        *("cpu", CPU, torch.float32, frozenset(), model_config.head_dim),
        exact=True,
        cache_dtype=torch.float32,
        toolkit=toolkit,
        page_size=PAGE,
    )
    runner = ModelRunner(
        load_model(model_config, Build(ops)),
        Build(ops),
        RunnerConfig(
            *(SLOTS, MAX_LENGTH, (GroupLayout(FULL, 0, PAGE, NUM_PAGES),)),
            max_tokens=12 * SLOTS,
            draft_room=4 * SLOTS,
        ),
        open_drafter=lambda draft_runner: (
            Ngram() if kind == "NGRAM" else ModelDrafter(draft_runner())
        ),
        draft=None if kind == "NGRAM" else DraftModel(load_model(draft, Build(ops)), Build(ops)),
    )
    return SimpleNamespace(model=plain.model, head=plain.lm_head), runner


def opened(kind: str, folder: Path) -> tuple[PlainMTP | SimpleNamespace, ModelRunner]:
    if kind in ("NGRAM", "STANDALONE"):
        return opened_beside(kind, folder)
    if kind == "DFLASH":
        plain = tiny_blocks("qwen3", folder, folder / test_block.BLOCKS, head_dim=16)
        return plain, test_block.runner_of(folder, True, SLOTS)
    if kind == "EAGLE3":
        plain = tiny_eagle3("qwen3", folder, folder / EAGLE, head_dim=16)
        return plain, runner_of(folder, True, slots=SLOTS)
    if kind == "states":
        return tiny_next("qwen3 next", folder), runner_of(folder, True, slots=SLOTS)
    plain = tiny_mtp("glm4 moe", folder, 0.1, head_dim=16)
    return plain, runner_of(folder, True, tree=(2, 2) if kind == "tree" else (), slots=SLOTS)


def drawn(
    runner: ModelRunner, prompt: list[int], first_seed: int, stood: list[int]
) -> list[tuple[int, ...]]:
    """What so many seeds draw, all of them in one batch; stood: gets how many drafts came true."""
    driver = Driver(runner)
    requests = [
        Request(
            prompt,
            SamplingParams(
                max_new_tokens=LENGTH + DRAFTS + 1, temperature=HEAT, top_k=WAYS, seed=seed
            ),
        )
        for seed in range(first_seed, first_seed + SLOTS)
    ]
    entered = [driver.enter(request) for request in requests]
    grants = [each for _, grant in entered for each in driver.of_every_group(grant)]
    parts = {"joins": [join for join, _ in entered], "grants": grants}
    reported = {each.slot: 0 for each in requests}
    while short := [each for each in requests if len(each.output) < LENGTH]:
        rows = []
        for each in short:
            many = reported[each.slot] if each.output else 0
            count = each.known - each.done + many
            rows.append(Row(each.slot, each.done, count, many, want=SAMPLE, propose=DRAFTS))
        result = runner.launch(driver.plan(rows=rows, **parts)).result()
        assert not result.error and not result.failed, result
        for each, tokens, drafts in zip(short, result.tokens, result.drafts, strict=True):
            stood.append(len(tokens) // 4 - 1)
            each.output += np.frombuffer(tokens, np.int32).tolist()
            each.done, reported[each.slot], parts = each.known - 1, len(drafts) // 4, {}
    runner.launch(driver.plan(leaves=[each.slot for each in requests])).result()
    return [tuple(each.output[:LENGTH]) for each in requests]


@torch.no_grad()
def chances(plain: PlainMTP | SimpleNamespace, prompt: list[int]) -> dict[tuple[int, ...], float]:
    """Of each answer of so many tokens."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        longer: dict[tuple[int, ...], float] = {}
        for answer, chance in found.items():
            tokens = torch.tensor([[*prompt, *answer]])
            logits = plain.head(plain.model(tokens).last_hidden_state[0, -1]).numpy()
            kept = support(logits, HEAT, WAYS, 1.0, 0.0).astype(np.float64)
            for token in np.flatnonzero(kept):
                longer[*answer, int(token)] = chance * kept[token] / kept.sum()
        found = longer
    return found


@pytest.mark.parametrize(
    "kind", ["DFLASH", "EAGLE3", "NEXTN", "NGRAM", "STANDALONE", "states", "tree"]
)
def test_many_seeds_draw_what_the_model_says(tmp_path, kind: str) -> None:
    torch.set_num_threads(1)
    plain, runner = opened(kind, tmp_path)
    prompt = prompt_of(10, 3)
    found, stood = Counter[tuple[int, ...]](), list[int]()
    for first in range(0, DRAWS // (LENGTH - 1), SLOTS):
        found.update(drawn(runner, prompt, first, stood))
    right, total = chances(plain, prompt), sum(found.values())
    assert not found.keys() - right.keys()
    cells, square, rest, seen = 0, 0.0, 0.0, 0
    for answer, chance in right.items():
        if chance * total < 5:
            rest, seen = rest + chance * total, seen + found[answer]
            continue
        cells += 1
        square += (found[answer] - chance * total) ** 2 / (chance * total)
    if rest >= 5:
        cells, square = cells + 1, square + (seen - rest) ** 2 / rest
    assert cells > 20
    assert sum(stood) > 1000
    assert square < cells + 4 * (2 * cells) ** 0.5  # four deviations of a chi-square of so many
