"""The only reader of environment variables.

Every flag can be given as BANYAN_<FLAG>; a few variables that other tools share are honoured; what
is set and has no effect here is reported or refused by name, never by value (`variables.py`).
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from banyan.ascend.variables import notes_on_npu, refusals_on_npu
from banyan.config.variables import OF_LAUNCHES, SETTINGS, notes_on, refusals_of

_PREFIX = "BANYAN_"
_STORE, _NEW_STORE = "ASCEND_MF_STORE_URL", "MF_CONFIG_STORE_URL"
"""Two names of the store of MemFabric; its newer releases use the second."""
_TRUE = ("1", "true", "yes", "on")

_SECRETS = ("BANYAN_API_KEY", "BANYAN_ADMIN_API_KEY", "BANYAN_DIST_SECRET", "HF_TOKEN")
_OWN_SWITCHES = (
    *("BANYAN_USE_MODELSCOPE", "BANYAN_ALLOW_LONGER_CONTEXT", "BANYAN_DIST_SECRET"),
    *("BANYAN_NPU", "BANYAN_NPU_SOC", "BANYAN_NPU_CHECKS"),
)


@dataclass(frozen=True)
class NpuWishes:
    """How an Ascend NPU is opened.

    Attributes:
        driver: "" = torch_npu; else the module that replaces it.
        soc: the chip to emulate.
        is_checked: hold each operator call against its contract.
        buffer: megabytes of each group of ranks; "" = the library's own choice.
        store: URL at which engines of MemFabric meet.
        exchange_buffer: as buffer, of groups that experts are exchanged in.
        rounds_sent: rows that are sent by their counts travel as 8 bits.
        fuses_latents: what comes before latent attention is to be one operator.
        fractal_pages: pages of latents are to have the fractal form.
        protocol: how they copy; "" = as the chip does.
    """

    driver: str = ""
    soc: str = "A3"
    is_checked: bool = False
    buffer: str = ""
    store: str = ""
    protocol: str = ""
    exchange_buffer: str = ""
    rounds_sent: bool = False
    fuses_latents: bool = False
    fractal_pages: bool = False


@dataclass(frozen=True)
class Environment:
    """What the environment says, read once.

    Attributes:
        flags: flag name -> text, from BANYAN_<FLAG>.
        settings: name -> text of the variables that set a field.
        dist_secret: what the nodes of one replica have in common.
        npu: how an Ascend NPU is opened.
        launch: name -> text of the variables that rules for Ascend NPUs are about.
        visible_gpus: numbers or names of the CUDA devices that this process may use, separated by
            commas; None = all.
        hf_cache: folder of the hub cache, "" = the library's own choice.
        notes: a line for each variable that is set and has no effect.
        refusals: a line for each variable that must not be ignored.
    """

    flags: Mapping[str, str] = field(default_factory=dict[str, str])
    settings: Mapping[str, str] = field(default_factory=dict[str, str])
    hf_token: str = field(default="", repr=False)
    dist_secret: str = field(default="", repr=False)
    hf_endpoint: str = ""
    hf_cache: str = ""
    hf_offline: bool = False
    use_modelscope: bool = False
    allow_longer_context: bool = False
    npu: NpuWishes = NpuWishes()
    launch: Mapping[str, str] = field(default_factory=dict[str, str])
    visible_gpus: str | None = None
    notes: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()
    npu_notes: tuple[str, ...] = ()
    npu_refusals: tuple[str, ...] = ()
    """The last two where the device is an Ascend NPU, of the variables of its documents."""


def forget_secrets() -> None:
    """Take the keys out of this process's environment, so that no child inherits them."""
    for name in _SECRETS:
        os.environ.pop(name, None)


def keep_ranks_local() -> None:
    """Let NCCL listen on the loopback interface alone, unless the environment names another one."""
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def for_downloads(environment: Environment) -> dict[str, str]:
    """Variables of a child process that downloads: this process's own, with the hub's token."""
    token = {"HF_TOKEN": environment.hf_token} if environment.hf_token else {}
    return {**os.environ, **token}


def read_environment(variables: Mapping[str, str] | None = None) -> Environment:
    """Read `variables`, the process's own by default."""
    given = os.environ if variables is None else variables

    def is_on(*names: str) -> bool:
        return any(given.get(name, "").lower() in _TRUE for name in names)

    flags = {
        name.removeprefix(_PREFIX).lower().replace("_", "-"): text
        for name, text in sorted(given.items())
        if name.startswith(_PREFIX) and name not in _OWN_SWITCHES
    }
    store = given.get(_STORE, "") or given.get(_NEW_STORE, "")
    both = {given.get(name, "").strip() for name in (_STORE, _NEW_STORE)} - {""}
    disagreeing = (f"{_STORE} and {_NEW_STORE} name two stores",) if len(both) > 1 else ()
    launch = {name: given[name] for name in OF_LAUNCHES if given.get(name)}
    home = given.get("HF_HOME", "")
    return Environment(
        flags=flags,
        settings={name: given[name] for name in SETTINGS if given.get(name)},
        hf_token=given.get("HF_TOKEN", ""),
        dist_secret=given.get("BANYAN_DIST_SECRET", ""),
        hf_endpoint=given.get("HF_ENDPOINT", "").rstrip("/"),
        hf_cache=given.get("HF_HUB_CACHE", "") or (os.path.join(home, "hub") if home else ""),
        hf_offline=is_on("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"),
        use_modelscope=is_on("SGLANG_USE_MODELSCOPE", "BANYAN_USE_MODELSCOPE"),
        allow_longer_context=is_on(
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "BANYAN_ALLOW_LONGER_CONTEXT"
        ),
        npu=NpuWishes(
            given.get("BANYAN_NPU", ""),
            given.get("BANYAN_NPU_SOC", "") or "A3",
            is_on("BANYAN_NPU_CHECKS"),
            given.get("HCCL_BUFFSIZE", "").strip(),
            store.strip(),
            given.get("ASCEND_MF_TRANSFER_PROTOCOL", "").strip(),
            given.get("DEEPEP_HCCL_BUFFSIZE", "").strip(),
            is_on("DEEP_NORMAL_MODE_USE_INT8_QUANT"),
            is_on("SGLANG_NPU_USE_MLAPO"),
            is_on("SGLANG_USE_FIA_NZ"),
        ),
        visible_gpus=given.get("CUDA_VISIBLE_DEVICES"),
        launch=launch | ({_STORE: store} if store else {}),
        notes=notes_on(given),
        refusals=refusals_of(given),
        npu_notes=notes_on_npu(given),
        npu_refusals=(*refusals_on_npu(given), *disagreeing),
    )
