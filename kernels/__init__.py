"""Kernels of the speculative round; installed as ``specjax.kernels``.

Each file holds the reference (plain ``jax.numpy``, the contract), the Pallas body and the public
function. That one takes ``implementation``, ``"xla"`` (the reference) or ``"pallas"`` (one launch),
and ``interpret``: whether the kernel runs in the interpreter, where ``None`` is yes on a CPU. It
raises ``ValueError`` for shapes that do not belong together and an unknown implementation. Only
``backend.py`` knows the GPU lowering.
"""
