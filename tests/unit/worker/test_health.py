"""Probes and metrics over HTTP."""

from __future__ import annotations

import json
import socket
import struct
import threading
import urllib.error
import urllib.request
from typing import Any

import pytest

from engine.request import EngineStats
from shared.probes import HealthServer
from shared.protocol import Timings, Usage
from worker.metrics import WorkerMetrics
from worker.request_metrics import Asked

TRACE = "0af7651916cd43dd8448eb211c80319c"


def get(port: int, path: str, accept: str = "*/*") -> tuple[int, str]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers={"Accept": accept})
    try:
        with urllib.request.urlopen(request, timeout=20) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_probes_answer_by_what_they_are_told() -> None:
    well = {"value": True}

    def probe() -> tuple[bool, dict[str, Any]]:
        return well["value"], {"well": well["value"]}

    metrics = WorkerMetrics("m")
    server = HealthServer("127.0.0.1", 0, metrics.registry, live=probe, ready=lambda: (False, {}))
    try:
        assert get(server.port, "/health") == (200, json.dumps({"well": True}))
        well["value"] = False
        assert get(server.port, "/health?x=1")[0] == 503
        assert get(server.port, "/ready")[0] == 503 and get(server.port, "/nothing")[0] == 404
        metrics.engine(EngineStats(running=3, total_blocks=10, used_blocks=5, steps=7, generated_tokens=20))
        metrics.engine(EngineStats(running=2, total_blocks=10, used_blocks=1, steps=9, generated_tokens=25))
        metrics.ended(
            "completed",
            Usage(prompt_tokens=2, completion_tokens=11),
            Timings(queue_ms=200, first_token_ms=50, run_ms=1050),
            Asked(64, ("stop", None), longest=9, trace={"traceparent": f"00-{TRACE}-{'1' * 16}-01"}),
        )
        metrics.intervals.add(0.02, 3)
        status, text = get(server.port, "/metrics")
        openmetrics = get(server.port, "/metrics", "application/openmetrics-text; version=1.0.0")[1]
    finally:
        server.close()
    assert status == 200
    for line in (
        'ropeway_num_requests_running{model_name="m"} 2.0',
        'ropeway_kv_cache_usage_perc{model_name="m"} 0.1',
        'ropeway_engine_steps_total{model_name="m"} 9.0',
        'ropeway_generation_tokens_total{model_name="m"} 25.0',
        'ropeway_jobs_total{model_name="m",status="completed"} 1.0',
        'ropeway_time_to_first_token_seconds_sum{model_name="m"} 0.25',
        'ropeway_request_time_per_output_token_seconds_sum{model_name="m"} 0.125',
        'ropeway_inter_token_latency_seconds_bucket{le="0.01",model_name="m"} 0.0',
        'ropeway_inter_token_latency_seconds_bucket{le="0.025",model_name="m"} 3.0',
        'ropeway_time_per_output_token_seconds_sum{model_name="m"} 0.06',
        'ropeway_request_success_total{finished_reason="stop",model_name="m"} 1.0',
        'ropeway_request_success_total{finished_reason="error",model_name="m"} 1.0',
        'ropeway_request_success_total{finished_reason="length",model_name="m"} 0.0',
        'ropeway_jobs_total{model_name="m",status="expired"} 0.0',
        'ropeway_request_decode_time_seconds_sum{model_name="m"} 1.0',
        'ropeway_request_params_max_tokens_sum{model_name="m"} 64.0',
        'ropeway_dead_letters_total{model_name="m"} 0.0',
        'ropeway_fenced_publishes_total{model_name="m"} 0.0',
    ):
        assert line in text.splitlines(), line
    assert TRACE not in text and openmetrics.endswith("# EOF\n")
    buckets = [line for line in openmetrics.splitlines() if f'# {{trace_id="{TRACE}"}} 0.25' in line]
    assert [line.partition("{")[0] for line in buckets] == ["ropeway_time_to_first_token_seconds_bucket"]


def test_a_client_that_goes_away_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    gone, asked = threading.Event(), threading.Event()
    handlers: list[threading.Thread] = []

    def probe() -> tuple[bool, dict[str, Any]]:
        handlers.append(threading.current_thread())
        asked.set()
        assert gone.wait(20)
        return True, {}

    server = HealthServer("127.0.0.1", 0, WorkerMetrics("m").registry, live=probe, ready=probe)
    try:
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(b"GET /health HTTP/1.0\r\n\r\n")
            assert asked.wait(20)
            # Closing resets the connection, so that the answer cannot be written.
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        gone.set()
        handlers[0].join(20)
    finally:
        server.close()
    assert "Traceback" not in capfd.readouterr().err
