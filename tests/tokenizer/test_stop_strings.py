"""Stops: a stream cut anywhere gives what the whole text gives, and nothing can hang."""

import re
import subprocess
import sys
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from banyan.base.errors import RequestError
from banyan.tokenizer.stop_strings import StopChecker, StopMatch, check_stops

LETTERS = st.text(alphabet="abc", max_size=30)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=5)
PATTERNS = st.lists(
    st.sampled_from(
        [
            "a+b",
            "(ab|c)c",
            "[^a]b",
            "c.a",
            "a{2,3}",
            "b(a|b)*?c",
            "(?i:A)|bb",
            "(a?){3}b",
            r"\w\w\wc",
        ]
    ).filter(lambda p: "?i" not in p),
    max_size=3,
)


def first_stop(text: str, stop: list[str], patterns: list[str]) -> StopMatch | None:
    """The definition: ends first, then starts first."""
    for end in range(1, len(text) + 1):
        for start in range(end):
            for string in stop:
                if text[start:end] == string:
                    return StopMatch(string, start, end)
            for pattern in patterns:
                if re.fullmatch(pattern, text[start:end]):
                    return StopMatch(pattern, start, end)
    return None


def run(checker: StopChecker, pieces: list[str]) -> str:
    return "".join(map(checker.push, pieces)) + checker.finish()


@given(st.lists(LETTERS, max_size=12), STOPS, PATTERNS, st.booleans())
def test_a_stream_cut_anywhere_stops_where_the_whole_text_stops(
    pieces: list[str], stop: list[str], patterns: list[str], keep: bool
) -> None:
    text = "".join(pieces)
    checker = StopChecker(stop, patterns, no_stop_trim=keep)
    answer = run(checker, pieces)
    expected = first_stop(text, stop, patterns)
    if expected is None:
        assert checker.match is None and answer == text
        return
    assert checker.match is not None
    assert (checker.match.start, checker.match.end) == (expected.start, expected.end)
    assert answer == text[: expected.end if keep else expected.start]


@given(st.lists(LETTERS, max_size=12), STOPS)
def test_text_that_may_begin_a_stop_is_held_back_and_no_more(
    pieces: list[str], stop: list[str]
) -> None:
    checker = StopChecker(stop)
    text = sent = ""
    for piece in pieces:
        text += piece
        sent += checker.push(piece)
        if checker.match is not None:
            return
        held = text[len(sent) :]
        longest = next(
            (i for i in range(len(text)) if any(s.startswith(text[i:]) for s in stop)), len(text)
        )
        assert held == text[longest:]


def test_nothing_follows_a_stop() -> None:
    checker = StopChecker(["END"])
    assert checker.push("one E") == "one "
    assert checker.push("ND two") == ""
    assert checker.match == StopMatch("END", 4, 7)
    assert checker.push("three") == "" and checker.finish() == ""


def test_the_matched_text_stays_when_asked_for() -> None:
    checker = StopChecker([], [r"\d{3}"], no_stop_trim=True)
    assert run(checker, ["ab1", "2", "34"]) == "ab123"


def test_a_pattern_ignores_case_when_it_says_so() -> None:
    checker = StopChecker([], ["(?i)[^x]stop"])
    assert run(checker, ["x XSTOP y ST", "Op z"]) == "x XSTOP y"[:9]
    assert checker.match == StopMatch("(?i)[^x]stop", 9, 14)


def test_held_text_comes_out_at_the_end() -> None:
    checker = StopChecker(["END"])
    assert checker.push("xEN") == "x"
    assert checker.finish() == "EN"


@pytest.mark.parametrize(
    "pattern",
    ["[", "foo**", "a{1,100000000}", r"(a)\1", "a*", "|a", "$", "^", "a*$", "(?!a)", "(?<=a+)b",
     "(" * 100 + "a" + ")" * 99, "(?>a)b", "a++", "(a{40}){40}", "(?x)a", "x" * 257,
     "(?=a*)b", "(?=.{65})b", "(?=(?=a)b)c", "(?=.{50})b", "a(?=[ab]{0,30}c)"],
)  # fmt: skip
def test_a_pattern_that_a_stream_cannot_answer_is_refused(pattern: str) -> None:
    with pytest.raises(RequestError) as error:
        check_stops([], [pattern])
    assert error.value.param == "stop_regex" and error.value.status == 400


COUNTS_WITHOUT_END = ["(a{0}){10000000}b", "(a{0}){4294967294}b", "((a{0}){1000}){1000}b",
    "(((((((()" + "{999})" * 7 + "{999}b", "(|){0,999999}b", "(?:(?=){1000}){1000}b",
]  # fmt: skip


