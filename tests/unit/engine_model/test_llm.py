"""`LLM` and `build_engine` over a tiny model: call shapes, errors, and how settings become an engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.build import build_engine, choose_device, choose_dtype
from engine.config import EngineConfig
from engine.llm import LLM
from shared.errors import ContextLengthExceededError, InvalidRequestError
from shared.sampling import SamplingParams
from tests.support.tiny_llama import VOCAB, save_tiny_model

TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}{% if add_generation_prompt %}w9{% endif %}"
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llm") / "tiny"
    save_tiny_model(path)
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "w2", "chat_template": TEMPLATE}))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7], "temperature": 0.5, "top_k": 9}))
    return path


def make(folder: Path, **options: Any) -> LLM:
    settings: dict[str, Any] = {"dtype": "float32", "num_blocks": 32, "block_size": 4, "cache_dir": folder / "cache"}
    return LLM(str(folder), **(settings | options))


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return make(folder)


def test_prompts_as_text_as_ids_one_or_several(llm: LLM) -> None:
    (text,) = llm.generate("w5 w6 w11", GREEDY, use_tqdm=False)
    (ids,) = llm.generate({"prompt_token_ids": [5, 6, 11]}, GREEDY, use_tqdm=False)
    both = llm.generate(["w5 w6 w11", {"prompt": "w8"}], [GREEDY, SamplingParams(max_tokens=2, n=2)], use_tqdm=False)
    assert text.prompt == "w5 w6 w11"
    assert ids.prompt is None
    assert text.prompt_token_ids == ids.prompt_token_ids == [5, 6, 11]
    assert text.outputs[0].token_ids == ids.outputs[0].token_ids == both[0].outputs[0].token_ids
    assert [choice.index for choice in both[1].outputs] == [0, 1]
    assert len({output.request_id for output in (text, ids, *both)}) == 4
    assert all(output.finished and output.error is None for output in both)
    choice = text.outputs[0]
    assert (len(choice.token_ids), choice.finish_reason, choice.stop_reason) == (6, "length", None)
    assert (choice.logprobs, choice.cumulative_logprob) == (None, None)
    metrics = text.metrics
    assert metrics.first_token_time is not None
    assert metrics.finished_time is not None
    assert metrics.arrival_time <= metrics.first_token_time <= metrics.finished_time


def test_logprobs_come_as_a_mapping_per_token_with_the_token_in_it(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=5, logprobs=2, ignore_eos=True)
    (output,) = llm.generate("w5 w6", params, use_tqdm=False)
    choice = output.outputs[0]
    assert choice.logprobs is not None
    assert len(choice.logprobs) == 5
    own = [candidates[token] for candidates, token in zip(choice.logprobs, choice.token_ids, strict=True)]
    assert choice.cumulative_logprob == pytest.approx(sum(entry.logprob for entry in own))
    assert own[0].decoded_token == llm.get_tokenizer().id_to_token(choice.token_ids[0])


@pytest.mark.parametrize("budget", [8, 1024])
def test_prompt_logprobs_are_those_of_transformers(folder: Path, budget: int) -> None:
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = [[3 + (at * at) % 90 for at in range(length)] for length in (1, 2, 30)]
    llm = make(folder, max_num_seqs=4, max_num_batched_tokens=budget)
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=3)
    for prompt, output in zip(
        prompts, llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False), strict=True
    ):
        assert output.error is None
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        with torch.inference_mode():
            expected = reference(torch.tensor([prompt])).logits[0].float().log_softmax(-1)
        assert len(output.prompt_logprobs) == len(prompt)
        for row, token, found in zip(expected, prompt[1:], output.prompt_logprobs[1:], strict=False):
            assert found is not None
            ranks = row.argsort(descending=True).tolist()
            assert set(found) == {token, *ranks[:3]}
            for candidate, entry in found.items():
                assert entry.logprob == pytest.approx(row[candidate].item(), abs=1e-3)
                assert entry.rank == ranks.index(candidate) + 1
                assert entry.decoded_token.strip() == f"w{candidate}"
    (plain,) = llm.generate({"prompt_token_ids": prompts[2]}, GREEDY, use_tqdm=False)
    assert plain.prompt_logprobs is None
    assert plain.num_cached_tokens > 0, "what was computed for log probabilities is found by others"
    (again,) = llm.generate({"prompt_token_ids": prompts[2]}, params, use_tqdm=False)
    assert again.num_cached_tokens == 0


@pytest.mark.parametrize(
    ("keep", "most", "kept"), [(None, 6, 60), (3, 6, 3), (90, 6, 60), (-1, 6, 60), (-1, 80, 48), (-1, 127, 1)]
)
def test_a_prompt_is_cut_to_what_is_asked_for_or_fits(llm: LLM, keep: int | None, most: int, kept: int) -> None:
    ids = [3 + at % 90 for at in range(60)]
    params = SamplingParams(temperature=0, max_tokens=most, truncate_prompt_tokens=keep, stop_token_ids=[5])
    cut, plain = llm.generate(
        [{"prompt_token_ids": ids}, {"prompt_token_ids": ids[-kept:]}],
        [params, msgspec.structs.replace(params, truncate_prompt_tokens=None)],
        use_tqdm=False,
    )
    assert cut.prompt_token_ids == ids[-kept:] == plain.prompt_token_ids
    assert cut.outputs == plain.outputs
    assert len(ids) == 60, "the caller's own list stays as it is"


def test_no_cut_makes_room_for_more_tokens_than_the_cache_holds(llm: LLM) -> None:
    with pytest.raises(ContextLengthExceededError):
        llm.generate("w5 w6", SamplingParams(max_tokens=128, truncate_prompt_tokens=-1), use_tqdm=False)


def test_chat_renders_the_template(llm: LLM) -> None:
    messages = [{"role": "w3", "content": [{"type": "text", "text": "w4"}, {"type": "text", "text": "w5"}]}]
    (one,) = llm.chat(messages, GREEDY, use_tqdm=False)
    assert one.prompt_token_ids == [3, 4, 5, 9]
    several = llm.chat([messages, [{"role": "w3", "content": None}]], GREEDY, use_tqdm=False)
    assert [output.prompt_token_ids for output in several] == [[3, 4, 5, 9], [3, 9]]
    with pytest.raises(InvalidRequestError) as caught:
        llm.chat([{"role": "w3", "content": [{"type": "image_url"}]}], GREEDY)
    assert caught.value.param == "messages"


def test_default_params_are_the_generation_configs(llm: LLM) -> None:
    params = llm.get_default_sampling_params()
    assert (params.temperature, params.top_k, params.top_p) == (0.5, 9, 1.0)


def test_settings_of_the_caller_s_tokenizer_change_nothing_here(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    assert llm.get_tokenizer() is tokenizer
    before = llm.generate("one two", SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)[0]
    tokenizer.enable_truncation(1)
    tokenizer.enable_padding(length=9)
    after = llm.generate("one two", SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)[0]
    assert after.prompt_token_ids == before.prompt_token_ids


def test_a_refused_prompt_leaves_nothing_in_the_engine(llm: LLM) -> None:
    with pytest.raises(ContextLengthExceededError):
        llm.generate(["w5", {"prompt_token_ids": [1] * 300}], GREEDY, use_tqdm=False)
    with pytest.raises(InvalidRequestError):
        llm.generate({"prompt_token_ids": [VOCAB]}, GREEDY, use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="1 for 2 prompts"):
        llm.generate(["w5", "w6"], [GREEDY], use_tqdm=False)
    assert not llm._engine.has_work()
    llm._engine.check()


@pytest.mark.parametrize(
    ("call", "arguments", "field"),
    [
        ("generate", (5,), "prompts"),
        ("generate", ([5],), "prompts"),
        ("generate", (b"w5",), "prompts"),
        ("generate", ({"prompt_token_ids": 5},), "prompt_token_ids"),
        ("generate", ({"prompt_token_ids": ["w5"]},), "prompt_token_ids"),
        ("generate", ("w5", 3), "sampling_params"),
        ("generate", ("w5", ["greedy"]), "sampling_params"),
        ("generate", ("w5", {"n": 1}), "sampling_params"),
        ("chat", (5,), "messages"),
        ("chat", ("hello",), "messages"),
    ],
)
def test_arguments_of_wrong_types_are_named(llm: LLM, call: str, arguments: tuple[Any, ...], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        getattr(llm, call)(*arguments, use_tqdm=False)
    assert caught.value.param == field
    assert not llm._engine.has_work()


def test_a_request_that_fails_while_it_runs_has_its_error_and_others_go_on(llm: LLM) -> None:
    nothing_left = SamplingParams(allowed_token_ids=[2], min_tokens=2, max_tokens=4)
    bad, good = llm.generate(["w5", "w6"], [nothing_left, GREEDY], use_tqdm=False)
    assert isinstance(bad.error, InvalidRequestError)
    assert bad.outputs[0].finish_reason == "error"
    assert good.error is None
    assert len(good.outputs[0].token_ids) == 6


def test_seeds_make_runs_repeatable(folder: Path) -> None:
    params = SamplingParams(temperature=1.5, max_tokens=8, ignore_eos=True)

    def texts(seed: int | None) -> list[list[int]]:
        outputs = make(folder, seed=seed).generate(["w5", "w5"], params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    first = texts(4)
    assert texts(4) == first
    assert first[0] != first[1]
    assert params.seed is None


def test_info_says_what_the_engine_is(folder: Path) -> None:
    options: dict[str, Any] = {"dtype": "float32", "cache_dir": folder / "cache", "block_size": 4}
    engine = build_engine(EngineConfig(str(folder), max_model_len=100, max_num_seqs=2, **options))
    info = engine.info()
    assert (info.name, info.max_model_len, info.vocab_size, info.dtype) == ("tiny", 100, VOCAB, "float32")
    assert info.eos_token_ids == [2, 7]
    assert info.kv_tokens == 200  # two full contexts, however much memory there is
    assert info.sampling_defaults == {"temperature": 0.5, "top_k": 9.0}
    named = build_engine(EngineConfig(str(folder), served_name="mine", num_blocks=7, **options)).info()
    assert (named.name, named.kv_tokens) == ("mine", 28)
    assert named.digest == info.digest
    other = build_engine(EngineConfig(str(folder), num_blocks=7, **(options | {"dtype": "bfloat16"}))).info()
    assert other.digest != info.digest


def test_settings_that_do_not_fit_the_model_are_refused(folder: Path) -> None:
    cache = folder / "cache"
    with pytest.raises(ValueError, match="max_model_len 257 is more than the model's 256"):
        build_engine(EngineConfig(str(folder), max_model_len=257, cache_dir=cache))
    with pytest.raises(ValueError, match="a KV block takes"):
        build_engine(EngineConfig(str(folder), block_size=16384, kv_cache_memory_mb=1, cache_dir=cache))
    with pytest.raises(ValueError, match="float16 is for GPUs"):
        build_engine(EngineConfig(str(folder), dtype="float16", device="cpu", cache_dir=cache))
    with pytest.raises(ValueError, match="block_size must be"):
        EngineConfig("x", block_size=0)


def test_a_sliding_window_bounds_the_context(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "m", "mistral", sliding_window=64)
    options: dict[str, Any] = {"dtype": "float32", "cache_dir": tmp_path}
    assert build_engine(EngineConfig(str(tmp_path / "m"), **options)).info().max_model_len == 64
    with pytest.raises(ValueError, match="sliding window of 64"):
        build_engine(EngineConfig(str(tmp_path / "m"), max_model_len=65, **options))


def test_tensors_that_the_model_does_not_take_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_tiny_model(tmp_path / "m", attention_bias=True)
    build_engine(EngineConfig(str(tmp_path / "m"), dtype="float32", cache_dir=tmp_path))
    assert not caplog.records
    config = json.loads((tmp_path / "m" / "config.json").read_text()) | {"num_hidden_layers": 2}
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    build_engine(EngineConfig(str(tmp_path / "m"), dtype="float32", cache_dir=tmp_path))
    assert "tensors are not used, such as model.layers.2." in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["NoSuchForCausalLM"]}, "'NoSuchForCausalLM' is not served"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"hidden_size": None}, "hidden_size"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1.0}}, "rope type 'spiral'"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1.0}}, "factor is missing"),
        ({"intermediate_size": 81}, "has shape"),
        ({"num_hidden_layers": 4}, "is missing"),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    folder: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in folder.iterdir():
        if file.is_file():
            (copy / file.name).write_bytes(file.read_bytes())
    config = json.loads((copy / "config.json").read_text()) | change
    config = {key: value for key, value in config.items() if value is not None}
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        build_engine(EngineConfig(str(copy), dtype="float32", cache_dir=tmp_path))


def test_device_and_dtype_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert choose_dtype("bfloat16", cpu) is torch.bfloat16
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    assert choose_dtype("auto", cpu) is torch.float32
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    assert choose_dtype("auto", cpu) is torch.bfloat16
    assert choose_dtype("auto", torch.device("cuda")) is torch.bfloat16
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == cpu
    with pytest.raises(ValueError, match="no CUDA device"):
        choose_device("cuda")
