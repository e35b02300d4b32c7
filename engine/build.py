"""From settings to a running engine: find and read the model, size the KV cache, put the parts together."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from engine import cpu_kernels
from engine.adapters.device import DeviceAdapters
from engine.adapters.library import AdapterLibrary, AdapterSource
from engine.adapters.targets import targets
from engine.adapters.weights import Adapter, load_adapter
from engine.cache_folder import default_cache_dir
from engine.config import EngineConfig, SchedulerConfig
from engine.cpu_share import CpuShare
from engine.cpus import bounded_threads
from engine.device.memory import device_memory
from engine.device.runner import DeviceRunner
from engine.device.start import measured_blocks, record_decodes, schedules_ahead, wants_device_runner
from engine.device_kernels import device_ops
from engine.engine import Engine
from engine.loading.checkpoint import Checkpoint
from engine.loading.converted import ROWS
from engine.loading.memory import give_back_freed_memory
from engine.loading.resolve import load, take_weights
from engine.models.config import ModelConfig
from engine.models.registry import OWN_STEP, CausalLM, model_class
from engine.pace import PrefillPace
from engine.request import ModelInfo
from engine.runner import ModelRunner
from engine.sampler import Sampler
from engine.waiting import stays_awake
from kernels import native_build
from kernels.cpu import native
from kernels.invariant.paged_attention import proven_pieces
from kernels.ops import Ops, is_native, ops_for

logger = logging.getLogger(__name__)

_CPU_CACHE_BYTES = 1024 * 1024 * 1024
_MIB = 1024 * 1024
#: Prompt tokens of a sequence that a pass may compute beside decodes where no threshold is set and no pace kept. On two
#: cores of a CPU 64 take torch as long as two decodes of 16 sequences in float32: the longest gap is then a little over
#: three of those.
_PREFILL_THRESHOLDS = {"cpu": 32, "cuda": 512}
#: Prompt tokens of the class `batch` in a pass, where a pass takes the longer the more rows it has; 0: no bound.
_BATCH_TOKENS = {"cpu": 128, "cuda": 0}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def build_engine(config: EngineConfig, source: AdapterSource | None = None) -> Engine:
    """Load the model and put an engine around it. Adapters that nobody registers come from `source`.

    Raises:
        ValueError: the model is not found or not served, or a setting does not fit it.
    """
    torch.set_num_threads(bounded_threads(config.threads or torch.get_num_threads()))
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    if device.type == "cpu" and config.kernels == "auto" and config.cpu_kernels != "torch":
        native_build.begin(config.cache_dir or default_cache_dir())
    checkpoint = load(config.model, config.cache_dir, dtype)
    model_config = ModelConfig.from_hf(checkpoint.config)
    max_model_len = _context(config, model_config)
    ops = _ops(config, model_config, device, dtype)

    def construct() -> CausalLM:
        serving = model_class(model_config.architecture)
        return serving(model_config, checkpoint.tensors, ops, device, dtype, max_model_len)

    model = _model(checkpoint, construct, native.layout() if is_native(ops) else ROWS, mapped=config.map_weights)
    slots = library = None
    if config.enable_lora:
        slots = DeviceAdapters(model_config, ops, config.max_loras, config.max_lora_rank, dtype, device)
        library = _library(config, model, slots, source)
    if config.screen_head:
        model.screen_head()
    runner = _runner(config, model, checkpoint, ops, max_model_len, slots)
    num_blocks = runner.num_blocks
    scheduler = SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=max(config.max_num_batched_tokens, config.max_num_seqs),
        max_model_len=max_model_len,
        long_prefill_token_threshold=_prefill_threshold(config, device),
        prefill_pace=_prefill_pace(config, model_config, ops),
        batch_prefill_tokens=_BATCH_TOKENS[device.type],
        enable_prefix_caching=config.enable_prefix_caching,
        max_loras=config.max_loras,
    )
    info = _info(config, checkpoint, model, ops, max_model_len, num_blocks * config.block_size)
    logger.info(
        "model %s: %s on %s, %d KV blocks of %d tokens", info.name, info.dtype, device, num_blocks, config.block_size
    )
    launcher = runner if isinstance(runner, DeviceRunner) and schedules_ahead(config, device) else None
    return Engine(runner, info, checkpoint.bundle.tokenizer, scheduler, library, launcher)


def _model(checkpoint: Checkpoint, construct: Callable[[], CausalLM], layout: str, *, mapped: bool) -> CausalLM:
    """The model over the checkpoint's weights, which are kept as it has prepared them."""
    anew = take_weights(checkpoint, layout, mapped=mapped)
    try:
        model = construct()
    except ValueError as error:
        converted = checkpoint.converted
        if converted is None or anew:
            raise
        logger.warning("%s is made anew: %s", converted.folder, error)
        checkpoint.tensors, anew = converted.convert(), True
        model = construct()
    _warn_unused(checkpoint)
    checkpoint.tensors.clear()
    give_back_freed_memory()
    if anew and checkpoint.converted is not None and model.prepared:
        checkpoint.converted.begin_to_keep(layout, model.prepared)
    model.prepared = {}
    return model


