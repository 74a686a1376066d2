"""Imports specjax, decodes with tiny weights, plainly and with speculation, and serves them."""

import importlib.util
import tempfile
from importlib.metadata import version
from pathlib import Path

import specjax
from specjax.testing import check_tokens, serve, write_files

PROMPTS = [[1, 2, 3], [5, 8, 13, 21, 34], [7]]


def main() -> None:
    """Fails with an exception if the installation does not work."""
    assert importlib.util.find_spec("specjax.kernels") is not None
    assert "site-packages" in str(specjax.__file__), specjax.__file__
    with tempfile.TemporaryDirectory() as folder:
        files = write_files(Path(folder))
        with files.engine(speculative=False, dtype="float32") as plain:
            check_tokens(plain, PROMPTS)
        with files.engine(dtype="float32") as engine, serve(engine) as client:
            assert check_tokens(engine, PROMPTS) > 0
            body = {"prompt": PROMPTS[0], "temperature": 0, "max_tokens": 8}
            assert client.post("/v1/completions", body).json()["choices"][0]["text"]
    print(f"smoke test passed with jax {version('jax')} and flax {version('flax')}")


if __name__ == "__main__":
    main()
