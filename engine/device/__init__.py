"""What runs passes on a GPU without the host waiting for it; the same control flow runs on a CPU, for tests."""
