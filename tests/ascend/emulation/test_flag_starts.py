"""Every flag that the table calls working on an Ascend NPU starts there, many in one start, and no
line of the start says otherwise.
"""

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from banyan.config.flags.flag import Flag
from banyan.config.flags.outcome import WORKS, outcome_of
from banyan.config.flags.table import find, known_flags
from tests.ascend.emulation.device import EmulatedNpu
from tests.ascend.emulation.test_drafts import made
from tests.models.families import tiny
from tests.support.emulated_ranks import IN_ALL, SIZES, start
from tests.system.checkpoint import write_tiny_model
from tests.system.serving import serving

Flags = dict[str, object]


def plain(folder: Path) -> Flags:
    """A model with a tokenizer, and a file of its inputs."""
    write_tiny_model(folder / "model")
    save_file({"tokens": torch.tensor([5, 6, 7])}, folder / "input.safetensors")
    return {"skip_tokenizer_init": False}


def deep(folder: Path) -> Flags:
    heads = {"head_dim": 16, "num_attention_heads": 8, "num_key_value_heads": 8}
    wide = {"hidden_size": 128, "intermediate_size": 512, "max_position_embeddings": 512}
    tiny("qwen3", folder / "model", num_hidden_layers=6, **heads, **wide)
    return {}


def sparse(folder: Path) -> Flags:
    """A model with a file of channels."""
    deep(folder)
    lists = [list(range(16))] * 8
    keys = [f"model.layers.{layer}.self_attn.k_proj" for layer in range(6)]
    (folder / "channels.json").write_text(json.dumps(dict.fromkeys(keys, lists)))
    return {}


def of_family(variant: str) -> Callable[[Path], Flags]:
    def make(folder: Path) -> Flags:
        tiny(variant, folder / "model", max_position_embeddings=512, **SIZES.get(variant, {}))
        return {}

    return make


def drafting(drafter: str) -> Callable[[Path], Flags]:
    def make(folder: Path) -> Flags:
        (folder / "hot.json").write_text(json.dumps([n for n in range(90) if n % 9]))
        return made(drafter, folder / "model")

    return make


def hook(config: Mapping[str, object]) -> Callable[..., torch.Tensor]:
    """A hook that changes nothing."""
    return lambda module, given, made: made


