"""The model that drafts: what the flags say of it, and what it does not go with."""

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from banyan.base.errors import BanyanError
from banyan.config.env import Environment
from banyan.config.resolve import prepare
from banyan.config.rules.conflicts import refuse_conflicts
from banyan.config.schema import Config, SpeculativeConfig
from banyan.config.speculation import branching_flag, longest_branch, plan_drafts
from banyan.formats.arrays import write_arrays
from banyan.model_config.checkpoint import read_model_config
from banyan.model_config.draft_model import draft_model_config, draft_of, find_draft_model
from tests.support.checkpoints import LLAMA, folder
from tests.support.flags import config_of

SMALL = LLAMA | {"num_hidden_layers": 1}


@pytest.fixture
def models(tmp_path: Path):
    """Writes a target and a draft of some facts; the flags that name both."""

    def write(target: dict = LLAMA, draft: dict = SMALL) -> list[str]:
        for name in "ab":
            (tmp_path / name).mkdir(exist_ok=True)
        named = [folder(tmp_path / name, facts) for name, facts in (("a", target), ("b", draft))]
        return [
            *("--model-path", named[0], "--speculative-draft-model-path", named[1]),
            *("--speculative-algorithm", "STANDALONE"),
        ]

    return write


def resolved(*words: str):
    return prepare(config_of(*words), Environment())[0]


@pytest.mark.parametrize(
    ("words", "drafts"),
    [
        ("", 3),
        ("--speculative-num-steps 5", 5),
        ("--speculative-num-draft-tokens 3", 2),
        ("--speculative-num-steps 2 --speculative-eagle-topk 1", 2),
    ],
)
def test_a_model_drafts_three_tokens_by_default(models, words: str, drafts: int):
    assert resolved(*models(), *words.split()).speculative.drafts == drafts


def test_what_the_flags_say_of_the_draft_is_of_it_alone(models):
    words = models()
    config = resolved(
        *words,
        *("--speculative-draft-model-revision", "main", "--speculative-draft-load-format", "dummy"),
        *("--speculative-draft-model-quantization", "int8", "--quantization", "q8_0"),
    )
    draft = draft_of(config)
    assert (draft.revision, draft.load_format, draft.quantization) == ("main", "dummy", "int8")
    assert draft.path == words[3]
    assert (config.model.revision, config.model.quantization) == ("", "q8_0")
    assert config.model.load_format == "safetensors"


def test_a_draft_model_is_read_by_the_configuration_that_was_named(models, tmp_path: Path):
    words = models()
    plain = (Path(words[3]) / "config.json").rename(tmp_path / "decrypted.json")
    (Path(words[3]) / "config.json").write_bytes(b"encrypted")
    with pytest.raises(BanyanError, match="is not JSON"):
        resolved(*words)
    config = resolved(*words, "--decrypted-draft-config-file", str(plain))
    draft = draft_model_config(config.speculative, draft_of(config), None)
    assert draft.num_layers == SMALL["num_hidden_layers"]


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({"vocab_size": LLAMA["vocab_size"] + 1}, "their token ids differ"),
        ({"num_hidden_layers": 9}, "its drafts would take longer"),
        ({"architectures": ["BertModel"], "model_type": "bert"}, "is an embedding model|Bert"),
    ],
)
def test_a_draft_that_does_not_go_with_the_model_is_refused(models, facts: dict, text: str):
    with pytest.raises(BanyanError, match=text):
        resolved(*models(draft=SMALL | facts))


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--nnodes 2 --tp-size 2 --dist-init-addr here:5000", "on one machine only"),
        ("--pp-size 2", "stages do not verify"),
        ("--speculative-eagle-topk 2", "the size of the draft tree is not given"),
        ("--speculative-token-map FILE", "it is for --speculative-algorithm EAGLE with"),
        ("--speculative-draft-model-quantization nvfp4_online", "not available in this build"),
        ("--speculative-draft-model-quantization gptq", "draft-model-quantization gptq is not"),
        ("--speculative-draft-load-format gguf", "gguf"),
        ("--tp-size 3", "do not divide"),
    ],
)
def test_what_a_draft_model_does_not_go_with_is_refused_by_name(models, words: str, text: str):
    with pytest.raises(BanyanError, match=text):
        resolved(*models(), *words.split())