def _library(
    config: EngineConfig, model: CausalLM, slots: DeviceAdapters, source: AdapterSource | None
) -> AdapterLibrary[Adapter]:
    """Reads adapters for a model and its slots."""
    parts_of = partial(
        load_adapter,
        targets=targets(model.config),
        dtype=model.dtype,
        max_rank=config.max_lora_rank,
        base=model.own_layers(),
        base_step=OWN_STEP,
    )

    def read(folder: Path) -> Adapter:
        return slots.prepare(parts_of(folder))

    return AdapterLibrary(read, config.max_cpu_loras or config.max_loras, source=source)


def _prefill_threshold(config: EngineConfig, device: torch.device) -> int:
    asked = config.long_prefill_token_threshold
    return _PREFILL_THRESHOLDS[device.type] if asked is None else asked


def _prefill_pace(config: EngineConfig, model: ModelConfig, ops: Ops) -> PrefillPace | None:
    paced = config.long_prefill_token_threshold is None and is_native(ops)
    return PrefillPace.of(model) if paced else None


def choose_device(name: str) -> torch.device:
    """The device for a setting.

    Raises:
        ValueError: CUDA is asked for and not there.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda: torch finds no CUDA device")
    return torch.device(name)


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype for a setting.

    Raises:
        ValueError: float16 on a CPU.
    """
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" or _cpu_computes_bfloat16() else torch.float32
    if name == "float16" and device.type == "cpu":
        raise ValueError("dtype float16 is for GPUs; on a CPU take bfloat16 or float32")
    return _DTYPES[name]


def _cpu_computes_bfloat16() -> bool:
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def _ops(config: EngineConfig, model: ModelConfig, device: torch.device, dtype: torch.dtype) -> Ops:
    if device.type == "cpu" and config.kernels == "auto" and cpu_kernels.use_native(config, model, dtype):
        return ops_for(device.type, native=True)  # deterministic by themselves
    if config.deterministic:
        if config.enable_lora:
            raise ValueError("enable_lora: in deterministic mode adapters need the native CPU kernels")
        if device.type == "cuda":
            # Else cuBLAS takes what workspace is free, and may sum in another order for it. Read at its first use.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        proven_pieces(model.head_dim, device, torch.get_num_threads())  # now, so that it fails at load if at all
    return device_ops(config, model, device)


def _context(config: EngineConfig, model: ModelConfig) -> int:
    own = model.max_position_embeddings
    length = config.max_model_len or own
    if length > own:
        raise ValueError(f"max_model_len {length} is more than the model's {own}")
    if model.sliding_window is not None and model.sliding_window < length:
        if config.max_model_len is not None:
            raise ValueError(f"max_model_len {length} is more than the sliding window of {model.sliding_window}")
        length = model.sliding_window
    return length


