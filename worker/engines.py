"""Makes the engine that the settings ask for."""

from __future__ import annotations

from engine.request import EngineProtocol
from shared.settings import WorkerSettings

#: Context of the simulated engine where none is set.
_SIM_CONTEXT = 4096


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
            num_blocks=settings.num_blocks or everything,
            max_model_len=context,
        )
    )


def _build_model(settings: WorkerSettings) -> EngineProtocol:
    from engine.config import EngineConfig
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
            kv_cache_memory_mb=settings.kv_cache_memory_mb,
            enable_prefix_caching=settings.enable_prefix_caching,
            deterministic=settings.deterministic,
            cpu_kernels=settings.cpu_kernels,
            threads=settings.threads,
            cache_dir=settings.cache_dir,
        )
    )