def test_the_two_must_belong_together(models):
    words = models()
    with pytest.raises(BanyanError, match="needs --speculative-draft-model-path"):
        resolved(*words[:2], *words[4:])
    with pytest.raises(BanyanError, match="it drafts without a model"):
        resolved(*words[:4], "--speculative-algorithm", "NGRAM")
    with pytest.raises(BanyanError, match="there is no model"):
        resolved(*words[:2], "--speculative-draft-model-path", "/nowhere", *words[4:])


def test_ranks_that_cannot_share_the_draft_are_refused(models):
    draft = SMALL | {"num_attention_heads": 1, "num_key_value_heads": 1}
    with pytest.raises(BanyanError, match="do not divide its 1 heads"):
        resolved(*models(draft=draft), "--tp-size", "2")


def test_a_draft_without_an_algorithm_is_reported(models, caplog):
    words = models()
    assert resolved(*words[:4]).speculative.drafts == 0
    assert "draft source has no effect" in caplog.text
    assert json.loads(Path(words[3], "config.json").read_text())


AHEAD = LLAMA | {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "num_nextn_predict_layers": 1,
}


MIMO = {"architecture": "MiMoForCausalLM"}


def ahead(path: Path, facts: dict, *words: str):
    named = ("--model-path", folder(path, facts), "--speculative-algorithm", "NEXTN")
    return resolved(*named, *words).speculative


def test_a_layer_of_the_checkpoint_drafts_without_a_model_of_its_own(tmp_path):
    speculative = ahead(tmp_path, AHEAD)
    assert speculative.is_mtp and speculative.is_model and speculative.drafts == 3
    assert not speculative.draft_path
    named = ("--model-path", folder(tmp_path, AHEAD), "--speculative-algorithm", "DEEPSEEK_MTP")
    assert resolved(*named).speculative == speculative


@pytest.mark.parametrize(
    ("facts", "words", "text"),
    [
        ({"num_nextn_predict_layers": 0}, "", "has no layer for drafting"),
        ({}, "--speculative-draft-model-path M", "the served model's checkpoint"),
        ({}, "--speculative-draft-model-quantization int8", "the served model's checkpoint"),
        ({}, "--speculative-draft-load-format dummy", "the served model's checkpoint"),
        ({}, "--pp-size 2", "stages do not verify"),
        ({}, "--speculative-eagle-topk 4", "the size of the draft tree is not given"),
    ],
)
def test_what_a_layer_that_drafts_does_not_go_with_is_refused_by_name(
    tmp_path, facts: dict, words: str, text: str
):
    with pytest.raises(BanyanError, match=text):
        ahead(tmp_path, AHEAD | facts, *words.split())


def test_the_layer_of_a_model_with_an_indexer_drafts(tmp_path):
    latent = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4}
    indexer = {"index_n_heads": 4, "index_head_dim": 8, "index_topk": 4, "v_head_dim": 8}
    facts = AHEAD | latent | indexer | {"architectures": ["DeepseekV32ForCausalLM"]}
    assert ahead(tmp_path, facts).is_mtp


@pytest.mark.parametrize(
    "other", [{"architecture": "Qwen3ForCausalLM"}, {"format": "gguf", **MIMO}], ids=str
)
def test_a_layer_that_is_not_run_is_refused(tmp_path, other: dict):
    """Its family runs none, or none from files of this form."""
    config = resolved("--model-path", folder(tmp_path, AHEAD), "--speculative-algorithm", "NEXTN")
    model_config = replace(read_model_config(config.model.path), **other)
    with pytest.raises(BanyanError, match=f"of {model_config.architecture} cannot be loaded from"):
        find_draft_model(
            config, model_config, Environment(), lambda config, model_config, environment: config
        )


EAGLE = SMALL | {"architectures": ["LlamaForCausalLMEagle"]}
TREE = "--speculative-num-steps 2 --speculative-eagle-topk 3 --speculative-num-draft-tokens 9"


