"""Makes the runner for a GPU: measures how many KV blocks there is room for, and records decodes."""

from __future__ import annotations

import logging

import torch

from engine.adapters.device import DeviceAdapters
from engine.config import EngineConfig
from engine.device.capture_sizes import capture_sizes
from engine.device.graphs import CudaGraphs, GraphBackend, RecordedCalls
from engine.device.memory import DeviceMemory, DeviceMemoryError, count_blocks
from engine.device.runner import DeviceRunner
from engine.models.registry import CausalLM
from engine.plan import Span, StepPlan
from engine.sampler import Sampler
from engine.sequence import Sequence
from kernels.ops import Ops, is_triton, serves_fixed
from shared.sampling import SamplingParams

logger = logging.getLogger(__name__)


def schedules_ahead(config: EngineConfig, device: torch.device) -> bool:
    """Whether a step begins before the last one's tokens are known."""
    return device.type == "cuda" if config.async_scheduling is None else config.async_scheduling


def wants_device_runner(config: EngineConfig, ops: Ops, device: torch.device) -> bool:
    """On a GPU; and on a CPU where that is to show what a GPU does."""
    return device.type == "cuda" or is_triton(ops) or schedules_ahead(config, device)


def record_decodes(runner: DeviceRunner, config: EngineConfig, ops: Ops, model: CausalLM, max_model_len: int) -> None:
    """Record decodes, unless that is not wanted or no kernels serve it.

    Raises:
        DeviceMemoryError: there is no memory left for them.
    """
    device = model.device
    sizes = capture_sizes(config.max_num_seqs, config.cudagraph_capture_sizes)
    # On a GPU the references would read every sequence up to the greatest length.
    served = serves_fixed(ops) and (device.type == "cpu" or is_triton(ops))
    if config.enforce_eager or not sizes or not served:
        logger.info("decodes are not recorded%s", "" if served else ": these kernels do not serve it")
        return
    backend: GraphBackend = CudaGraphs(device) if device.type == "cuda" else RecordedCalls()
    try:
        runner.record(sizes, max_model_len, config.max_loras, backend)
    except torch.OutOfMemoryError as error:
        raise DeviceMemoryError(
            "no memory is left to record decodes: lower gpu_memory_utilization, give fewer cudagraph_capture_sizes, or "
            "set enforce_eager"
        ) from error


def measured_blocks(
    config: EngineConfig,
    model: CausalLM,
    sampler: Sampler,
    ops: Ops,
    adapters: DeviceAdapters | None,
    max_model_len: int,
    memory: DeviceMemory,
    block_bytes: int,
) -> int:
    """KV blocks that the device has room for beside the largest pass, which is run once.

    Raises:
        DeviceMemoryError: not even one.
    """

    def run() -> int:
        return _largest_pass(config, model, sampler, ops, adapters, max_model_len) * block_bytes

    return count_blocks(memory, config.gpu_memory_utilization, block_bytes, run)


def _largest_pass(
    config: EngineConfig,
    model: CausalLM,
    sampler: Sampler,
    ops: Ops,
    adapters: DeviceAdapters | None,
    max_model_len: int,
) -> int:
    """Run as many prompt tokens as a step may have, of as many sequences as there may be, each of which is drawn.

    Returns:
        Blocks of the cache that it took.
    """
    size, tokens = config.block_size, max(config.max_num_batched_tokens, config.max_num_seqs)
    count = min(config.max_num_seqs, tokens)
    lengths = [min(max_model_len, tokens // count + (index < tokens % count)) for index in range(count)]
    # Whatever the sequences are, a block more for each is enough.
    blocks = tokens // size + count
    params = SamplingParams(temperature=1.0, top_p=0.9, top_k=50 if model.config.vocab_size > 50 else 0)
    slot = -1 if adapters is None else 0
    spans: list[Span] = []
    first = 0
    for index, length in enumerate(lengths):
        table = list(range(first, first + -(-length // size)))
        first += len(table)
        sequence = Sequence(
            str(index), 0, params, index, [0] * length, length, length + 1, block_table=table, adapter_slot=slot
        )
        spans.append(Span(sequence, 0, length, sample=True))
    runner = DeviceRunner(model, sampler, ops, blocks, size, adapters)
    runner.execute(StepPlan(spans))
    return blocks + 1
