"""Trees of a draft model: step by step what a plain loop by the published rule (EAGLE-2) grows,
verifies and accepts."""

import numpy as np
import pytest
import torch

from banyan.base.draft_tree import is_chain
from banyan.base.ids import SlotId
from banyan.messages.plan import SAMPLE, Row
from banyan.messages.sampling_params import SamplingParams
from banyan.runner.draft_trees import Branches
from banyan.runner.speculative.tree_growth import Growing, Ways, row_of
from tests.models.drafting import PlainMTP, PlainTree, tiny_eagle
from tests.runner.speculative.test_eagle import EAGLE, pair, prompt_of, runner_of
from tests.support.captured import Elsewhere
from tests.support.runner_driver import Driver, Request, greedy

__all__ = ["pair"]
pytestmark = pytest.mark.usefixtures("one_thread")
NEW = 20


def by_plain_loop(plain: PlainMTP, prompt: list[int], count: int, steps: int, breadth: int):
    """The answer, and before each verification the tree, after it how many tokens it gave."""
    tokens = [*prompt, plain.next_of(prompt)]
    given: list[tuple[PlainTree, int]] = []
    while len(tokens) < len(prompt) + NEW:
        guessed, parents = tree = plain.tree(tokens, count, steps, breadth)
        here, stood = -1, 0
        while here is not None:
            token = plain.next_of(tokens)
            tokens.append(token)
            stood += 1
            ways = zip(guessed, parents, strict=True)
            here = next((at for at, way in enumerate(ways) if way == (token, here)), None)
        given.append((tree, stood))
    return tokens[len(prompt) :], given


class Branching:
    """Requests that are drafted trees for, by plans."""

    def __init__(self, runner, prompts: list[list[int]], count: int, sampling=None) -> None:
        self.driver, self.count = Driver(runner), count
        self.requests = [Request(p, sampling or greedy(NEW + count + 1)) for p in prompts]
        entered = [self.driver.enter(request) for request in self.requests]
        self.parts = {"joins": [e[0] for e in entered], "grants": [e[1] for e in entered]}
        self.trees: dict[int, PlainTree] = {}
        self.given: dict[int, list] = {request.slot: [] for request in self.requests}

    def step(self, chunk: int = 1000) -> None:
        live = [request for request in self.requests if len(request.output) < NEW]
        rows = [self.row(request, chunk) for request in live]
        result = self.driver.runner.launch(self.driver.plan(rows=rows, **self.parts)).result()
        assert not result.error and not result.failed, result
        self.parts = {}
        for at, (request, row) in enumerate(zip(live, rows, strict=True)):
            tokens = np.frombuffer(result.tokens[at], np.int32).tolist()
            if row.drafts:
                self.given[request.slot].append((self.trees[request.slot], len(tokens)))
            request.output += tokens
            request.done = request.known - 1 if row.want else row.start + row.count
            drafts = np.frombuffer(result.drafts[at], np.int32).tolist()
            parents = np.frombuffer(result.parents[at] if result.parents else b"", np.int32)
            follows = parents.tolist() or list(range(-1, len(drafts) - 1))
            self.trees[request.slot] = drafts, follows

    def row(self, request: Request, chunk: int) -> Row:
        many = self.count if request.output else 0
        count = min(chunk, request.known - request.done)
        is_last = request.done + count == request.known
        return Row(
            *(request.slot, request.done, count + many, many),
            want=SAMPLE if is_last else 0,
            propose=self.count if is_last else 0,
        )

    def run(self, chunk: int = 1000) -> None:
        while any(len(request.output) < NEW for request in self.requests):
            self.step(chunk)


@pytest.mark.parametrize(
    ("is_recorded", "count", "steps", "breadth"),
    [(True, 7, 5, 4), (True, 3, 2, 3), (False, 9, 3, 3), (True, 12, 3, 5)],
)
def test_each_step_grows_and_accepts_what_a_plain_loop_does(
    pair, is_recorded, count, steps, breadth
):
    plain, folder = pair
    runner = runner_of(folder, is_recorded, tree=(breadth, steps))
    accepted, branched = 0, 0
    for seed, (length, chunk) in enumerate([(1, 1000), (30, 7)]):
        prompt = prompt_of(length, seed)
        loop = Branching(runner, [prompt], count)
        loop.run(chunk)
        (request,) = loop.requests
        output, given = by_plain_loop(plain, prompt, count, steps, breadth)
        assert request.output == output and loop.given[request.slot] == given
        accepted += sum(stood - 1 for _, stood in given)
        branched += sum(not is_chain(parents) for (_, parents), _ in given)
        runner.launch(loop.driver.plan(leaves=[request.slot])).result()
    assert accepted > 10 and branched > 5


