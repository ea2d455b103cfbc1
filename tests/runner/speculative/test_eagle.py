"""A layer that drafts from the target's hidden states: step by step what a plain loop drafts,
verifies and accepts by the published rule."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from banyan.base.errors import ModelError
from banyan.config.schema import LoadConfig, SpeculativeConfig
from banyan.layers.build import Build
from banyan.messages.plan import SAMPLE, Row
from banyan.model_config.checkpoint import read_model_config
from banyan.model_config.draft_model import eagle_model_config
from banyan.model_config.model_config import FULL, STATE, ModelConfig
from banyan.models.eagle import EagleLM
from banyan.models.weights.draft_models import load_eagle, load_mtp_layer, restrict_head
from banyan.models.weights.loader import load_model
from banyan.ops.bind import NO_TOOLKIT, bind, open_toolkit
from banyan.platform.base import Platform
from banyan.runner.kvstore import GroupLayout
from banyan.runner.runner import ModelRunner
from banyan.runner.runner_config import RunnerConfig
from banyan.runner.speculative.draft_runner import DraftModel
from banyan.runner.speculative.eagle import HiddenDrafter
from banyan.runner.speculative.tree_growth import Grower
from tests.models import test_gguf_experts
from tests.models.drafting import (
    PlainMTP,
    tiny_eagle,
    tiny_eagle3,
    tiny_mimo,
    tiny_mtp,
    tiny_next,
)
from tests.models.families import rewrite_config
from tests.runner.speculative.test_standalone import drafted_loop
from tests.support.captured import Elsewhere, SampledInTensors
from tests.support.runner_driver import PAGE, Driver, Request, greedy, ids

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
NUM_PAGES, MAX_LENGTH = 64, 128
NEW, VOCAB = 24, 97
EAGLE = "eagle"
"""Folder of the model that drafts, within that of the target."""


def runner_of(
    folder: Path,
    is_recorded: bool,
    tokens: tuple[int, ...] = (),
    tree: tuple[int, ...] = (),
    slots: int = 4,
    platform: Platform | None = None,
) -> ModelRunner:
    """tree: tokens that follow one, and levels, of drafts that branch."""
    model_config = read_model_config(str(folder))
    toolkit = open_toolkit("cpu", 1, {}) if is_recorded else NO_TOOLKIT

    def build_of(model_config: ModelConfig) -> Build:
        ops = bind(
            *("cpu", CPU, torch.float32, frozenset(), model_config.head_dim),
            exact=True,
            cache_dtype=torch.float32,
            toolkit=toolkit,
            page_size=PAGE,
        )
        return Build(ops if platform is None else SampledInTensors(ops))

    build = mine = build_of(model_config)
    groups = [GroupLayout(FULL, 0, PAGE, NUM_PAGES)]
    if model_config.has_states:
        groups.append(GroupLayout(STATE, 0, PAGE, NUM_PAGES))
    sizes = RunnerConfig(
        *(slots, MAX_LENGTH, tuple(groups)),
        max_tokens=12 * slots if is_recorded else 0,
        draft_room=4 * slots,
        branching=tree[1] + 1 if tree else 0,
        shapes=() if platform is None else (1, 4),
        verified=0 if platform is None else 4,
    )
    model = load_model(model_config, build)
    if (folder / EAGLE).exists():
        source = str(folder / EAGLE)
        kind = "EAGLE3" if "Eagle3" in (folder / EAGLE / "config.json").read_text() else "EAGLE"
        asked = SpeculativeConfig(kind, draft_source=source)
        draft = eagle_model_config(asked, LoadConfig(source, path=source), model_config)
        mine = build_of(draft)
        ahead = load_eagle(draft, model, mine, PAGE)
        if tokens:
            assert isinstance(ahead, EagleLM)
            restrict_head(ahead, model_config, tokens, mine)
    else:
        ahead = load_mtp_layer(model_config, model, build, PAGE)

    def open_drafter(open_draft_runner) -> HiddenDrafter:
        draft_runner = open_draft_runner()
        return HiddenDrafter(draft_runner, Grower(draft_runner, *tree) if tree else None)

    runner = ModelRunner(
        *(model, build, sizes, platform),
        open_drafter=open_drafter,
        draft=DraftModel(ahead, mine, ahead),
    )
    assert runner.forward.is_recorded == is_recorded
    for layer in range(runner.store.num_layers):  # what nobody has written is no number
        for pages in runner.store.tensors(layer).values():
            pages.fill_(float("nan"))
    return runner


@pytest.mark.parametrize("variant", ["qwen3 next", "qwen3.5", "qwen3.5 moe"])
@pytest.mark.parametrize("how", ["eager", "recorded", "captured"])
def test_states_go_back_behind_drafts_that_do_not_stand(tmp_path, variant, how):
    plain, accepted, refused = tiny_next(variant, tmp_path, noise=0.15), 0, 0
    platform = Elsewhere() if how == "captured" else None
    runner = runner_of(tmp_path, how == "recorded", platform=platform)
    assert runner.forward.how == how
    assert runner.abilities.goes_back
    for seed, (length, chunk) in enumerate([(1, 1000), (30, 7), (40, 16)]):
        prompt = prompt_of(length, seed)
        right, steps = plain_loop(plain, prompt, 3, NEW)
        assert drafted_loop(runner, prompt, 3, NEW, chunk) == (right, steps)
        accepted += sum(steps) - len(steps)
        refused += sum(1 < count < 4 for count in steps) + sum(count == 1 for count in steps)
    assert accepted > 10 and refused > 3


def plain_loop(plain: PlainMTP, prompt: list[int], drafts: int, new: int):
    """The answer, and how many tokens each verification gave."""
    tokens, given = [*prompt, plain.next_of(prompt)], []
    while len(tokens) < len(prompt) + new:
        guessed = plain.drafts(tokens, drafts)
        count = 0
        while True:
            token = plain.next_of(tokens)
            is_right = count < drafts and guessed[count] == token
            tokens.append(token)
            count += 1
            if not is_right:
                break
        given.append(count)
    return tokens[len(prompt) :], given


def prompt_of(length: int, seed: int) -> list[int]:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


WHOLE = pytest.mark.skipif(os.environ.get("DRAFTS") != "all", reason="make test-drafts runs it")
PAIRS = ("deepseek v3", "deepseek v3.2", "glm4 moe", "mistral", "qwen3")


@pytest.fixture(scope="module", params=[*PAIRS, pytest.param("glm moe dsa", marks=WHOLE)])
def pair(request, tmp_path_factory) -> tuple[PlainMTP, Path]:
    folder = tmp_path_factory.mktemp("ahead")
    if request.param == "glm4 moe":
        return tiny_mtp(request.param, folder, 0.1, head_dim=16), folder
    if request.param == "mistral":
        return tiny_eagle(request.param, folder, folder / EAGLE), folder
    if request.param == "qwen3":
        plain = tiny_eagle3(request.param, folder, folder / EAGLE, head_dim=16)
        return plain, folder
    return tiny_mtp(request.param, folder), folder


@pytest.mark.parametrize(("is_recorded", "drafts"), [(False, 3), (True, 1), (True, 5)])
def test_each_step_accepts_what_a_plain_loop_accepts(pair, is_recorded: bool, drafts: int):
    plain, folder = pair
    runner, accepted, refused = runner_of(folder, is_recorded), 0, 0
    for seed, (length, chunk) in enumerate([(1, 1000), (2, 1000), (30, 7), (40, 16)]):
        prompt = prompt_of(length, seed)
        right, steps = plain_loop(plain, prompt, drafts, NEW)
        assert drafted_loop(runner, prompt, drafts, NEW, chunk) == (right, steps)
        accepted += sum(steps) - len(steps)
        refused += sum(count <= drafts for count in steps)
    assert accepted > 20 and refused > 0


def test_a_prompt_whose_pages_were_read_before_is_drafted_for_as_well(pair):
    """What the first token behind the pages needs, they keep; nothing else remembers the prompt."""
    plain, folder = pair
    runner, drafts, prompt = runner_of(folder, True), 3, prompt_of(50, 9)
    right = plain_loop(plain, prompt, drafts, NEW)
    driver, first = Driver(runner), Request(prompt, greedy(1))
    driver.run([first], chunk=20)
    driver.plan(leaves=[first.slot])
    again = Request(prompt, greedy(NEW + drafts))
    join, grant = driver.enter(again, shared=first.pages[:3])
    parts, given = {"joins": [join], "grants": [grant]}, []
    while len(again.output) < NEW:
        many = drafts if again.output else 0
        count = again.known - again.done
        row = Row(again.slot, again.done, count + many, many, want=SAMPLE, propose=drafts)
        result = runner.launch(driver.plan(rows=[row], **parts)).result()
        found = np.frombuffer(result.tokens[0], np.int32).tolist()
        given += [len(found)] if many else []
        again.output += found
        again.done, parts = again.known - 1, {}
    assert (again.output, given) == right


def test_what_was_not_read_for_a_while_is_read_when_a_draft_is_asked_for(pair):
    plain, folder = pair
    runner, prompt, new = runner_of(folder, True), prompt_of(15, 3), 60
    driver, request = Driver(runner), Request(prompt, greedy(new + 4))
    join, grant = driver.enter(request)
    parts = {"joins": [join], "grants": [grant]}
    while len(request.output) < new:
        asks = len(request.output) in (11, 13, 55)  # the last one after more than is ever held
        row = Row(
            *(request.slot, request.done, request.known - request.done),
            want=SAMPLE,
            propose=3 if asks else 0,
        )
        result = runner.launch(driver.plan(rows=[row], **parts)).result()
        request.output += np.frombuffer(result.tokens[0], np.int32).tolist()
        request.done, parts = request.known - 1, {}
        if asks:
            assert result.drafts[0] == ids(plain.drafts([*prompt, *request.output], 3))


def test_requests_next_to_each_other_are_drafted_for_as_alone(pair):
    plain, folder = pair
    runner, drafts = runner_of(folder, True), 2
    driver = Driver(runner)
    requests = [Request(prompt_of(8 + 13 * i, 20 + i), greedy(20)) for i in range(3)]
    entered = [driver.enter(request) for request in requests]
    parts = {"joins": [join for join, _ in entered], "grants": [grant for _, grant in entered]}
    for _ in range(4):
        rows = [
            Row(each.slot, each.done, each.known - each.done, want=SAMPLE, propose=drafts)
            for each in requests
        ]
        result = runner.launch(driver.plan(rows=rows, **parts)).result()
        parts = {}
        for each, tokens, guessed in zip(requests, result.tokens, result.drafts, strict=True):
            each.output += np.frombuffer(tokens, np.int32).tolist()
            each.done = each.known - 1
            assert guessed == ids(plain.drafts([*each.prompt, *each.output], drafts))


def test_a_checkpoint_without_the_layer_is_refused_with_what_is_missing(tmp_path):
    tiny_mtp("glm4 moe", tmp_path, head_dim=16)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.4.eh_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="layer that drafts.*lacks 1 weights.*join"):
        runner_of(tmp_path, False)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda weights: weights.pop("d2t"), "knows 88 of 97 tokens .*lacks d2t"),
        (lambda weights: weights.pop("lm_head.weight"), "no lm_head for its 88 of 97"),
        (lambda weights: weights.pop("fc.weight"), "lacks 1 weights.*join"),
        (lambda weights: weights.update(d2t=weights["d2t"] + 97), "names token .* of 97 tokens"),
        (lambda weights: weights.update(d2t=weights["d2t"][:5].clone()), "hold 88 whole numbers"),
        (lambda weights: weights["d2t"].sub_(torch.arange(88)), "names a token twice"),
        (lambda weights: weights.update(more=weights["fc.weight"][:1].clone()), "have no place"),
    ],
)
def test_a_model_of_eagle3_that_is_not_whole_is_refused(tmp_path, change, text: str):
    tiny_eagle3("qwen3", tmp_path, tmp_path / EAGLE, head_dim=16)
    weights = load_file(tmp_path / EAGLE / "model.safetensors")
    change(weights)
    save_file(weights, tmp_path / EAGLE / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=f"none of EAGLE3's: .*{text}"):
        runner_of(tmp_path, False)


def test_eagle3_with_the_head_of_the_model_and_other_names_drafts_as_its_rule_says(tmp_path):
    plain = tiny_eagle3("qwen3", tmp_path, tmp_path / EAGLE, head_dim=16, known=97)
    weights = load_file(tmp_path / EAGLE / "model.safetensors")
    del weights["d2t"], weights["t2d"], weights["lm_head.weight"]
    others = {name.replace("midlayer", "layers.0"): value for name, value in weights.items()}
    save_file(others, tmp_path / EAGLE / "model.safetensors", metadata={"format": "pt"})
    rewrite_config(tmp_path / EAGLE, draft_vocab_size=None)
    prompt = prompt_of(20, 4)
    assert drafted_loop(runner_of(tmp_path, True), prompt, 3, NEW) == plain_loop(
        plain, prompt, 3, NEW
    )


@pytest.mark.parametrize("more", [{}, {"tie_word_embeddings": True}], ids=["head", "tied"])
def test_with_a_token_map_no_other_token_is_drafted(tmp_path, more: dict):
    plain = tiny_eagle("mistral", tmp_path, tmp_path / EAGLE, **more)
    known = torch.arange(97)[torch.arange(97) % 6 > 0]
    plain.forbidden = torch.arange(97)[torch.arange(97) % 6 == 0]
    runner, refused = runner_of(tmp_path, True, tuple(known.tolist())), 0
    for seed in range(3):
        prompt = prompt_of(20, seed)
        right, steps = plain_loop(plain, prompt, 3, NEW)
        assert drafted_loop(runner, prompt, 3, NEW) == (right, steps)
        refused += bool(set(right) & set(plain.forbidden.tolist()))
    assert refused


@pytest.mark.parametrize(
    ("case", "sizes"),
    [
        (
            "glm4 moe",
            {"hidden_size": 44, "head_dim": 16, "num_attention_heads": 5, "num_key_value_heads": 1},
        ),
        ("deepseek v3, split expansion", {"hidden_size": 44}),
    ],
)
def test_the_layer_of_a_gguf_file_drafts_as_its_rule_says(tmp_path, case: str, sizes: dict):
    """Of widths that no block of a rounded type divides, so that nothing is rounded."""
    plain = tiny_mtp(test_gguf_experts.variant_of(case), tmp_path, 0.1, **sizes)
    config = plain.model.config
    config.num_nextn_predict_layers = 1
    runner = runner_of(test_gguf_experts.convert(tmp_path, case, config), True)
    given = 0
    for seed in range(2):
        prompt = prompt_of(20, seed)
        right, steps = plain_loop(plain, prompt, 3, NEW)
        assert drafted_loop(runner, prompt, 3, NEW) == (right, steps)
        given += sum(steps) - len(steps)
    assert given > 0


def test_the_layer_of_mimo_drafts_as_its_rule_says(tmp_path):
    plain = tiny_mimo(tmp_path)
    runner = runner_of(tmp_path, True)
    for seed in range(2):
        prompt = prompt_of(20, seed)
        right, steps = plain_loop(plain, prompt, 3, NEW)
        assert drafted_loop(runner, prompt, 3, NEW) == (right, steps)
        assert sum(steps) > len(steps)
