# Everything a newcomer needs: `make demo` and `make test`. Both create the environment first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint types unit browser notebook docs clean

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[hf,viz,exact,dev,docs]"
	touch $@

demo: $(STAMP)
	$(BIN)/prooflens demo

test: lint types unit notebook

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy

# The report is tested in a browser. Where one may be installed it is; elsewhere those tests are skipped and say so.
browser:
	@command -v chromium chromium-browser google-chrome >/dev/null || \
	  { [ "$$(id -u)" = 0 ] && apt-get update >/dev/null 2>&1 && apt-get install --yes --no-install-recommends chromium >/dev/null 2>&1; } || \
	  echo "no chromium: the report's browser tests are skipped"

unit: $(STAMP) browser
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

notebook: $(STAMP)
	$(BIN)/python -m pytest --nbmake examples

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
