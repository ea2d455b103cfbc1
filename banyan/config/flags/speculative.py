"""Flags of speculative decoding: what drafts tokens, and how many the model verifies at once."""

from banyan.config.flags.flag import INT, SWITCH, Elsewhere, Flag
from banyan.model_config.quantization import spellings

FLAGS = (
    Flag(
        "speculative-algorithm",
        "speculative.algorithm",
        "what drafts the next tokens, which the model then verifies together: NGRAM, from what "
        "this server has seen, STANDALONE, by a small model of the same vocabulary, NEXTN, by a "
        "layer that the model's checkpoint brings for it, EAGLE and EAGLE3, by a model that was "
        "trained to draft for this one (where none is named, EAGLE is NEXTN), DFLASH, by one that "
        "drafts a whole block in one pass, or a plug-in's name; "
        "answers are the same with it and without",
        translate=(("DEEPSEEK_MTP", "NEXTN"),),
        elsewhere=(
            Elsewhere(
                "DSPARK UNO",
                "of models that were trained to draft for another one, those of EAGLE, EAGLE3 and "
                "DFLASH are read",
                "use NEXTN where the checkpoint has a layer for it, STANDALONE with a small model, "
                "or NGRAM",
            ),
        ),
        proof="tests/system/test_speculation.py"
        "::test_a_text_that_repeats_itself_takes_fewer_steps_and_reads_the_same",
    ),
    Flag(
        "speculative-num-draft-tokens",
        "speculative.num_tokens",
        "tokens that one request verifies in a step at most, its last one included; default: the "
        "longest suffix that is looked for, 12, or 4 where a model drafts, or 8 where "
        "--speculative-eagle-topk is 4 by itself",
        kind=INT,
        low=2,
        high=64,
        proof="tests/config/test_speculation.py::test_drafts_are_what_both_bounds_allow",
    ),
    Flag(
        "speculative-dflash-block-size",
        "speculative.block_size",
        "tokens of a block of DFLASH, the newest one and its drafts; default: "
        "--speculative-num-draft-tokens, or as the draft model was trained",
        kind=INT,
        low=2,
        high=64,
        documented=False,
        proof="tests/model_config/test_dflash.py::test_a_block_is_as_long_as_the_flags_or_the_model_say",
    ),
    Flag(
        "speculative-num-steps",
        "speculative.num_steps",
        "tokens that are drafted after each sampled one at most, one behind another; default: one "
        "less than --speculative-num-draft-tokens, or 5 where --speculative-eagle-topk is 4 by "
        "itself",
        kind=INT,
        low=1,
        high=63,
        proof="tests/config/test_speculation.py::test_drafts_are_what_both_bounds_allow",
    ),
    Flag(
        "speculative-eagle-topk",
        "speculative.eagle_topk",
        "tokens that a draft model goes on with behind each of as many: from 2 on its drafts are a "
        "tree, the likeliest --speculative-num-draft-tokens less one of what it has looked at in "
        "--speculative-num-steps levels, and all three must be given; default: 4 where none of "
        "them is given and a model of EAGLE or EAGLE3 drafts for one of Llama's, else 1",
        kind=INT,
        low=1,
        high=64,
        proof="tests/model_config/test_draft_model.py::test_a_tree_has_as_many_drafts_as_all_three_flags_say",
    ),
    Flag(
        "disable-adaptive-drafts",
        "speculative.is_fixed",
        "draft and verify as many tokens as allowed in every step, whatever they bring and cost",
        kind=SWITCH,
        documented=False,
        proof="tests/scheduler/test_speculation.py::test_drafts_may_be_made_whatever_they_cost",
    ),
    Flag(
        "speculative-draft-model-path",
        "speculative.draft_source",
        "the model that drafts: folder, .gguf file, hub id, pypi:PACKAGE or demo",
        aliases=("speculative-draft-model",),
        proof="tests/system/test_draft_models.py"
        "::test_a_model_that_agrees_takes_fewer_steps_and_changes_no_answer",
    ),
    Flag(
        "speculative-draft-model-revision",
        "speculative.draft_revision",
        "branch, tag or commit of a draft model of the hub",
        proof="tests/model_config/test_draft_model.py::test_what_the_flags_say_of_the_draft_is_of_it_alone",
    ),
    Flag(
        "speculative-draft-load-format",
        "speculative.draft_load_format",
        "form of the draft model's weights; dummy = random weights of the right shape",
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
        proof="tests/model_config/test_draft_model.py::test_what_the_flags_say_of_the_draft_is_of_it_alone",
    ),
    Flag(
        "speculative-draft-model-quantization",
        "speculative.draft_quantization",
        "what float weights of the draft model are rounded to at load, as --quantization; "
        "default: kept as stored",
        choices=("int8", "q8_0", "q4_0", "q4_1", "gguf", *spellings(), "unquant"),
        elsewhere=(
            Elsewhere(
                "nvfp4_online mxfp_w4a8 quark_int4fp8_moe quark_mxfp4 marlin humming mlx_q4 mlx_q8",
                "checkpoints of that form are not read, and no weights are rounded to it",
                "int8 rounds float weights to 8 bits, q4_0 and q4_1 to four",
            ),
        ),
        proof="tests/system/test_draft_models.py"
        "::test_the_weights_of_the_draft_are_rounded_by_themselves",
    ),
    Flag(
        "speculative-token-map",
        "speculative.token_map",
        "file of the token ids that a model of EAGLE drafts, the frequent ones, so that its head "
        "is as much smaller: a list of whole numbers as .json, .npy or .safetensors; a .pt file is "
        "a pickle, and refused; default: all",
        proof="tests/model_config/test_draft_model.py::test_a_token_map_says_what_is_drafted",
    ),
    Flag(
        "speculative-ngram-min-match-window-size",
        "speculative.min_match",
        "shortest suffix of a request that NGRAM looks for, in tokens",
        kind=INT,
        low=1,
        high=1024,
        proof="tests/runner/speculative/test_ngram.py"
        "::test_a_suffix_shorter_than_the_shortest_is_not_followed",
    ),
    Flag(
        "speculative-ngram-max-match-window-size",
        "speculative.max_match",
        "longest suffix of a request that NGRAM compares, in tokens",
        kind=INT,
        low=1,
        high=1024,
        proof="tests/runner/speculative/test_ngram.py"
        "::test_places_that_agree_over_more_than_the_longest_suffix_are_equal",
    ),
    Flag(
        "speculative-ngram-max-bfs-breadth",
        "speculative.max_breadth",
        "places with the same suffix that NGRAM looks at, the newest first",
        kind=INT,
        low=1,
        high=1024,
        proof="tests/runner/speculative/test_ngram.py::test_no_more_places_are_looked_at_than_told",
    ),
    Flag(
        "speculative-ngram-min-bfs-breadth",
        "speculative.min_breadth",
        "ways in which NGRAM goes on behind a token, at least where it knows so many; from 2 on "
        "its drafts branch, and more ways are followed behind a shorter suffix, up to "
        "--speculative-ngram-max-bfs-breadth",
        kind=INT,
        low=1,
        high=64,
        proof="tests/runner/speculative/test_ngram_tree.py"
        "::test_a_token_goes_on_in_several_ways_where_so_many_are_asked_for",
    ),
    Flag(
        "speculative-ngram-match-type",
        "speculative.match_type",
        "which of several continuations NGRAM drafts: BFS = the newest, PROB = the most frequent",
        choices=("BFS", "PROB"),
        proof="tests/runner/speculative/test_ngram.py"
        "::test_the_newest_continuation_is_drafted_or_the_most_frequent",
    ),
    Flag(
        "speculative-ngram-branch-length",
        "speculative.branch",
        "tokens of the shortest suffix and its continuation together",
        kind=INT,
        aliases=("speculative-ngram-max-trie-depth",),
        low=2,
        high=4096,
        proof="tests/runner/speculative/test_ngram.py::test_a_continuation_ends_with_its_branch",
    ),
    Flag(
        "speculative-ngram-capacity",
        "speculative.capacity",
        "nodes of NGRAM's memory, of which a token takes as many as a branch is long (and some "
        "150 bytes)",
        kind=INT,
        low=1,
        proof="tests/runner/speculative/test_ngram.py"
        "::test_the_sequence_that_left_first_is_forgotten_first",
    ),
)
