"""docs/ascend_rules.md, made from the table of the rules."""

from collections.abc import Iterator

from banyan.ascend.launch.findings import sentences

_HEAD = """# Rules of a launch on Ascend NPUs

Printed by `banyan check --rules`; a test keeps this file equal to it.

Each start with `--device npu` is held against these rules: errors end it, warnings are logged.
`banyan check` does the same for any command line, also for machines that are not this one, and
`banyan doctor --device npu` for the machine itself (23). Words in braces are the numbers of the
case. `flag` rules come from the documents' table of flags for A2 and A3, which
`banyan config --device npu` prints.

*Source*: the documents' feature table, parameter guide and install page; the operators' published
contracts; torch_npu (what its parsers take); SGLang (what its launcher refuses).

"""


def rules_page() -> str:
    return _HEAD + "".join(_lines())


def _lines() -> Iterator[str]:
    yield "| rule | | says | what to do | source |\n|---|---|---|---|---|\n"
    for each in sentences().values():
        says, use = (text.replace("|", "\\|") for text in (each.says, each.use))
        yield f"| {each.rule} | {each.severity} | {says} | {use} | {each.source} |\n"
