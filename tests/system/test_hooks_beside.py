"""Hooks and dumps beside what else a start may ask for: they see every layer there and change no
answer, or the pair is refused by name."""

import json
import os
from pathlib import Path

import pytest

from banyan.base.errors import BanyanError
from banyan.llm import Engine
from tests.models.drafting import tiny_eagle, tiny_mtp
from tests.models.families import tiny
from tests.support.lora import write_adapter

PROMPT = [5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6, 7]
EIGHT = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
INSIDE = {"engine_mode": "inprocess"}
ADAPTIVE = {"disable_adaptive_drafts": True}
WHOLE = pytest.mark.skipif(os.environ.get("PARALLEL") != "all", reason="make test-parallel runs it")
CODE = """
import os

def scaled(config):
    def hook(module, given, made):
        with open(config["record"], "a") as file:
            file.write(f"{os.getpid()} ")
        return made * config["by"]
    return hook
"""


def answer(model: Path, **flags: object) -> list[object]:
    """Tokens, or the vector, of the prompt."""
    given = {"skip_tokenizer_init": True, "threads": 1, "max_total_tokens": 2048, **flags}
    with Engine(str(model), cpu_activations="fp32", log_level="error", **given) as engine:
        if "is_embedding" in flags:
            return engine.encode(PROMPT)["embedding"]
        asked: dict[str, object] = {"input_ids": PROMPT, "sampling_params": EIGHT}
        if "lora_paths" in flags:
            asked["lora_path"] = "a"
        return engine.generate(**asked)["output_ids"]


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that the hook writes to."""
    (tmp_path / "its_hooks.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    return tmp_path / "record"


def hook(record: Path, by: float) -> list[str]:
    config = {"record": str(record), "by": by}
    named = {"target_modules": ["layers.*.mlp"], "hook_factory": "its_hooks:scaled"}
    return [json.dumps(named | {"config": config})]


def sees_and_changes_nothing(model: Path, record: Path, ranks: int, **flags: object) -> None:
    """Every rank's layers are seen and dumped, and the answer is that without; a hook that changes
    them changes the answer."""
    plain, folder = answer(model, **flags), record.parent / "dumped"
    watched = {"forward_hooks": hook(record, 1.0), "debug_tensor_dump_output_folder": str(folder)}
    assert answer(model, **flags, **watched) == plain
    assert len(set(record.read_text().split())) == ranks
    dumped = {each.parent.name for each in folder.glob("*/pass-*.safetensors")}
    assert len(dumped) == ranks
    assert answer(model, **flags, forward_hooks=hook(record, -40.0)) != plain


def test_next_to_drafts_of_the_text(tiny_model: Path, record: Path) -> None:
    sees_and_changes_nothing(tiny_model, record, 1, **INSIDE, speculative_algorithm="NGRAM")


@WHOLE
def test_next_to_drafts_of_another_model(tiny_model: Path, record: Path) -> None:
    drafting = {"speculative_algorithm": "STANDALONE", **ADAPTIVE}
    named = {"speculative_draft_model_path": str(tiny_model), **drafting}
    sees_and_changes_nothing(tiny_model, record, 1, **INSIDE, **named)


@WHOLE
def test_next_to_drafts_of_the_model_itself(tmp_path: Path, record: Path) -> None:
    tiny_mtp("deepseek v3", tmp_path / "model")
    named = {"speculative_algorithm": "NEXTN", **ADAPTIVE}
    sees_and_changes_nothing(tmp_path / "model", record, 1, **INSIDE, **named)


@WHOLE
def test_next_to_drafts_of_a_model_made_for_it(tmp_path: Path, record: Path) -> None:
    tiny_eagle("mistral", tmp_path / "model", tmp_path / "eagle")
    named = {"speculative_algorithm": "EAGLE", **ADAPTIVE}
    named["speculative_draft_model_path"] = str(tmp_path / "eagle")
    sees_and_changes_nothing(tmp_path / "model", record, 1, **INSIDE, **named)


def test_next_to_adapters(tiny_model: Path, tmp_path: Path, record: Path) -> None:
    named = [f"a={write_adapter(tmp_path / 'a', 0)}"]
    sees_and_changes_nothing(tiny_model, record, 1, **INSIDE, lora_paths=named)


def test_where_vectors_are_asked_for(tiny_model: Path, record: Path) -> None:
    sees_and_changes_nothing(tiny_model, record, 1, **INSIDE, is_embedding=True)


RANKS = (
    ("mistral", {"tp_size": 2}),
    ("mistral", {"pp_size": 2}),
    ("qwen3 moe", {"dp_size": 2, "tp_size": 2, "enable_dp_attention": True}),
)


@WHOLE
@pytest.mark.parametrize(("variant", "layout"), RANKS)
def test_on_every_rank(
    variant: str, layout: dict[str, object], tmp_path: Path, record: Path
) -> None:
    tiny(variant, tmp_path / "model")
    sees_and_changes_nothing(tmp_path / "model", record, 2, **layout)


@WHOLE
def test_next_to_a_second_replica(tiny_model: Path, record: Path) -> None:
    sees_and_changes_nothing(tiny_model, record, 1, dp_size=2)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"num_continuous_decode_steps": 4}, "cannot be combined with --forward-hooks"),
        ({"model_impl": "transformers"}, "cannot be combined with --model-impl transformers"),
    ],
)
def test_what_it_does_not_go_with_is_refused_by_name(
    flags: dict[str, object], said: str, tiny_model: Path, record: Path
) -> None:
    with pytest.raises(BanyanError, match=said):
        answer(tiny_model, **INSIDE, **flags, forward_hooks=hook(record, 1.0))
