"""Kernels of the speculative round; installed as ``specjax.kernels``.

Each file holds the reference (plain ``jax.numpy``, the contract) and the public function.
"""
