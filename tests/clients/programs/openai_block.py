"""Run a code block that uses openai-python and print its ``answer``; the argument is JSON."""

import json
import sys
from typing import Any

names: dict[str, Any] = {}
exec(json.loads(sys.argv[1])["source"], names)
print(names["answer"].model_dump_json())
