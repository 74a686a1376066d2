"""Kernels of the speculative round; installed as ``specjax.kernels``.

Each file has the reference (plain ``jax.numpy``, the contract), the Pallas body and the public
function. The public function takes ``implementation``; ``None`` follows the platform. It raises
``ValueError`` for mismatched shapes and for an unknown implementation. Only ``backend.py`` depends
on the GPU lowering and decides which implementation runs.
"""
