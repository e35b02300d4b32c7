"""Adapters as PEFT saves them: the same numbers as PEFT's own, or a refusal that names what is wrong."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from engine.adapters.targets import targets
from engine.adapters.weights import Adapter, load_adapter
from engine.models.config import ModelConfig
from shared.errors import AdapterError
from shared.lora.files import content_identity
from shared.lora.peft_config import read_config
from tests.support.peft_adapters import ALL_LINEAR, edit_config, edit_tensors, save_adapter
from tests.support.tiny_llama import save_tiny_model

RANKS = {"q_proj": 2, "model.layers.1.mlp.down_proj": 8, r"layers\.[02]\.self_attn\.o_proj": 3}
ALPHAS = {"v_proj": 32, "^model.layers.0.mlp.gate_proj": 1}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    return save_tiny_model(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="module")
def saved(base: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters") / "plain"
    save_adapter(base, folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(saved, tmp_path / "adapter"))


def load(base: PreTrainedModel, folder: Path, **options: Any) -> Adapter:
    own = {"model.embed_tokens": base.get_input_embeddings().weight, "lm_head": base.get_output_embeddings().weight}
    settings: dict[str, Any] = {"max_rank": 16, "base": own, "dtype": torch.float32}
    return load_adapter(folder, targets(ModelConfig.from_hf(base.config.to_dict())), **(settings | options))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"r": 8, "lora_alpha": 3, "target_modules": ["k_proj"]},
        {"use_rslora": True, "r": 16},
        {"rank_pattern": RANKS, "alpha_pattern": ALPHAS},
        {"rank_pattern": RANKS, "alpha_pattern": ALPHAS, "use_rslora": True},
        {"target_modules": r".*\.layers\.[01]\.mlp\.(up|down)_proj"},
        {"target_modules": "all-linear"},
        {"target_modules": ["q_proj", "gate_proj"], "layers_to_transform": [1]},
        {"target_modules": ["model.layers.2.self_attn.v_proj", "lm_head"]},
        {"target_modules": ["embed_tokens", "lm_head", "q_proj"], "alpha_pattern": {"embed_tokens": 2}},
    ],
    ids=str,
)
def test_what_is_added_is_what_peft_adds(base: PreTrainedModel, tmp_path: Path, options: dict[str, Any]) -> None:
    reference = save_adapter(base, tmp_path, **options)
    adapter = load(base, tmp_path)
    wanted = {
        name: module.get_delta_weight("default")
        for name, module in reference.base_model.model.named_modules()
        if hasattr(module, "get_delta_weight")
    }
    assert adapter.parts.keys() == wanted.keys()
    for name, part in adapter.parts.items():
        delta = part.b @ part.a
        torch.testing.assert_close(delta.T if "embed" in name else delta, wanted[name], rtol=1e-5, atol=1e-6)
        assert wanted[name].abs().max() > 1e-3
    assert adapter.rank == max(part.a.shape[0] for part in adapter.parts.values())


def test_weights_are_in_the_model_s_dtype(base: PreTrainedModel, saved: Path) -> None:
    adapter = load(base, saved, dtype=torch.bfloat16)
    assert {part.a.dtype for part in adapter.parts.values()} == {torch.bfloat16}
    assert {part.b.dtype for part in adapter.parts.values()} == {torch.bfloat16}
    assert adapter.bytes * 2 == load(base, saved).bytes


def test_identity_is_of_content(base: PreTrainedModel, saved: Path, folder: Path) -> None:
    same = content_identity(saved)
    assert content_identity(folder) == same
    edit_config(folder, base_model_name_or_path="elsewhere", lora_dropout=0.5)
    assert content_identity(folder) == same
    edit_config(folder, lora_alpha=9)
    assert content_identity(folder) != same
    edit_config(folder, lora_alpha=8)
    assert content_identity(folder) == same
    edit_tensors(folder, layers__0__mlp__up_proj__lora_A__weight=torch.zeros(4, 48))
    assert content_identity(folder) != same


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias"),
        ({"bias": "lora_only"}, "bias"),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"target_parameters": ["x"]}, "target_parameters"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"use_qalora": True}, "use_qalora"),
        ({"something_new_of_next_year": {"a": 1}}, "something_new_of_next_year"),
        ({"peft_type": "LOHA"}, "LOHA"),
        ({"peft_type": None}, "peft_type"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4"),
        ({"init_lora_weights": "olora"}, "olora"),
        ({"r": 0}, "rank 0 of r"),
        ({"r": "8"}, "r"),
        ({"r": 1.5}, "r"),
        ({"lora_alpha": None}, "lora_alpha"),
        ({"rank_pattern": {"q_proj": -1}}, "q_proj"),
        ({"rank_pattern": {"q_(": 2}}, "rank_pattern"),
        ({"alpha_pattern": {"(.|..|...)+[A-Z]": 2}}, "takes too long"),
        ({"rank_pattern": {"q_proj": 5}}, "q_proj"),
        ({"r": 5}, "[5, 80] is needed"),
        ({"target_modules": ["q_proj"]}, "target_modules"),
        ({"target_modules": [*ALL_LINEAR, "c_attn"]}, "c_attn"),
        ({"target_modules": r".*\.q_proj"}, "target_modules"),
        ({"target_modules": 3}, "target_modules"),
    ],
    ids=str,
)
def test_a_config_is_refused_by_the_name_of_the_field(
    base: PreTrainedModel, folder: Path, fields: dict[str, Any], named: str
) -> None:
    edit_config(folder, **fields)
    with pytest.raises(AdapterError) as caught:
        load(base, folder)
    assert named in caught.value.message
    assert caught.value.status == 400


@pytest.mark.parametrize("neutral", [{"use_dora": False}, {"modules_to_save": []}, {"new": None}, {"bias": "none"}])
def test_what_is_off_is_no_reason_to_refuse(base: PreTrainedModel, folder: Path, neutral: dict[str, Any]) -> None:
    edit_config(folder, **neutral)
    assert load(base, folder).rank == 4


Q = "layers__0__self_attn__q_proj"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({f"{Q}__lora_A__weight": None}, "model.layers.0.self_attn.q_proj"),
        ({f"{Q}__lora_B__weight": None}, "model.layers.0.self_attn.q_proj"),
        ({f"{Q}__lora_A__weight": torch.zeros(4, 47)}, "[4, 48] is needed"),
        ({f"{Q}__lora_B__weight": torch.zeros(48)}, "[48, 4] is needed"),
        ({f"{Q}__lora_A__weight": torch.full((4, 48), torch.nan)}, "finite"),
        ({f"{Q}__lora_B__weight": torch.full((48, 4), torch.inf)}, "finite"),
        ({f"{Q}__lora_B__weight": torch.full((48, 4), 3e38)}, "finite once it is scaled"),
        ({f"{Q}__lora_A__weight": torch.zeros(4, 48, dtype=torch.int32)}, "finite"),
        ({"base_model__model__model__layers__9__mlp__up_proj__lora_A__weight": torch.zeros(4, 48),
          "base_model__model__model__layers__9__mlp__up_proj__lora_B__weight": torch.zeros(80, 4)}, "layers.9"),
        ({"base_model__model__transformer__h__0__lora_A__weight": torch.zeros(4, 48),
          "base_model__model__transformer__h__0__lora_B__weight": torch.zeros(80, 4)}, "transformer.h.0"),
        ({"model__layers__0__mlp__up_proj__lora_C": torch.zeros(1)}, "lora_C"),
        ({"base_model__model__lm_head__weight": torch.zeros(96, 48)}, "lm_head.weight"),
        ({"base_model__model__model__layers__0__mlp__up_proj__lora_magnitude_vector": torch.ones(80)}, "magnitude"),
        ({"base_model__model__lm_head__base_layer__weight": torch.zeros(97, 48)}, "resized"),
        ({"base_model__model__lm_head__base_layer__weight": torch.zeros(96, 48)}, "differs"),
        ({"base_model__model__model__layers__0__mlp__up_proj__base_layer__weight": torch.zeros(80, 48)}, "up_proj"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_weights_are_refused_by_the_name_of_the_module(
    base: PreTrainedModel, folder: Path, changes: dict[str, torch.Tensor | None], named: str
) -> None:
    edit_config(folder, target_modules=None)
    edit_tensors(folder, **changes)
    with pytest.raises(AdapterError) as caught:
        load(base, folder)
    assert named in caught.value.message


def remove_weights(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()


def only_pickle(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


def truncate(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


def garbage(folder: Path) -> None:
    (folder / "adapter_model.safetensors").write_bytes(b"\xff" * 100)


def remove_config(folder: Path) -> None:
    (folder / "adapter_config.json").unlink()


def garble_config(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{")


def list_as_config(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("[]")


def huge_config(folder: Path) -> None:
    (folder / "adapter_config.json").write_bytes(b" " * 1_000_000)


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (remove_weights, "adapter_model.safetensors"),
        (only_pickle, "only safetensors"),
        (truncate, "adapter_model.safetensors"),
        (garbage, "adapter_model.safetensors"),
        (remove_config, "adapter_config.json"),
        (garble_config, "adapter_config.json"),
        (list_as_config, "adapter_config.json"),
        (huge_config, "larger than"),
    ],
)
def test_broken_folders_are_refused(
    base: PreTrainedModel, folder: Path, spoil: Callable[[Path], None], named: str
) -> None:
    spoil(folder)
    with pytest.raises(AdapterError) as caught:
        load(base, folder)
    assert named in caught.value.message
    assert str(folder) not in caught.value.message


def test_a_rank_above_the_limit_is_refused(base: PreTrainedModel, saved: Path) -> None:
    with pytest.raises(AdapterError, match="rank is 4, at most 3"):
        load(base, saved, max_rank=3)


def test_an_adapter_for_another_size_is_refused(saved: Path, tmp_path: Path) -> None:
    other = save_tiny_model(tmp_path / "other", hidden_size=60, num_attention_heads=6)
    with pytest.raises(AdapterError, match=r"lora_B of model\.layers\.0"):
        load(other, saved)


def test_patterns_are_peft_s(saved: Path) -> None:
    from peft.utils.other import get_pattern_key

    config = read_config(saved)
    config.rank_pattern = {"proj": 1, "q_proj": 2, ".*k_proj": 3, "self_attn.v_proj": 4, r"layers\.1\d?\..*": 5}
    for module in (f"model.layers.{layer}.self_attn.{name}_proj" for layer in (0, 1, 11, 21) for name in "qkvo"):
        wanted = config.rank_pattern.get(get_pattern_key(list(config.rank_pattern), module), config.r)
        assert config.rank(module) == wanted
