"""Kernels of the speculative round; installed as ``specjax.kernels``.

Each file has a reference in plain ``jax.numpy``, which defines the results, the Pallas body and the
public function. The public function takes ``implementation``; ``None`` chooses one for the
platform. It raises ``ValueError`` for mismatched shapes and for an unknown implementation. Only
``backend.py`` depends on the GPU lowering and decides which implementation runs.
"""