def test_a_device_that_has_the_lengths_grows_and_accepts_the_same(pair):
    plain, folder = pair
    runner = runner_of(folder, False, tree=(4, 5), platform=Elsewhere())
    loop = Branching(runner, [prompt_of(9, 1), prompt_of(30, 2)], 7)
    loop.run(chunk=16)
    for request in loop.requests:
        output, given = by_plain_loop(plain, request.prompt, 7, 5, 4)
        mine = loop.given[request.slot]
        assert request.output[:NEW] == output[:NEW]
        assert mine[: len(given)] == given[: len(mine)] and len(mine) > 2


def test_in_a_batch_a_tree_grows_as_alone_bit_for_bit(pair):
    _, folder = pair
    runner = runner_of(folder, True, tree=(4, 4))
    prompts = [prompt_of(length, 40 + length) for length in (3, 21, 37)]
    drawn = SamplingParams(max_new_tokens=NEW + 8, temperature=0.9, seed=3)
    alone = []
    for prompt in prompts:
        loop = Branching(runner, [prompt], 6, drawn)
        loop.run()
        alone.append((loop.requests[0].output, loop.given[loop.requests[0].slot]))
        runner.launch(loop.driver.plan(leaves=[loop.requests[0].slot])).result()
    together = Branching(runner, prompts, 6, drawn)
    together.run(chunk=16)
    for request, (output, given) in zip(together.requests, alone, strict=True):
        mine = together.given[request.slot]
        both = min(len(mine), len(given))
        assert request.output[:NEW] == output[:NEW] and mine[:both] == given[:both]


def test_a_tree_holds_tokens_of_the_token_map_alone(tmp_path):
    plain = tiny_eagle("mistral", tmp_path, tmp_path / EAGLE)
    known = [token for token in range(97) if token % 6]
    plain.forbidden = torch.arange(0, 97, 6)
    runner = runner_of(tmp_path, True, tuple(known), tree=(3, 3))
    loop = Branching(runner, [prompt_of(20, 1)], 6)
    loop.run()
    (request,) = loop.requests
    right = by_plain_loop(plain, request.prompt, 6, 3, 3)
    assert (request.output, loop.given[request.slot]) == right


class Guesses:
    """What a model might say: anything, equal numbers and impossible tokens among it."""

    def __init__(self, seed: int, ways: int) -> None:
        self.numbers, self.ways = np.random.default_rng(seed), ways

    def behind(self, count: int) -> Ways:
        logprobs = -np.sort(self.numbers.integers(0, 9, (count, self.ways)) / 2.0)
        logprobs[self.numbers.random(logprobs.shape) < 0.1] = -np.inf
        tokens = np.argsort(self.numbers.random((count, 50)))[:, : self.ways]
        return Ways(tokens, logprobs, torch.empty(0))


@pytest.mark.parametrize("seed", range(40))
def test_a_tree_takes_no_more_places_than_a_chain_and_keeps_what_leads_to_its_front(seed: int):
    count, steps, breadth = 1 + seed % 13, 1 + seed % 6, 2 + seed % 5
    growing, guesses = Growing(count, steps, breadth), Guesses(seed, breadth)
    written: dict[int, object] = {0: growing.front[0]}
    levels = 0
    while growing.front:
        growing.take(guesses.behind(len(growing.front)))
        levels += 1
        for node in growing.front:
            assert 0 < node.place < count
            written[node.place] = node
        for node, path in zip(growing.front, growing.paths, strict=True):
            assert [written[place] for place in path] == node.path
    tree = growing.tree
    assert levels <= steps and len(tree.tokens) <= count and tree.depth <= steps
    assert all(parent < at for at, parent in enumerate(tree.parents))
    assert len(set(zip(tree.parents, tree.tokens, strict=True))) == len(tree.tokens)


def test_a_row_reaches_whatever_its_tokens_read():
    """Pages are shown to a step up to where its longest row ends."""
    row = row_of(SlotId(1), Branches(13, [[0, 5, 1], [0, 5, 2]]))
    assert (row.start + row.count, row.count, row.drafts) == (13 + 5 + 1, 2, 1)


def test_among_equals_the_nearer_one_is_drafted_and_then_the_one_that_was_found_first():
    growing = Growing(5, 2, 2)
    growing.take(Ways(np.array([[7, 9]]), np.array([[-1.0, -1.0]]), torch.empty(0)))
    tokens, logprobs = np.array([[1, 2], [3, 4]]), np.array([[0.0, -1.0], [0.0, -1.0]])
    growing.take(Ways(tokens, logprobs, torch.empty(0)))
    assert growing.tree.tokens == [7, 9, 1, 3, 2] and growing.tree.parents == [-1, -1, 0, 1, 0]


def test_where_the_draft_model_says_nothing_that_can_be_nothing_is_drafted():
    growing = Growing(5, 2, 2)
    growing.take(Ways(np.array([[7, 9]]), np.full((1, 2), np.nan), torch.empty(0)))
    assert not growing.front and growing.tree.tokens == []
