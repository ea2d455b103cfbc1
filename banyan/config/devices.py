"""Facts of devices that flags depend on, known before a device is opened. No torch."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from banyan.base.errors import ConfigError
from banyan.base.os import has_cuda_driver, num_gpus
from banyan.base.table import Table
from banyan.config.env import Environment
from banyan.config.schema import Config


@dataclass(frozen=True)
class HostTierFacts:
    """How pages of a device are kept in memory of the host as well.

    Attributes:
        copies: accepted values of --hicache-io-backend, the default first.
        layouts: accepted values of --hicache-mem-layout: the default, and the default of latent
            attention.
        serves_ranks: one process copies the pages of several ranks.
    """

    copies: tuple[str, str]
    layouts: tuple[str, str]
    serves_ranks: bool = False


@dataclass(frozen=True)
class DeviceFacts:
    """
    Attributes:
        is_open: no device is named; the start chooses one.
        is_host: weights and pages already lie in memory of the host.
        compiles_kernels: its kernels are compiled on this machine, at the first start.
        has_graphs: steps are captured in graphs, which hold memory.
        drafts_trees: draft trees are the default for models that have them.
        torch_sampler: torch can sample next to the device's own kernel.
        attention: the attention backend of this device alone; "" = none has its name.
        host_tier: None = its pages cannot lie in memory of the host as well.
        keeps_fp8: products with 8-bit floats exist for any type of activations.
        rounds_to: methods of checkpoints that --quantization applies to float weights too.
        chip: the chip of this machine in `config/flags/outcomes.tsv`; None = the device's name.
        is_here: whether this machine has such a device.
        variables: environment variables of its documents; Environment has their outcomes.
        check_start: checks a start: the Config as it was given, the folder of the model ("" before
            that is found) and the environment; raises ConfigError.
    """

    is_open: bool = False
    is_host: bool = False
    compiles_kernels: bool = False
    has_graphs: bool = False
    drafts_trees: bool = False
    torch_sampler: bool = False
    attention: str = ""
    host_tier: HostTierFacts | None = None
    keeps_fp8: bool = False
    rounds_to: tuple[str, ...] = ()
    variables: Collection[str] = ()
    check_start: Callable[[Config, str, Environment], None] | None = None
    chip: Callable[[Environment], str] | None = None
    is_here: Callable[[Environment], bool] | None = None


def _check_gpus(config: Config, folder: str, environment: Environment) -> None:
    """Refuse ranks without a GPU of their own, where the number of GPUs is known.

    Raises:
        ConfigError: a rank's GPU does not exist.
    """
    parallel, device = config.parallel, config.device
    ranks = -(-parallel.world // parallel.rank_nodes) * parallel.local_replicas
    last = device.first_number + (ranks - 1) * device.number_step
    found = num_gpus(environment.visible_gpus)
    if found is not None and last >= found:
        raise ConfigError(
            f"--device cuda: the ranks of this machine take GPUs up to number {last}, and it has "
            f"{found} from 0 on",
            hint="lower --tp, --pp, --dp, --base-gpu-id or --gpu-id-step",
        )


AUTO = DeviceFacts(is_open=True, compiles_kernels=True, drafts_trees=True, torch_sampler=True)
CPU = DeviceFacts(is_host=True, compiles_kernels=True, drafts_trees=True, torch_sampler=True)
CUDA = DeviceFacts(
    has_graphs=True,
    torch_sampler=True,
    check_start=_check_gpus,
    host_tier=HostTierFacts(("kernel", "direct"), ("page_first_direct", "page_first")),
    keeps_fp8=True,
    rounds_to=("fp8",),
)
DEVICES: Table[DeviceFacts] = Table(
    "device",
    {
        "auto": "banyan.config.devices:AUTO",
        "cpu": "banyan.config.devices:CPU",
        "cuda": "banyan.config.devices:CUDA",
        "npu": "banyan.ascend.device_facts:NPU",
    },
    plugins="banyan.device_facts",
)


def facts_of(config: Config) -> DeviceFacts:
    """The facts of `--device`; the defaults for a device of another package without any."""
    name = config.device.name
    return DEVICES.load(name) if name in DEVICES else DeviceFacts()


def choose_device(config: Config, environment: Environment) -> Config:
    """With the device whose own attention is named, where no device is and this machine has it."""
    device = config.device
    for name in DEVICES if facts_of(config).is_open else ():
        facts = DEVICES.load(name)
        is_named = facts.attention and facts.attention == device.attention
        if is_named and facts.is_here is not None and facts.is_here(environment):
            return replace(config, device=replace(device, name=name))
    return config


def outcome_device(config: Config, environment: Environment) -> str:
    """The device of a start as the table of outcomes calls it. No torch is imported for "auto"."""
    if chip := facts_of(config).chip:
        return chip(environment)
    if not facts_of(config).is_open:
        return config.device.name
    return "cuda" if has_cuda_driver() else "cpu"


def rounded_methods(config: Config, environment: Environment) -> tuple[str, ...]:
    """`DeviceFacts.rounds_to` of the device of a start."""
    name = outcome_device(config, environment)
    return DEVICES.load(name).rounds_to if name in DEVICES else facts_of(config).rounds_to
