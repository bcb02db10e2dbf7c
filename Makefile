# Two commands matter: `make run` and `make test`. Both set up .venv first, if it is not there or not up to date.
# Variables:  PYTHON=python3.12 (which Python makes .venv)   ARGS="…" (passed on to the command behind the target)

.DEFAULT_GOAL := help
.PHONY: help setup run test lab report clean

VENV_PYTHON := $(if $(filter Windows_NT,$(OS)),.venv/Scripts/python.exe,.venv/bin/python)
ASKED := $(PYTHON)
CANDIDATES := $(if $(ASKED),$(ASKED),python3 python3.13 python3.12 python3.11 python)

help:
	@echo "make run      set up, run every notebook in the right preset for this machine, say where the report is"
	@echo "make test     set up, run all tests"
	@echo "make lab      set up, open JupyterLab on the first notebook"
	@echo "make report   write the newest run's report again"
	@echo "make clean    remove .venv and the caches in this folder; results stay"
	@echo 'Options: PYTHON=python3.12, ARGS="01_memory_leak --preset smoke"'

setup:
	@for python in $(CANDIDATES); do \
	  if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
	    exec $$python tools/setup_venv.py $(if $(ASKED),--as-asked); \
	  fi; \
	done; \
	echo "setup: needs Python 3.11 or newer; none of these is one: $(CANDIDATES). Name yours: make PYTHON=/path/to/python3" >&2; \
	exit 2

run: setup
	@$(VENV_PYTHON) -m o1lab run $(ARGS)

test: setup
	@$(VENV_PYTHON) -m pytest $(ARGS)

lab: setup
	@$(VENV_PYTHON) -m jupyter lab notebooks/00_start_here.ipynb $(ARGS)

report: setup
	@$(VENV_PYTHON) -m o1lab report $(ARGS)

clean:
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis *.egg-info
	find o1lab tests tools -name __pycache__ -type d -prune -exec rm -rf {} +
