"""The documents' command lines on the emulated NPU: each starts a server that answers, but for what
is refused by name."""

import json
import os
from pathlib import Path

import pytest

from banyan.base.errors import ConfigError
from banyan.config.cli import parse
from banyan.config.env import read_environment
from tests.emulation import commands
from tests.emulation.commands import LINES
from tests.emulation.test_families import LATENT
from tests.models.families import rewrite_config
from tests.models.quantised import FORMS
from tests.models.test_quant import rewrite_weights
from tests.system.checkpoint import write_tiny_model
from tests.system.serving import launch, status_of, wait_until
from tests.system.test_hidden_drafts import with_words

IS_WHOLE = os.environ.get("NPU_CASES") == "all"
ONE = "install page, one server"
DOCS = Path(__file__).parents[2] / "docs" / "ascend.md"
START_S = 300.0
SIZES = LATENT | {
    **{"num_attention_heads": 8, "num_key_value_heads": 8, "n_routed_experts": 16},
    **{"index_head_dim": 128, "moe_intermediate_size": 32},
}
AT_START = (
    *("--disaggregation-mode", "--disaggregation-bootstrap-port"),
    *("--moe-a2a-backend", "--enable-deepep-moe", "--deepep-mode"),
)
"""What is refused when a device is opened, or belongs to what is refused; drafts are refused when
the model is known. `test_ranks.py` and `test_handoff.py` see to it."""


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    """What each line serves: a model of 8-bit weights with experts, latents, a layer that drafts,
    and in V3.2 an indexer; one server takes any."""
    plain = write_tiny_model(tmp_path_factory.mktemp("plain") / "model")
    made = {ONE: plain}
    for recipe, variant in (("deepseek-r1", "deepseek v3"), ("deepseek-v3.2", "deepseek v3.2")):
        folder = tmp_path_factory.mktemp(recipe)
        with_words(variant, folder, plain, **SIZES)
        served = json.loads((folder / "config.json").read_text())
        if types := served.get("mlp_layer_types"):  # the one that drafts is not among these
            rewrite_config(folder, mlp_layer_types=types[: served["num_hidden_layers"]])
        rewrite_weights(folder, FORMS["modelslim, dynamic"])
        made |= {name: folder for name in LINES if recipe in name}
    return {name: made["recipe deepseek-r1, decode"] for name in LINES} | made


@pytest.mark.skipif(not IS_WHOLE, reason="NPU_CASES is not all")
@pytest.mark.parametrize("name", LINES)
def test_a_documented_line_starts_a_server_that_answers(
    npu, models: dict[str, Path], tmp_path, monkeypatch, name: str
) -> None:
    line = LINES[name].scaled().servable()
    variables = {"BANYAN_NPU": "emulated", "BANYAN_NPU_CHECKS": "1", **line.variables}
    for key, value in variables.items():
        monkeypatch.setenv(key, value)
    where = ("--model-path", str(models[name]), "--max-total-tokens", "4096")
    server = launch(tmp_path / "log", *where, *line.words)
    try:

        def is_ready() -> bool:
            assert server.process.poll() is None, server.tail()
            return status_of(server, "/readyz") == 200

        wait_until(is_ready, START_S, "the server to be ready")
        greedy = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
        for length in (3, 140):
            ids = [(7 * i * i + 3 * i) % 97 for i in range(length)]
            found = server.generate(input_ids=ids, sampling_params=greedy)
            assert len(found["output_ids"]) == 6
        ranks = int(dict(f for f in line.flags() if len(f) == 2).get("--tp-size", "1"))
        children = server.children_of("banyan.compose")
        assert len(children) >= ranks
    finally:
        server.kill()


@pytest.mark.parametrize("name", LINES)
def test_what_is_left_out_of_a_line_is_refused_by_name(name: str) -> None:
    line = LINES[name].scaled()
    for gone in line.left_out:
        if gone in AT_START or gone.startswith("--speculative"):
            continue
        words = [word for flag in line.flags() if flag[0] == gone for word in flag]
        words += line.servable().words
        kept = dict(line.servable().variables)
        kept |= {key: value for key, value in line.variables.items() if key == gone}
        with pytest.raises(ConfigError, match=gone):
            parse(["--model-path", "M", *words], read_environment(kept))
    parse(
        ["--model-path", "M", *line.servable().words], read_environment(line.servable().variables)
    )


def test_the_page_lists_what_is_left_out() -> None:
    assert "\n".join(commands.table()) in DOCS.read_text()
