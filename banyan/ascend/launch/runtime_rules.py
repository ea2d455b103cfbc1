"""Rules 11 to 13, 19 and 22: what the libraries of the device read, and graphs."""

import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from banyan.ascend.launch.facts import Launch
from banyan.ascend.launch.findings import Breach, breach

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
