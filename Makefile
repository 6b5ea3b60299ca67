# make install   the virtual environment .venv, every version as in constraints.txt
# make pretrain  pretrain a small GPT on 8 ranks: pipeline 2 x data 2 x tensor 2, ZeRO-3
# make test      all tests, four at a time;   PYTEST_ARGS="tests/topology -x" for some;
#                without Chromium, those that open a report in a browser are skipped
# make quick     the tests that start no ranks
# make lint      ruff, mypy and the import layers
# make docs      the documentation as a site, build/website/index.html; a dead link fails

PYTHON ?= $(shell command -v python3.11 || command -v python3)
PYTEST_ARGS ?=
# How many tests compute side by side; each has a pool of eight rank processes of its own.
TEST_PROCESSES ?= 4
# How many more may run, if the tests beside them only wait for a limit of time.
WAITING_PROCESSES ?= 3
WORKERS = $(shell expr $(TEST_PROCESSES) + $(WAITING_PROCESSES))

# Recipes find the tools of the environment by name, and so do the ranks that they launch.
export PATH := $(CURDIR)/.venv/bin:$(PATH)
# With this variable set, each of the hundred programs that tests start would compile megaspeed again.
unexport PYTHONDONTWRITEBYTECODE
INSTALLED := .venv/.installed
# DeepSpeed's launcher warns twice if it finds no GPU by itself.
ON_CPU := $(if $(wildcard /dev/nvidia0 /dev/kfd),,DS_ACCELERATOR=cpu)

.PHONY: install pretrain test quick lint docs

install: $(INSTALLED)

# Rebuilt when a requirement or a pinned version changes.
$(INSTALLED): setup.cfg setup.py constraints.txt
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "megaspeed needs Python 3.11 or newer: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	test -x .venv/bin/python || "$(PYTHON)" -m venv .venv
	.venv/bin/python -m pip install --constraint constraints.txt --editable ".[dev,docs]"
	@touch $@

pretrain: $(INSTALLED)
	OMP_NUM_THREADS=1 $(ON_CPU) deepspeed --quiet --num_accelerators 8 scripts/pretrain.py --config ds_configs/3d.json

test: $(INSTALLED)
	python -m pytest --numprocesses $(WORKERS) --computing $(TEST_PROCESSES) --dist worksteal $(PYTEST_ARGS)

quick: $(INSTALLED)
	python -m pytest --numprocesses $(TEST_PROCESSES) --dist worksteal -m "not ranks and not slow" $(PYTEST_ARGS)

lint: $(INSTALLED)
	ruff check .
	mypy
	lint-imports

# The variable silences a notice about the theme's successor. With --quiet, --strict would ignore warnings.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 mkdocs build --strict --config-file website/mkdocs.yml
