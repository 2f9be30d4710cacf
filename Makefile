# Every target creates the virtual environment it needs; `PYTHON=python3.12 make demo` picks another
# interpreter (constraints.txt pins the torch of these environments, setup.cfg states the range).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt

.PHONY: demo test lint tensorboard screenshots help clean

help:
	@echo "make demo   train 4 ranks split and fused on the CPU, profile both, judge both (< 5 minutes)"
	@echo "make test   lint, types and the whole test suite (< 15 minutes on 2 cores)"
	@echo "make lint   ruff and mypy only"
	@echo "make tensorboard  show the demo's profiles in TensorBoard, or LOGDIR=<folder> (its runs are folders)"
	@echo "make screenshots  docs/images anew, in a browser"
	@echo "make clean  remove the virtual environment and what demo wrote"

demo: $(VENV)/.run
	$(BIN)/python examples/demo.py --out out/demo

test: lint
	$(BIN)/python -m pytest

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The demo's profiles are recorded if they are not there; those of another folder are not.
LOGDIR ?= out/demo

tensorboard: $(VENV)/.tensorboard $(if $(filter out/demo,$(LOGDIR)),out/demo/split)
	$(BIN)/python -m tensorboard.main --logdir $(LOGDIR)

screenshots: $(VENV)/.run out/demo/split
	$(INSTALL) 'playwright >=1.45, <2'
	$(BIN)/python scripts/screenshots.py --cpu out/demo/split

out/demo/split: | $(VENV)/.run
	-$(BIN)/python examples/demo.py --out out/demo

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: setup.cfg pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e .
	@touch $@

# Megatron-core is the tests' oracle; without it (no release for this Python) those tests skip and say so.
$(VENV)/.test: $(VENV)/.run
	$(INSTALL) -e '.[test,tensorboard]'
	-$(INSTALL) -e '.[megatron]'
	@touch $@

$(VENV)/.tensorboard: $(VENV)/.run
	$(INSTALL) -e '.[tensorboard]'
	@touch $@

clean:
	rm -rf $(VENV) out