EAGLE3 = SMALL | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 7}
TAPS = "eagle_aux_hidden_state_layer_ids"


def eagle(models, draft: dict, target: dict = LLAMA, *words: str):
    name = "EAGLE3" if draft.items() >= EAGLE3.items() else "EAGLE"
    return resolved(*models(target, draft)[:4], "--speculative-algorithm", name, *words)


@pytest.mark.parametrize("name", ["LlamaForCausalLMEagle", "LlamaForCausalLM"])
def test_a_model_that_was_trained_to_draft_is_known_by_both_its_names(models, name: str):
    config = eagle(models, EAGLE | {"architectures": [name]})
    speculative = config.speculative
    assert speculative.is_eagle and not speculative.is_mtp
    draft = draft_model_config(speculative, draft_of(config), read_model_config(config.model.path))
    assert (draft.architecture, draft.num_layers) == ("LlamaForCausalLM", 1)


@pytest.mark.parametrize("name", ["EAGLE", "STANDALONE", "NEXTN"])
def test_a_tree_has_as_many_drafts_as_all_three_flags_say(models, tmp_path, name: str):
    if name == "NEXTN":
        (tmp_path / "ahead").mkdir()
        speculative = ahead(tmp_path / "ahead", AHEAD, *TREE.split())
    else:
        draft = EAGLE if name == "EAGLE" else SMALL
        named = models(LLAMA, draft)[:4]
        words = (*named, "--speculative-algorithm", name, *TREE.split())
        speculative = resolved(*words).speculative
    assert (speculative.drafts, speculative.levels, longest_branch(speculative)) == (8, 2, 3)
    assert branching_flag(speculative) == "--speculative-eagle-topk 3"


@pytest.mark.parametrize(
    ("target", "words", "expected"),
    [
        ({}, "", (7, 5, 4)),
        ({}, "--device npu", (3, 0, 0)),
        ({}, "--attention-backend torch_native", (7, 5, 4)),
        ({}, "--tp-size 2 --attn-cp-size 2", (3, 0, 0)),
        ({}, "--speculative-num-steps 4", (4, 0, 0)),
        ({}, "--speculative-eagle-topk 1", (3, 0, 1)),
        ({}, "--speculative-num-draft-tokens 3", (2, 0, 0)),
        ({"architectures": ["MistralForCausalLM"], "model_type": "mistral"}, "", (3, 0, 0)),
    ],
)
@pytest.mark.parametrize("draft", ["EAGLE", "EAGLE3"])
def test_what_is_drafted_where_none_of_the_three_is_given(models, draft, target, words, expected):
    facts = {"EAGLE": EAGLE, "EAGLE3": EAGLE3}[draft]
    config = eagle(models, facts, LLAMA | {"num_hidden_layers": 12} | target, *words.split())
    speculative = config.speculative
    assert (speculative.drafts, speculative.levels, speculative.eagle_topk) == expected


def test_other_attention_reads_no_trees(models):
    def with_another(*words: str) -> Config:
        config = eagle(models, EAGLE, LLAMA, "--speculative-num-steps", "2")
        given = eagle(models, EAGLE, LLAMA, *words).speculative if words else SpeculativeConfig()
        named = ("algorithm", "draft_source")
        given = replace(given, **{name: getattr(config.speculative, name) for name in named})
        device = replace(config.device, attention="of a plug-in")
        config = replace(config, speculative=given, device=device)
        refuse_conflicts(config, None, Environment())
        return plan_drafts(config, read_model_config(config.model.path), Environment())

    assert (with_another().speculative.drafts, with_another().speculative.levels) == (3, 0)
    with pytest.raises(BanyanError, match="topk 3 cannot be combined with --attention-backend"):
        with_another(*TREE.split())


