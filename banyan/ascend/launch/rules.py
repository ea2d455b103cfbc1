"""The rules of a start on Ascend NPUs: a pure function from a launch to findings.

This module has rules 1 to 3 (backends, pages, quantisation, the documents' table of flags), 11 to
13, 19 and 22 (variables that libraries of the device read, graphs), and 14 to 16 (interfaces
between nodes, MemFabric's store, ports, drafts). The others are in `expert_rules.py`.
"""

import csv
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from ipaddress import ip_address
from pathlib import Path
from types import MappingProxyType

from banyan.ascend.launch.expert_rules import EXPERT_RULES
from banyan.ascend.launch.facts import Breach, Finding, Launch, breach, finding_of
from banyan.config.flags.outcome import REFUSED, outcome_of
from banyan.config.flags.table import find

EXCLUDED = ("planned", "no", "special")
"""Columns of flags that the documents' build does not take on Ascend NPUs."""
_ATTENTION = ("auto", "ascend", "torch_native")
_PAGE_STEP, _LARGEST_PAGE = 128, 512
_QUANTIZATIONS = (
    *("modelslim", "w8a8_int8", "gptq", "awq", "compressed-tensors", "gguf", "unquant"),
)
_CHOICES = (
    ("1a", "attention-backend", _ATTENTION),
    ("1a", "prefill-attention-backend", _ATTENTION),
    ("1a", "decode-attention-backend", _ATTENTION),
    ("1b", "sampling-backend", ("pytorch", "ascend")),
    ("1c", "grammar-backend", ("xgrammar", "none")),
    ("1d", "kv-cache-dtype", ("auto", "bf16", "bfloat16")),
)


def backends(launch: Launch) -> Iterator[Breach]:
    for rule, flag, allowed in _CHOICES:
        value = launch.text(flag)
        if value and value not in allowed:
            yield breach(rule, flag=flag, value=value)


def pages(launch: Launch) -> Iterator[Breach]:
    size = launch.number("page-size")
    if not size:
        return
    if size % _PAGE_STEP or not _PAGE_STEP <= size <= _LARGEST_PAGE:
        yield breach("2a", value=size)
    elif size != _PAGE_STEP:
        if launch.is_set("SGLANG_USE_FIA_NZ"):
            yield breach("2b", value=size, why="a cache in the fractal format")
        elif launch.model is not None and launch.model.is_latent:
            yield breach("2b", value=size, why=f"the latent attention of {launch.model.name}")


def quantization(launch: Launch) -> Iterator[Breach]:
    value = launch.text("quantization")
    is_modelslim = None if launch.model is None else launch.model.is_modelslim
    if value and value not in _QUANTIZATIONS:
        yield breach("3c", value=value)
    elif value == "modelslim" and is_modelslim is False:
        yield breach("3a")
    elif value not in ("", "modelslim", "w8a8_int8") and is_modelslim:
        yield breach("3b", value=value)


def support(launch: Launch) -> Iterator[Breach]:
    """Flags that the documents exclude on this chip, and that are refused there."""
    soc = launch.soc.name
    columns = documented_columns(soc)
    for flag, value in launch.arguments.items():
        column = columns.get(flag, "")
        if column not in EXCLUDED or value is False:
            continue
        if outcome_of(find(flag, abbreviate=False), value, soc).verdict == REFUSED:
            yield breach("flag-a", flag=flag, column=column, soc=soc)


@cache
def documented_columns(soc: str) -> Mapping[str, str]:
    """The column of every documented flag, by its name in the tables of flags."""
    found: dict[str, str] = {}
    with open(Path(__file__).parent / "support.tsv", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE):
            found.setdefault(find(row["flag"], abbreviate=False).name, row[soc])
    return MappingProxyType(found)


FLAG_RULES = (backends, pages, quantization, support)


