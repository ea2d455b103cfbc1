"""Flags of structured output: which library constrains answers, and what compiling may cost."""

from banyan.config.flags.flag import FLOAT, FOREVER_S, SWITCH, Flag

FLAGS = (
    Flag(
        "grammar-backend",
        "grammar.backend",
        "library that constrains answers: xgrammar, llguidance, outlines, a plug-in's name, or "
        "none; default: xgrammar when installed, else llguidance",
        proof="tests/system/test_flag_effects.py"
        "::test_without_a_grammar_backend_constraints_are_refused",
    ),
    Flag(
        "constrained-json-disable-any-whitespace",
        "grammar.compact",
        "constrained JSON has no white space between its parts",
        kind=SWITCH,
        proof="tests/grammar/test_backends.py::test_compact_json_has_no_white_space",
    ),
    Flag(
        "constrained-json-whitespace-pattern",
        "grammar.whitespace",
        "regex of the white space that constrained JSON may have between its parts; without it "
        "any, in bounds",
        proof="tests/grammar/test_backends.py::test_white_space_in_json_follows_the_pattern",
    ),
    Flag(
        "grammar-timeout",
        "grammar.timeout_s",
        "seconds that compiling one constraint may take before its requests get 400",
        kind=FLOAT,
        low=0.1,
        high=FOREVER_S,
        documented=False,
        proof="tests/grammar/test_compiler.py::test_what_takes_too_long_is_refused_alone",
    ),
)