@pytest.mark.parametrize(
    ("facts", "taps"),
    [
        ({}, (2, 6, 9)),
        ({"eagle_config": {TAPS: [1, 5, 8], "use_aux_hidden_state": True}}, (2, 6, 9)),
        ({"eagle_config": {TAPS: [3, 0]}}, (1, 4)),
        ({"architectures": ["LlamaForCausalLM"]}, (2, 6, 9)),
    ],
)
def test_a_model_of_eagle3_says_which_layers_it_reads(models, facts: dict, taps: tuple):
    config = resolved(
        *models(LLAMA | {"num_hidden_layers": 12}, EAGLE3 | facts)[:4],
        *("--speculative-algorithm", "EAGLE3"),
    )
    speculative = config.speculative
    assert speculative.is_eagle and not speculative.is_mtp
    draft = draft_model_config(speculative, draft_of(config), read_model_config(config.model.path))
    assert draft.draft_fields is not None and draft.vocab_size == LLAMA["vocab_size"]
    assert (draft.draft_fields.num_tokens, draft.draft_fields.aux_layers) == (7, taps)


def test_eagle3_needs_a_model(tmp_path):
    named = ("--model-path", folder(tmp_path, AHEAD), "--speculative-algorithm", "EAGLE3")
    with pytest.raises(BanyanError, match="needs --speculative-draft-model-path"):
        resolved(*named)


def test_without_a_model_eagle_is_the_layer_of_the_checkpoint(tmp_path):
    named = ("--model-path", folder(tmp_path, AHEAD), "--speculative-algorithm", "EAGLE")
    assert resolved(*named).speculative.is_mtp
    with pytest.raises(BanyanError, match="has no layer for drafting"):
        resolved(*named[:1], folder(tmp_path, LLAMA), *named[2:])


@pytest.mark.parametrize(
    ("draft", "target", "words", "text"),
    [
        ({"hidden_size": 2 * LLAMA["hidden_size"]}, {}, "", "reads hidden states of"),
        ({"vocab_size": LLAMA["vocab_size"] + 1}, {}, "", "their token ids differ"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, {}, "", "LlamaForCausalLMEagle, Ll"),
        (
            {"draft_vocab_size": 7, "architectures": ["LlamaForCausalLM"]},
            {},
            "",
            "of EAGLE3's kind",
        ),
        ({"architectures": ["Qwen2ForCausalLM"]}, {}, "", "reads draft models of"),
        ({}, AHEAD, "", "is not supported; supported are LlamaForCausalLM"),
        ({}, {}, "--pp-size 2", "stages do not verify"),
        ({}, {}, "--speculative-eagle-topk 4 --speculative-num-steps 2", "is not given"),
        ({}, {}, TREE.replace("tokens 9", "tokens 14"), "at most 12 drafts, not 13"),
        ({}, {}, f"{TREE} --tp-size 2 --attn-cp-size 2", "cannot be combined with .*topk 3"),
        ({}, {}, "--speculative-token-map FILE.json", "cannot be read: .*No such file"),
        ({}, {}, "--speculative-token-map FILE.pt", "is a pickle"),
    ],
)
def test_what_eagle_does_not_go_with_is_refused_by_name(models, draft, target, words, text):
    with pytest.raises(BanyanError, match=text):
        eagle(models, EAGLE | draft, LLAMA | target, *words.split())


@pytest.mark.parametrize(
    ("draft", "target", "text"),
    [
        ({"hidden_size": 2 * LLAMA["hidden_size"]}, {}, "reads hidden states of"),
        ({"vocab_size": LLAMA["vocab_size"] + 1}, {}, "their token ids differ"),
        ({"draft_vocab_size": LLAMA["vocab_size"] + 1}, {}, "draft_vocab_size must be in"),
        ({"num_hidden_layers": 2}, {}, "num_hidden_layers is not supported"),
        ({"target_hidden_size": 3}, {}, "target_hidden_size is not supported"),
        ({"norm_before_residual": True}, {}, "norm_before_residual is not supported"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, {}, "use_aux_hidden_state is not"),
        ({"eagle_config": {TAPS: [1, 12]}}, {}, "layers .2, 13. .*has 12"),
        ({"eagle_config": {TAPS: [1, "a"]}}, {}, "layers .2, .a.. .*has 12"),
        ({"eagle_config": {TAPS: [1] * 9}}, {}, "reads the inputs of layers"),
        ({}, {"num_hidden_layers": 2}, "layers .2, 1, -1. .*has 2"),
        ({}, AHEAD | {"num_hidden_layers": 12}, "is not supported; supported are LlamaForCausalLM"),
    ],
)
def test_what_eagle3_does_not_go_with_is_refused_by_name(models, draft, target, text):
    words = models(LLAMA | {"num_hidden_layers": 12} | target, EAGLE3 | draft)
    with pytest.raises(BanyanError, match=text):
        resolved(*words[:4], "--speculative-algorithm", "EAGLE3")


