"""Where planes are held against float64, mlx computes on the CPU: GPUs round products as they like."""

from tests.kernels.conftest import computed_on_the_cpu

__all__ = ["computed_on_the_cpu"]
