"""Adapters as PEFT saves them: the same numbers as PEFT's own, or a refusal that names what is wrong."""

from __future__ import annotations

import json
import math
import re
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
from shared.lora.check import Checked, check_adapter
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


def check(base: PreTrainedModel, folder: Path, max_rank: int = 16, dtype: str = "float32") -> Checked:
    """The same without the model's weights and without torch."""
    config = ModelConfig.from_hf(base.config.to_dict())
    modules = {name: (target.inputs, target.outputs) for name, target in targets(config).items()}
    return check_adapter(folder, modules, max_rank=max_rank, max_bytes=10**8, dtype=dtype)


def _any_tensor(message: str) -> str:
    """Of two tensors that are both at fault safetensors names either."""
    return re.sub(r"tensor `\w+`", "tensor", message)


def refused(base: PreTrainedModel, folder: Path, **options: Any) -> AdapterError:
    """Why both do not serve it, in the same words."""
    with pytest.raises(AdapterError) as caught:
        load(base, folder, **options)
    with pytest.raises(AdapterError) as checked:
        check(base, folder, **options)
    assert _any_tensor(checked.value.message) == _any_tensor(caught.value.message)
    return caught.value


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
    size = (tmp_path / "adapter_model.safetensors").stat().st_size
    assert check(base, tmp_path) == Checked(adapter.rank, size)


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
    error = refused(base, folder)
    assert named in error.message
    assert error.status == 400


@pytest.mark.parametrize("neutral", [{"use_dora": False}, {"modules_to_save": []}, {"new": None}, {"bias": "none"}])
def test_what_is_off_is_no_reason_to_refuse(base: PreTrainedModel, folder: Path, neutral: dict[str, Any]) -> None:
    edit_config(folder, **neutral)
    assert load(base, folder).rank == check(base, folder).rank == 4


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
        ({"base_model__model__model__layers__0__mlp__up_proj__base_layer__weight": torch.zeros(80, 48)}, "up_proj"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_weights_are_refused_by_the_name_of_the_module(
    base: PreTrainedModel, folder: Path, changes: dict[str, torch.Tensor | None], named: str
) -> None:
    edit_config(folder, target_modules=None)
    edit_tensors(folder, **changes)
    assert named in refused(base, folder).message


def test_a_changed_head_is_found_out_where_the_model_is(base: PreTrainedModel, folder: Path) -> None:
    edit_config(folder, target_modules=None)
    edit_tensors(folder, base_model__model__lm_head__base_layer__weight=torch.zeros(96, 48))
    assert check(base, folder).rank == 4
    with pytest.raises(AdapterError, match="differs"):
        load(base, folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("value", [1.5, 0.0, torch.nan, torch.inf, -torch.inf])
def test_numbers_are_looked_at_in_every_type(
    base: PreTrainedModel, folder: Path, dtype: torch.dtype, value: float
) -> None:
    half = torch.ones(48, 4, dtype=dtype)
    half[47, 3] = value
    edit_tensors(folder, **{f"{Q}__lora_B__weight": half})
    if math.isfinite(value):
        assert check(base, folder).rank == load(base, folder).rank
    else:
        assert "finite number" in refused(base, folder).message


def test_a_scale_that_leaves_the_dtype_is_refused(base: PreTrainedModel, folder: Path) -> None:
    edit_tensors(folder, **{f"{Q}__lora_B__weight": torch.full((48, 4), 40000.0)})
    for name, dtype in (("float16", torch.float16), ("bfloat16", torch.bfloat16)):
        message = ""
        try:
            load(base, folder, dtype=dtype)
        except AdapterError as error:
            message = error.message
        try:
            check(base, folder, dtype=name)
        except AdapterError as error:
            assert error.message == message
        else:
            assert not message
    assert name == "bfloat16" and not message


@pytest.mark.parametrize(
    ("dtype", "value"), [(torch.float32, 1e300), (torch.float16, 70000.0), (torch.bfloat16, 1e39)], ids=str
)
def test_numbers_that_the_model_s_dtype_cannot_hold_are_refused(
    base: PreTrainedModel, folder: Path, dtype: torch.dtype, value: float
) -> None:
    half = torch.ones(4, 48, dtype=torch.float64)
    half[1, 1] = value
    edit_tensors(folder, **{f"{Q}__lora_A__weight": half})
    with pytest.raises(AdapterError, match="lora_A of model") as caught:
        load(base, folder, dtype=dtype)
    with pytest.raises(AdapterError) as checked:
        check(base, folder, dtype=str(dtype).removeprefix("torch."))
    assert checked.value.message == caught.value.message


def remove_weights(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()


def only_pickle(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


def truncate(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


def garbage(folder: Path) -> None:
    (folder / "adapter_model.safetensors").write_bytes(b"\xff" * 100)


def huge_header(folder: Path) -> None:
    (folder / "adapter_model.safetensors").write_bytes((2**60).to_bytes(8, "little") + b"{}" * 50)


def deep_header(folder: Path) -> None:
    header = b"[" * 100_000
    (folder / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)


def overlapping(folder: Path) -> None:
    """Two tensors that are the same bytes."""
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    header = json.dumps({"a": entry, "b": entry}).encode()
    (folder / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))


def shape_that_overflows(folder: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 4]}}).encode()
    (folder / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))


