"""Kernels of the speculative round; installed as ``specjax.kernels``.

Each file holds the reference (plain ``jax.numpy``, the contract), the Pallas body and the public
function, which takes ``implementation``. Only ``backend.py`` knows the GPU lowering.
"""
