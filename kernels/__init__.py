"""Kernels of the speculative round; installed as ``specjax.kernels``.

Each file holds the reference (plain ``jax.numpy``, the contract), the Pallas body and the public
function. That one takes ``implementation``, of which ``None`` follows the platform. It raises
``ValueError`` for shapes that do not belong together and an unknown implementation. Only
``backend.py`` knows the GPU lowering and decides which implementation runs.
"""
