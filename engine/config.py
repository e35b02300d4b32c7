"""Settings of the engine as plain dataclasses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from engine.cpus import check_pinning
from engine.pace import PrefillPace
from kernels.backends import Kernels

Device = Literal["auto", "cpu", "cuda"]
CpuKernels = Literal["auto", "native", "torch"]
DType = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """What the scheduler may put into one step and into the KV cache.

    Attributes:
        max_num_seqs: most sequences that run at once.
        max_num_batched_tokens: most tokens in one forward pass; at least `max_num_seqs`, since every running sequence
            decodes one in each step.
        max_model_len: context in tokens, prompt and output.
        long_prefill_token_threshold: most prompt tokens of one sequence in a pass that also decodes, so that running
            streams do not wait for a whole long prompt; 0: no such bound.
        prefill_pace: decides on that in place of the threshold, pass by pass; None: nothing does.
        batch_prefill_tokens: most prompt tokens of the class `batch` in one pass; where others are served, that class
            is also left out by turns, see `engine.classes`. 0: no such bound, and every pass is for all classes.
        enable_prefix_caching: reuse the blocks of equal prefixes.
        watermark: share of the pool that an admission leaves free while others run.
        lookahead: waiting sequences that are tried behind one that does not fit.
        max_bypasses: admissions past a waiting sequence after which nobody passes it any more.
        output_reserve: output tokens that `Engine.capacity` sets aside at most for each live sequence.
        max_loras: most adapters in one batch.

    Raises:
        ValueError: a value is out of bounds.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_model_len: int = 2048
    long_prefill_token_threshold: int = 0
    prefill_pace: PrefillPace | None = None
    batch_prefill_tokens: int = 0
    enable_prefix_caching: bool = True
    watermark: float = 0.01
    lookahead: int = 8
    max_bypasses: int = 32
    output_reserve: int = 256
    max_loras: int = 4

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise ValueError(f"max_num_seqs must be at least 1, not {self.max_num_seqs}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs})"
            )
        if self.max_loras < 1:
            raise ValueError(f"max_loras must be at least 1, not {self.max_loras}")
        if self.max_model_len < 2:
            raise ValueError(f"max_model_len must be at least 2, not {self.max_model_len}")
        if not 0.0 <= self.watermark < 1.0:
            raise ValueError(f"watermark must be in [0, 1), not {self.watermark}")
        bounds = ("long_prefill_token_threshold", "batch_prefill_tokens", "lookahead", "max_bypasses", "output_reserve")
        for name in bounds:
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """All of an engine: the model, where it runs, and what the scheduler may do.

    Attributes:
        model: a known name, a folder in Hugging Face form, a GGUF file or a hub name.
        served_name: name to serve the model under; None: its own.
        device: `auto` takes the GPU where there is one.
        dtype: of weights and KV cache; `auto`: bfloat16 on a GPU or a CPU that computes in it, else float32.
        max_model_len: context in tokens; None: the model's own.
        max_num_seqs: most sequences in a batch.
        max_num_batched_tokens: token budget of a step.
        long_prefill_token_threshold: see `SchedulerConfig`; None: with the native CPU kernels what `engine.pace`
            says, else 32 on a CPU, 512 on a GPU.
        block_size: tokens per KV block.
        num_blocks: blocks of the KV cache; wins over `kv_cache_memory_mb`.
        num_gpu_blocks_override: vLLM's name of `num_blocks`.
        kv_cache_memory_mb: memory of the KV cache in MiB; None: 1024 on a CPU, on a GPU what `gpu_memory_utilization`
            leaves. Never more than `max_num_seqs` sequences of `max_model_len` tokens could fill.
        gpu_memory_utilization: share of a GPU's memory that may be used, by other processes too: what weights and the
            largest pass, which is run once, leave of it is the KV cache's.
        enable_prefix_caching: reuse the blocks of equal prefixes.
        deterministic: results do not depend, bit for bit, on batch, chunking, prefix hits and preemption.
        enable_lora: serve adapters.
        max_loras: most adapters in one batch, each in a slot on the device.
        max_lora_rank: largest rank of an adapter.
        max_cpu_loras: adapters kept in memory; None: as many as `max_loras`.
        kernels: `auto`: those of the device, see `cpu_kernels` for a CPU; `triton`: Triton's, in its interpreter on a
            CPU; `reference`: plain torch.
        cpu_kernels: where `kernels` is `auto`. `native`: C++ kernels, built on first use; `torch`: torch's own; `auto`:
            native where they can be used.
        enforce_eager: record no decodes.
        cudagraph_capture_sizes: batch sizes for which decodes are recorded; larger batches are not. None: 1, 2, 4, then
            steps of 8 up to 256 and of 16 up to `max_num_seqs`.
        async_scheduling: plan and begin a step before the tokens of the last one are known; None: on a GPU.
        screen_head: native kernels find greedy tokens by an 8-bit copy of the output matrix, the same tokens faster; it
            takes a byte for each weight of the matrix.
        threads: of torch and of the native kernels; None leaves torch's setting.
        cpu_pinning: CPUs of the native kernels' threads: `none`: wherever the system puts them; `auto`: one each, on
            different cores first; or a list such as `0-3,8`. The thread that runs the engine is not pinned.
        map_weights: weights that were packed before are pages of their file in the cache, which all processes share, in
            place of a copy in large pages, which is faster to compute with.
        cache_dir: folder for converted tokenizers; None: the user's cache folder.

    Raises:
        ValueError: a value is out of bounds.
    """

    model: str
    served_name: str | None = None
    device: Device = "auto"
    dtype: DType = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 1024
    long_prefill_token_threshold: int | None = None
    block_size: int = 16
    num_blocks: int | None = None
    num_gpu_blocks_override: int | None = None
    kv_cache_memory_mb: int | None = None
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    deterministic: bool = False
    enable_lora: bool = False
    max_loras: int = 1
    max_lora_rank: int = 16
    max_cpu_loras: int | None = None
    kernels: Kernels = "auto"
    cpu_kernels: CpuKernels = "auto"
    enforce_eager: bool = False
    cudagraph_capture_sizes: Sequence[int] | None = None
    async_scheduling: bool | None = None
    screen_head: bool = True
    threads: int | None = None
    cpu_pinning: str = "none"
    map_weights: bool = False
    cache_dir: Path | None = None

    def __post_init__(self) -> None:
        if not self.model:
            raise ValueError("model must not be empty")
        check_pinning(self.cpu_pinning)
        if self.block_size < 1:
            raise ValueError(f"block_size must be at least 1, not {self.block_size}")
        if self.kernels not in get_args(Kernels):
            raise ValueError(f"kernels must be one of {', '.join(get_args(Kernels))}, not {self.kernels!r}")
        if self.cpu_kernels not in get_args(CpuKernels):
            raise ValueError(f"cpu_kernels must be one of {', '.join(get_args(CpuKernels))}, not {self.cpu_kernels!r}")
        if "auto" not in (self.kernels, self.cpu_kernels):
            raise ValueError(f"cpu_kernels {self.cpu_kernels} is for kernels auto, not for kernels {self.kernels}")
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ValueError(f"max_cpu_loras ({self.max_cpu_loras}) must be at least max_loras ({self.max_loras})")
        for name, names in (("device", get_args(Device)), ("dtype", get_args(DType))):
            if getattr(self, name) not in names:
                raise ValueError(f"{name} must be one of {', '.join(names)}, not {getattr(self, name)!r}")
        for name in ("max_loras", "max_lora_rank", "max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.num_blocks is not None and self.num_gpu_blocks_override is not None:
            raise ValueError("num_gpu_blocks_override is another name of num_blocks: give one of them")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ValueError(f"gpu_memory_utilization must be in (0, 1], not {self.gpu_memory_utilization}")
        if any(size < 1 for size in self.cudagraph_capture_sizes or ()):
            raise ValueError(
                f"cudagraph_capture_sizes must be at least 1, not {min(self.cudagraph_capture_sizes or ())}"
            )
        for name in ("max_model_len", "num_blocks", "num_gpu_blocks_override", "kv_cache_memory_mb", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
