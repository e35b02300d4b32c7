"""Exit code 0 if a process in this container answers /health well on one of the ports given."""

from __future__ import annotations

import sys
from urllib.error import URLError
from urllib.request import urlopen


def well(port: str) -> bool:
    """Whether /health answers 200; 503 says that a restart would help."""
    try:
        with urlopen(f"http://127.0.0.1:{port}/health", timeout=8) as answer:
            return bool(answer.status == 200)
    except (URLError, OSError):
        return False


if __name__ == "__main__":
    sys.exit(0 if any(well(port) for port in sys.argv[1:]) else 1)
