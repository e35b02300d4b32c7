"""A small model for gateway tests: byte-level BPE tokenizer, chat template, card."""

from __future__ import annotations

from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from shared.protocol import Card, TokenizerBundle

MODEL = "tiny"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
#: SmolLM2's way of writing conversations.
TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe brief<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@cache
def tokenizer_json(bos: bool = False) -> str:
    """A byte-level BPE tokenizer; with `bos` it puts a BOS in front where special tokens are asked for."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cable of a ropeway never stops, the cabins join it and leave it"] * 4, trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
        )
    return tokenizer.to_str()


def bundle(template: str | None = TEMPLATE, *, bos: bool = False) -> TokenizerBundle:
    """What the gateway takes a tokenizer from."""
    return TokenizerBundle(
        tokenizer_json=tokenizer_json(bos),
        chat_template=template,
        special_tokens={"bos_token": SPECIAL[0], "eos_token": SPECIAL[2]},
    )


def card(**changes: object) -> Card:
    """A pool's card: 512 tokens of context, one lane unless told otherwise."""
    values: dict[str, object] = {
        "pool": MODEL,
        "digest": "d1",
        "lanes": 1,
        "max_model_len": 512,
        "vocab_size": 400,
        "eos_token_ids": [2],
        "kv_tokens": 2048,
        "created_ms": 1_700_000_000_000,
    }
    return Card(**(values | changes))  # type: ignore[arg-type]