def write_ids(path: Path, ids: list) -> str:
    array = np.array(ids)
    if path.suffix == ".json":
        path.write_text(json.dumps(ids))
    elif path.suffix == ".npy":
        np.save(path, array)
    else:
        write_arrays(str(path), {"token_map": array}, {})
    return str(path)


@pytest.mark.parametrize("form", ["json", "npy", "safetensors"])
def test_a_token_map_says_what_is_drafted(models, tmp_path, form: str):
    path = write_ids(tmp_path / f"hot.{form}", [7, 3, 400])
    config = eagle(models, EAGLE, LLAMA, "--speculative-token-map", path)
    served = read_model_config(config.model.path)
    draft = draft_model_config(config.speculative, draft_of(config), served)
    assert draft.draft_fields is not None
    assert (
        draft.draft_fields.tokens,
        draft.draft_fields.num_tokens,
        draft.draft_fields.aux_layers,
    ) == (
        (3, 7, 400),
        3,
        (),
    )


@pytest.mark.parametrize(
    ("name", "ids", "text"),
    [
        ("a.json", [1, 512], "names token 512, the model has 512"),
        ("a.npy", [-1, 5], "names token -1, the model has 512"),
        ("a.json", [5, 5], "names a token twice"),
        ("a.json", [], "names no token"),
        ("a.json", [1.5], "holds no list of token ids"),
        ("a.json", [True], "holds no list of token ids"),
        ("a.npy", [1.5], "holds no list of token ids"),
        ("a.npy", [[1, 2]], "holds no list of token ids"),
        ("a.npy", [{"a": 1}], "cannot be read: .*allow_pickle"),
        ("a.safetensors", [[1, 2]], "holds no list of token ids"),
    ],
)
def test_a_token_map_of_something_else_is_refused(models, tmp_path, name, ids, text):
    path = write_ids(tmp_path / name, ids)
    with pytest.raises(BanyanError, match=text):
        eagle(models, EAGLE, LLAMA, "--speculative-token-map", path)


def test_a_token_map_in_a_damaged_or_huge_file_is_refused(models, tmp_path):
    path = tmp_path / "a.json"
    path.write_text("[1, 2")
    with pytest.raises(BanyanError, match="cannot be read"):
        eagle(models, EAGLE, LLAMA, "--speculative-token-map", str(path))
    os.truncate(path, 1 << 27)
    with pytest.raises(BanyanError, match="more than 67,108,864 bytes"):
        eagle(models, EAGLE, LLAMA, "--speculative-token-map", str(path))


def test_a_token_map_is_for_eagle_alone(models, tmp_path):
    path = write_ids(tmp_path / "hot.json", [1])
    with pytest.raises(BanyanError, match="names its own draft vocabulary"):
        eagle(models, EAGLE3, LLAMA, "--speculative-token-map", path)
    named = ("--model-path", folder(tmp_path, LLAMA), "--speculative-algorithm", "NGRAM")
    with pytest.raises(BanyanError, match="it is for --speculative-algorithm EAGLE with"):
        resolved(*named, "--speculative-token-map", path)


DFLASH_TARGET = LLAMA | {"num_hidden_layers": 12}
DFLASH = LLAMA | {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "block_size": 8,
    "num_target_layers": 12,
    "dflash_config": {"mask_token_id": 5, "target_layer_ids": [1, 9]},
}


