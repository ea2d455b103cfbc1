"""Options of the test suite."""

import logging
import os
import re
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# Before torch is loaded: each of its small products waits for all threads, and where two files run
# at a time those of one spin while the other's hold the cores, which takes a hundred times as long.
# An engine sets its own number all the same.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A busy machine slows examples down; none is asserted to be quick.
settings.register_profile("banyan", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("banyan")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--border-steps",
        type=int,
        default=100_000,
        help="random actions that the border kit plays",
    )
    parser.addoption(
        "--real-border-steps",
        type=int,
        default=14_000,
        help="steps that the border kit plays with the real runner",
    )


LIVE = re.compile(
    "tests/(cli|clients|disaggregation|engine|engine_client|hub|kv_transfer|launch|parallel|proofs|requests|router|server|system)/"
)
"""Rings whose tests start processes and talk over sockets."""


@pytest.fixture(autouse=True)
def _log_as_before() -> Iterator[None]:
    """What a test does to the package's log (a command that shows warnings alone) ends with it."""
    log = logging.getLogger("banyan")
    handlers, level, propagates = log.handlers[:], log.level, log.propagate
    yield
    log.handlers[:], log.propagate = handlers, propagates
    log.setLevel(level)


LONGEST = [
    "system/test_processes",
    "ops/test_cpu_build",
    "border/test_real_runner",
    "ops/test_cpu_attention",
    "ops/test_cpu_experts",
    "system/test_handoff",
    "system/test_router",
    "system/test_self_healing",
    "system/test_fidelity",
    "ops/test_cpu_adapter_rows",
    "system/test_numerics",
    "system/test_hidden_drafts",
    "system/test_store",
    "system/test_start_up",
    "system/test_flag_effects",
    "system/test_draft_models",
    "system/test_lora",
    "ops/test_cpu_linear",
    "ops/test_cpu_sparse_attention",
    "system/test_faults",
    "system/test_states",
    "models/test_adapters",
    "models/test_families",
    "models/test_quant",
    "system/test_lora_beside",
    "models/quantize/test_quantize",
    "models/quantize/test_translated",
    "system/test_hostile_requests",
    "ascend/emulation/test_engine",
    "ascend/emulation/test_families",
    "ascend/emulation/test_ranks",
    "ascend/emulation/test_layouts",
]
"""Files that take longest, the longest first: where several run at a time none of them is last."""


def _turn(item: pytest.Item) -> tuple[bool, int]:
    name = item.nodeid.partition("::")[0].removeprefix("tests/").removesuffix(".py")
    place = LONGEST.index(name) if name in LONGEST else len(LONGEST)
    return name.startswith("ascend/emulation/"), place


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What gives torch another device runs last: the process keeps it. A live test that fails runs
    once more and is told as RERUN: one hiccup of a machine in 13,000 tests is no verdict."""
    items.sort(key=_turn)
    for item in items:
        if LIVE.match(item.nodeid):
            item.add_marker(pytest.mark.flaky(reruns=1))
