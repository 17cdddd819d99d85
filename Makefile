# Every target first sets up .venv when it is missing, or when the lock file or pyproject.toml changed.
# Choose another Python with `make PYTHON=python3.12 ...`; pass flags on with `make train ARGS="--steps 50"`.

# The first Python on the PATH that is new enough; python3 when none is, and the check below says so.
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3; do \
	"$$p" -c '$(NEW_ENOUGH)' 2>/dev/null && break; done; echo "$$p")
BIN := .venv/bin
READY := .venv/.installed
ARGS ?=

# One thread per rank: several ranks share the cores, and more threads would only fight for them.
OMP_NUM_THREADS ?= 1
export OMP_NUM_THREADS

.PHONY: help train test test-fast test-all test-elsewhere test-book lab notebooks book workshop bench gpu-check lint format lock clean

help: ## list the targets
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' Makefile

train: $(READY) ## train a small Llama on 2 x 2 ranks, on real text that is already on this machine
	$(BIN)/minipar train --mesh dp=2,tp=2 $(ARGS)

test: lint ## everything that proves the project: style, layers, all tests, all notebooks
	$(BIN)/python -m tests.side_by_side $(ARGS)

test-fast: $(READY) ## the tests without the slow ones and the notebooks; some minutes
	$(BIN)/python -m tests.side_by_side -m "not slow and not notebook and not exhaustive" $(ARGS)

# And all of what the others take samples of: every mesh, many faults; takes hours.
test-all: lint
	$(BIN)/python -m tests.side_by_side -m "" --hypothesis-profile default $(ARGS)
	MINIPAR_TESTS_STRICT=1 $(BIN)/python -m pytest -q tests/law  # parity without a race

# What trains, rounded as other processors would; ARGS="--settings avx2"; hours.
test-elsewhere: $(READY)
	$(BIN)/python -m tests.elsewhere $(ARGS)

# It asks no host for news or updates.
OVERRIDES := .venv/share/jupyter/lab/settings/overrides.json
lab: $(READY) ## open JupyterLab on the notebooks
	@mkdir -p $(dir $(OVERRIDES))
	@echo '{"@jupyterlab/apputils-extension:notification":' \
		'{"fetchNews": "false", "checkForUpdates": false}}' > $(OVERRIDES)
	$(BIN)/jupyter lab notebooks/ $(ARGS)

# Execute the notebooks again and normalise them.
notebooks: $(READY)
	$(BIN)/jupyter nbconvert --to notebook --execute --inplace \
		--ExecutePreprocessor.timeout=120 $(or $(ARGS),notebooks/*.ipynb)
	$(BIN)/python -m minipar.lab.publish notebooks/

# The tools of the book have a place of their own: nothing else needs them, and they need no torch.
SPHINX := .venv-book/bin/python -m sphinx -n -W --keep-going -q -c book .

book: .venv-book/.installed ## notebooks and pages as a site, in build/book
	$(SPHINX) build/book $(ARGS)

# Open each page of the book in Chromium, follow all links.
test-book: export GITHUB_REPOSITORY ?= example/minipar
test-book: export BOOK := build/test-book
test-book: .venv-book/.installed
	$(SPHINX) $(BOOK)
	.venv-book/bin/python -m pytest -q -c /dev/null --rootdir . book $(ARGS)

# A folder to give away, without history, outputs and answers: build/workshop.
workshop: $(READY)
	rm -rf build/workshop build/handout
	mkdir -p build/workshop
	git archive HEAD | tar -x -C build/workshop
	$(BIN)/python -m minipar.lab.publish build/workshop/notebooks --handout build/handout
	rm -r build/workshop/notebooks/solutions
	cp -r build/handout/. build/workshop/notebooks/

bench: $(READY) ## compare our data parallel with PyTorch's own; ARGS=fsdp compares another strategy
	$(BIN)/minipar bench $(or $(ARGS),ddp)

gpu-check: $(READY) ## parity, speed, memory and overlap on this machine's GPUs
	MINIPAR_GPU=1 $(BIN)/python -m pytest -q -p no:cacheprovider tests/law/test_law.py -k equals_one_device
	$(BIN)/python -m minipar.lab.gpu_check $(ARGS)

# Check style and the direction of imports.
lint: $(READY)
	$(BIN)/ruff check --quiet
	$(BIN)/ruff format --quiet --check
	$(BIN)/lint-imports --no-logo

format: $(READY) ## put the code into the project's style
	$(BIN)/ruff check --quiet --fix-only
	$(BIN)/ruff format

# Resolves pyproject.toml afresh, but for the pins that are moved by hand: torch, and the packages that
# only some platforms need (their lines carry a marker). torch's local version (+cpu) and its CUDA wheels
# are left out, so that one file serves all. Read `git diff` afterwards and bring environment.yml along.
# Held back: soupsieve 3 asks for Python 3.11.5, and distributions ship 3.11.2.
lock: HELD := "soupsieve<3"
lock: BOOK_TOOLS := import tomllib; \
	print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['book'])
# Resolve the dependencies afresh and write requirements.lock.
lock:
	rm -rf .venv-lock
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/pip install -qq $(HELD) "$$(grep '^torch==' requirements.lock)" setuptools ".[test]"
	grep '^#' requirements.lock > .venv-lock/new
	grep '^[^#].*;' requirements.lock > .venv-lock/marked
	.venv-lock/bin/pip freeze --all --exclude pip --exclude minipar \
		| grep -Ev '^(nvidia|cuda|triton)' | sed 's/+.*//' > .venv-lock/found
	cut -d= -f1 .venv-lock/marked | sed 's/.*/^&==/' > .venv-lock/skip
	grep -v -f .venv-lock/skip .venv-lock/found | cat - .venv-lock/marked | LC_ALL=C sort -f >> .venv-lock/new
	cp .venv-lock/new requirements.lock
	rm -rf .venv-lock
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/pip install -qq -c requirements.lock $$($(PYTHON) -c "$(BOOK_TOOLS)")
	grep '^#' book/requirements.lock > .venv-lock/new
	.venv-lock/bin/pip freeze --all --exclude pip --exclude setuptools | LC_ALL=C sort -f >> .venv-lock/new
	cp .venv-lock/new book/requirements.lock
	rm -rf .venv-lock

# Remove .venv and all caches; runs/ stays.
clean:
	rm -rf .venv .venv-book .venv-lock build dist *.egg-info
	rm -rf .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find minipar tests notebooks -name __pycache__ -o -name .ipynb_checkpoints | xargs rm -rf

.venv-book/.installed: book/requirements.lock
	"$(PYTHON)" -m venv .venv-book
	.venv-book/bin/python -m pip install -qq --disable-pip-version-check -r $<
	@touch $@

$(READY): requirements.lock pyproject.toml
	@"$(PYTHON)" -c '$(NEW_ENOUGH)' || { \
		echo "minipar needs Python 3.11 or newer, but $(PYTHON) is $$("$(PYTHON)" --version 2>&1)."; \
		echo "Name one that is: make PYTHON=/path/to/python3.12 ..."; exit 1; }
	@echo "Setting up .venv (a few minutes, once) ..."
	"$(PYTHON)" -m venv .venv
	$(BIN)/python -m pip install -qq --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@