def _warn_unused(checkpoint: Checkpoint) -> None:
    """Tensors that the model did not take: its answers may be wrong for such a checkpoint."""
    harmless = ("lm_head.weight", "rotary_emb.inv_freq")  # a tied head that was saved too; a table that is computed
    unused = sorted(name for name in checkpoint.tensors if not name.endswith(harmless))
    if unused:
        logger.warning("%s: %d tensors are not used, such as %s", checkpoint.name, len(unused), unused[0])


def _count_blocks(
    config: EngineConfig, model: CausalLM, max_model_len: int, measure: Callable[[int], int | None]
) -> int:
    """KV blocks; `measure` says how many of so many bytes a device has room for, None where that is not known."""
    asked = config.num_blocks or config.num_gpu_blocks_override
    if asked is not None:
        return asked
    shape = model.config
    per_token = 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim * model.dtype.itemsize
    block = per_token * config.block_size
    most = config.max_num_seqs * -(-max_model_len // config.block_size)
    if config.kv_cache_memory_mb is None and (measured := measure(block)) is not None:
        return min(measured, most)
    memory = _CPU_CACHE_BYTES if config.kv_cache_memory_mb is None else config.kv_cache_memory_mb * _MIB
    blocks = min(memory // block, most)
    if blocks < 1:
        raise ValueError(f"a KV block takes {block / _MIB:.1f} MiB: more than the KV cache's {memory / _MIB:.0f} MiB")
    return int(blocks)


def _runner(
    config: EngineConfig,
    model: CausalLM,
    checkpoint: Checkpoint,
    ops: Ops,
    max_model_len: int,
    adapters: DeviceAdapters | None,
) -> ModelRunner:
    tokenizer, size = checkpoint.bundle.tokenizer, config.block_size

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    sampler, memory = Sampler(ops, encode), device_memory(model.device)

    def measure(block: int) -> int | None:
        if memory is None:
            return None
        return measured_blocks(config, model, sampler, ops, adapters, max_model_len, memory, block)

    if not wants_device_runner(config, ops, model.device):
        num_blocks = _count_blocks(config, model, max_model_len, measure)
        return ModelRunner(model, sampler, ops, num_blocks, size, adapters, _share(model.device))
    if adapters is not None:
        adapters.reserve()  # before what is left is measured, and passes are recorded
    num_blocks = _count_blocks(config, model, max_model_len, measure)
    runner = DeviceRunner(model, sampler, ops, num_blocks, size, adapters)
    record_decodes(runner, config, ops, model, max_model_len)
    return runner


def _share(device: torch.device) -> CpuShare | None:
    """For torch's threads where they stay awake between regions, and so are in the way of others."""
    threads = torch.get_num_threads()
    return CpuShare(threads) if device.type == "cpu" and threads > 1 and stays_awake() else None


def _info(
    config: EngineConfig, checkpoint: Checkpoint, model: CausalLM, ops: Ops, max_model_len: int, kv_tokens: int
) -> ModelInfo:
    bundle, dtype = checkpoint.bundle, str(model.dtype).removeprefix("torch.")
    parts = [checkpoint.digest, checkpoint.config, dtype]
    if config.deterministic:
        # A job that moves between workers keeps its bits only where all of a pool compute alike.
        parts.append("deterministic, native" if is_native(ops) else "deterministic")
    identity = json.dumps(parts, sort_keys=True)
    return ModelInfo(
        name=config.served_name or checkpoint.name,
        digest=hashlib.sha256(identity.encode()).hexdigest(),
        max_model_len=max_model_len,
        vocab_size=model.config.vocab_size,
        eos_token_ids=bundle.eos_token_ids,
        kv_tokens=kv_tokens,
        dtype=dtype,
        tokenizer_json=bundle.tokenizer.to_str(),
        chat_template=bundle.chat_template,
        special_tokens=bundle.special_tokens,
        sampling_defaults=checkpoint.sampling_defaults,
        adapter_modules=_adapter_modules(model) if config.enable_lora else {},
        max_lora_rank=config.max_lora_rank if config.enable_lora else 0,
    )


def _adapter_modules(model: CausalLM) -> dict[str, tuple[int, int]]:
    return {name: (target.inputs, target.outputs) for name, target in targets(model.config).items()}