def test_counts_of_nothing_are_answered_at_once() -> None:
    """In a process of its own, so that a loop without end fails this test and no other."""
    code = f"""
from banyan.base.errors import RequestError
from banyan.tokenizer.stop_strings import check_stops
for pattern in {COUNTS_WITHOUT_END!r}:
    try:
        check_stops([], [pattern])
    except RequestError as error:
        assert error.param == "stop_regex"
print("done")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "done\n"


CONTEXTS = [r"[ab]\s*$", r"^b+", r"\bab\b", r"a\B", r"\n(?=ab)", r"a(?!b)", r"(?<=a)b+", r"(?<!a)b",
    r"(?m)^a$", r"\Aa", r"b\Z", r"a(?=\s|$)", r"(?<!\ba)\nb", r"(?=ab)", r"\b", r"b+\b|\n\n",
]  # fmt: skip


@given(
    st.lists(st.text(alphabet="ab \n", max_size=6), max_size=10),
    st.sampled_from(CONTEXTS),
    st.booleans(),
)
def test_a_pattern_that_looks_around_is_asked_about_the_text_so_far(
    pieces: list[str], pattern: str, keep: bool
) -> None:
    check_stops([], [pattern])
    checker = StopChecker([], [pattern], no_stop_trim=keep)
    text = answer = ""
    for piece in pieces:
        text += piece
        answer += checker.push(piece)
        found = re.search(pattern, text)
        if checker.match is None:
            assert found is None
            assert text.startswith(answer)
            continue
        assert found is not None
        match = checker.match
        assert match.start >= found.start()
        assert answer == text[: match.end if keep else match.start]
        return
    assert answer + checker.finish() == text


@pytest.mark.parametrize(
    ("pattern", "pieces", "answer"),
    [
        (r"[.!?]\s*$", ["One", " two", ".", " Three"], "One two"),
        (r"\n(?=User:)", ["Hi\n", "Us", "er: you"], "Hi"),
        (r"(?<!Mr)\.", ["Mr", ". A", " b", ". C"], "Mr. A b"),
        (r"\bor\b", ["for", " oral", " or", " and"], "for oral "),
        (r"^\s*No", ["Yes. No", " way"], "Yes. No way"),
        (r"(?m)^\s*No", ["Yes.\n", " No", " way"], "Yes.\n"),
    ],
)
def test_anchors_borders_and_look_arounds_cut_the_answer(
    pattern: str, pieces: list[str], answer: str
) -> None:
    checker = StopChecker([], [pattern])
    assert run(checker, pieces) == answer


@pytest.mark.parametrize(
    "stop", [[""], ["x" * (1 << 20)], ["x"] * 10_000, ["y" * 1000] * 9]
)  # fmt: skip
def test_stop_strings_beyond_the_limits_are_refused(stop: list[str]) -> None:
    with pytest.raises(RequestError) as error:
        check_stops(stop)
    assert error.value.param == "stop"


def test_what_looks_like_a_regex_is_an_ordinary_stop_string() -> None:
    check_stops(["(a+)+$", "[", "\\", "^", "]", "-"])
    checker = StopChecker(["(a+)+$", "[", "\\"])
    assert run(checker, ["aaa(a+", ")+$ b"]) == "aaa"


@pytest.mark.parametrize(
    "pattern", ["(a+)+b", "(a|a)*b", "(a|aa)+b", ".*.*.*.*b", "(a?){100}a{100}b"]
)
def test_visits_stay_linear_for_patterns_that_make_backtracking_explode(pattern: str) -> None:
    check_stops([], [pattern])
    checker = StopChecker([], [pattern])
    text = "a" * 2_000
    assert run(checker, [text]) == text
    assert checker.match is None


def work(pattern: str, text: str) -> int:
    """Calls that reading `text`, token by token, makes: the work without the clock."""
    check_stops([], [pattern])
    checker = StopChecker([], [pattern])
    return calls(lambda: [checker.push(text[i : i + 4]) for i in range(0, len(text), 4)])


def calls(act: Callable[[], object]) -> int:
    count = 0

    def tally(*_: object) -> None:
        nonlocal count
        count += 1

    sys.setprofile(tally)
    try:
        act()
    finally:
        sys.setprofile(None)
    return count


def test_the_members_of_a_class_are_tested_once_for_a_character() -> None:
    letters = "".join(map(chr, range(0x4E00, 0x4E00 + 60)))
    small = work(r"[^a]{1,480}\x01", "b" * 400)
    assert work(rf"(?i)[^{letters}]{{1,480}}\x01", "b" * 400) < 1.1 * small + 100


@pytest.mark.parametrize("pattern", [r"\n(?=[ab]{8}c)", r"(?<![ab]{20})c", r"a\b.{0,40}c$"])
def test_the_work_of_looking_around_does_not_grow_with_the_text(pattern: str) -> None:
    short = work(pattern, "ab\nb" * 200)
    assert work(pattern, "ab\nb" * 800) < 4.5 * short


def test_stops_are_compiled_once_for_all_sequences_of_a_request() -> None:
    stop, patterns = ["x" * 1000 + str(i) for i in range(8)], ["(a?){300}b$"]
    check_stops(stop, patterns)
    StopChecker(stop, patterns)
    assert calls(lambda: StopChecker(stop, patterns)) < 100


def test_thirty_two_stops_read_each_character_once() -> None:
    stops = ["x" * 250 + chr(0x4E00 + i) for i in range(32)]
    check_stops(stops)
    checker = StopChecker(stops)
    text = ("x" * 249 + "y") * 400
    assert run(checker, list(text)) == text
