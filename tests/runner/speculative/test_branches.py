"""Drafts that branch, verified by the runner: answers are those without drafts, token by token, and
each step accepts what a plain walk over the tree accepts."""

from random import Random

import numpy as np
import pytest
import torch

from banyan.base.draft_tree import accepted_path, is_chain, paths_of, ranks_of
from banyan.layers.build import Build
from banyan.messages.plan import SAMPLE, SCORE, Row
from banyan.messages.sampling_params import SamplingParams
from banyan.model_config.model_config import FULL
from banyan.models.weights.loader import load_model
from banyan.ops.bind import NO_TOOLKIT, bind, open_toolkit
from banyan.runner.kvstore import GroupLayout
from banyan.runner.runner import ModelRunner
from banyan.runner.runner_config import RunnerConfig
from banyan.runner.speculative import Tree
from tests.runner.conftest import VOCAB
from tests.support.runner_driver import PAGE, Driver, Request, greedy

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
NEW, NODES = 30, 9


class Gardener:
    """Drafts trees around the given right tokens; most of them branch, and lie in no order."""

    def __init__(self, right: dict[int, list[int]], seed: int) -> None:
        self.right, self.random = right, Random(seed)
        self.known: dict[int, list[int]] = {}
        self.grown: dict[int, Tree] = {}

    def join(self, slot, tokens, namespace):
        self.known[slot] = tokens

    def leave(self, slot):
        del self.known[slot]

    def extend(self, slot, first, tokens):
        assert len(self.known[slot]) == first
        self.known[slot] += tokens

    def flush(self): ...

    def propose(self, rows, counts):
        for row, count in zip(rows, counts, strict=True):
            self.grown[row.slot] = self.tree(row.slot, count)
        return [self.grown[row.slot] for row in rows]

    def tree(self, slot: int, count: int) -> Tree:
        """The right tokens somewhere in it, up to a random depth."""
        whole, known = self.right[slot], self.known[slot]
        right = whole[len(known) : len(known) + self.random.randrange(5)]
        tokens, parents, here, taken = [], [], -1, dict[int, set[int]]()
        while len(tokens) < count:
            is_right = bool(right) and self.random.random() < 0.4
            parent = here if is_right else self.random.randrange(-1, len(tokens))
            token = right.pop(0) if is_right else self.random.randrange(VOCAB)
            if token in taken.setdefault(parent, set()) or (
                parent == here and right[:1] == [token]
            ):
                right = []
                continue
            if len(paths_of([*parents, parent])[-1]) > 6:
                continue
            taken[parent].add(token)
            tokens.append(token)
            parents.append(parent)
            here = len(tokens) - 1 if is_right else here
        return Tree(tokens, parents)


@pytest.fixture(params=[False, True], ids=["eager", "recorded"])
def world(request, model_config):
    toolkit = open_toolkit("cpu", 1, {}) if request.param else NO_TOOLKIT
    ops = bind(
        *("cpu", CPU, torch.float32, frozenset(), model_config.head_dim),
        exact=True,
        cache_dtype=torch.float32,
        toolkit=toolkit,
        page_size=PAGE,
    )
    build = Build(ops)
    model = load_model(model_config, build)

    def make(gardener: Gardener | None) -> ModelRunner:
        sizes = RunnerConfig(
            *(6, 192, (GroupLayout(FULL, 0, PAGE, 64),)),
            max_tokens=96 if request.param else 0,
            draft_room=48,
            branching=8 if gardener else 0,
        )
        opener = None if gardener is None else (lambda draft_runner: gardener)
        runner = ModelRunner(model, build, sizes, open_drafter=opener)
        assert runner.forward.is_recorded == request.param
        for layer in range(runner.store.num_layers):
            for pages in runner.store.tensors(layer).values():
                pages.fill_(float("nan"))
        return runner

    return make


def prompts(count: int) -> list[list[int]]:
    random = Random(5)
    return [[random.randrange(VOCAB) for _ in range(random.randrange(1, 40))] for _ in range(count)]


def answers(world, sampling: list[SamplingParams], **more) -> list[Request]:
    asked = [Request(p, s, **more) for p, s in zip(prompts(len(sampling)), sampling, strict=True)]
    Driver(world(None)).run(asked)
    return asked


