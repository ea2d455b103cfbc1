"""Further families against transformers: alone, in a batch, in chunks, greedily, on two ranks."""

from pathlib import Path

import pytest
import torch

from banyan.layers.build import Build
from banyan.model_config.checkpoint import read_model_config
from banyan.model_config.model_config import stored_head_dim
from banyan.models.weights.loader import load_model
from banyan.ops.bind import bind
from banyan.parallel.groups import GroupsConfig, open_groups
from tests.models.conftest import PagedModel
from tests.models.families import tiny
from tests.models.family_others import OTHERS
from tests.parallel.ranks import together
from tests.support.logits import PROMPT, assert_as_expected, load

CPU = torch.device("cpu")
_STEPS = 6


def _greedy(reference, prompt, steps):
    """The next tokens by transformers, over the whole sequence each time."""
    tokens = list(prompt)
    for _ in range(steps):
        with torch.no_grad():
            tokens.append(int(reference(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("variant", OTHERS)
def test_a_family_gives_the_logits_and_tokens_of_transformers(variant, ops, paged, tmp_path):
    reference = tiny(variant, tmp_path)
    model = load(tmp_path, ops)

    (whole,) = paged(model).step([(0, PROMPT)])
    assert_as_expected(whole, reference)

    pages = paged(model, num_requests=2)
    chunks = [
        pages.step([(1, PROMPT[first + 3 : first + 3 + count]), (0, PROMPT[first : first + count])])
        for first, count in ((0, 13), (13, 1), (14, 30))
    ]
    torch.testing.assert_close(torch.cat([c[1] for c in chunks]), whole[:44], atol=1e-4, rtol=0)

    given, token = [], int(chunks[-1][1][-1].argmax())
    for _ in range(_STEPS):
        given.append(token)
        token = int(pages.step([(0, [token])])[0][-1].argmax())
    assert given == _greedy(reference, PROMPT[:44], _STEPS)


def _logits(folder, groups):
    model_config = read_model_config(folder)
    ops = bind("cpu", CPU, torch.float32, frozenset(), stored_head_dim(model_config))
    return PagedModel(load_model(model_config, Build(ops, groups))).step([(0, PROMPT)])[0]


def _rank(rank, size, address, folders):
    groups = open_groups(GroupsConfig(rank, size, address, timeout_s=60))
    return [_logits(folder, groups).tolist() for folder in folders]


def test_two_ranks_give_the_logits_of_transformers(tmp_path):
    folders = [str(tmp_path / str(number)) for number in range(len(OTHERS))]
    references = [tiny(variant, Path(at)) for variant, at in zip(OTHERS, folders, strict=True)]

    for rank, answers in enumerate(together(2, tmp_path, _rank, folders)):
        assert isinstance(answers, list), f"rank {rank}: {answers}"
        for logits, reference in zip(answers, references, strict=True):
            assert_as_expected(torch.tensor(logits), reference)
