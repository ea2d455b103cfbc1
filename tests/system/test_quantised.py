"""Quantised checkpoints through the whole engine: found by themselves, computed by the fastest
kernels of this machine, shared by ranks."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from banyan.base.errors import ConfigError
from tests.models.families import rewrite_config
from tests.models.quantised import FORMS
from tests.models.quantised_checkpoints import rewrite_weights
from tests.system.test_flag_effects import prompt_scores


def pair(tiny_model: Path, name: str, folder: Path) -> tuple[Path, Path]:
    """The tiny model quantised, and the same in floats of the weights that this means."""
    quantised, plain = folder / "quantised", folder / "plain"
    for copy in (quantised, plain):
        shutil.copytree(tiny_model, copy)
    form = FORMS[name]
    meant = rewrite_weights(quantised, form)
    if form.settings is not None:
        rewrite_config(quantised, quantization_config=form.settings)
    save_file(load_file(plain / "model.safetensors") | meant, plain / "model.safetensors")
    return quantised, plain


@pytest.mark.parametrize("name", ["gptq 4, zero points", "modelslim, static"])
def test_scores_are_those_of_the_weights_that_are_meant(
    name: str, tiny_model: Path, tmp_path: Path
) -> None:
    quantised, plain = pair(tiny_model, name, tmp_path)
    exact = prompt_scores(plain)

    found = prompt_scores(quantised)

    assert np.abs(found - exact).mean() < 0.01 * exact.std()


def test_ranks_share_a_quantised_model(tiny_model: Path, tmp_path: Path) -> None:
    quantised, _ = pair(tiny_model, "gptq 4", tmp_path)
    alone = prompt_scores(quantised)

    shared = prompt_scores(quantised, tp=2)

    assert np.abs(shared - alone).mean() < 0.01 * alone.std()


def test_a_flag_may_name_the_form_and_no_other(tiny_model: Path, tmp_path: Path) -> None:
    quantised, _ = pair(tiny_model, "gptq 4", tmp_path)

    named = prompt_scores(quantised, quantization="gptq_marlin")

    assert np.array_equal(named, prompt_scores(quantised))
    with pytest.raises(ConfigError, match="its weights are gptq, and cannot be converted to awq"):
        prompt_scores(quantised, quantization="awq")
    with pytest.raises(ConfigError, match="are gptq already; only float weights can be quantized"):
        prompt_scores(quantised, quantization="int8")