def drafted(world, sampling: list[SamplingParams], seed: int = 0, masks=None, **more):
    """The requests run together with trees, and how many drafts stood."""
    right = answers(world, sampling, **more)
    longer = [
        SamplingParams(**{f: getattr(s, f) for f in s.__struct_fields__} | {"max_new_tokens": 60})
        for s in sampling
    ]
    gardener = Gardener({}, seed)
    runner = world(gardener)
    driver = Driver(runner)
    asked = [Request(p, s, **more) for p, s in zip(prompts(len(sampling)), longer, strict=True)]
    entered = [driver.enter(r) for r in asked]
    for request, answer in zip(asked, right, strict=True):
        gardener.right[request.slot] = answer.prompt + answer.output
    parts = {"joins": [j for j, _ in entered], "grants": [g for _, g in entered]}
    stood = moved = 0
    while running := [r for r in asked if len(r.output) < NEW]:
        rows, foreseen = [], []
        for r in running:
            tree = gardener.grown.get(r.slot, Tree([], []))
            drafts = len(tree.tokens)
            start = r.known - 1 if r.output else 0
            want = SAMPLE | (SCORE if r.score_from >= 0 else 0)
            first = max(0, r.score_from)
            rows.append(
                Row(
                    r.slot, start, r.known + drafts - start, drafts, b"", want, first, propose=NODES
                )
            )
            foreseen.append(tree)
        result = runner.launch(driver.plan(rows=rows, **parts)).result()
        assert not result.error and not result.failed, result
        parts = {}
        for r, tree, tokens in zip(running, foreseen, result.tokens, strict=True):
            given = np.frombuffer(tokens, np.int32).tolist()
            whole = gardener.right[r.slot]
            if len(whole) > r.known + len(given):  # by the published rule, on the right answer
                sampled = [whole[r.known]] + [-1] * len(tree.tokens)
                for at, path in enumerate(paths_of(tree.parents)[1:], 1):
                    above = [tree.tokens[n - 1] for n in path[1:]]
                    if whole[r.known : r.known + len(above)] == above:
                        sampled[at] = whole[r.known + len(above)]
                path = accepted_path(tree.tokens, tree.parents, sampled)
                assert len(given) == len(path)
                moved += path[-1] != len(path) - 1
            stood += len(given) - 1
            r.output += given
        for scores in result.scores:
            driver.note(running[scores.row], scores)
    for request, answer in zip(asked, right, strict=True):
        assert request.output[:NEW] == answer.output[:NEW]
        for position, value in answer.scores.items():
            if position < len(answer.prompt) + NEW:
                assert request.scores[position] == pytest.approx(value, abs=1e-5)
    return stood, moved


def test_each_step_accepts_what_the_rule_accepts_and_the_answer_is_that_without_drafts(world):
    stood, moved = drafted(world, [greedy(NEW + 8)] * 4)
    assert stood > 20 and moved > 10


def test_what_is_drawn_with_a_seed_is_drawn_without_drafts_too(world):
    drawn = [
        SamplingParams(max_new_tokens=NEW + 8, temperature=0.8, seed=s, top_k=20, top_p=0.95)
        for s in range(3)
    ]
    stood, moved = drafted(world, drawn, seed=1)
    assert stood > 15 and moved > 5


def test_penalties_count_what_leads_to_a_draft_and_nothing_next_to_it(world):
    strict = greedy(NEW + 8, repetition_penalty=1.6, frequency_penalty=0.5, presence_penalty=0.3)
    drawn = SamplingParams(
        max_new_tokens=NEW + 8, temperature=0.9, seed=4, repetition_penalty=1.3, min_new_tokens=9,
        stop_ids=(3, 5), logit_bias={7: 2.0},
    )  # fmt: skip
    stood, _ = drafted(world, [strict, drawn, greedy(NEW + 8)], seed=2)
    assert stood > 15


def test_scores_are_those_of_the_tokens_that_stand(world):
    stood, moved = drafted(world, [greedy(NEW + 8)] * 2, seed=3, score_from=0, score_top=2)
    assert stood > 8 and moved > 3


def test_paths_ranks_and_what_stands():
    parents = [-1, -1, 0, 1, 1, 3]
    assert paths_of(parents) == [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4], [0, 2, 5], [0, 2, 4, 6]]
    assert ranks_of(parents) == [0, 1, 0, 0, 1, 0]
    assert not is_chain(parents) and is_chain([-1, 0, 1]) and is_chain([])
    assert accepted_path([5, 6, 7, 8, 9, 1], parents, [6, 0, 8, 0, 1, 0, 2]) == [0, 2, 4, 6]
    assert accepted_path([5, 6, 7, 8, 9, 1], parents, [4, 0, 8, 0, 1, 0, 2]) == [0]
