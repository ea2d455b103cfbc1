"""What --use-ray makes of the layout of ranks, and what it does not go with."""

from importlib.machinery import ModuleSpec
from importlib.util import find_spec

import pytest

from banyan.base.errors import ConfigError
from banyan.base.install import install_command
from banyan.config import resolve
from banyan.config.rules import parallel
from tests.support.configs import MODEL_CONFIG, NOTHING
from tests.support.flags import config_of


@pytest.fixture
def ray(monkeypatch) -> None:
    """As if the package were here; nothing of it is used before an engine starts."""

    def found(name: str) -> ModuleSpec | None:
        return ModuleSpec(name, None) if name == "ray" else find_spec(name)

    monkeypatch.setattr(parallel, "find_spec", found)


def resolved(*argv: str):
    return resolve.resolve(config_of(*argv), MODEL_CONFIG, NOTHING).parallel


def test_ranks_that_ray_is_to_start_are_nodes(ray) -> None:
    plain = resolved("--tp", "2", "--pp", "2")
    assert (plain.nodes, plain.are_by_rank) == (1, False)
    alone = resolved("--tp", "2", "--pp", "2", "--use-ray")
    assert (alone.nodes, alone.local_world, alone.are_by_rank) == (4, 1, True)
    whole = resolved("--tp", "2", "--pp", "2", "--use-ray", "--nnodes", "2")
    assert (whole.nodes, whole.local_world, whole.are_by_rank) == (2, 2, False)


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        ((), "there is one rank, and nothing for Ray to start"),
        (("--tp", "2", "--dp", "2"), "--data-parallel-size 2 cannot be combined with --use-ray"),
        (
            ("--tp", "4", "--nnodes", "2", "--node-rank", "1"),
            "--use-ray cannot be combined with --node-rank 1",
        ),
        (("--tp", "4", "--nnodes", "3"), "4 ranks cannot be spread evenly over 3 nodes"),
        (("--tp", "2", "--dist-init-addr", "here"), "--dist-init-addr host:port"),
    ],
)
def test_what_ray_cannot_start_is_refused(ray, flags: tuple[str, ...], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        resolved(*flags, "--use-ray")


def test_without_the_package_it_is_named(monkeypatch) -> None:
    monkeypatch.setattr(parallel, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="--use-ray needs the package ray") as caught:
        resolved("--tp", "2", "--use-ray")
    assert install_command("ray") in str(caught.value)
