"""transformers' own model with the weights that the engine reads."""

from __future__ import annotations

from typing import Any

from benchmarks.common import MODEL


def reference_model(dtype: str, name: str = MODEL) -> Any:
    """transformers' Llama of the checkpoint, ready for inference; `dtype` is a name of torch's."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from engine.loading.resolve import load

    checkpoint = load(name)
    config = LlamaConfig(**{key: value for key, value in checkpoint.config.items() if key != "architectures"})
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.load_state_dict(checkpoint.tensors, strict=False, assign=True)
    model.tie_weights()
    # Made on the meta device, the table of frequencies has no values yet.
    rotary = type(model.model.rotary_emb)(config)
    model = model.to(getattr(torch, dtype)).eval()
    model.model.rotary_emb = rotary
    return model


def reference_logprobs(model: Any, tokens: list[int]) -> Any:
    """[tokens, vocab] float32: the log probabilities behind each position, from one pass over all of them."""
    import torch

    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].float().log_softmax(-1)
