"""Facts of devices that flags depend on, known before a device is opened. No torch."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

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
        is_host: weights and pages already lie in memory of the host.
        compiles_kernels: its kernels are compiled on this machine, at the first start.
        has_graphs: steps are captured in graphs, which hold memory.
        drafts_trees: draft trees are the default for models that have them.
        attention: the attention backend of this device alone; "" = none has its name.
        host_tier: None = its pages cannot lie in memory of the host as well.
        variables: environment variables of its documents; Environment has their outcomes.
        check_start: checks a start: the Config as it was given, the folder of the model ("" before
            that is found) and the environment; raises ConfigError.
        flag_outcomes: a line per documented flag, what it does on this machine's chip.
    """

    is_host: bool = False
    compiles_kernels: bool = False
    has_graphs: bool = False
    drafts_trees: bool = False
    attention: str = ""
    host_tier: HostTierFacts | None = None
    variables: Collection[str] = ()
    check_start: Callable[[Config, str, Environment], None] | None = None
    flag_outcomes: Callable[[Environment], Iterator[str]] | None = None


AUTO = DeviceFacts(compiles_kernels=True, drafts_trees=True)
CPU = DeviceFacts(is_host=True, compiles_kernels=True, drafts_trees=True)
CUDA = DeviceFacts(
    has_graphs=True,
    host_tier=HostTierFacts(("kernel", "direct"), ("page_first_direct", "page_first")),
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