ALLOCATOR, OTHER_ALLOCATOR = "PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
_TRUTH = (r"True|False|true|false", "True or False")
_WHOLE = (r"\d+", "a whole number")
_SHARE = (r"0?\.\d+|1(\.0*)?", "a number above 0 and up to 1")
_KEYS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "expandable_segments": _TRUTH,
        "pin_memory_expandable_segments": _TRUTH,
        "pinned_mem_register": _TRUTH,
        "multi_stream_lazy_reclaim": _TRUTH,
        "max_split_size_mb": (r"2[1-9]|[3-9]\d|\d{3,}", "a whole number above 20"),
        "segment_size_mb": _WHOLE,
        "base_addr_aligned_kb": (r"\d|1[0-6]", "a whole number from 0 to 16"),
        "page_size": (r"\d+[kKmMgG]?[bB]?", "a size"),
        "garbage_collection_threshold": _SHARE,
        "per_process_memory_fraction": _SHARE,
        "roundup_power2_divisions": (r"\d+|\[.*\]", "a whole number or a list of sizes"),
    }
)
"""Key of the allocator's variable -> what its value looks like, and how that is called."""
_PAIR = re.compile(r"\s*([^:,\[\]]*)(?::(\[[^\]]*\]|[^,]*))?\s*(?:,|$)")


def task_queue(launch: Launch) -> Iterator[Breach]:
    value = launch.variable("TASK_QUEUE_ENABLE")
    if not value:
        return
    if value not in ("0", "1", "2"):
        yield breach("11a", value=value)
        return
    if value == "2" and launch.has_graphs:
        yield breach("11b")
    if value != "0" and launch.role == "decode":
        yield breach("11c", value=value)


def streams(launch: Launch) -> Iterator[Breach]:
    value = launch.variable("STREAMS_PER_DEVICE")
    if value and value not in ("8", "32"):
        yield breach("12a", value=value)


def allocator(launch: Launch) -> Iterator[Breach]:
    given = launch.variable(ALLOCATOR)
    if given and launch.variable(OTHER_ALLOCATOR):
        yield breach("13a")
    pairs = dict(read_pairs(given))
    has_experts = launch.exchange != "none" or (
        launch.model is not None and launch.model.experts > 0
    )
    if has_experts and pairs.get("expandable_segments", "").lower() != "true":
        yield breach("13b")
    for key, value in pairs.items():
        if key not in _KEYS:
            yield breach("13c", key=key, keys=", ".join(_KEYS))
            continue
        pattern, wanted = _KEYS[key]
        if not re.fullmatch(pattern, value):
            yield breach("13d", key=key, value=value, wanted=wanted)


def read_pairs(text: str) -> Iterator[tuple[str, str]]:
    """The keys and values of the allocator's variable; a list in brackets is one value."""
    for found in _PAIR.finditer(text):
        if found.group(1):
            yield found.group(1).strip(), (found.group(2) or "").strip()


def graphs(launch: Launch) -> Iterator[Breach]:
    if launch.role == "prefill" and launch.has_graphs:
        yield breach("19a")
    size, running = launch.number("cuda-graph-max-bs"), launch.running_per_replica
    if running and size > running:
        yield breach("19b", size=size, running=running)
    has_bound = "max-prefill-tokens" in launch.arguments
    if launch.number("chunked-prefill-size") == -1 and not has_bound:
        yield breach("19c")


def expansion(launch: Launch) -> Iterator[Breach]:
    if launch.variable("HCCL_OP_EXPANSION_MODE") != "AIV":
        return
    if launch.role:
        yield breach("22a", what=f"--disaggregation-mode {launch.role}")
    elif launch.model is not None and launch.model.is_sparse:
        yield breach("22a", what=f"the sparse attention of {launch.model.name}")


RUNTIME_RULES = (task_queue, streams, allocator, graphs, expansion)


