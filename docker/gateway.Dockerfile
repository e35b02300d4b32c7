# syntax=docker/dockerfile:1
# Gateway and background tasks; no torch. From the project's folder:
#   docker build --file docker/gateway.Dockerfile --tag ropeway/gateway:0.1.0 .
# PYTHON_IMAGE can name the base by digest. PACKAGES adds what a deployment needs, such as s3fs for an adapter store.
ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ARG PACKAGES=""
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY ropeway ropeway
COPY gateway gateway
COPY tasks tasks
COPY worker worker
COPY engine engine
COPY kernels kernels
COPY shared shared
RUN python -m venv /opt/ropeway \
 && /opt/ropeway/bin/pip install --no-cache-dir --constraint constraints.txt '.[gateway,tasks,otel]' \
 && if [ -n "${PACKAGES}" ]; then /opt/ropeway/bin/pip install --no-cache-dir --constraint constraints.txt ${PACKAGES}; fi

FROM ${PYTHON_IMAGE}
ARG CACHE=/var/cache/ropeway
# Readable by any user and writable by none but its own group: a cluster may choose the user.
RUN groupadd --gid 10001 ropeway \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin ropeway \
 && install -d -o 10001 -g 10001 -m 0770 "${CACHE}"
COPY --from=build /opt/ropeway /opt/ropeway
COPY docker/healthcheck.py /opt/ropeway/healthcheck.py
ENV PATH=/opt/ropeway/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp \
    TMPDIR=/tmp \
    XDG_CACHE_HOME=${CACHE} \
    HF_HOME=${CACHE}/huggingface \
    ROPEWAY_HOST=0.0.0.0 \
    ROPEWAY_TASKS_HEALTH_HOST=0.0.0.0
USER 10001:10001
EXPOSE 8000 8002
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=10s --start-period=60s --retries=3 \
    CMD ["python", "/opt/ropeway/healthcheck.py", "8000", "8002"]
ENTRYPOINT ["ropeway"]
CMD ["gateway"]
