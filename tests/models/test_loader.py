"""The strict account of the loader, sharded checkpoints, and random weights."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from banyan.base.errors import ConfigError, ModelError
from banyan.layers.build import Build
from banyan.layers.step_inputs import StepInputs
from banyan.models.weights.loader import load_model
from banyan.models.weights.reader import load_transforms, read_tensors
from banyan.ops.bind import bind

CPU = torch.device("cpu")
PROMPT = list(range(20))


def load(model_config, ops, **changes):
    return load_model(model_config, Build(ops), **changes)


def rewrite(model_config, change):
    """Apply `change` to the checkpoint's dictionary of tensors."""
    path = Path(model_config.path) / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_a_missing_tensor_is_named(tiny_llama, ops):
    _, model_config = tiny_llama()
    rewrite(model_config, lambda t: t.pop("model.layers.1.self_attn.k_proj.weight"))

    with pytest.raises(ModelError, match=r"lacks 1 weights.*layers\.1\.attention\.qkv\.weight \(k"):
        load(model_config, ops)


def test_the_first_five_of_many_missing_tensors_are_named(tiny_llama, ops):
    _, model_config = tiny_llama()

    with pytest.raises(ModelError, match=r"lacks 18 weights.*layers\.2.* and 13 more"):
        load(replace(model_config, num_layers=4), ops)


def test_a_tensor_without_a_place_is_named(tiny_llama, ops):
    _, model_config = tiny_llama()
    rewrite(
        model_config, lambda t: t.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(8)})
    )

    with pytest.raises(ModelError, match=r"1 tensors.*no place.*q_norm"):
        load(model_config, ops)


def test_a_bias_that_the_configuration_does_not_have_is_refused(tiny_llama, ops):
    _, model_config = tiny_llama(attention_bias=True)

    with pytest.raises(ModelError, match="8 tensors of the checkpoint have no place"):
        load(replace(model_config, attention_bias=False, output_bias=False), ops)


def test_a_tensor_of_another_shape_is_refused_with_both_shapes(tiny_llama, ops):
    _, model_config = tiny_llama()

    with pytest.raises(ModelError, match=r"mlp\..*has shape \[\d+.*asks for \[\d+"):
        load(replace(model_config, intermediate_size=32), ops)


def test_stored_rotary_frequencies_are_ignored(tiny_llama, ops):
    _, model_config = tiny_llama()
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(model_config, lambda t: t.update({name: torch.ones(4)}))

    load(model_config, ops)


def test_a_sharded_checkpoint_loads_like_a_whole_one(tiny_llama, ops, paged):
    reference, model_config = tiny_llama(max_shard_size="40KB")
    index = Path(model_config.path) / "model.safetensors.index.json"
    assert len(set(json.loads(index.read_text())["weight_map"].values())) > 1

    (logits,) = paged(load(model_config, ops)).step([(0, PROMPT)])

    with torch.no_grad():
        expected = reference(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_a_missing_shard_is_named(tiny_llama, ops):
    _, model_config = tiny_llama(max_shard_size="40KB")
    shard = sorted(Path(model_config.path).glob("*.safetensors"))[1]
    shard.unlink()

    with pytest.raises(ModelError, match=shard.name):
        load(model_config, ops)


@pytest.mark.parametrize("name", ["../outside.safetensors", "folder/x.safetensors", 7])
def test_an_index_that_leaves_its_folder_is_refused(name, tiny_llama, ops):
    _, model_config = tiny_llama(max_shard_size="40KB")
    index = Path(model_config.path) / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))

    with pytest.raises(ModelError, match="same folder"):
        load(model_config, ops)


def test_a_folder_without_weights_is_refused(tiny_llama, ops, tmp_path):
    _, model_config = tiny_llama()
    empty = tmp_path / "empty"
    empty.mkdir()

    with pytest.raises(ModelError, match="holds no"):
        load(replace(model_config, path=str(empty)), ops)


def test_dummy_weights_follow_the_seed_and_need_no_files(tiny_llama, ops, paged):
    _, model_config = tiny_llama(tie_word_embeddings=True)
    model_config = replace(model_config, path="nowhere")

    def logits(seed):
        return paged(load(model_config, ops, load_format="dummy", seed=seed)).step([(0, PROMPT)])[0]

    assert torch.equal(logits(1), logits(1))
    assert not torch.allclose(logits(1), logits(2))


def test_weights_do_not_alias_the_file(tiny_llama, ops, paged):
    _, model_config = tiny_llama()
    model = load(model_config, ops)
    (before,) = paged(model).step([(0, PROMPT)])
    path = Path(model_config.path) / "model.safetensors"
    with path.open("r+b") as file:
        file.seek(1000)
        file.write(b"\xff" * (path.stat().st_size - 1000))

    (after,) = paged(model).step([(0, PROMPT)])

    assert torch.equal(before, after)


def test_bfloat16_activations_stay_near_fp32(tiny_llama, ops, paged):
    _, model_config = tiny_llama()
    half = bind("cpu", CPU, torch.bfloat16, frozenset(), model_config.head_dim)
    model = load_model(model_config, Build(half, dtype=torch.bfloat16))

    (logits,) = paged(model).step([(0, PROMPT)])

    (exact,) = paged(load(model_config, ops)).step([(0, PROMPT)])
    assert logits.dtype == torch.float32
    assert (logits - exact).abs().mean() < 0.05 * exact.std()


