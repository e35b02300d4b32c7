"""`python -m gateway`."""

from __future__ import annotations

from gateway.main import run

run()
