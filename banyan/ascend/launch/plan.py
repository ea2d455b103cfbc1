"""A launch plan: from a recipe and the nodes of each role to variables and a command per node.

The recipes have the flags and variables of the documents, in their spelling. They name no machines.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from banyan.ascend.launch.facts import (
    Finding,
    Launch,
    LaunchModel,
    Soc,
    arguments_of_words,
    known_model,
)
from banyan.ascend.launch.rules import INTERFACES, STORE, check
from banyan.base.errors import ConfigError
from banyan.base.log import printable
from banyan.config.env import read_environment

PREFILL, DECODE, SERVE = "prefill", "decode", "serve"


@dataclass(frozen=True)
class Role:
    """What all nodes of one role have in common.

    Attributes:
        dies: devices of one instance; 0 = all of the nodes that are named.
        flags: of the command line, without model, addresses and nodes.
    """

    dies: int
    port: int
    flags: str
    variables: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class Recipe:
    """
    Attributes:
        name: a short one, for files and services.
        source: the document that it is from.
        bootstrap_port, meeting_port, store_port: of the prefill nodes; the second of every role.
    """

    name: str
    source: str
    roles: Mapping[str, Role]
    bootstrap_port: int = 8998
    meeting_port: int = 6688
    store_port: int = 6670
    router_port: int = 5000


_SEGMENTS = {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"}
_GUIDE = {**_SEGMENTS, "STREAMS_PER_DEVICE": "32", "SGLANG_SET_CPU_AFFINITY": "1"}
_GUIDE_FLAGS = (
    "--trust-remote-code --device npu --attention-backend ascend --page-size 128 "
    "--quantization modelslim --tp-size 32 --moe-a2a-backend deepep --moe-dense-tp-size 1 "
    "--tokenizer-worker-num 4 --load-balance-method round_robin "
    "--speculative-algorithm NEXTN --speculative-eagle-topk 1 "
)
_GUIDE_PREFILL = (
    "--speculative-num-steps 1 --speculative-num-draft-tokens 2 --deepep-mode normal "
    "--enable-nsa-prefill-context-parallel --nsa-prefill-cp-mode in-seq-split --attn-cp-size 32 "
    "--chunked-prefill-size -1 --max-prefill-tokens 68000 --max-running-requests 1 "
    "--disable-radix-cache --disable-cuda-graph --mem-fraction-static 0.73"
)
_GUIDE_DECODE = (
    "--speculative-num-steps 3 --speculative-num-draft-tokens 4 --deepep-mode low_latency "
    "--dp-size 8 --ep-size 32 --enable-dp-attention --enable-dp-lm-head --cuda-graph-max-bs 4 "
    "--mem-fraction-static 0.79"
)
GUIDE = Recipe(
    "deepseek-v3.2",
    "parameter guide",
    {
        PREFILL: Role(
            32,
            8000,
            _GUIDE_FLAGS + _GUIDE_PREFILL,
            {
                **_GUIDE,
                "HCCL_BUFFSIZE": "1200",
                "TASK_QUEUE_ENABLE": "2",
                "DEEP_NORMAL_MODE_USE_INT8_QUANT": "1",
                "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK": "0",
                "SGLANG_USE_AG_AFTER_QLORA": "1",
            },
        ),
        DECODE: Role(
            32,
            8001,
            _GUIDE_FLAGS + _GUIDE_DECODE,
            {
                **_GUIDE,
                "HCCL_BUFFSIZE": "400",
                "TASK_QUEUE_ENABLE": "0",
                "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK": "8",
                "SGLANG_SCHEDULER_SKIP_ALL_GATHER": "1",
                "SGLANG_ENABLE_OVERLAP_PLAN_STREAM": "1",
                "SGLANG_ENABLE_SPEC_V2": "1",
            },
        ),
    },
)

_PAGE_FLAGS = (
    "--trust-remote-code --device npu --attention-backend ascend --mem-fraction-static 0.8 "
    "--quantization modelslim --tp-size 16 --dp-size 1"
)
INSTALL_PAGE = Recipe(
    "deepseek-r1",
    "install page",
    {
        PREFILL: Role(16, 8000, _PAGE_FLAGS, _SEGMENTS),
        DECODE: Role(
            16,
            8001,
            _PAGE_FLAGS + " --moe-a2a-backend deepep --deepep-mode low_latency --ep-size 16",
            {
                **_SEGMENTS,
                "HCCL_BUFFSIZE": "200",
                "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK": "24",
                "SGLANG_NPU_USE_MLAPO": "1",
            },
        ),
    },
    bootstrap_port=6657,
)

PLAIN = Recipe(
    "plain",
    "install page",
    {SERVE: Role(0, 30000, "--trust-remote-code --device npu --attention-backend ascend")},
)
"""For every other model: one server over all devices that are named."""


def recipe_of(source: str) -> tuple[Recipe, LaunchModel | None]:
    """The recipe of a model, by its name, and its facts."""
    model = known_model(source)
    if model is None:
        return PLAIN, None
    return (GUIDE if model.is_sparse else INSTALL_PAGE), model


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
