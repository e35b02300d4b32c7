"""Parts of `benchmarks.gpu_check`, a file for each section."""
