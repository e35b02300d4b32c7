"""A model's folder may hold code: it is never run, whatever its configs say of it."""

from __future__ import annotations

import json
from pathlib import Path

from engine.llm import LLM
from shared.sampling import SamplingParams
from tests.support.tiny_llama import save_tiny_model

CODE = "from pathlib import Path\nPath(__file__).with_name('ran').write_text('x')\nraise RuntimeError('ran')\n"


def test_code_beside_a_model_is_not_run(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    for name in ("modeling_custom.py", "configuration_custom.py", "tokenization_custom.py"):
        (tmp_path / name).write_text(CODE)
    for file, places in (
        ("config.json", {"AutoConfig": "configuration_custom.C", "AutoModelForCausalLM": "modeling_custom.M"}),
        ("tokenizer_config.json", {"AutoTokenizer": ["tokenization_custom.T", None]}),
    ):
        path = tmp_path / file
        config = json.loads(path.read_text("utf-8")) if path.exists() else {}
        path.write_text(json.dumps(config | {"auto_map": places}), "utf-8")
    llm = LLM(str(tmp_path), dtype="float32")
    output = llm.generate([{"prompt_token_ids": [1, 2, 3]}], SamplingParams(max_tokens=2, temperature=0))[0]
    assert len(output.outputs[0].token_ids) == 2
    assert not (tmp_path / "ran").exists()
