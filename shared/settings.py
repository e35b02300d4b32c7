"""Settings: one class per process, environment prefix `ROPEWAY_`, every field described. Shown by `ropeway config`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict

from shared.address_guard import check_allow
from shared.keys import DEFAULT_LANES
from shared.webhook_signing import check_secrets


class CommonSettings(BaseSettings):
    """What every process needs. An unknown `ROPEWAY_` name is not an error: processes share one environment."""

    # An error's text may end in a log, and the value at fault be a secret.
    model_config = SettingsConfigDict(
        env_prefix="ROPEWAY_", extra="ignore", validate_default=True, hide_input_in_errors=True
    )

    redis_url: str = Field(
        "redis://127.0.0.1:6379/0",
        description="Redis: redis://, rediss://, unix://, redis+sentinel:// or redis+cluster:// URL",
    )
    adapter_store: str | None = Field(
        None,
        description="folder or fsspec URL (s3://...) of LoRA adapters that all processes can read; "
        "unset: in the user's cache folder",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least level that is logged")
    log_json: bool | None = Field(None, description="JSON lines; unset: where standard error is not a terminal")
    otlp_traces_endpoint: str | None = Field(
        None,
        pattern=r"^https?://[^/]",
        description="URL of an OpenTelemetry collector that takes traces by OTLP over HTTP; unset: as "
        "OTEL_EXPORTER_OTLP_ENDPOINT says, else none",
    )


class AdapterSettings(CommonSettings):
    """What those need who take adapters, files and batches in."""

    tasks_redis_url: str | None = Field(
        None,
        description="Redis of the background tasks; unset: redis_url. Must be set where that is a cluster, and be none",
    )
    files_store: str | None = Field(
        None,
        description="folder or fsspec URL (s3://...) of uploaded files and of batches' output, for gateways and tasks; "
        "unset: in the user's cache folder",
    )
    files_retention_s: float = Field(
        30 * 24 * 3600.0, gt=0, description="seconds that files, and records of batches that have ended, are kept"
    )
    max_adapter_bytes: int = Field(2 * 1024**3, ge=1, description="largest file of a LoRA adapter's weights in bytes")
    webhook_allow: Annotated[list[str], AfterValidator(check_allow)] = Field(
        [],
        description="where webhooks may go besides public addresses, as a JSON list of networks (10.1.0.0/16) and "
        "hosts (hooks.internal, *.internal), for gateways and tasks",
    )
    webhook_http: bool = Field(False, description="webhooks may go to http:// too, for gateways and tasks")


class GatewaySettings(AdapterSettings):
    """Settings of the HTTP gateway."""

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    api_keys: list[SecretStr] = Field(
        [],
        description="accepted API keys as a JSON list, beside those of `ropeway keys`; empty: see require_keys",
    )
    metrics_key: SecretStr | None = Field(
        None, description="a further key that may read /metrics and /v1/pools, and nothing else: for an autoscaler"
    )
    require_keys: bool = Field(
        False,
        description="ask for keys though none is set here: those of `ropeway keys` are accepted in any case. Setting "
        "any key has the same effect",
    )
    key_cache_s: float = Field(
        5.0, gt=0, description="seconds after which a change of a key or a tenant holds that no message told of"
    )
    key_outage_s: float = Field(
        300.0, ge=0, description="seconds that keys and tenants that are known here go on while Redis is away"
    )
    usage_days: int = Field(90, ge=0, le=3650, description="days that it is kept what keys have used")
    pools: list[str] = Field(
        [],
        description="pools that are meant to be here, as a JSON list: until one's first worker has come, requests for "
        "it are answered with 503 and not with 404, and its load asks for a worker",
    )
    scale_target_s: float = Field(
        10.0,
        gt=0,
        description="seconds that queued jobs may wait, in the number of workers that /v1/pools asks for",
    )
    shutdown_grace_s: int = Field(20, ge=0, description="seconds that SIGTERM leaves open requests to end")
    admin_api_keys: list[SecretStr] = Field(
        [],
        description="API keys that may load and unload adapters too, as a JSON list; without any key, this machine may "
        "where the gateway listens on loopback",
    )
    max_adapters: int = Field(10_000, ge=1, description="most names of adapters; above it 429")
    adapter_wait_s: float = Field(600.0, gt=0, description="longest wait of a request for an adapter's load")
    cors_origins: list[str] = Field(
        [], description='origins of pages whose scripts may use this API, as a JSON list; ["*"]: any; empty: none'
    )
    token_secret: SecretStr | None = Field(
        None,
        min_length=16,
        description="what signs the tokens of job streams, the same for all gateways; unset: one kept in Redis",
    )
    max_token_s: float = Field(3600.0, gt=0, description="longest life of a token of a job's stream, in seconds")
    max_body_bytes: int = Field(8 * 1024 * 1024, ge=1024, description="largest request body in bytes")
    max_file_bytes: int = Field(200 * 1024 * 1024, ge=1, description="largest uploaded file in bytes")
    max_prompts: int = Field(128, ge=1, description="most prompts in one completions request")
    max_choices: int = Field(128, ge=1, description="most choices in one request, prompts times n")
    max_jobs_per_request: int = Field(256, ge=1, description="most jobs in one submit")
    max_queued_jobs: int | None = Field(10_000, ge=1, description="most queued jobs per lane; above it 429")
    max_queued_tokens: int | None = Field(None, ge=1, description="most queued tokens per lane; above it 429")
    submit_replicas: int = Field(
        0, ge=0, description="replicas of Redis that must have a job before it counts as accepted; else 503"
    )
    submit_replica_timeout_ms: int = Field(
        1000, ge=1, le=4000, description="milliseconds that a submit waits for submit_replicas"
    )
    max_pool_queued_jobs: int | None = Field(None, ge=1, description="about the most queued jobs of a pool; above: 429")
    max_pool_queued_tokens: int | None = Field(
        None, ge=1, description="about the most queued tokens per pool; above it 429"
    )
    max_tenant_queued_jobs: int | None = Field(
        None, ge=1, description="about the most queued jobs per tenant, over all models; above it 429"
    )
    max_tenant_queued_tokens: int | None = Field(
        None, ge=1, description="about the most queued tokens per tenant, over all models; above it 429"
    )
    rate_limit_requests: int | None = Field(None, ge=1, description="requests per minute and tenant; above it 429")
    rate_limit_tokens: int | None = Field(
        None, ge=1, description="tokens per minute and tenant, prompts and max_tokens; above it 429"
    )
    deadline_s: float = Field(3600.0, gt=0, description="seconds until a job must have ended")
    max_run_s: float = Field(600.0, gt=0, description="seconds past its deadline that a running job's keys are kept")
    retention_s: float = Field(3600.0, gt=0, description="seconds that an ended job's result and events are kept")
    max_retention_s: float = Field(
        7 * 24 * 3600.0, gt=0, description="longest retention that a job may ask for, in seconds"
    )
    disconnect_grace_s: float = Field(
        0.0, ge=0, description="seconds until the job of a client that went away is cancelled"
    )
    sweep_s: float = Field(
        15.0, ge=0, description="seconds between looks for jobs that are past their deadline or in no queue; 0: none"
    )
    max_wait_s: float = Field(60.0, gt=0, description="longest ?wait= of a job")
    stream_queue_frames: int = Field(256, ge=1, description="frames held per stream before a slow reader reads the log")
    keepalive_s: float = Field(15.0, gt=0, description="seconds of silence after which an SSE comment is sent")
    tokenizer_threads: int = Field(2, ge=1, description="threads that render and tokenize")
    flush_ms: int = Field(100, ge=0, description="where nothing is streamed: how long a worker may gather tokens")
    max_live_streams: int = Field(10_000, ge=1, description="most concurrent subscriptions; above it 429")

    @property
    def keys_required(self) -> bool:
        """Whether anything but probes asks for a key: one is set, or it is said so."""
        return bool(self.require_keys or self.api_keys or self.admin_api_keys or self.metrics_key)


class TasksSettings(AdapterSettings):
    """Settings of the process that runs background tasks."""

    adapter_roots: list[Path] = Field(
        [], description="folders, as a JSON list, beneath which adapters may be loaded from a path; empty: none"
    )
    adapter_hub: bool = Field(True, description="adapters may be loaded from the Hugging Face hub")
    adapter_load_timeout_s: int = Field(1800, ge=1, description="seconds that one load may take")
    adapter_retention_s: float = Field(
        8 * 24 * 3600.0, ge=0, description="seconds that the store keeps content that no name points to any more"
    )
    adapter_sweep_s: float = Field(5.0, gt=0, description="seconds between looks for loads that nobody is at any more")
    batch_window: int = Field(64, ge=1, le=4096, description="lines of one batch that are in the queue at a time")
    batch_slice_s: float = Field(
        20.0, gt=0, description="seconds after which a batch lets other background tasks that wait have their turn"
    )
    webhook_secrets: Annotated[list[SecretStr], AfterValidator(check_secrets)] = Field(
        [],
        description="what signs webhooks of tenants without a secret of their own, as a JSON list of whsec_...; "
        "several: each signs; empty: one kept in Redis",
    )
    webhook_retry_s: float = Field(24 * 3600.0, gt=0, description="seconds for which a webhook is tried again")
    webhook_first_retry_s: float = Field(
        5.0,
        gt=0,
        description="seconds until a webhook's second try; each further pause is twice as long, up to an hour",
    )
    webhook_timeout_s: float = Field(15.0, gt=0, le=300, description="seconds that a webhook's receiver has to answer")
    webhook_connections: int = Field(64, ge=1, le=1024, description="webhooks that are sent at a time")
    webhook_max_bytes: int = Field(
        1024 * 1024, ge=4096, description="largest body of a webhook; the result of a job with a larger one is left out"
    )
    webhook_poll_s: float = Field(1.0, gt=0, description="seconds between looks for webhooks that are to be sent")
    tasks_health_host: str = Field("127.0.0.1", description="address of /health and /metrics")
    tasks_health_port: int = Field(8002, ge=0, le=65535, description="port of /health and /metrics; 0 takes a free one")


class WorkerSettings(CommonSettings):
    """Settings of a worker."""

    model: str = Field("smollm2-135m-instruct", description="a known name, a folder, a GGUF file or a hub name")
    pool: str | None = Field(None, description="pool to serve; unset: the model's own name")
    lanes: int = Field(DEFAULT_LANES, ge=1, le=256, description="lanes of the pool; all its workers must agree")
    engine: Literal["auto", "sim"] = Field("auto", description="sim: a cost model in place of a model")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: the GPU where there is one")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("auto", description="of weights and KV cache")
    max_model_len: int | None = Field(None, ge=1, description="context in tokens; unset: the model's own")
    max_num_seqs: int = Field(64, ge=1, description="most sequences in a batch")
    max_num_batched_tokens: int = Field(1024, ge=16, description="token budget of a step")
    long_prefill_token_threshold: int | None = Field(
        None,
        ge=0,
        description="most prompt tokens of one job in a step that also decodes; unset: 512 on a GPU; on a CPU by "
        "what they cost beside how many streams, with torch's kernels 32",
    )
    block_size: int = Field(16, ge=1, description="tokens per KV block")
    kv_cache_memory_mb: int | None = Field(
        None,
        ge=1,
        description="memory of the KV cache; unset: 1024 on a CPU, what gpu_memory_utilization leaves on a GPU",
    )
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="share of a GPU's memory for weights, the largest step and KV cache together"
    )
    num_blocks: int | None = Field(None, ge=1, description="blocks of the KV cache; wins over kv_cache_memory_mb")
    num_gpu_blocks_override: int | None = Field(None, ge=1, description="vLLM's name of num_blocks")
    enable_prefix_caching: bool = Field(True, description="find full blocks again by hash")
    deterministic: bool = Field(False, description="results do not depend on the batch, bit for bit")
    enable_lora: bool = Field(False, description="serve LoRA adapters; all workers of a pool alike")
    # Unlike vLLM's 1: with it, requests of two adapters would take turns and never share a batch.
    max_loras: int = Field(4, ge=1, description="most adapters in one batch, each in a slot on the device")
    max_lora_rank: int = Field(16, ge=1, description="largest rank of an adapter; all workers of a pool alike")
    max_cpu_loras: int | None = Field(
        None, ge=1, description="adapters kept in memory, pinned ones among them; unset: four times max_loras"
    )
    adapter_copies_mb: int = Field(
        20_480,
        ge=0,
        description="disk in cache_dir for copies of adapters from an object store, beside the newest; "
        "those that were read longest ago go first",
    )
    kernels: Literal["auto", "triton", "reference"] = Field(
        "auto", description="auto: the device's own; triton: on a CPU in its interpreter, for tests; reference: torch"
    )
    cpu_kernels: Literal["auto", "native", "torch"] = Field(
        "auto", description="on a CPU; native: C++ kernels, built on first use; auto: where they can be used"
    )
    enforce_eager: bool = Field(False, description="on a GPU: record no decodes (CUDA graphs)")
    cudagraph_capture_sizes: list[Annotated[int, Field(ge=1)]] | None = Field(
        None, description="batch sizes of recorded decodes, as a JSON list; unset: 1, 2, 4, then steps of 8, then of 16"
    )
    async_scheduling: bool | None = Field(
        None, description="begin a step before the last one's tokens are known; unset: on a GPU"
    )
    screen_head: bool = Field(
        True, description="native kernels find greedy tokens by an 8-bit copy of the output matrix; the same tokens"
    )
    threads: int | None = Field(
        None, ge=1, description="threads that compute; unset: the CPUs of this process, less one from 8 on"
    )
    cpu_pinning: str = Field(
        "none",
        pattern=r"^(none|auto|\d+(-\d+)?(,\d+(-\d+)?)*)$",
        description="CPUs of the native kernels' threads: none, auto (one each) or a list such as 0-3,8",
    )
    map_weights: bool = Field(
        False, description="workers on a machine share the pages of kept weights; a little slower than large pages"
    )
    lease_s: float = Field(15.0, gt=0.1, description="seconds that a job may go unseen before another worker takes it")
    max_attempts: int = Field(
        3,
        ge=1,
        description="charged tries from which on a job is given up when its worker dies; five workers have to die at "
        "least, the last two with this job alone, so up to 5 it changes nothing",
    )
    heartbeat_s: float = Field(2.0, gt=0.01, description="seconds between entries in the registry")
    grace_s: float = Field(20.0, ge=0, description="seconds that SIGTERM leaves running jobs to end")
    step_timeout_s: float = Field(60.0, gt=0, description="a step longer than this counts as a hang")
    home_poll_ms: int = Field(250, ge=10, description="how often home lanes are looked at without a wake")
    all_poll_ms: int = Field(2000, ge=10, description="how often all lanes are looked at")
    steal_delay_ms: int = Field(30, ge=0, description="how long a woken worker leaves a lane to its home")
    health_host: str = Field("127.0.0.1", description="address of /health and /metrics")
    health_port: int = Field(8001, ge=0, le=65535, description="port of /health and /metrics; 0 takes a free one")
    sim_step_ms: float = Field(10.0, ge=0, description="sim engine: milliseconds per step")
    sim_token_us: float = Field(0.0, ge=0, description="sim engine: microseconds per token of a step")
    sim_adapter_load_ms: float = Field(0.0, ge=0, description="sim engine: milliseconds to read an adapter")
    cache_dir: Path | None = Field(
        None, description="folder for converted tokenizers and copies of adapters; unset: the user's cache folder"
    )
