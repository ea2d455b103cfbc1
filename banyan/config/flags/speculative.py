"""Flags of speculative decoding: what drafts tokens, and how many the model verifies at once."""

from banyan.config.flags.flag import INT, Elsewhere, Flag

FLAGS = (
    Flag(
        "speculative-algorithm",
        "speculative.algorithm",
        "what drafts the next tokens, which the model then verifies together: NGRAM, from what "
        "this server has seen, or a plug-in's name; answers are the same with it and without",
        elsewhere=(
            Elsewhere(
                "EAGLE EAGLE3 NEXTN STANDALONE DFLASH DSPARK UNO",
                "no draft model is run, and drafts come from what the server has seen",
                "use NGRAM, or leave the flag out",
            ),
        ),
        proof="tests/system/test_speculation.py"
        "::test_a_text_that_repeats_itself_takes_fewer_steps_and_reads_the_same",
    ),
    Flag(
        "speculative-num-draft-tokens",
        "speculative.num_tokens",
        "tokens that one request verifies in a step at most, its last one included; default: the "
        "longest suffix that is looked for, 12",
        kind=INT,
        low=2,
        high=64,
        proof="tests/config/test_speculation.py::test_drafts_are_what_both_bounds_allow",
    ),
    Flag(
        "speculative-num-steps",
        "speculative.num_steps",
        "tokens that are drafted after each sampled one at most; default: one less than "
        "--speculative-num-draft-tokens",
        kind=INT,
        low=1,
        high=63,
        proof="tests/config/test_speculation.py::test_drafts_are_what_both_bounds_allow",
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
