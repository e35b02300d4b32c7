"""`python -m tasks`: settings come from the environment."""

from __future__ import annotations

import sys

from tasks.main import run

if __name__ == "__main__":
    sys.exit(run())
