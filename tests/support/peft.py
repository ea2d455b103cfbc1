"""Adapters of peft, and models that hold them."""

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from banyan.layers.build import Build
from banyan.lora.adapter_config import WEIGHTS
from banyan.lora.load import base_of, enable_lora
from banyan.lora.targets import LoRATargets
from banyan.model_config.checkpoint import read_model_config
from banyan.models.weights.loader import load_model
from banyan.ops.lora import AdapterTokens

PROMPT = [(7 * i * i + 3 * i) % 97 for i in range(40)]


def opened(folder, ops, targets=(), max_rank=64, kinds=()):
    """A model with room for adapters, and what they must fit."""
    lora_targets = LoRATargets(max_rank, 4, targets, kinds)
    model = load_model(read_model_config(str(folder)), Build(ops, adapters=lora_targets))
    enable_lora(model, lora_targets, ops)
    return model, base_of(model, lora_targets)


def enter(base, number, loaded):
    for name, table in base.lora_targets.tables.items():
        table.enter(number, loaded.parts.get(name, ()))
    for name, rows in base.lora_targets.rows.items():
        rows.enter(number, loaded.rows.get(name))
    for name, experts in base.lora_targets.experts.items():
        experts.enter(number, loaded.experts.get(name, {}))


def show(base, adapters):
    base.lora_targets.tokens = AdapterTokens(len(adapters))
    base.lora_targets.tokens.fill(np.array(adapters))
    base.lora_targets.outputs = base.lora_targets.tokens


def random_peft(model, folder, **config):
    """The model with an adapter of random matrices, saved to `folder`."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(5)
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(init_lora_weights=False, task_type="CAUSAL_LM", **config)
    )
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "magnitude" in name:
                parameter.mul_(torch.rand_like(parameter) + 0.5)
            elif any(part in name for part in ("lora_", "modules_to_save", "trainable_tokens")):
                parameter.copy_(torch.randn_like(parameter) * 0.2)
    adapted.save_pretrained(folder)
    return adapted.eval()


def edited(folder, change):
    """The adapter in a folder with other tensors."""
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)
