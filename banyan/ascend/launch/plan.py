"""A launch plan: from a recipe and the nodes of each role to variables and a command per node."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from banyan.ascend.launch.facts import Launch, LaunchModel, Soc, arguments_of_words
from banyan.ascend.launch.findings import Finding
from banyan.ascend.launch.recipes import DECODE, PREFILL, SERVE, Recipe, recipe_of
from banyan.ascend.launch.rules import INTERFACES, STORE, check
from banyan.base.errors import ConfigError
from banyan.base.log import printable
from banyan.config.env import read_environment

_MODULE = ("python3", "-m", "banyan.launch_server")
_BETWEEN_A2 = {"HCCL_INTRA_PCIE_ENABLE": "1", "HCCL_INTRA_ROCE_ENABLE": "0"}
_TRANSFER_A2 = {"ASCEND_MF_TRANSFER_PROTOCOL": "device_rdma"}


@dataclass(frozen=True)
class Wish:
    """What a plan is made for.

    Attributes:
        model: folder of the weights, the same on every node.
        nodes: role -> addresses, one instance after another.
        interface: the network interface that reaches the other nodes.
    """

    model: str
    soc: Soc
    nodes: Mapping[str, Sequence[str]]
    interface: str = ""


@dataclass(frozen=True)
class PlannedNode:
    """One machine of a plan.

    Attributes:
        name: role, number of the instance, number in it ("prefill-0-1").
        words: of the flags, after `python3 -m banyan.launch_server`.
        is_first: it serves HTTP for its instance.
    """

    name: str
    role: str
    address: str
    port: int
    variables: Mapping[str, str]
    words: tuple[str, ...]
    is_first: bool

    @property
    def command(self) -> tuple[str, ...]:
        return (*_MODULE, *self.words)


@dataclass(frozen=True)
class LaunchPlan:
    """
    Attributes:
        router: the words that start what is before the roles; () where one role serves alone.
    """

    recipe: Recipe
    wish: Wish
    model: LaunchModel | None
    nodes: tuple[PlannedNode, ...]
    router: tuple[str, ...]


def make_plan(wish: Wish) -> LaunchPlan:
    """
    Raises:
        ConfigError: roles that the recipe has not, or nodes that make no whole instances.
    """
    if not wish.model.startswith("/"):
        raise ConfigError(
            f"{printable(wish.model, 80)} is no folder from / on",
            hint="name the folder of the weights as it is on every machine",
        )
    recipe, model = recipe_of(wish.model)
    given = {role for role, addresses in wish.nodes.items() if addresses}
    if given != set(recipe.roles):
        wanted = " and ".join(f"--{role}" for role in recipe.roles)
        raise ConfigError(
            f"the recipe for {wish.model} has other roles than {_flags(given)}",
            hint=f"give the addresses of the nodes with {wanted}",
        )
    nodes = tuple(node for role in recipe.roles for node in _nodes_of(role, wish, recipe))
    return LaunchPlan(recipe, wish, model, nodes, _router(nodes, recipe))


def _flags(roles: set[str]) -> str:
    return " and ".join(f"--{role}" for role in sorted(roles)) or "none"


def _nodes_of(role: str, wish: Wish, recipe: Recipe) -> Iterator[PlannedNode]:
    part, addresses = recipe.roles[role], wish.nodes[role]
    count = -(-part.dies // wish.soc.devices) or len(addresses)
    if len(addresses) % count:
        raise ConfigError(
            f"--{role}: {len(addresses)} nodes of {wish.soc.devices} devices ({wish.soc.name}) "
            f"are no whole instances of {part.dies} devices, {count} nodes each",
            hint=f"name {count} nodes, or a multiple",
        )
    if count > 1 and not wish.interface:
        raise ConfigError(
            f"--{role}: an instance has {count} nodes, and no interface between them is named",
            hint="give --interface",
        )
    for first in range(0, len(addresses), count):
        members = addresses[first : first + count]
        for rank, address in enumerate(members):
            yield PlannedNode(
                name=f"{role}-{first // count}-{rank}",
                role=role,
                address=address,
                port=part.port,
                variables=_variables(role, wish, recipe, count),
                words=_words(role, wish, recipe, members, rank),
                is_first=rank == 0,
            )


def _variables(role: str, wish: Wish, recipe: Recipe, count: int) -> dict[str, str]:
    part = recipe.roles[role]
    found = dict(part.variables)
    if count > 1:
        found |= dict.fromkeys(INTERFACES, wish.interface)
    if role != SERVE:
        found[STORE] = f"tcp://{wish.nodes[PREFILL][0]}:{recipe.store_port}"
    if wish.soc.name == "A2":
        sends = "--moe-a2a-backend deepep" in part.flags
        found |= _BETWEEN_A2 if count > 1 and sends else {}
        found |= _TRANSFER_A2 if role != SERVE else {}
    return found


def _words(
    role: str, wish: Wish, recipe: Recipe, members: Sequence[str], rank: int
) -> tuple[str, ...]:
    part, count = recipe.roles[role], len(members)
    words = ["--model-path", wish.model, *part.flags.split()]
    if not part.dies:
        words += ["--tp-size", str(count * wish.soc.devices)]
    words += ["--nnodes", str(count), "--node-rank", str(rank)]
    if role != SERVE:
        words += ["--disaggregation-mode", role, "--disaggregation-transfer-backend", "ascend"]
    if role == PREFILL:
        words += ["--disaggregation-bootstrap-port", str(recipe.bootstrap_port)]
    if role != SERVE or count > 1:
        words += ["--dist-init-addr", f"{members[0]}:{recipe.meeting_port}"]
    return (*words, "--host", members[rank], "--port", str(part.port))


def _router(nodes: Sequence[PlannedNode], recipe: Recipe) -> tuple[str, ...]:
    if SERVE in recipe.roles:
        return ()
    words = ["python3", "-m", "banyan.launch_lb"]
    for role in (PREFILL, DECODE):
        for node in nodes:
            if node.role == role and node.is_first:
                words += [f"--{role}", f"http://{node.address}:{node.port}"]
    return (*words, "--host", "127.0.0.1", "--port", str(recipe.router_port))


def check_plan(plan: LaunchPlan) -> Iterator[tuple[PlannedNode, Finding]]:
    """What the rules say of each node's start, as if it were typed there."""
    for node in plan.nodes:
        environment = read_environment(node.variables)
        launch = Launch(
            arguments=arguments_of_words(node.words, environment),
            variables=environment.launch,
            soc=plan.wish.soc,
            model=plan.model,
        )
        for finding in check(launch):
            yield node, finding


def lines_of(words: Sequence[str]) -> list[str]:
    """A command line, each flag with its value on a line of its own, quoted for a shell."""
    lines: list[str] = []
    for word in words:
        starts = word.startswith("--") or not lines
        if starts:
            lines.append(shlex.quote(word))
        else:
            lines[-1] += " " + shlex.quote(word)
    return lines
