"""Structured output flags: grammar library and compile limits."""

from banyan.config.flags.flag import FLOAT, FOREVER_S, SWITCH, Flag

FLAGS = (
    Flag(
        "grammar-backend",
        "grammar.backend",
        "library for structured output: xgrammar, llguidance, outlines, the name of a plug-in, or "
        "none; default: xgrammar if installed, else llguidance",
        proof="tests/system/test_flag_effects.py"
        "::test_without_a_grammar_backend_constraints_are_refused",
    ),
    Flag(
        "constrained-json-disable-any-whitespace",
        "grammar.compact",
        "constrained JSON has no white space between its tokens",
        kind=SWITCH,
        proof="tests/grammar/test_backends.py::test_compact_json_has_no_white_space",
    ),
    Flag(
        "constrained-json-whitespace-pattern",
        "grammar.whitespace",
        "regex of the white space that constrained JSON may contain; default: any, of limited "
        "length",
        proof="tests/grammar/test_backends.py::test_white_space_in_json_follows_the_pattern",
    ),
    Flag(
        "grammar-timeout",
        "grammar.timeout_s",
        "seconds to compile one grammar; longer compilations answer 400",
        kind=FLOAT,
        low=0.1,
        high=FOREVER_S,
        documented=False,
        proof="tests/grammar/test_compiler.py::test_what_takes_too_long_is_refused_alone",
    ),
)
