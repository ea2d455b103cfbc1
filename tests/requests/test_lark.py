"""Lark grammars become regular expressions of the same texts, or are refused by name."""

import re

import pytest

from banyan.base.errors import RequestError
from banyan.requests.lark import COMMON, MAX_CHARS, regex_of_lark

PATCH = """
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

// the parts of a patch
hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF
%import common.LF
"""
SQL = """
?start: query (";" query)*
query.2: "select"i WS columns WS "from"i WS CNAME
       | "drop"i WS CNAME    // the other one
columns: "*" | CNAME ("," CNAME)~0..2
%import common (WS, CNAME)
"""
CASES = {
    PATCH: (
        [
            "*** Begin Patch\n*** Add File: a.txt\n+one\n+\n*** End Patch",
            "*** Begin Patch\n*** Update File: b\n@@ f\n-x\n*** End of File\n*** End Patch\n",
            "*** Begin Patch\n*** Delete File: c\n*** Update File: d\n*** End Patch",
        ],
        [
            "*** Begin Patch\n*** End Patch",
            "*** Begin Patch\n*** Add File: a.txt\none\n*** End Patch",
            "*** Begin Patch\n*** Add File: \n+x\n*** End Patch",
        ],
    ),
    SQL: (
        ["select * from t", "SELECT a,b,c FROM t;Drop  u"],
        ["select a,b,c,d from t", "select from t", "drop t;", "sel ect * from t"],
    ),
    'start: "a".."f" ["-" x] "/" "\\n" "\\u00e9"\nx: /\\d\\/[)]/ | /b|c/': (
        ["a/\né", "f-7/)/\né", "c-b/\né", "a-c/\né"],
        ["g/\né", "a-/\né", "a-bc/\né", "A/\né"],
    ),
    'start: "ab"+ ("c" | "d" "e")? "."': (
        ["ab.", "ababc.", "abde."],
        ["abb.", "abcde.", "ab", "abx"],
    ),
    'start: "]".."^" /x/i+ "é".."ü"': (["]xXé", "^xü"], ["[xé", "]é", "]xa"]),
    'start: NUMBER ("," NUMBER)* | "(" SIGNED_INT ")"\n%import common (NUMBER, SIGNED_INT)': (
        ["1", "1.5,2e7,.5", "(-3)"],
        ["", "1,", "-1", "()", "."],
    ),
}


DOUBLING = "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(40)) + '\nr40: "a"\nstart: r0'


@pytest.mark.parametrize("grammar", CASES, ids=range(len(CASES)))
def test_the_same_texts_are_taken(grammar: str) -> None:
    pattern = re.compile(regex_of_lark(grammar))
    taken, refused = CASES[grammar]
    assert [t for t in taken if not pattern.fullmatch(t)] == []
    assert [t for t in refused if pattern.fullmatch(t)] == []


@pytest.mark.parametrize("grammar", CASES, ids=range(len(CASES)))
def test_the_library_takes_the_same(grammar: str) -> None:
    lark = pytest.importorskip("lark")
    grammar_of_library = grammar.replace("/(.*)/", "/(.+)/?")  # no empty terminals there
    parser = lark.Lark(grammar_of_library, parser="earley", lexer="dynamic_complete")
    taken, refused = CASES[grammar]
    for text in taken:
        parser.parse(text)
    for text in refused:
        with pytest.raises(lark.exceptions.LarkError):
            parser.parse(text)


@pytest.mark.parametrize("name", COMMON)
def test_what_is_imported_is_an_expression(name: str) -> None:
    found = regex_of_lark(f'start: X "!"\n%import common.{name} -> X')
    assert re.compile(found) and found.endswith("!")


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        ('start: "(" start ")" | "x"', r"'start' contains itself \(start → start\)"),
        ('start: a\na: "x" b\nb: a?', "'a' contains itself"),
        ("start: nowhere", "'nowhere' is not defined"),
        ('other: "a"', "'start' is not defined"),
        ('start: "a"\n%ignore " "', "%ignore has no counterpart"),
        ('start: "a"\n%import python.NAME', "only common"),
        ("start: A\n%import common.NOTHING -> A", "common.NOTHING is not known"),
        ('start: "a"\nstart: "b"', "defined twice"),
        ('start: ("a"', "is not closed"),
        ('start: "a")', "is not expected"),
        ('start: *"a"', "is not expected"),
        ("start: @", "is not understood"),
        ("start: /a/m", "flags"),
        ('start: "z".."a"', "no range"),
        ('start: "ab".."c"', "no range"),
        ('start: x{"a"}\nx{y}: y', "not understood|templates"),
        ("words", "no definition"),
        ("", "'start' is not defined"),
        ('start: "a"~99999', "too often"),
        ("start: " + "(" * 5000, "deep"),
        ("start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(500)), "deep"),
        (DOUBLING, str(MAX_CHARS)),
    ],
)
def test_what_has_no_expression_is_refused_by_name(grammar: str, why: str) -> None:
    with pytest.raises(RequestError, match=why) as caught:
        regex_of_lark(grammar)
    assert caught.value.status == 400 and caught.value.code == "unsupported_grammar"
