# make demo   a real vLLM server with kvtiers: cold, GPU, CPU and filesystem hits, timed
# make test   all tests
# make check  format, lint, types
# make faults every fault of docs/reliability.md, put in for real; writes its table
# make soak   random load and faults on two replicas, for SOAK_MINUTES (30); ARGS="--seed 7"
# make bench  kvtiers and vLLM's own tiering in turns; writes the README's numbers
SHELL := /bin/sh
BIN := .venv/bin
INSTALLED := .venv/.kvtiers-installed
PACKAGES := connector tiers policies simulator tools
# mypy does not see a default editable install, whose packages an import hook
# finds; a folder of links with the packages' real names it sees.
LINKS := .cache/mypy-path/kvtiers
SOAK_MINUTES ?= 30

.PHONY: install demo check test test-unit faults soak bench clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml tools/install.sh
	tools/install.sh
	touch $@

demo: $(INSTALLED)
	$(BIN)/kvtiers demo $(ARGS)

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	mkdir -p $(LINKS)
	for package in $(PACKAGES); do ln -sfn "$(CURDIR)/$$package" $(LINKS)/$$package; done
	MYPYPATH=$(dir $(LINKS)) $(BIN)/mypy

test-unit: $(INSTALLED)
	$(BIN)/python -m pytest tests/unit

# One after the other: they share the machine's cores, and the quick ones tell first.
test: test-unit
	$(BIN)/python -m pytest tests/services
	$(BIN)/python -m pytest tests -m "contract or packaging"
	$(BIN)/python -m pytest tests -m e2e

faults: $(INSTALLED)
	$(BIN)/python -m pytest tests/faults -m e2e --write-reliability $(ARGS)

soak: $(INSTALLED)
	$(BIN)/python tests/soak/soak.py --minutes $(SOAK_MINUTES) $(ARGS)

bench: $(INSTALLED)
	$(BIN)/python -m benchmarks.ttft --scenarios single load --json benchmarks/results/ttft.json $(ARGS)
	$(BIN)/python -m benchmarks.ttft --systems kvtiers --scenarios load load-redis \
		--json benchmarks/results/pressure.json $(ARGS)
	$(BIN)/kvtiers demo --redis --json benchmarks/results/demo.json
	$(BIN)/python -m benchmarks.report

clean:
	rm -rf .venv .cache build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