@pytest.mark.parametrize("load_format", ["pickle", "gguf"])
def test_a_load_format_that_cannot_be_is_refused(load_format, tiny_llama, ops):
    _, model_config = tiny_llama()

    with pytest.raises(ConfigError, match="load format"):
        load(model_config, ops, load_format=load_format)


def test_an_unknown_architecture_is_refused_with_the_known_ones(tiny_llama, ops):
    _, model_config = tiny_llama()

    with pytest.raises(ConfigError, match="LlamaForCausalLM"):
        load(replace(model_config, architecture="FooForCausalLM"), ops)


def test_a_model_of_the_null_device_has_shapes_and_no_numbers(tiny_llama, paged):
    _, model_config = tiny_llama()
    device = torch.device("meta")
    ops = bind("null", device, torch.float32, frozenset(), model_config.head_dim)
    model = load_model(replace(model_config, path="nowhere"), Build(ops, device=device), "dummy")
    positions = torch.arange(5, device=device)

    def attention(spec, q, k, v, sinks):
        return ops.paged_attention(
            q, k, v, positions, positions, positions, spec.scale, 0, 0.0, sinks
        )

    def states(layer):
        raise AssertionError(f"layer {layer} keeps no state")

    hidden = model(StepInputs(positions, positions, attention, states))

    assert model.logits(hidden).shape == (5, model_config.vocab_size)


@pytest.mark.parametrize("shards", ["1GB", "40KB"])
def test_files_that_are_read_whole_give_the_weights_of_mapped_ones(shards, tiny_llama, ops, paged):
    _, model_config = tiny_llama(max_shard_size=shards)

    read, mapped = load(model_config, ops, is_mapped=False), load(model_config, ops)

    assert torch.equal(paged(read).step([(0, PROMPT)])[0], paged(mapped).step([(0, PROMPT)])[0])


CUSTOM = """
def doubled(tensors):
    for name, weight in tensors:
        if name == "lm_head.weight":
            weight = type(weight).from_tensor(weight.dense * 2)
        yield name, weight


def without_head(tensors):
    return (pair for pair in tensors if pair[0] != "lm_head.weight")


number = 7
"""


@pytest.fixture
def custom_module(tmp_path, monkeypatch):
    """A module with functions of a user's own, on the Python path."""
    folder = tmp_path / "packages"
    folder.mkdir()
    (folder / "my_weights.py").write_text(CUSTOM)
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    sys.modules.pop("my_weights", None)


@pytest.mark.parametrize("name", ["my_weights:doubled", "my_weights.doubled"])
def test_a_users_function_changes_what_the_model_sees(name, tiny_llama, ops, paged, custom_module):
    _, model_config = tiny_llama()

    model = load(model_config, ops, transforms=load_transforms([name], model_config.path))

    (plain,) = paged(load(model_config, ops)).step([(0, PROMPT)])
    torch.testing.assert_close(paged(model).step([(0, PROMPT)])[0], 2 * plain)


def test_the_account_holds_for_what_a_users_function_yields(tiny_llama, ops, custom_module):
    _, model_config = tiny_llama()

    with pytest.raises(ModelError, match=r"lacks 1 weights.*head\.weight"):
        load(
            model_config,
            ops,
            transforms=load_transforms(["my_weights:without_head"], model_config.path),
        )


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no_such_module:f", "cannot be imported"),
        ("my_weights", "cannot be imported"),
        ("my_weights:missing", "no function 'missing'"),
        ("my_weights:number", "no function 'number'"),
    ],
)
def test_a_function_that_cannot_be_had_is_refused(name, reason, custom_module):
    with pytest.raises(ConfigError, match=reason):
        load_transforms([name], "nowhere")


def test_code_that_lies_with_the_checkpoint_is_refused(custom_module):
    with pytest.raises(ConfigError, match="never run"):
        load_transforms(["my_weights:doubled"], str(custom_module))


def _resident_files() -> int:
    """Bytes of files that this process has in memory."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssFile:")[2].split()[0]) << 10


def test_what_was_read_of_a_file_does_not_stay_in_memory(tiny_llama, tmp_path):
    _, model_config = tiny_llama()
    tensors = {f"t{at}": torch.randint(256, (4 << 20,), dtype=torch.uint8) for at in range(12)}
    save_file(tensors, tmp_path / "model.safetensors")
    whole, before, most = 0, _resident_files(), 0
    kept = []
    for name, tensor in read_tensors(replace(model_config, path=str(tmp_path))):
        whole += int(torch.equal(tensor.values, tensors[name]))
        kept.append((name, tensor))
        most = max(most, _resident_files() - before)
    assert whole == 12 and most < 20 << 20, f"{most} bytes of {48 << 20} were in memory at once"
    assert all(torch.equal(tensor.values, tensors[name]) for name, tensor in kept)


def test_the_tensors_of_a_module_come_together_wherever_they_lie(tiny_llama, tmp_path):
    """Else the words of all layers wait for scales that lie behind them, in memory."""
    _, model_config = tiny_llama()
    tensors = {
        **{f"l.{at}.weight_packed": torch.ones(4, 4, dtype=torch.int32) for at in range(3)},
        **{f"l.{at}.weight_scale": torch.ones(4, 1, dtype=torch.bfloat16) for at in range(3)},
        "head.weight": torch.ones(3, 3, dtype=torch.bfloat16),
    }
    save_file(tensors, tmp_path / "model.safetensors")

    names = [name for name, _ in read_tensors(replace(model_config, path=str(tmp_path)))]

    assert names == [
        "head.weight",
        *(f"l.{at}.weight_{last}" for at in range(3) for last in ("packed", "scale")),
    ]
