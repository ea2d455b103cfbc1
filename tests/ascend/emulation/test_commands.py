"""The documents' command lines on the emulated NPU: each starts a server, which answers as a server
on the CPU does."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

import banyan
from tests.ascend.emulation import commands
from tests.ascend.emulation.commands import LINES, nodes_of, scaled
from tests.ascend.emulation.test_prologue import ALL, DEEPSEEK
from tests.models.families import rewrite_config, tiny
from tests.models.quantised import FORMS
from tests.models.quantised_checkpoints import rewrite_weights
from tests.support.documented_lines import FLAG_FILE
from tests.support.emulated import LATENT, compare
from tests.support.hidden_drafts import with_words
from tests.support.transfer_engines import needs
from tests.system.checkpoint import write_tiny_model
from tests.system.handing import Servers
from tests.system.serving import Server, free_port, launch, status_of, wait_until

IS_WHOLE = os.environ.get("NPU_CASES") == "all"
ONE = "install page: one server"
DOCS = Path(__file__).parents[3] / "docs" / "ascend.md"
START_S = 300.0
STORE = "ASCEND_MF_STORE_URL"
BFLOAT16 = 0.06
"""How far apart log-probabilities may be, of activations in 16 bits and in 32."""
SIZES = LATENT | {
    **{"num_attention_heads": 8, "num_key_value_heads": 8, "n_routed_experts": 16},
    **{"index_head_dim": 128, "moe_intermediate_size": 32},
    **{"hidden_size": 1024, "weights": 0.05},
}
WIDE = DEEPSEEK | {"num_hidden_layers": 2, "first_k_dense_replace": 1, "weights": 0.02}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    """What each line serves: a model of 8-bit weights with experts, latents, a layer that drafts,
    and in V3.2 an indexer; one server takes any."""
    plain = write_tiny_model(tmp_path_factory.mktemp("plain") / "model")
    made = {name: plain for name in LINES if name.startswith("server arguments") or name == ONE}
    for recipe, variant in (("deepseek-r1", "deepseek v3"), ("deepseek-v3.2", "deepseek v3.2")):
        folder = tmp_path_factory.mktemp(recipe)
        if recipe == "deepseek-r1":  # what comes before latent attention is one operator there
            tiny(variant, folder, **SIZES | WIDE, vocab_size=512, max_position_embeddings=2048)
            for file in plain.glob("tokenizer*"):
                shutil.copy(file, folder)
            rewrite_weights(folder, FORMS["modelslim, dynamic"], ALL)
            made |= {name: folder for name in LINES if recipe in name}
            made |= {name: folder for name in LINES if "install" in name and name != ONE}
            continue
        with_words(variant, folder, plain, **SIZES)
        served = json.loads((folder / "config.json").read_text())
        if types := served.get("mlp_layer_types"):  # the one that drafts is not among these
            rewrite_config(folder, mlp_layer_types=types[: served["num_hidden_layers"]])
        rewrite_weights(folder, FORMS["modelslim, dynamic"])
        made |= {name: folder for name in LINES if recipe in name or "guide" in name}
    return made


@contextmanager
def serving(
    name: str, model: Path, log: Path, patch: pytest.MonkeyPatch, nodes: int = 1
) -> Iterator[Server]:
    """A server of this line, once it is ready; the first of so many programs."""
    line = scaled(LINES[name], nodes)
    variables = {"BANYAN_NPU": "tests.ascend.emulation", "BANYAN_NPU_CHECKS": "1", **line.variables}
    variables["BANYAN_DEVICE"] = "npu"  # lines without the backend of NPUs name no device
    if nodes > 1:
        variables |= dict.fromkeys(("HCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"), "lo")
    if STORE in line.variables:  # of the server before it, or one that is made now
        variables[STORE] = os.environ.get(STORE) or f"tcp://127.0.0.1:{free_port()}"
        needs("ascend")
    for key, value in variables.items():
        patch.setenv(key, value)
    file = log.with_suffix(".yaml")
    file.write_text(FLAG_FILE)
    given = (str(file) if word == "config.yaml" else word for word in line.words)
    words = ("--model-path", str(model), "--max-total-tokens", "4096", *given)
    meeting = f"127.0.0.1:{free_port()}"
    programs = [
        launch(
            log.with_name(f"{log.name}-{node}"),
            *(*words, "--node-rank", str(node), "--dist-init-addr", meeting),
        )
        for node in reversed(range(nodes))
    ]
    server = programs[-1]
    try:

        def is_ready() -> bool:
            assert all(each.process.poll() is None for each in programs), server.tail()
            return status_of(server, "/readyz") == 200

        wait_until(is_ready, START_S, "the server to be ready")
        for each in programs:
            assert "several operators" not in each.log.read_text(errors="replace"), "one was asked"
        ranks = commands.ranks_of(line)
        assert all(len(p.children_of("banyan.server.processes")) >= ranks / nodes for p in programs)
        yield server
    finally:
        for each in programs:
            each.kill()


BODIES = [
    {
        "input_ids": [(7 * i * i + 3 * i) % 97 for i in range(length)],
        "sampling_params": {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True},
        "return_logprob": True,
        "top_logprobs_num": 2,
    }
    for length in (3, 140)
]
CASES = [(name, nodes_of(line)) for name, line in LINES.items() if "second" not in name]
"""The line of a second node is started beside the first's."""
_known: dict[Path, list[dict]] = {}


