from dataclasses import replace

import pytest

from banyan.base.errors import ConfigError
from banyan.config.cli import parse
from banyan.config.env import read_environment
from banyan.config.resolve import resolve
from banyan.config.rules.cache import store_wishes
from banyan.config.schema import CacheConfig, Config, ParallelConfig
from banyan.model_config.model_config import FULL, WINDOW
from tests.support.configs import MODEL_CONFIG, NOTHING
from tests.support.flags import config_of

STORE = ["--enable-hierarchical-cache", "--hicache-storage-backend", "file"]
MIXED = replace(MODEL_CONFIG, layer_kinds=(FULL, WINDOW), window=64)


def test_flags_name_the_store_and_what_goes_there() -> None:
    policies = ["--hicache-write-policy", "write_back"]
    policies += ["--hicache-storage-prefetch-policy", "wait_complete"]
    cache = config_of(*STORE, *policies).cache
    assert (cache.hierarchical, cache.store) == (True, "file")
    assert (cache.store_writes, cache.store_waits) == ("write_back", "wait_complete")


def test_the_extra_configuration_is_divided_between_engine_and_store() -> None:
    extra = '{"prefetch_threshold": 64, "prefetch_timeout_base": 2, "path": "x", "max_bytes": 9}'
    wishes = store_wishes(
        config_of(*STORE, f"{'--hicache-storage-backend-extra-config'}={extra}").cache
    )
    assert (wishes.threshold, wishes.timeout_s, wishes.timeout_per_ki_s) == (64, 2, 0.25)
    assert wishes.rest == {"path": "x", "max_bytes": 9}


@pytest.mark.parametrize(
    "extra",
    [
        {"prefetch_threshold": "many"},
        {"prefetch_threshold": 1.5},
        {"prefetch_timeout_base": -1},
        {"prefetch_timeout_base": True},
        {"prefetch_timeout_per_ki_token": float("inf")},
    ],
)
def test_wrong_extra_values_are_named(extra: dict) -> None:
    cache = CacheConfig(hierarchical=True, store="file", store_options=extra)
    with pytest.raises(ConfigError, match=next(iter(extra))):
        resolve(Config(cache=cache), MODEL_CONFIG, NOTHING)


def test_a_variable_names_the_folder_of_the_store() -> None:
    given = read_environment({"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": "/pages"})
    cache = parse(STORE, given).cache
    assert store_wishes(cache).rest == {"path": "/pages"}
    named = replace(cache, store_options={"path": "/other"})
    assert store_wishes(named).rest == {"path": "/other"}


@pytest.mark.parametrize("name", ["hf3fs", "eic", "aibrix"])
def test_stores_of_others_are_refused_with_what_to_do(name: str) -> None:
    with pytest.raises(ConfigError, match="use file, with a folder that all machines share"):
        config_of("--enable-hierarchical-cache", "--hicache-storage-backend", name)


@pytest.mark.parametrize(
    "cache, model_config, parallel, message",
    [
        (CacheConfig(store="file"), MODEL_CONFIG, {}, "needs --enable-hierarchical-cache"),
        (
            CacheConfig(hierarchical=True, disable_radix=True),
            MODEL_CONFIG,
            {},
            "cannot be combined with --disable-radix-cache",
        ),
        (
            CacheConfig(hierarchical=True, store="file"),
            MODEL_CONFIG,
            {"nodes": 2, "tp": 2},
            "--nnodes 2",
        ),
        (
            CacheConfig(hierarchical=True, store="file"),
            MODEL_CONFIG,
            {"tp": 2, "cp": 2},
            "--attn-cp-size",
        ),
        (CacheConfig(hierarchical=True, store="file"), MIXED, {}, "--disable-hybrid-swa-memory"),
    ],
)
def test_what_does_not_go_with_a_store_is_refused_by_name(
    cache, model_config, parallel, message
) -> None:
    config = Config(cache=cache, parallel=ParallelConfig(**parallel))
    with pytest.raises(ConfigError, match=message):
        resolve(config, model_config, NOTHING)


def test_layers_with_windows_that_keep_every_position_may_be_stored() -> None:
    cache = CacheConfig(hierarchical=True, store="file", keeps_windows=True)
    assert resolve(Config(cache=cache), MIXED, NOTHING).cache.store == "file"


@pytest.mark.parametrize(
    ("device", "copies", "others"),
    [("cuda", "kernel", "kernel_ascend"), ("npu", "kernel_ascend", "kernel")],
)
def test_each_device_has_its_own_ways_to_keep_pages_on_the_host(device, copies, others) -> None:
    flags = ("--device", device, "--enable-hierarchical-cache")
    cache = resolve(config_of(*flags), MODEL_CONFIG, NOTHING).cache
    assert (cache.host_tier, cache.host_copies) == (True, copies)
    assert cache.host_layout == "page_first_direct"
    with pytest.raises(ConfigError, match=f"--hicache-io-backend {others} is not available"):
        resolve(config_of(*flags, "--hicache-io-backend", others), MODEL_CONFIG, NOTHING)


def test_a_tier_of_several_ranks_is_of_npus_alone() -> None:
    flags = ("--enable-hierarchical-cache", "--tp", "2", "--device")
    assert resolve(config_of(*flags, "npu"), MODEL_CONFIG, NOTHING).cache.host_tier
    with pytest.raises(ConfigError, match="not available on cuda with several ranks"):
        resolve(config_of(*flags, "cuda"), MODEL_CONFIG, NOTHING)
    with pytest.raises(ConfigError, match="not available with --nnodes: one process"):
        nodes = ("--nnodes", "2", "--dist-init-addr", "192.0.2.7:6688")
        resolve(config_of(*flags, "npu", *nodes), MODEL_CONFIG, NOTHING)
