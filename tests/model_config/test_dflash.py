"""Models that draft blocks: what their configurations say, and what they do not go with."""

from pathlib import Path

import pytest

from banyan.base.errors import BanyanError
from banyan.config.env import Environment
from banyan.config.resolve import prepare
from banyan.config.schema import Config
from banyan.model_config.checkpoint import read_model_config
from banyan.model_config.draft_model import draft_model_config, draft_of
from tests.model_config.test_checkpoint import LLAMA, folder
from tests.support.flags import config_of

TARGET = LLAMA | {"num_hidden_layers": 12}
BLOCKS = LLAMA | {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "block_size": 8,
    "num_target_layers": 12,
    "dflash_config": {"mask_token_id": 5, "target_layer_ids": [1, 9]},
}


def of(tmp_path: Path, *words: str, draft: object = None, target: object = None) -> Config:
    for name in "ab":
        (tmp_path / name).mkdir(exist_ok=True)
    named = ("--model-path", folder(tmp_path / "a", TARGET | (target or {})))
    model = ("--speculative-draft-model-path", folder(tmp_path / "b", BLOCKS | (draft or {})))
    asked = ("--speculative-algorithm", "DFLASH", *words)
    return prepare(config_of(*named, *model, *asked), Environment())[0]


@pytest.mark.parametrize(
    ("words", "drafts"),
    [
        ("", 7),
        ("--speculative-dflash-block-size 4", 3),
        ("--speculative-num-draft-tokens 4", 3),
        ("--speculative-num-draft-tokens 4 --speculative-dflash-block-size 4", 3),
        ("--speculative-num-steps 1", 7),
        ("--speculative-dflash-block-size 12", 11),
    ],
)
def test_a_block_is_as_long_as_the_flags_or_the_model_say(tmp_path, caplog, words, drafts):
    speculative = of(tmp_path, *words.split()).speculative
    assert (speculative.drafts, speculative.levels) == (drafts, 1)
    assert ("was trained for blocks of 8 tokens: of 12" in caplog.text) == (drafts > 7)


@pytest.mark.parametrize(
    ("facts", "taps", "block"),
    [
        ({}, (2, 10), 8),
        ({"dflash_config": {"mask_token_id": 5}}, (2, 10), 8),
        ({"dflash_config": {"mask_token_id": 5}, "num_hidden_layers": 1}, (7,), 8),
        ({"block_size": None}, (2, 10), 16),
        ({"dflash_config": BLOCKS["dflash_config"] | {"block_size": 4}}, (2, 10), 4),
    ],
)
def test_a_model_says_which_layers_it_reads(tmp_path, facts, taps, block):
    config = of(tmp_path, draft=facts)
    served = read_model_config(config.model.path)
    model_config = draft_model_config(config.speculative, draft_of(config), served)
    assert model_config.eagle is not None and model_config.architecture == "Qwen3ForCausalLM"
    assert (model_config.eagle.aux_layers, model_config.eagle.block, model_config.eagle.mask) == (
        taps,
        block,
        5,
    )


def told(**facts: object) -> dict[str, object]:
    return {"dflash_config": {**BLOCKS["dflash_config"], **facts}}


@pytest.mark.parametrize(
    ("draft", "target", "words", "text"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, {}, "", "of DFlashDraftModel, and this is"),
        (told(projector_type="domino"), {}, "", "dflash_config.projector_type: draft models of"),
        ({"layer_types": ["sliding_attention"] * 2}, {}, "", "layer_types: draft models of"),
        (told(target_layer_ids=[1, 11]), {}, "", "outputs of layers .* the served model has 12"),
        (told(target_layer_ids=[9, 1]), {}, "", "from the first on, each once"),
        (told(mask_token_id=10**9), {}, "", "mask_token_id must be in"),
        (told(mask_token_id=None), {}, "", "mask_token_id must be a whole number; it is missing"),
        ({"block_size": 1}, {}, "", "block_size must be in"),
        ({"hidden_size": 128, "head_dim": 16}, {}, "", "reads hidden states of 128 numbers"),
        ({}, {}, "--speculative-num-steps 4", "in one pass, one token behind another"),
        ({}, {}, "--speculative-eagle-topk 4", "in one pass, one token behind another"),
        (
            {},
            {},
            "--speculative-num-draft-tokens 4 --speculative-dflash-block-size 5",
            "a row verifies one block",
        ),
        ({}, {}, "--tp-size 2 --attn-cp-size 2", "DFLASH"),
        ({}, {}, "--pp-size 2", "stages do not verify"),
        ({}, {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}, "", "not drafted for"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(tmp_path, draft, target, words, text):
    with pytest.raises(BanyanError, match=text):
        of(tmp_path, *words.split(), draft=draft, target=target)


def test_a_length_of_blocks_is_for_dflash_alone():
    words = ("--speculative-algorithm", "NGRAM", "--speculative-dflash-block-size", "4")
    with pytest.raises(BanyanError, match="only DFLASH reads it"):
        prepare(config_of(*words), Environment())
    with pytest.raises(BanyanError, match="needs --speculative-draft-model-path"):
        prepare(config_of("--speculative-algorithm", "DFLASH"), Environment())