def of_cpu(model: Path) -> list[dict]:
    """What one server on the CPU answers."""
    if model not in _known:
        flags = {"device": "cpu", "skip_tokenizer_init": True, "max_total_tokens": 4096}
        with banyan.Engine(str(model), engine_mode="inprocess", threads=1, **flags) as engine:
            _known[model] = [engine.generate(**body) for body in BODIES]
    return _known[model]


@pytest.mark.skipif(not IS_WHOLE, reason="NPU_CASES is not all")
@pytest.mark.parametrize(("name", "nodes"), [*CASES, ("recipe deepseek-v3.2: decode", 2)])
def test_a_documented_line_starts_a_server_that_answers(
    npu, models: dict[str, Path], tmp_path, monkeypatch, name: str, nodes: int
) -> None:
    """One that goes on with prompts answers with one that computes them, by the line beside its.
    With two nodes, as documented, each of the two is two programs."""
    role, right = LINES[name].role, of_cpu(models[name])
    with ExitStack() as stack:

        def start(name: str) -> Server:
            log = tmp_path / re.sub(r"\W+", "-", name)
            return stack.enter_context(serving(name, models[name], log, monkeypatch, nodes))

        if role == "decode":
            first = start(name.replace("decode", "prefill"))
            port = int(
                dict(
                    f for f in LINES[name.replace("decode", "prefill")].flags() if len(f) == 2
                ).get("--disaggregation-bootstrap-port", 8998)
            )
            pair = Servers(first, start(name), port)
            answers = []
            for body in BODIES:
                both = [each.result(START_S) for each in pair.start("/generate", body)]
                assert [each.status_code for each in both] == [200, 200], both[1].text
                answers.append(both[1].json())
            hold(answers, right)
            stats = pair.decode.stats()
            assert stats["computed_tokens"] < 3 + 140 - 128 + 2 * 8, "a page came"
            return
        server = start(name)
        if role != "prefill":
            hold([server.generate(**body) for body in BODIES], right)
            return
        for room, body in enumerate(BODIES):
            asked = {"bootstrap_host": "127.0.0.1", "bootstrap_room": room, "stream": True, **body}
            with server.http.stream("POST", "/generate", json=asked, timeout=START_S) as answer:
                lines = next(line for line in answer.iter_lines() if line.startswith("data: "))
            first = json.loads(lines.removeprefix("data: "))
            assert len(first["output_ids"]) == 1
            assert abs(best(first) - best(right[room])) < BFLOAT16


def hold(found: list[dict], right: list[dict]) -> None:
    """Six tokens each; the CPU's, as far as its best token is clear. The best token of the first
    place is as likely as the CPU's, also where two are nearly as good."""
    assert all(len(each["output_ids"]) == 6 for each in found)
    compare(found, right, BFLOAT16)
    for mine, its in zip(found, right, strict=True):
        assert abs(best(mine) - best(its)) < BFLOAT16


def best(answer: dict) -> float:
    """The log-probability of the best token of the first place."""
    return answer["meta_info"]["output_top_logprobs"][0][0][0]


def test_the_page_lists_the_lines() -> None:
    assert "\n".join(commands.table()) in DOCS.read_text()
