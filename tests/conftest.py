"""Options of the test suite, its marks, and the order of its files."""

import gc
import logging
import os
import signal
import ssl
from collections.abc import Iterator
from pathlib import Path

import certifi
import pytest
from hypothesis import HealthCheck, settings

from tests.support.matrices import left_out, runs

# Before torch is loaded: each of its small products waits for all threads, and where two files run
# at a time those of one spin while the other's hold the cores, which takes a hundred times as long.
# An engine sets its own number all the same.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A busy machine slows examples down; none is asserted to be quick.
settings.register_profile("banyan", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("banyan")


def pytest_configure() -> None:
    """Ctrl-C counts in the processes that tests start, also where a shell runs the tests in the
    background and has it ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--border-steps",
        type=int,
        default=10_000,
        help="least random actions that the border kit plays",
    )
    parser.addoption(
        "--real-border-steps",
        type=int,
        default=2_000,
        help="least steps that the border kit plays with the real runner",
    )
    parser.addoption(
        "--quick",
        action="store_true",
        help="leave out the files that start processes or take long",
    )


LAYERS = {
    "": "unit",
    "ascend/emulation/": "model",
    "base/test_child_process": "live",
    "base/test_torch_parts": "live",
    "base/test_worker_process": "live",
    "bench/test_front": "live",
    "bench/test_peer_processes": "live",
    "border/test_branches": "model",
    "border/test_joined": "model",
    "border/test_real": "model",
    "border/test_rounded": "model",
    "border/test_stages": "model",
    "border/test_store": "model",
    "chat_template/test_templates": "live",
    "cli/": "live",
    "clients/": "live",
    "console/": "live",
    "context_parallel/": "model",
    "deploy/test_dashboards": "live",
    "disaggregation/": "model",
    "media/test_preparation": "live",
    "server/test_pictures": "live",
    "engine/test_multi_node": "live",
    "examples/": "live",
    "hub/test_downloads": "live",
    "kv_transfer/test_file_store": "live",
    "layers/": "model",
    "lora/": "model",
    "models/": "model",
    "models/test_plugins": "live",
    "moe/": "model",
    "ops/": "model",
    "ops/test_cpu_build": "live",
    "ops/test_cpu_stage_times": "live",
    "parallel/": "live",
    "pipeline/": "model",
    "proofs/": "live",
    "runner/": "model",
    "server/test_batches_crash": "live",
    "server/test_serve": "live",
    "server/test_tool_servers": "live",
    "system/": "live",
    "test_llm": "live",
    "test_repository": "live",
    "tokenizer/test_encode": "live",
    "trust/": "live",
    "wheel/": "live",
}
"""Marks by the beginning of a file's name, the longest first: `unit` starts no process and no
compiler, `model` computes with tiny random models in this process, `live` starts processes."""


@pytest.fixture(autouse=True)
def _log_as_before() -> Iterator[None]:
    """What a test does to the package's log (a command that shows warnings alone) ends with it."""
    log = logging.getLogger("banyan")
    handlers, level, propagates = log.handlers[:], log.level, log.propagate
    yield
    log.handlers[:], log.propagate = handlers, propagates
    log.setLevel(level)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Of torch: steps of tiny models only lose by sharing work, most of all on a busy machine."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session", autouse=True)
def _no_authorities_of_the_web() -> Iterator[None]:
    """Clients do not read the certificates that the web's authorities have, which takes each new
    client 25 ms. No test calls the web; those of TLS bring an authority of their own."""
    bundles = {certifi.where(), ssl.get_default_verify_paths().openssl_cafile}
    load = ssl.SSLContext.load_verify_locations

    def load_others(
        self: ssl.SSLContext,
        cafile: str | None = None,
        capath: str | None = None,
        cadata: str | None = None,
    ) -> None:
        if cafile not in bundles:
            load(self, cafile, capath, cadata)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl.SSLContext, "load_verify_locations", load_others)
        yield


