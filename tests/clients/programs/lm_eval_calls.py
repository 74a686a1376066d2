"""Run tasks of lm-eval against a server; arguments and results are JSON."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager

TASKS = Path(__file__).parent.parent / "tasks"


def main(address: str, key: str, model: str, tokenizer: str) -> dict[str, Any]:
    os.environ["OPENAI_API_KEY"] = key
    os.chdir(TASKS)  # data files are relative to it
    found = {}
    for name, options in {
        "ids": {"batch_size": 4},
        "texts": {"tokenized_requests": False, "num_concurrent": 4},
    }.items():
        args: dict[str, Any] = {
            "model": model,
            "base_url": f"{address}/v1/completions",
            "tokenizer": tokenizer,
            "tokenizer_backend": "huggingface",
            "max_length": 256,
            "max_retries": 1,
        }
        results = lm_eval.simple_evaluate(
            "local-completions",
            model_args=args | options,
            tasks=["capitals", "counting"],
            task_manager=TaskManager(include_path=str(TASKS), include_defaults=False),
            bootstrap_iters=0,
        )
        found[name] = {
            "accuracy": results["results"]["capitals"]["acc,none"],
            "choices": [
                [[*arguments, *result] for arguments, result in pairs(sample)]
                for sample in results["samples"]["capitals"]
            ],
            "texts": [
                [sample["arguments"][0][0], sample["resps"][0][0]]
                for sample in results["samples"]["counting"]
            ],
        }
    return found


def pairs(sample: dict[str, Any]) -> Any:
    return zip(sample["arguments"], (one[0] for one in sample["resps"]), strict=True)


if __name__ == "__main__":
    results = main(**json.loads(sys.argv[1]))
    print()
    print(json.dumps(results))
