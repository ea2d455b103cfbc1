"""Speculative decoding flags: draft source and number of drafts."""

from banyan.config.flags.device import ATTENTION
from banyan.config.flags.flag import FLOAT, INT, SWITCH, Elsewhere, Flag
from banyan.model_config.quantization import spellings

FLAGS = (
    Flag(
        "speculative-algorithm",
        "speculative.algorithm",
        "speculative decoding: NGRAM (text seen before), STANDALONE (small model, same "
        "vocabulary), NEXTN (the checkpoint's MTP layer), EAGLE, EAGLE3 (trained draft models; "
        "EAGLE without one is NEXTN), DFLASH (block draft model), or a plug-in's name; answers "
        "stay the same",
        translate=(("DEEPSEEK_MTP", "NEXTN"),),
        elsewhere=(
            Elsewhere(
                "DSPARK UNO",
                "supported trained draft models are EAGLE, EAGLE3 and DFLASH",
                "use NEXTN if the checkpoint has an MTP layer, STANDALONE, or NGRAM",
            ),
        ),
        proof="tests/system/test_speculation.py"
        "::test_a_text_that_repeats_itself_takes_fewer_steps_and_reads_the_same",
    ),
    Flag(
        "speculative-num-draft-tokens",
        "speculative.num_tokens",
        "maximum tokens verified per request and step, the last sampled token included; default: "
        "12 for NGRAM, 4 with a draft model, 8 with a default tree (--speculative-eagle-topk)",
        kind=INT,
        low=2,
        high=64,
        proof="tests/config/test_speculation.py::test_drafts_are_what_both_bounds_allow",
    ),
    Flag(
        "speculative-dflash-block-size",
        "speculative.block_size",
        "tokens per DFLASH block, the newest token included; default: "
        "--speculative-num-draft-tokens, or as the draft model was trained",
        kind=INT,
        low=2,
        high=64,
        documented=False,
        proof="tests/model_config/test_draft_model.py::test_a_block_is_as_long_as_the_flags_or_the_model_say",
    ),
    Flag(
        "speculative-num-steps",
        "speculative.num_steps",
        "draft steps, or levels of a draft tree; default: --speculative-num-draft-tokens less one, "
        "or 5 with a default tree (--speculative-eagle-topk)",
        kind=INT,
        low=1,
        high=63,
        proof="tests/config/test_speculation.py::test_drafts_are_what_both_bounds_allow",
    ),
    Flag(
        "speculative-eagle-topk",
        "speculative.eagle_topk",
        "branches per draft token; 1 = a chain, from 2 on a tree (set --speculative-num-steps and "
        "--speculative-num-draft-tokens too); default: 4 for EAGLE and EAGLE3 on Llama models if "
        "none of the three is set, else 1",
        kind=INT,
        low=1,
        high=64,
        proof="tests/model_config/test_draft_model.py::test_a_tree_has_as_many_drafts_as_all_three_flags_say",
    ),
    Flag(
        "speculative-accept-threshold-single",
        "speculative.accept_single",
        "sampled answers accept every draft of at least this probability, which changes them; 1 = "
        "only what the model samples",
        kind=FLOAT,
        low=0.0,
        high=1.0,
        proof="tests/runner/speculative/test_thresholds.py::test_a_low_threshold_accepts_every_draft",
    ),
    Flag(
        "speculative-accept-threshold-acc",
        "speculative.accept_total",
        "sampled answers accept a draft with its probability divided by this, which changes them",
        kind=FLOAT,
        low=0.0,
        high=1.0,
        proof="tests/runner/speculative/test_thresholds.py::test_a_low_threshold_accepts_every_draft",
    ),
    Flag(
        "disable-adaptive-drafts",
        "speculative.is_fixed",
        "always draft and verify the maximum number of tokens, instead of adapting to acceptance "
        "rate and cost",
        kind=SWITCH,
        documented=False,
        proof="tests/scheduler/test_speculation.py::test_drafts_may_be_made_whatever_they_cost",
    ),
    Flag(
        "speculative-draft-model-path",
        "speculative.draft_source",
        "draft model: folder, .gguf file, hub id, pypi:PACKAGE or demo",
        aliases=("speculative-draft-model",),
        proof="tests/system/test_draft_models.py"
        "::test_a_model_that_agrees_takes_fewer_steps_and_changes_no_answer",
    ),
    Flag(
        "speculative-draft-model-revision",
        "speculative.draft_revision",
        "branch, tag or commit of the draft model on the hub",
        proof="tests/model_config/test_draft_model.py::test_what_the_flags_say_of_the_draft_is_of_it_alone",
    ),
    Flag(
        "speculative-draft-attention-backend",
        "speculative.draft_attention",
        "as --attention-backend, for the draft model; default: as the served model",
        choices=ATTENTION,
        proof="tests/config/test_execution.py::test_the_draft_model_has_its_own_attention",
    ),
    Flag(
        "decrypted-draft-config-file",
        "speculative.draft_config_file",
        "file to read instead of the draft model's config.json",
        proof="tests/model_config/test_draft_model.py"
        "::test_a_draft_model_is_read_by_the_configuration_that_was_named",
    ),
    Flag(
        "speculative-draft-load-format",
        "speculative.draft_load_format",
        "format of the draft model's weights; dummy = random weights of the right shapes",
        choices=("auto", "safetensors", "gguf", "dummy"),
        translate=(("layered", "auto"),),
        elsewhere=(
            Elsewhere(
                "pt npcache bitsandbytes sharded_state presharded mistral flash_rl remote "
                "remote_instance fastsafetensors instanttensor expert_pack private runai_streamer",
                "draft weights are read from safetensors, GGUF and torch files",
                "convert them to safetensors, or use a GGUF file",
            ),
        ),
        proof="tests/model_config/test_draft_model.py::test_what_the_flags_say_of_the_draft_is_of_it_alone",
    ),
    Flag(
        "speculative-draft-model-quantization",
        "speculative.draft_quantization",
        "quantization of the draft model's float weights at load, as --quantization; default: keep "
        "the stored type",
        choices=("int8", "q8_0", "q4_0", "q4_1", "gguf", *spellings(), "unquant"),
        elsewhere=(
            Elsewhere(
                "nvfp4_online mxfp_w4a8 quark_int4fp8_moe quark_mxfp4 marlin humming mlx_q4 mlx_q8",
                "this quantization method is not supported",
                "use int8 for 8 bits, q4_0 or q4_1 for 4 bits",
            ),
        ),
        proof="tests/system/test_draft_models.py"
        "::test_the_weights_of_the_draft_are_rounded_by_themselves",
    ),
    Flag(
        "speculative-token-map",
        "speculative.token_map",
        ".json, .npy or .safetensors file of frequent token ids to which EAGLE's lm_head is "
        "restricted (.pt files are refused); default: all tokens",
        proof="tests/model_config/test_draft_model.py::test_a_token_map_says_what_is_drafted",
    ),
    Flag(
        "speculative-ngram-min-match-window-size",
        "speculative.min_match",
        "NGRAM: minimum suffix length to match, in tokens",
        kind=INT,
        low=1,
        high=1024,
        proof="tests/runner/speculative/test_ngram.py"
        "::test_a_suffix_shorter_than_the_shortest_is_not_followed",
    ),
    Flag(
        "speculative-ngram-max-match-window-size",
        "speculative.max_match",
        "NGRAM: maximum suffix length to match, in tokens",
        kind=INT,
        low=1,
        high=1024,
        proof="tests/runner/speculative/test_ngram.py"
        "::test_places_that_agree_over_more_than_the_longest_suffix_are_equal",
    ),
    Flag(
        "speculative-ngram-max-bfs-breadth",
        "speculative.max_breadth",
        "NGRAM: maximum number of matches to look at, newest first",
        kind=INT,
        low=1,
        high=1024,
        proof="tests/runner/speculative/test_ngram.py::test_no_more_places_are_looked_at_than_the_limit",
    ),
    Flag(
        "speculative-ngram-min-bfs-breadth",
        "speculative.min_breadth",
        "NGRAM: minimum branches per draft token if that many are known; 1 = a chain; shorter "
        "matches branch more, up to --speculative-ngram-max-bfs-breadth",
        kind=INT,
        low=1,
        high=64,
        proof="tests/runner/speculative/test_ngram.py"
        "::test_a_token_goes_on_in_several_ways_where_so_many_are_asked_for",
    ),
    Flag(
        "speculative-ngram-match-type",
        "speculative.match_type",
        "NGRAM: which continuation to draft; BFS = the newest, PROB = the most frequent",
        choices=("BFS", "PROB"),
        proof="tests/runner/speculative/test_ngram.py"
        "::test_the_newest_continuation_is_drafted_or_the_most_frequent",
    ),
    Flag(
        "speculative-ngram-branch-length",
        "speculative.branch",
        "NGRAM: maximum tokens of matched suffix and continuation together",
        kind=INT,
        aliases=("speculative-ngram-max-trie-depth",),
        low=2,
        high=4096,
        proof="tests/runner/speculative/test_ngram.py::test_a_continuation_ends_with_its_branch",
    ),
    Flag(
        "speculative-ngram-capacity",
        "speculative.capacity",
        "NGRAM: maximum nodes of its trie, --speculative-ngram-branch-length per stored token "
        "(about 150 bytes each)",
        kind=INT,
        low=1,
        proof="tests/runner/speculative/test_ngram.py"
        "::test_the_sequence_that_left_first_is_forgotten_first",
    ),
)