LONGEST = [
    "system/test_processes",
    "system/test_handoff",
    "ops/test_cpu_attention",
    "system/test_router",
    "system/test_lora_beside",
    "system/test_speculation",
    "system/test_states",
    "ops/test_cpu_experts",
    "system/test_shutdown",
    "system/test_structured",
    "system/test_weights",
    "system/test_nodes",
    "system/test_store",
    "system/test_lora",
    "border/test_real_kit",
    "ops/test_cpu_linear",
    "system/test_fidelity",
    "system/test_hidden_drafts",
    "system/test_draft_models",
    "system/test_flag_effects",
    "system/test_faults",
    "system/test_router_pairs",
    "system/test_joined",
    "system/test_traces",
    "models/test_families",
    "system/test_numerics",
    "system/test_lora_vectors",
    "system/test_self_healing",
    "system/test_start_up",
    "system/test_hostile_requests",
    "ops/test_cpu_build",
    "models/test_plugins",
    "models/test_expert_places",
    "models/test_gguf",
    "models/test_tensor_parallel",
    "models/quantize/test_to_folder",
    "models/quantize/test_quantize",
    "models/quantize/test_translated",
    "models/test_quant",
    "models/test_adapters",
    "ascend/emulation/test_engine",
    "ascend/emulation/test_families",
    "ascend/emulation/test_ranks",
    "ascend/emulation/test_layouts",
]
"""The longest files, the longest first: where several run at a time, none of them is last."""
NOT_QUICK = (
    *LONGEST,
    *("border/test_joined", "border/test_peer", "border/test_real_runner", "border/test_recorder"),
    *("border/test_stages", "border/test_store", "chat_template/test_chat", "grammar/test_schemas"),
    *("models/quantize/test_to_folder", "models/test_gguf", "ops/test_cpu_"),
    *("runner/speculative/test_eagle", "runner/speculative/test_tree_growth"),
    "runner/test_recorded_families",
)
"""Beginnings of the names of files that `make test-quick` leaves out, besides live ones."""


MATRICES = ("ascend/emulation/", "border/", "models/", "ops/", "parallel/", "runner/", "system/")
"""Where `make test` runs each value of each parameter of a test, and not all combinations."""
EMULATED = "ascend/emulation/"
"""Where it runs one test of the device in each file, because most start engines or ranks. A file
that is listed below runs whole."""
EMULATED_WHOLE = tuple(
    f"{EMULATED}{name}"
    for name in ("real/", "test_config", "test_contracts", "test_device", "test_engine")
    + ("test_family_contracts", "test_refusals", "test_selfcheck", "test_sparse_contracts")
)


def _name(path: str) -> str:
    """Name of a file below tests/, without its suffix."""
    return path.partition("::")[0].removeprefix("tests/").removesuffix(".py")


def _layer(name: str) -> str:
    return LAYERS[max((part for part in LAYERS if name.startswith(part)), key=len)]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`--quick` does not import the files that it leaves out."""
    if not config.getoption("--quick") or not collection_path.match("test_*.py"):
        return None
    name = _name(str(collection_path.relative_to(config.rootpath)))
    return _layer(name) == "live" or name.startswith(NOT_QUICK) or None


def _turn(item: pytest.Item) -> tuple[bool, int]:
    """The emulated device comes last, because a process keeps it."""
    name = _name(item.nodeid)
    place = LONGEST.index(name) if name in LONGEST else len(LONGEST)
    return name.startswith("ascend/emulation/"), place


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Exclude the tests and all modules from garbage collection. An engine that ends collects
    garbage, and to walk them takes two seconds each time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(trylast=True)  # behind the fixtures of the file
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Exclude the modules that a file has imported, too."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.hookimpl(tryfirst=True)  # before marks choose items
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_turn)
    for item in items:
        name = _name(item.nodeid)
        item.add_marker(_layer(name))
        if name.startswith(NOT_QUICK):
            item.add_marker("slow")
    matrices = [item for item in items if _name(item.nodeid).startswith(MATRICES)]
    for item in {*left_out(matrices), *_beyond_the_slice(items)}:
        item.add_marker("full")


def _beyond_the_slice(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Tests of the emulated device that its own target runs: all but the first of each file."""
    seen = set[str]()
    for item in items:
        name = _name(item.nodeid)
        if not name.startswith(EMULATED) or name.startswith(EMULATED_WHOLE):
            continue
        if "npu" in getattr(item, "fixturenames", ()) and runs(item):
            if name in seen:
                yield item
            seen.add(name)
