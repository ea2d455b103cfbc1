"""Experts with copies, anywhere on their ranks, have the bits of experts in their order."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from banyan.layers.build import Build
from banyan.messages.control_ops import PlaceExperts
from banyan.model_config.checkpoint import read_model_config
from banyan.models.weights.loader import load_model
from banyan.moe.balancer import ExpertMover
from banyan.moe.eplb import balanced, trivial
from banyan.moe.expert_location import ExpertMap
from banyan.ops.bind import bind, open_toolkit
from banyan.parallel.groups import Groups, GroupsConfig, open_groups
from tests.models.conftest import PagedModel
from tests.models.families import tiny
from tests.parallel.ranks import rank_processes
from tests.support.logits import PROMPT

EIGHT = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4}
VARIANTS = ("qwen2 moe, some dense", "gpt-oss")
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("ranks", "library"),
    [(2, "shared"), (2, "gloo"), pytest.param(4, "shared", marks=pytest.mark.slow)],
)
def test_copies_and_moves_change_no_bit(ranks, library, tmp_path):
    for variant in VARIANTS:
        more = {"num_local_experts": 8} if variant == "gpt-oss" else {}
        tiny(variant, tmp_path / variant, **more, **(EIGHT if ranks == 4 else {}))
    context = rank_processes()
    results = context.Queue()
    model_configs = [read_model_config(str(tmp_path / variant)) for variant in VARIANTS]
    args = (ranks, model_configs, f"file://{tmp_path}/meet", library, results)
    processes = [context.Process(target=_rank, args=(rank, *args)) for rank in range(ranks)]
    for process in processes:
        process.start()

    answers = [results.get(timeout=240) for _ in processes]

    for process in processes:
        process.join(60)
    for found in answers:
        assert not isinstance(found, Exception), found
        for of_model_config in found:
            plain, *others = (torch.tensor(logits) for logits in of_model_config)
            assert len(others) == 5 and plain.isfinite().all()
            for other in others:
                # Plain torch multiplies rows by how many there are.
                limit = 0 if library == "shared" else 1e-4
                torch.testing.assert_close(other, plain, rtol=0, atol=limit)


def _rank(rank, ranks, model_configs, address, library, results):
    torch.set_num_threads(1)
    kit = {"toolkit": open_toolkit("cpu", 1, {})} if library == "shared" else {}
    ops = bind("cpu", CPU, torch.float32, frozenset(), 16, exact=True, **kit)
    world = open_groups(
        GroupsConfig(rank, ranks, address, (library,), 60, recorder=ops.recorder)
    ).world
    build = Build(ops, Groups.with_experts_apart(world))
    try:
        results.put([_answers(model_config, build, rank, ranks) for model_config in model_configs])
    except Exception as error:
        results.put(error)
        raise


def _answers(model_config, build, rank, ranks):
    """Logits as ever; with copies, by either choice of them; elsewhere; and moved twice."""
    found = [PagedModel(load_model(model_config, build)).step([(0, PROMPT)])[0].tolist()]
    count, layers = model_config.experts.count, model_config.num_layers
    places = count + 2 * ranks
    loads = np.random.default_rng(3).integers(0, 1000, (layers, count))
    elsewhere = balanced(loads, places, ranks)
    for logical, dispatch in (
        (trivial(layers, count, places), "static"),
        (trivial(layers, count, places), "dynamic"),
        (elsewhere, "dynamic"),
    ):
        placed = replace(build, places=ExpertMap(logical, count, rank, ranks, dispatch))
        model = load_model(model_config, placed)
        found.append(PagedModel(model).step([(0, PROMPT)])[0].tolist())
    mover = ExpertMover(placed, lambda: model)
    sparse = [layer for layer in range(layers) if layer not in model_config.experts.dense_layers]
    for wanted in (balanced(loads[:, ::-1], places, ranks), trivial(layers, count, places)):
        order = PlaceExperts(sparse, [wanted[layer].tolist() for layer in sparse])
        assert "0 experts" not in mover.prepare(order)().text
        found.append(PagedModel(model).step([(0, PROMPT)])[0].tolist())
    return found
