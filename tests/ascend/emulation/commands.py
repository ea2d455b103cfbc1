"""The documents' command lines as they start on emulated NPUs: every one of SGLang's pages, and the
first node's of each role of the two recipes, which are kept in `tests/ascend/launch/golden`.

Counts of ranks are smaller by one factor, and addresses are this machine's.
`python -m tests.ascend.emulation.commands` prints the lines for docs/ascend.md.
"""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from tests.support.documented_lines import LEFT_OUT, REFUSED_ON_NPU, STARTS, DocumentedLine

FACTOR = 4
"""Of ranks, replicas, and tokens that ranks divide: what is less than one stays one."""
PAIRED = 2
"""Least ranks of a line that has several."""
GOLDEN = Path(__file__).parents[1] / "launch" / "golden"
_COUNTED = (
    *("--tp", "--tp-size", "--dp-size", "--ep", "--ep-size"),
    *("--attn-cp-size", "--max-prefill-tokens"),
)
_OF_MACHINES = ("--host", "--port", "--dist-init-addr", "--model-path", "--node-rank")
_OF_THEIR_HOSTS = ("HCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "SGLANG_SET_CPU_AFFINITY")
"""Names of interfaces, and a wish that takes as many cores as ranks."""


def nodes_of(line: DocumentedLine) -> int:
    return next((int(flag[1]) for flag in line.flags() if flag[0] == "--nnodes"), 1)


def scaled(line: DocumentedLine, nodes: int = 1) -> DocumentedLine:
    """With the counts of small machines, so many, and no addresses."""
    words: list[str] = []
    for flag, *value in line.flags():
        if flag == "--nnodes":
            value = [str(nodes)]
        elif flag in _COUNTED and int(value[0]) > PAIRED:
            value = [str(max(PAIRED, int(value[0]) // FACTOR))]
        if flag not in _OF_MACHINES:
            words += [flag, *value]
    kept = {k: v for k, v in line.variables.items() if k not in _OF_THEIR_HOSTS}
    return DocumentedLine(line.module, tuple(words), kept)


def _golden(recipe: str, role: str) -> DocumentedLine:
    folder = GOLDEN / recipe
    script = (folder / f"{role}-0-0.sh").read_text()
    module, command = "banyan.launch_server", script.partition("banyan.launch_server")[2]
    pairs = re.findall(r"^(\w+)=(.*)$", (folder / f"{role}-0-0.env").read_text(), re.MULTILINE)
    return DocumentedLine(module, tuple(shlex.split(command.replace("\\\n", " "))), dict(pairs))


def _completed(name: str) -> DocumentedLine:
    line = STARTS[name]
    return DocumentedLine(line.module, (*line.words, *LEFT_OUT.get(name, ())), line.variables)


LINES = {name: _completed(name) for name in STARTS if name not in REFUSED_ON_NPU} | {
    f"recipe {recipe}: {role}": _golden(recipe, role)
    for recipe in ("deepseek-r1", "deepseek-v3.2")
    for role in ("prefill", "decode")
}


def table() -> Iterator[str]:
    """Lines for docs/ascend.md."""
    yield "| command line | ranks |"
    yield "|---|---|"
    for name, line in LINES.items():
        yield f"| {name} | {ranks_of(line)}, here {ranks_of(scaled(line))} |"
    for name, why in REFUSED_ON_NPU.items():
        yield f"| {name} | refused: {why} |"


def ranks_of(line: DocumentedLine) -> int:
    """--tensor-parallel-size; of the file of flags, 2."""
    given = dict(flag for flag in line.flags() if len(flag) == 2)
    if "--config" in given:
        return 2
    return int(given.get("--tp-size") or given.get("--tp") or 1)


if __name__ == "__main__":
    print("\n".join(table()))
