"""Makes the engine that the settings ask for."""

from __future__ import annotations

from engine.request import EngineProtocol
from shared.adapter_store import open_store
from shared.settings import WorkerSettings
from worker.adapters import StoreSource

#: Context of the simulated engine where none is set.
_SIM_CONTEXT = 4096
#: Adapters in memory for each slot, where it is not set: so that the next ones are there when a slot changes hands.
_IN_MEMORY_PER_SLOT = 4


def build_engine(settings: WorkerSettings) -> EngineProtocol:
    """The engine; with a model this takes seconds. Torch is imported only for a model.

    Raises:
        RopewayError, OSError, ValueError: the model cannot be found, read or fitted into memory.
    """
    return _build_sim(settings) if settings.engine == "sim" else _build_model(settings)


def _build_sim(settings: WorkerSettings) -> EngineProtocol:
    from engine.sim import SimConfig, SimEngine

    context = settings.max_model_len or _SIM_CONTEXT
    everything = settings.max_num_seqs * -(-context // settings.block_size)
    return SimEngine(
        SimConfig(
            step_ms=settings.sim_step_ms,
            token_us=settings.sim_token_us,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            block_size=settings.block_size,
            num_blocks=settings.num_blocks or settings.num_gpu_blocks_override or everything,
            max_model_len=context,
            max_loras=settings.max_loras if settings.enable_lora else 0,
            max_lora_rank=settings.max_lora_rank,
            max_cpu_loras=_max_cpu_loras(settings),
            adapter_load_ms=settings.sim_adapter_load_ms,
        ),
        _source(settings),
    )


def _build_model(settings: WorkerSettings) -> EngineProtocol:
    from engine.config import EngineConfig
    from engine.cpus import serving_threads
    from engine.startup import start_engine

    return start_engine(
        EngineConfig(
            model=settings.model,
            served_name=settings.pool,
            device=settings.device,
            dtype=settings.dtype,
            max_model_len=settings.max_model_len,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            long_prefill_token_threshold=settings.long_prefill_token_threshold,
            block_size=settings.block_size,
            num_blocks=settings.num_blocks,
            num_gpu_blocks_override=settings.num_gpu_blocks_override,
            kv_cache_memory_mb=settings.kv_cache_memory_mb,
            gpu_memory_utilization=settings.gpu_memory_utilization,
            enable_prefix_caching=settings.enable_prefix_caching,
            deterministic=settings.deterministic,
            enable_lora=settings.enable_lora,
            max_loras=settings.max_loras,
            max_lora_rank=settings.max_lora_rank,
            max_cpu_loras=_max_cpu_loras(settings),
            kernels=settings.kernels,
            cpu_kernels=settings.cpu_kernels,
            enforce_eager=settings.enforce_eager,
            cudagraph_capture_sizes=settings.cudagraph_capture_sizes,
            async_scheduling=settings.async_scheduling,
            screen_head=settings.screen_head,
            threads=settings.threads or serving_threads(),
            cpu_pinning=settings.cpu_pinning,
            map_weights=settings.map_weights,
            cache_dir=settings.cache_dir,
        ),
        _source(settings),
    )


def _source(settings: WorkerSettings) -> StoreSource | None:
    if not settings.enable_lora:
        return None
    most = settings.adapter_copies_mb * 2**20
    return StoreSource(open_store(settings.adapter_store, settings.cache_dir, most_copies_bytes=most))


def _max_cpu_loras(settings: WorkerSettings) -> int:
    asked = settings.max_cpu_loras
    if settings.enable_lora and asked is not None and asked < settings.max_loras:
        raise ValueError(f"max_cpu_loras ({asked}) must be at least max_loras ({settings.max_loras})")
    return asked or _IN_MEMORY_PER_SLOT * settings.max_loras
