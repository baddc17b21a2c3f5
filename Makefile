# Everything a newcomer needs: `make demo` and `make test`. Both create the environment first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test quick lint types unit browser notebook docs bench bench-check fuzz clean

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[hf,viz,exact,dev,docs]"
	touch $@

demo: $(STAMP)
	$(BIN)/prooflens demo

# What runs on one core goes two at a time, before the tests that fill both.
test: $(STAMP)
	$(MAKE) --no-print-directory --jobs=2 --output-sync=target lint types docs notebook
	$(MAKE) --no-print-directory unit

# The inner loop, under 90 seconds on two cores: the parts that most changes touch, without what is slow or pretrained.
quick: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist worksteal -m "not slow and not pretrained" $(QUICK)

QUICK := tests/test_imports.py tests/test_docs.py tests/numerics tests/queries tests/regions tests/certificate tests/results \
  tests/verdicts/test_decide.py tests/engines/test_interval.py tests/engines/test_layer0.py tests/models/test_families.py

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

# Tests and the examples of docstrings. Two processes share two cores: one thread each.
unit: $(STAMP) browser
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist worksteal --doctest-modules --doctest-ignore-import-errors \
	  tests src/prooflens

# One thread: on a busy machine two of them wait for each other, and a notebook of 11 s takes over 100.
notebook: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --nbmake examples

# The site, strictly; links and headings are a test. Spelling: pages and docstrings.
docs: $(STAMP)
	$(BIN)/codespell *.md docs src
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Tightness, time and memory of every engine: build/bench/bench.json and bench.md. The check fails where one got looser.
bench: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/run.py -o build/bench

bench-check: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/run.py -o build/bench --check benchmarks/baseline.json

# A minute of changed inputs for every reader of untrusted files; guided by coverage where atheris is installed.
fuzz: $(STAMP)
	for target in query circuit effect spec family config weights run_json effect_json certificate onnx counts; do \
	  $(BIN)/python -m tests.fuzz $$target --seconds 60 || exit 1; done

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
