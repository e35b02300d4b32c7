# Every target is self-sufficient on a machine with Python 3.11 or newer: what it needs is installed on the first run.
#
#   make demo    one prompt through the whole system, with its figures
#   make serve   Redis, gateway and worker on http://127.0.0.1:8000  (ARGS="--port 9000 ..." adds options)
#   make test    all tests                                           (ARGS="-k sampler ..." adds pytest options)
#   make kernels Triton's kernels: in the interpreter, with mistakes in them, compiled for each target; no GPU is needed
#   make chaos   1,000 jobs under 100 disturbances: nothing is lost  (ARGS="--quick", "--seed 7" ...); under ten minutes
#   make helm    the chart: lint, rendering, schemas of Kubernetes (CRDS=FILE_OR_FOLDER adds definitions of custom kinds)
#   make docker-check, compose-check   image files and compose.yaml; neither needs an engine
#   make check   lint, format, types, import rules
#   make format  fix what lint and format can fix
#   make wheel   a wheel with the CPU kernels built for the usual CPUs, in dist/
#   make venv    only the environment in .venv
#   make clean   remove the environment and caches
#
# ROPEWAY_TORCH=cpu|cuda|default chooses the build of torch; unset: CPU unless there is an NVIDIA GPU.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo serve test kernels chaos helm docker-check compose-check check format wheel venv redis deploy-tools clean

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TOOLS := $(VENV)/.deploy-tools
ARGS ?=
CRDS ?=

help:
	@sed -n 's/^#   //p' Makefile

demo: venv
	@$(BIN)/ropeway demo $(ARGS)

# exec: signals reach the supervisor itself, which ends its children in order.
serve: venv
	@exec $(BIN)/ropeway serve $(ARGS)

test: venv redis deploy-tools
	$(BIN)/python -m pytest -q $(ARGS)

kernels: venv
	$(BIN)/python -m pytest -q tests/kernels/triton --kernels $(ARGS)
	env -u TRITON_INTERPRET $(BIN)/python -m kernels.triton.resources

chaos: venv redis
	$(BIN)/python -m benchmarks.chaos $(ARGS)

# A tool that cannot be had is an error here, and a skipped test in `make test`.
helm: $(TOOLS)
	$(BIN)/python scripts/chart_schema.py --check
	CHART_CRDS="$(CRDS)" $(BIN)/python -m pytest -q -rs tests/deploy -k chart $(ARGS)

docker-check: $(TOOLS)
	$(BIN)/hadolint --config docker/hadolint.yaml docker/*.Dockerfile
	$(BIN)/python -m pytest -q -rs tests/deploy/test_images.py $(ARGS)

compose-check: $(TOOLS)
	REDIS_PASSWORD=check $(BIN)/docker-compose --profile '*' config --quiet
	$(BIN)/python -m pytest -q -rs tests/deploy/test_compose.py $(ARGS)

check: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

wheel: venv
	$(BIN)/python scripts/wheel.py

venv: $(STAMP)

# The test of ensurepip finds a Debian machine whose Python came without the venv module.
$(STAMP): pyproject.toml constraints.txt scripts/install.py
	@for python in $${PYTHON:-python3 python3.13 python3.12 python3.11}; do \
	  if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then found=$$python; break; fi; \
	done; \
	if [ -z "$${found:-}" ]; then echo "Python 3.11 or newer is needed (PYTHON=... names one)" >&2; exit 1; fi; \
	"$$found" -c 'import ensurepip, venv' 2>/dev/null || scripts/debian_packages.sh python3-venv; \
	if [ ! -x $(BIN)/python ] || ! $(BIN)/python -m pip --version >/dev/null 2>&1; then "$$found" -m venv --clear $(VENV); fi; \
	echo "installing into $(VENV) (once; some minutes) ..."; \
	$(BIN)/python scripts/install.py
	@touch $@

# Best effort: without it the tests against Debian's server are skipped, those against the embedded one run.
redis:
	@command -v redis-server >/dev/null || scripts/debian_packages.sh redis-server \
	  || echo "no redis-server: the tests against it will be skipped" >&2

# Best effort, likewise: what looks at images, compose file and chart.
deploy-tools: venv
	@$(MAKE) --no-print-directory $(TOOLS) || echo "no tools for chart and images: their tests will be skipped" >&2

$(TOOLS): $(STAMP)
	$(BIN)/python scripts/install.py --extras deploy
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