def empty_file(folder: Path) -> None:
    (folder / "adapter_model.safetensors").write_bytes(b"")


def folder_in_its_place(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.safetensors").mkdir()


def remove_config(folder: Path) -> None:
    (folder / "adapter_config.json").unlink()


def garble_config(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{")


def list_as_config(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("[]")


def huge_config(folder: Path) -> None:
    (folder / "adapter_config.json").write_bytes(b" " * 1_000_000)


def deep_config(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "x": ' + "[" * 100_000 + "]" * 100_000 + "}")


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (remove_weights, "adapter_model.safetensors"),
        (only_pickle, "only safetensors"),
        (truncate, "adapter_model.safetensors"),
        (garbage, "adapter_model.safetensors"),
        (huge_header, "adapter_model.safetensors"),
        (deep_header, "adapter_model.safetensors"),
        (overlapping, "adapter_model.safetensors"),
        (shape_that_overflows, "adapter_model.safetensors"),
        (empty_file, "adapter_model.safetensors"),
        (folder_in_its_place, "no such file"),
        (remove_config, "adapter_config.json"),
        (garble_config, "adapter_config.json"),
        (list_as_config, "adapter_config.json"),
        (huge_config, "larger than"),
        (deep_config, "nested too deeply"),
    ],
)
def test_broken_folders_are_refused(
    base: PreTrainedModel, folder: Path, spoil: Callable[[Path], None], named: str
) -> None:
    spoil(folder)
    error = refused(base, folder)
    assert named in error.message
    assert str(folder) not in error.message


def test_a_name_of_megabytes_is_not_repeated(base: PreTrainedModel, folder: Path) -> None:
    header = json.dumps({"x" * 2_000_000: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (folder / "adapter_model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    message = refused(base, folder).message
    assert "xxx...: not a LoRA matrix" in message and len(message) < 1000


def test_a_rank_above_the_limit_is_refused(base: PreTrainedModel, saved: Path) -> None:
    assert "rank is 4, at most 3" in refused(base, saved, max_rank=3).message


def test_a_file_above_the_limit_is_not_even_opened(saved: Path) -> None:
    with pytest.raises(AdapterError, match="at most 1000 are allowed"):
        check_adapter(saved, {}, max_rank=16, max_bytes=1000)


def test_an_adapter_for_another_size_is_refused(saved: Path, tmp_path: Path) -> None:
    other = save_tiny_model(tmp_path / "other", hidden_size=60, num_attention_heads=6)
    assert "lora_B of model.layers.0" in refused(other, saved).message


def test_patterns_are_peft_s(saved: Path) -> None:
    from peft.utils.other import get_pattern_key

    config = read_config(saved)
    config.rank_pattern = {"proj": 1, "q_proj": 2, ".*k_proj": 3, "self_attn.v_proj": 4, r"layers\.1\d?\..*": 5}
    for module in (f"model.layers.{layer}.self_attn.{name}_proj" for layer in (0, 1, 11, 21) for name in "qkvo"):
        wanted = config.rank_pattern.get(get_pattern_key(list(config.rank_pattern), module), config.r)
        assert config.rank(module) == wanted
