"""The documents' command lines for Ascend NPUs: those of the install page, and the first node's of
each role of the two recipes, which are kept in `tests/ascend/launch/golden`.

Counts of ranks are smaller by one factor, and addresses are this machine's.
`python -m tests.ascend.emulation.commands` prints the lines for docs/ascend.md.
"""

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

FACTOR = 4
"""Of ranks, replicas, and tokens that ranks divide: what is less than one stays one."""
GOLDEN = Path(__file__).parents[1] / "launch" / "golden"
_COUNTED = ("--tp-size", "--dp-size", "--ep-size", "--attn-cp-size", "--max-prefill-tokens")
_OF_MACHINES = ("--host", "--port", "--dist-init-addr", "--model-path", "--node-rank")
_OF_THEIR_HOSTS = ("HCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "SGLANG_SET_CPU_AFFINITY")
"""Names of interfaces, and a wish that takes as many cores as ranks."""
_PAGE = (
    "--model-path M --trust-remote-code --attention-backend ascend --mem-fraction-static 0.8 "
    "--quantization w8a8_int8 --tp-size 16 --dp-size 1 --nnodes 1 --node-rank 0 "
    "--disaggregation-transfer-backend ascend --dist-init-addr 192.0.2.7:6688 --host 192.0.2.7 "
    "--device npu "
)
_STORE = {
    "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
    "ASCEND_MF_STORE_URL": "tcp://192.0.2.7:6670",
}


@dataclass(frozen=True)
class Line:
    """
    Attributes:
        words: flags and their values, as documented.
    """

    words: tuple[str, ...]
    variables: Mapping[str, str]

    @classmethod
    def of(cls, text: str, variables: Mapping[str, str]) -> "Line":
        return cls(tuple(text.split()), variables)

    def flags(self) -> Iterator[tuple[str, ...]]:
        """Each flag with its value."""
        starts = [at for at, word in enumerate(self.words) if word.startswith("--")]
        for start, end in zip(starts, [*starts[1:], len(self.words)], strict=True):
            yield self.words[start:end]

    @property
    def role(self) -> str:
        """ "prefill", "decode" or ""."""
        return next((flag[1] for flag in self.flags() if flag[0] == "--disaggregation-mode"), "")

    def scaled(self, nodes: int = 1) -> "Line":
        """With the counts of small machines, so many, and no addresses."""
        words: list[str] = []
        for flag, *value in self.flags():
            if flag == "--nnodes":
                value = [str(nodes)]
            elif flag in _COUNTED:
                value = [str(max(1, int(value[0]) // FACTOR))]
            if flag not in _OF_MACHINES:
                words += [flag, *value]
        kept = {k: v for k, v in self.variables.items() if k not in _OF_THEIR_HOSTS}
        return Line(tuple(words), kept)


def _golden(recipe: str, role: str) -> Line:
    folder = GOLDEN / recipe
    script = (folder / f"{role}-0-0.sh").read_text()
    command = script.partition("banyan.launch_server")[2]
    pairs = re.findall(r"^(\w+)=(.*)$", (folder / f"{role}-0-0.env").read_text(), re.MULTILINE)
    return Line(tuple(shlex.split(command.replace("\\\n", " "))), dict(pairs))


LINES = {
    "install page, one server": Line.of(
        "--model-path M --attention-backend ascend --host 0.0.0.0 --port 30000 --device npu", {}
    ),
    "install page, prefill": Line.of(
        _PAGE + "--disaggregation-mode prefill --disaggregation-bootstrap-port 6657 --port 8000",
        _STORE,
    ),
    "install page, decode": Line.of(
        _PAGE + "--disaggregation-mode decode --port 8001 --enable-deepep-moe "
        "--deepep-mode low_latency --ep-size 16",
        _STORE
        | {
            "HCCL_BUFFSIZE": "200",
            "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK": "24",
            "SGLANG_NPU_USE_MLAPO": "1",
        },
    ),
    **{
        f"recipe {recipe}, {role}": _golden(recipe, role)
        for recipe in ("deepseek-r1", "deepseek-v3.2")
        for role in ("prefill", "decode")
    },
}


def table() -> Iterator[str]:
    """Lines for docs/ascend.md."""
    yield "| command line | ranks |"
    yield "|---|---|"
    for name, line in LINES.items():
        given = dict(flag for flag in line.flags() if len(flag) == 2)
        small = dict(flag for flag in line.scaled().flags() if len(flag) == 2)
        yield f"| {name} | {given.get('--tp-size', 1)}, here {small.get('--tp-size', 1)} |"


if __name__ == "__main__":
    print("\n".join(table()))