def dflash_pair(tmp_path: Path, *words: str, draft: object = None, target: object = None) -> Config:
    for name in "ab":
        (tmp_path / name).mkdir(exist_ok=True)
    named = ("--model-path", folder(tmp_path / "a", DFLASH_TARGET | (target or {})))
    model = ("--speculative-draft-model-path", folder(tmp_path / "b", DFLASH | (draft or {})))
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
    speculative = dflash_pair(tmp_path, *words.split()).speculative
    assert (speculative.drafts, speculative.levels) == (drafts, 1)
    assert (
        "was trained for blocks of 8 tokens: acceptance drops in blocks of 12" in caplog.text
    ) == (drafts > 7)


@pytest.mark.parametrize(
    ("facts", "taps", "block"),
    [
        ({}, (2, 10), 8),
        ({"dflash_config": {"mask_token_id": 5}}, (2, 10), 8),
        ({"dflash_config": {"mask_token_id": 5}, "num_hidden_layers": 1}, (7,), 8),
        ({"block_size": None}, (2, 10), 16),
        ({"dflash_config": DFLASH["dflash_config"] | {"block_size": 4}}, (2, 10), 4),
    ],
)
def test_a_model_says_which_layers_it_reads(tmp_path, facts, taps, block):
    config = dflash_pair(tmp_path, draft=facts)
    served = read_model_config(config.model.path)
    model_config = draft_model_config(config.speculative, draft_of(config), served)
    assert model_config.draft_fields is not None and model_config.architecture == "Qwen3ForCausalLM"
    assert (
        model_config.draft_fields.aux_layers,
        model_config.draft_fields.block,
        model_config.draft_fields.mask,
    ) == (
        taps,
        block,
        5,
    )


def dflash_keys(**facts: object) -> dict[str, object]:
    return {"dflash_config": {**DFLASH["dflash_config"], **facts}}


@pytest.mark.parametrize(
    ("draft", "target", "words", "text"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, {}, "", "of DFlashDraftModel, and this is"),
        (
            dflash_keys(projector_type="domino"),
            {},
            "",
            "dflash_config.projector_type: only draft models of",
        ),
        ({"layer_types": ["sliding_attention"] * 2}, {}, "", "layer_types: only draft models of"),
        (
            dflash_keys(target_layer_ids=[1, 11]),
            {},
            "",
            "outputs of layers .* the served model has 12",
        ),
        (dflash_keys(target_layer_ids=[9, 1]), {}, "", "must be ascending, without repeats"),
        (dflash_keys(mask_token_id=10**9), {}, "", "mask_token_id must be in"),
        (
            dflash_keys(mask_token_id=None),
            {},
            "",
            "mask_token_id must be a whole number; it is missing",
        ),
        ({"block_size": 1}, {}, "", "block_size must be in"),
        ({"hidden_size": 128, "head_dim": 16}, {}, "", "reads hidden states of 128 numbers"),
        ({}, {}, "--speculative-num-steps 4", "in one pass, as one sequence"),
        ({}, {}, "--speculative-eagle-topk 4", "in one pass, as one sequence"),
        (
            {},
            {},
            "--speculative-num-draft-tokens 4 --speculative-dflash-block-size 5",
            "a row verifies one block",
        ),
        ({}, {}, "--tp-size 2 --attn-cp-size 2", "DFLASH"),
        ({}, {}, "--pp-size 2", "stages do not verify"),
        (
            {},
            {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"},
            "",
            "is not supported; supported",
        ),
    ],
)
def test_what_dflash_does_not_combine_with_is_refused_by_name(tmp_path, draft, target, words, text):
    with pytest.raises(BanyanError, match=text):
        dflash_pair(tmp_path, *words.split(), draft=draft, target=target)


def test_a_length_of_blocks_is_for_dflash_alone():
    words = ("--speculative-algorithm", "NGRAM", "--speculative-dflash-block-size", "4")
    with pytest.raises(BanyanError, match="only DFLASH reads it"):
        prepare(config_of(*words), Environment())
    with pytest.raises(BanyanError, match="needs --speculative-draft-model-path"):
        prepare(config_of("--speculative-algorithm", "DFLASH"), Environment())