INTERFACES = ("HCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
STORE = "ASCEND_MF_STORE_URL"
_HTTP_PORT, _BOOTSTRAP_PORT = 30000, 8998
_STORE_FORM = re.compile(r"tcp://(\[[0-9a-fA-F:]+\]|[\w.-]+):(\d{1,5})")
_MTP = ("NEXTN", "DEEPSEEK_MTP")


def interfaces(launch: Launch) -> Iterator[Breach]:
    for name in INTERFACES:
        value = launch.variable(name)
        if launch.nodes == 1:
            if value:
                yield breach("14d", name=name)
            continue
        if not value:
            yield breach("14a", nodes=launch.nodes, name=name)
            continue
        here = launch.interfaces
        if here is None:
            continue
        if value not in here:
            yield breach("14b", name=name, value=value, known=", ".join(sorted(here)))
        elif launch.number("node-rank") == 0:
            address = _host(launch.text("dist-init-addr"))
            if _is_address(address) and address not in here[value]:
                owned = ", ".join(here[value]) or "none"
                yield breach("14c", name=name, value=value, addresses=owned, address=address)


def store(launch: Launch) -> Iterator[Breach]:
    if not launch.role:
        return
    if launch.text("disaggregation-transfer-backend") == "ascend":
        url = launch.variable(STORE)
        found = _STORE_FORM.fullmatch(url)
        if not url:
            yield breach("15a")
        elif found is None or not 0 < int(found.group(2)) < 65536:
            yield breach("15b", value=url)
        else:
            address = _host(launch.text("dist-init-addr"))
            if launch.role == "prefill" and address and address != found.group(1).strip("[]"):
                yield breach("15d", host=found.group(1), address=address)
        if launch.packages is not None and "memfabric_hybrid" not in launch.packages:
            yield breach("15e")
    yield from _ports(launch)


def _ports(launch: Launch) -> Iterator[Breach]:
    wanted = [("--port", launch.number("port", _HTTP_PORT))]
    if launch.role == "prefill":
        port = launch.number("disaggregation-bootstrap-port", _BOOTSTRAP_PORT)
        wanted.append(("--disaggregation-bootstrap-port", port))
    meeting = launch.text("dist-init-addr").rpartition(":")[2]
    if meeting.isdigit():
        wanted.append(("--dist-init-addr", int(meeting)))
    found = _STORE_FORM.fullmatch(launch.variable(STORE))
    is_here = launch.role == "prefill" and launch.number("node-rank") == 0
    if found is not None and is_here:
        wanted.append((STORE, int(found.group(2))))
    for at, (second, port) in enumerate(wanted):
        for first, taken in wanted[:at]:
            if port == taken:
                yield breach("15c", port=port, first=first, second=second)


def drafts(launch: Launch) -> Iterator[Breach]:
    algorithm = launch.text("speculative-algorithm").upper()
    plans_ahead = launch.is_set("SGLANG_ENABLE_OVERLAP_PLAN_STREAM")
    width = launch.number("speculative-eagle-topk", 1)
    if launch.is_set("SGLANG_ENABLE_SPEC_V2"):
        if width != 1:
            yield breach("16a", value=width)
        if not plans_ahead:
            yield breach("16b")
    elif plans_ahead:
        yield breach("16f")
    steps = launch.number("speculative-num-steps")
    tokens = launch.number("speculative-num-draft-tokens")
    is_chain = algorithm not in ("", "NGRAM") and width == 1
    if is_chain and steps and tokens and tokens != steps + 1:
        yield breach("16c", tokens=tokens, steps=steps, wanted=steps + 1)
    model = launch.model
    drafter = launch.text("speculative-draft-model-path")
    if algorithm in _MTP and not drafter and model is not None and not model.draft_layers:
        yield breach("16d", value=algorithm, model=model.name)
    if algorithm == "EAGLE3" and not drafter:
        yield breach("16e")


def _host(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


NETWORK_RULES = (interfaces, store, drafts)


Rule = Callable[[Launch], Iterator[Breach]]
RULES: tuple[Rule, ...] = (*FLAG_RULES, *RUNTIME_RULES, *EXPERT_RULES, *NETWORK_RULES)
_RELAXED = ("5a",)
"""What later releases take."""
_NEED_A_MODEL = "2b 3a 3b 5b 6 9 13b 16d 17h 18a"


def check(launch: Launch) -> list[Finding]:
    """Everything that a launch does not keep, errors first; [] when all is well."""
    found = [
        finding_of(each, is_mild=launch.is_relaxed and each.rule in _RELAXED)
        for rule in RULES
        for each in rule(launch)
    ]
    return sorted(found, key=lambda finding: not finding.is_error)


def left_out(launch: Launch) -> Iterator[str]:
    """What could not be looked at, and why."""
    if launch.model is None:
        yield f"rules {_NEED_A_MODEL.replace(' ', ', ')}: the model is not on this machine"
    elif launch.model.is_modelslim is None:
        yield "rules 3a, 3b: the model is not on this machine"
    if launch.interfaces is None:
        yield "rules 14b, 14c: the interfaces are another machine's"
    if launch.packages is None:
        yield "rule 15e: the packages are another machine's"
