# make install | demo | test | test-browser | test-long | test-data | check: each makes what it needs first, on a bare
# machine with Python 3.11 or newer.
PYTHON ?= python3
BIN := .venv/bin
TSC := tsc --noEmit --allowJs --checkJs --strict --target es2022 --module es2022 --moduleResolution node \
	--lib es2022,dom,dom.iterable \
	$(addprefix src/regard/inspection/web/,main.js packed_script.js model/worker.js)

PYTEST := $(BIN)/pytest -n $$(($$(nproc) + 1)) --maxprocesses 8 \
	--dist loadfile --no-loadscope-reorder

.PHONY: install demo test test-browser test-long test-data faults fuzz lock audit mutants check format

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
	@echo "Regard is installed in .venv: try  $(BIN)/regard --help"

demo: install
	$(BIN)/regard demo --out runs/demo

# Files of tests share the cores, one thread each: two that wait for one another would take twice the time.
# One worker more than cores, since some tests wait; files in order, since the long ones come first.
# With a GPU, the tests of its kernels run as well; all others compute on the CPU (tests/conftest.py).
test: install
	$(PYTEST) tests --ignore tests/browser --ignore tests/data --ignore tests/long

# The page and the models in HTML files, in Chromium and, where it is installed, Firefox.
test-browser: install
	$(PYTEST) tests/browser

# Models of every kind are trained until they solve a task; every choice of every recipe key is tried.
test-long: install
	$(PYTEST) tests/long

# The tests that need the data sets or large files.
test-data: install
	$(PYTEST) tests/data

# 200 kills at random moments, and faults of disk, folders and clock; writes the tables of docs/reliability.md.
faults: install
	$(BIN)/python -m tests.faults --kills 200 --seed $${SEED:-1} --write

# Ten minutes for each target; an input that breaks one is written to the present folder.
fuzz: install
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[fuzz]'
	for target in readers recipes tokenizers html http; do \
		$(BIN)/python -m tests.fuzz $$target --seconds $${SECONDS_EACH:-600} || exit 1; done

# The versions that CI installs: those of a fresh .venv.
lock: install
	{ sed -n '/^#/p' constraints.txt; $(BIN)/pip freeze --all --exclude-editable | sed 's/+cpu$$//' | grep -v ' @ \|^pip==' | tr 'A-Z_' 'a-z-'; } \
		> constraints.new && mv constraints.new constraints.txt

# Known vulnerabilities of the pinned packages.
audit: install
	$(BIN)/pip install --quiet --disable-pip-version-check pip-audit
	$(BIN)/pip-audit --requirement constraints.txt --no-deps --disable-pip

# Mutation testing: do the unit tests notice small changes of the source code? About an hour on two cores.
mutants: install
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[mutation]'
	$(BIN)/python -m tests.mutation.run

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@if command -v tsc >/dev/null; then echo $(TSC); $(TSC); \
	else echo "tsc is not here: the page's types were not checked (Debian: node-typescript)"; fi

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