def unchanged(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterable[tuple[str, torch.Tensor]]:
    """A loader that changes nothing."""
    return weights


API = {
    "served_model_name": "x",
    "tokenizer_path": "{model}",
    "load_format": "safetensors",
    "model_impl": "native",
    "host": "0.0.0.0",
    "port": 31111,
    "grpc_mode": True,
    "api_key": "k",
    "fastapi_root_path": "/x",
    "chat_template": "chatml",
    "completion_template": "star_coder",
    "tool_call_parser": "hermes",
    "reasoning_parser": "qwen3",
    "stream_interval": 2,
    "skip_server_warmup": True,
    "tokenizer_worker_num": 2,
    "enable_dynamic_batch_tokenizer": True,
    "dynamic_batch_tokenizer_batch_size": 4,
    "dynamic_batch_tokenizer_batch_timeout": 0.01,
    "enable_tokenizer_batch_encode": True,
    "allow_auto_truncate": True,
    "enable_cache_report": True,
    "sampling_defaults": "openai",
    "preferred_sampling_params": {"temperature": 0.5},
    "random_seed": 3,
    "enable_custom_logit_processor": True,
    "enable_return_hidden_states": True,
    "weight_version": "v2",
    "context_length": 128,
    "json_model_override_args": {"rope_theta": 5000.0},
    "decrypted_config_file": "{model}/config.json",
    "log_level": "info",
    "log_requests": True,
    "log_requests_format": "json",
    "log_requests_level": 1,
    "log_level_http": "error",
    "decode_log_interval": 3,
    "show_time_cost": True,
    "enable_request_time_stats_logging": True,
    "export_metrics_to_file": True,
    "export_metrics_to_file_dir": "{folder}/records",
    "multi_item_scoring_delimiter": 5,
    "watchdog_timeout": 100.0,
    "soft_watchdog_timeout": 50.0,
    "gc_warning_threshold_secs": 1.0,
    "enable_trace": True,
    "oltp_traces_endpoint": "http://127.0.0.1:9/v1/traces",
    "kv_events_config": {"publisher": "null"},
    "custom_sigquit_handler": "faulthandler:dump_traceback",
}
SCHEDULE = {
    "max_running_requests": 3,
    "max_queued_requests": 9,
    "chunked_prefill_size": 128,
    "max_prefill_tokens": 256,
    "prefill_max_requests": 2,
    "schedule_policy": "lpm",
    "enable_priority_scheduling": True,
    "schedule_low_priority_values_first": True,
    "priority_scheduling_preemption_threshold": 5,
    "schedule_conservativeness": 0.8,
    "scheduler_recv_interval": 2,
    "disable_overlap_schedule": True,
    "page_size": 256,
    "kv_cache_dtype": "bf16",
    "dtype": "bfloat16",
    "max_total_tokens": 1024,
    "radix_eviction_policy": "lfu",
    "enable_hierarchical_cache": True,
    "hicache_ratio": 1.5,
    "hicache_io_backend": "direct",
    "hicache_mem_layout": "page_first_direct",
    "hicache_storage_backend": "file",
    "hicache_storage_backend_extra_config": {"prefetch_threshold": 128},
    "hicache_write_policy": "write_back",
    "hicache_storage_prefetch_policy": "wait_complete",
    "grammar_backend": "xgrammar",
    "constrained_json_disable_any_whitespace": True,
    "weight_loader_disable_mmap": True,
    "model_loader_extra_config": {"enable_multithread_load": True, "num_threads": 2},
    "cuda_graph_bs": [1, 2],
    "disable_cuda_graph_padding": True,
    "enable_cudagraph_gc": True,
    "enable_profile_cuda_graph": True,
    "enable_fp32_lm_head": True,
    "base_gpu_id": 1,
    "gpu_id_step": 2,
    "numa_node": [0],
}
TORCH = {
    "abort_on_priority_when_disabled": True,
    "mem_fraction_static": 0.3,
    "max_total_tokens": None,
    "hicache_size": 0,
    "disable_radix_cache": True,
    "cuda_graph_max_bs": 2,
    "constrained_json_whitespace_pattern": " ?",
    "enable_memory_saver": True,
    "enable_weights_cpu_backup": True,
    "enable_layerwise_nvtx_marker": True,
    "attention_backend": "torch_native",
    "speculative_ngram_min_match_window_size": 2,
    "speculative_ngram_max_match_window_size": 4,
    "speculative_ngram_max_bfs_breadth": 2,
    "speculative_ngram_min_bfs_breadth": 2,
    "speculative_ngram_match_type": "PROB",
    "speculative_ngram_branch_length": 5,
    "speculative_ngram_capacity": 1000,
}
OFFLOAD = {
    "offload_group_size": 3,
    "offload_num_in_group": 2,
    "offload_prefetch_step": 1,
    "prefill_attention_backend": "torch_native",
    "disable_cuda_graph": True,
    "num_continuous_decode_steps": None,
    "quantization": "unquant",
}
SPARSE = {
    "enable_double_sparsity": True,
    "ds_channel_config_path": "{folder}/channels.json",
    "ds_heavy_channel_type": "k",
    "ds_heavy_channel_num": 4,
    "ds_heavy_token_num": 2,
    "ds_sparse_decode_threshold": 3,
}
EXPERTS = {
    "tp_size": 2,
    "ep_size": 2,
    "nccl_port": 0,
    "expert_distribution_recorder_mode": "stat",
    "expert_distribution_recorder_buffer_size": -1,
    "enable_expert_distribution_metrics": True,
    "enable_return_routed_experts": True,
    "ep_num_redundant_experts": 2,
    "init_expert_location": json.dumps({"physical_to_logical_map": [[*range(8), 0, 1]] * 4}),
    "ep_dispatch_algorithm": "static",
    "enable_eplb": True,
    "eplb_algorithm": "deepseek",
    "eplb_rebalance_num_iterations": 100,
    "eplb_rebalance_layers_per_chunk": 1,
    "eplb_min_rebalancing_utilization_threshold": 0.9,
    "dist_timeout": 120.0,
    "disable_custom_all_reduce": True,
}
JOINED = {
    "tp_size": 2,
    "dp_size": 2,
    "enable_dp_attention": True,
    "enable_dp_lm_head": True,
    "moe_a2a_backend": "deepep",
    "deepep_mode": "normal",
    "moe_dense_tp_size": 1,
    "load_balance_method": "total_tokens",
    "enable_single_batch_overlap": True,
}
DIVIDED = {
    "tp_size": 2,
    "attn_cp_size": 2,
    "enable_nsa_prefill_context_parallel": True,
    "nsa_prefill_cp_mode": "interleave",
}
STAGES = {
    "pp_size": 2,
    "chunked_prefill_size": 128,
    "enable_dynamic_chunking": True,
    "pp_max_micro_batch_size": 2,
    "pp_async_batch_depth": 2,
}
DECODE = {
    "disaggregation_mode": "decode",
    "disaggregation_decode_enable_fake_auto": True,
    "num_reserved_decode_tokens": 8,
    "disaggregation_prefill_pp": 1,
    "disaggregation_decode_polling_interval": 2,
}
EAGLE = {
    "speculative_accept_threshold_single": 0.5,
    "speculative_accept_threshold_acc": 0.5,
    "speculative_algorithm": "EAGLE",
    "speculative_num_steps": 2,
    "speculative_eagle_topk": 2,
    "speculative_num_draft_tokens": 4,
    "speculative_draft_load_format": "safetensors",
    "speculative_draft_model_quantization": "unquant",
    "speculative_draft_attention_backend": "torch_native",
    "decrypted_draft_config_file": "{model}/eagle/config.json",
    "speculative_token_map": "{folder}/hot.json",
    "enable_memory_saver": True,
    "enable_draft_weights_cpu_backup": True,
}
HOOKS = {
    "forward_hooks": json.dumps(
        [{"target_modules": ["layers.*.mlp"], "hook_factory": f"{__name__}:hook", "config": {}}]
    ),
    "custom_weight_loader": [f"{__name__}:unchanged"],
    "debug_tensor_dump_output_folder": "{folder}/dump",
    "debug_tensor_dump_layers": [0],
    "debug_tensor_dump_input_file": "{folder}/input.safetensors",
}
LORA = {
    "enable_lora": True,
    "max_lora_rank": 8,
    "lora_target_modules": ["q_proj"],
    "max_loras_per_batch": 2,
    "max_loaded_loras": 3,
    "lora_eviction_policy": "fifo",
}
STATES = {
    "mamba_full_memory_ratio": 0.5,
    "mamba_track_interval": 128,
    "mamba_ssm_dtype": "bfloat16",
    "mamba_scheduler_strategy": "no_buffer",
}
SERVER = {
    "enable_metrics": True,
    "enable_metrics_for_all_schedulers": True,
    "collect_tokens_histogram": True,
    "tokenizer_metrics_allowed_custom_labels": ["a"],
    "tokenizer_metrics_custom_labels_header": "x-labels",
    "bucket_time_to_first_token": [1.0, 2.0],
    "bucket_inter_token_latency": [1.0, 2.0],
    "bucket_e2e_request_latency": [1.0, 2.0],
    "prompt_tokens_buckets": ["default"],
    "generation_tokens_buckets": ["custom", "1", "2"],
    "crash_dump_folder": "{folder}/crashes",
    "tool_server": "demo",
    "warmups": "constraint",
}
GROUPS: dict[str, tuple[Callable[[Path], Flags], Flags]] = {
    "api": (plain, API),
    "schedule": (plain, SCHEDULE),
    "torch": (drafting("NGRAM128"), TORCH),
    "offload": (deep, OFFLOAD),
    "sparse": (sparse, SPARSE),
    "gigabytes": (deep, {"cpu_offload_gb": 0.002, "decode_attention_backend": "torch_native"}),
    "decode": (plain, DECODE),
    "hooks": (plain, HOOKS),
    "adapters": (plain, LORA),
    "eagle": (drafting("EAGLE"), EAGLE),
    "states": (of_family("qwen3 next"), STATES),
    "counted states": (of_family("qwen3 next"), {"max_mamba_cache_size": 8}),
    "windows": (of_family("gemma3"), {"swa_full_tokens_ratio": 0.5}),
    "mixed windows": (of_family("gemma3"), {"hybrid_kvcache_ratio": 0.5}),
    "whole windows": (of_family("gemma3"), {"disable_hybrid_swa_memory": True}),
    "vectors": (plain, {"is_embedding": True}),
}
APART = {
    "experts": (of_family("qwen3 moe"), EXPERTS),
    "joined": (of_family("qwen3 moe"), JOINED),
    "divided": (of_family("deepseek v3.2"), DIVIDED),
    "stages": (deep, STAGES),
    "experts of all ranks": (of_family("qwen3 moe"), {"tp_size": 2, "enable_ep_moe": True}),
}
"""Groups of several ranks, each in a process of its own."""


ELSEWHERE = {
    **dict.fromkeys(("device", "model-path", "skip-tokenizer-init"), "every start"),
    **dict.fromkeys(("nnodes", "node-rank", "dist-init-addr"), "test_commands.py"),
    "disaggregation-bootstrap-port": "test_handoff.py",
    "disaggregation-transfer-backend": "test_handoff.py",
    "speculative-draft-model-path": "test_drafts.py",
    "lora-paths": "test_adapters.py",
    **dict.fromkeys(
        ("disaggregation-ib-device", "mooncake-ib-device"),
        "tests/disaggregation; the fabric of NPUs names no device",
    ),
    **dict.fromkeys(
        ("revision", "download-dir", "delete-ckpt-after-loading"),
        "tests/hub; the hub knows no device",
    ),
    "speculative-draft-model-revision": "tests/hub",
    "tokenizer-mode": "tests/tokenizer",
    "disaggregation-decode-enable-offload-kvcache": "test_handoff.py",
    **dict.fromkeys(
        ("disaggregation-decode-tp", "disaggregation-decode-dp"), "tests/disaggregation"
    ),
    **dict.fromkeys(
        (
            "remote-instance-weight-loader-seed-instance-ip",
            "remote-instance-weight-loader-seed-instance-service-port",
            "remote-instance-weight-loader-send-weights-group-ports",
            "remote-instance-weight-loader-backend",
            "remote-instance-weight-loader-start-seed-via-transfer-engine",
        ),
        "tests/system/test_weights.py; before a device is opened",
    ),
    "checkpoint-engine-wait-weights-before-ready": "a server that is not ready",
    **dict.fromkeys(
        (
            *("enable-multimodal", "mm-max-concurrent-calls", "mm-per-request-timeout"),
            *("mm-process-config", "limit-mm-data-per-request"),
        ),
        "tests/media; before a request comes to the engine",
    ),
}
"""Flags that other tests start here, and those that are over before a device is opened."""


def started(name: str, folder: Path, caplog: pytest.LogCaptureFixture, mode: str) -> list[str]:
    """The lines of a start that answers."""
    make, flags = (GROUPS | APART)[name]
    model = folder / "model"
    model.mkdir()
    given = make(folder) | flags | {"engine_mode": mode}
    for key, value in given.items():
        if isinstance(value, str):
            given[key] = value.replace("{model}", str(model)).replace("{folder}", str(folder))
    with caplog.at_level(logging.INFO), start(model, **given) as engine:
        if flags.get("is_embedding"):
            assert engine.encode("hello")["embedding"]
            return caplog.messages
        params = {"max_new_tokens": 3, "temperature": 0, "ignore_eos": True}
        found = engine.generate(input_ids=[5, 6, 7], sampling_params=params)
        assert len(found["output_ids"]) == 3
    return caplog.messages


@pytest.mark.parametrize("name", [*GROUPS, *(pytest.param(name, marks=IN_ALL) for name in APART)])
def test_flags_that_work_start_without_a_line_that_they_do_not(
    npu: EmulatedNpu, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    lines = started(name, tmp_path, caplog, "normal" if name in APART else "inprocess")
    untrue = [line for line in lines if line.startswith("--") and "is accepted" in line]
    assert not untrue


@IN_ALL
def test_flags_of_the_server_work_before_an_npu(
    npu: EmulatedNpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process of its own, with the routes."""
    monkeypatch.setenv("BANYAN_NPU", "tests.ascend.emulation")
    plain(tmp_path)
    words = ["--model-path", str(tmp_path / "model"), "--device", "npu"]
    for key, value in SERVER.items():
        values = value if isinstance(value, list) else [] if value is True else [value]
        texts = (str(each).replace("{folder}", str(tmp_path)) for each in values)
        words += ["--" + key.replace("_", "-"), *texts]
    with serving(tmp_path / "log", *words) as server:
        assert server.generate(input_ids=[5, 6, 7])["text"]
        assert "is accepted" not in server.log.read_text()


@pytest.mark.parametrize("chip", ["A2", "A3"])
def test_every_flag_that_works_is_started(chip: str) -> None:
    groups = [flags for _, flags in (GROUPS | APART).values()]
    given = {key.replace("_", "-") for flags in (*groups, SERVER) for key in flags}
    started_here = {find(key, abbreviate=False).name for key in given}
    flags = [known for known in known_flags() if isinstance(known, Flag) and known.documented]
    works = {flag.name for flag in flags if outcome_of(flag, None, chip).verdict == WORKS}
    assert works - started_here == ELSEWHERE.keys()
