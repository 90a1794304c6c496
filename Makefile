# `make run` trains the digits, `make test` runs the tests, `make test-fast` the light ones and what a change reaches, `make nightly` the rest.
PYTHON ?= $(or $(shell command -v python3.11),python3)
VENV := .venv
BIN := $(VENV)/bin
# Seconds that a fresh Prefect home may take to start on a busy machine.
export PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS ?= 120

.PHONY: install run test test-fast nightly lint bench chaos images lock clean
.DEFAULT_GOAL := run

install: $(VENV)/installed

# The stamp is written last, so an interrupted installation starts again.
$(VENV)/installed: requirements-hashed.lock pyproject.toml
	@echo "Setting up $(VENV) (about two minutes) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: --require-hashes \
		--requirement requirements-hashed.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@mkdir -p $(VENV)/typed/baton
	@ln -sfn ../../../flows $(VENV)/typed/baton/flows
	@ln -sfn ../../../tasks $(VENV)/typed/baton/tasks
	@ln -sfn ../../../flows/package/__init__.py $(VENV)/typed/baton/__init__.py
	@ln -sfn ../../../flows/package/py.typed $(VENV)/typed/baton/py.typed
	@touch $@

run: install
	@$(BIN)/baton run deploy/runs/digits/run.yaml

PYTEST := $(BIN)/python -m pytest --quiet --dist loadfile --no-loadscope-reorder

# Whole runs wait a third of their time, so three processes keep two cores at work.
test: install
	@$(PYTEST) --numprocesses 3 -m "not nightly"

test-fast: install
	@$(PYTEST) --numprocesses 2 --fast -m "not slow and not nightly"

# What is long by nature, several hours: long tests, the whole gallery, chaos, all figures.
nightly: install
	@BATON_TEST_GALLERY=all BATON_TEST_IMAGES=all $(PYTEST) --numprocesses 3 -m nightly
	@$(MAKE) chaos
	@$(MAKE) bench

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# All figures, under two hours on an idle machine; BENCH="--quick --only abdij" for some. Writes tests/benchmarks/RESULTS.md.
bench: install
	$(BIN)/python -m tests.benchmarks $(BENCH)

# About 410 interruptions of real runs and 400 plans of store faults; over an hour on two cores.
chaos: install
	$(BIN)/python -m tests.end_to_end.chaos
	$(BIN)/python -m tests.end_to_end.hosts_chaos
	$(BIN)/python -m tests.end_to_end.cloud_chaos --plans 400
	$(BIN)/python -m tests.protocol
	BATON_TEST_CLOUD_RUNS=12 $(BIN)/python -m pytest tests/end_to_end/test_cloud_runs.py
	BATON_TEST_WHOLE_TABLE=1 $(BIN)/python -m pytest tests/end_to_end/test_strategies.py tests/end_to_end/test_any_cut.py \
		tests/foundation/log/test_interleavings_in_flight.py

# With podman or docker; IMAGES="checkpoint train-cpu" builds only those, BASE_IMAGE=... on another base.
images:
	$(PYTHON) containers/build.py $(IMAGES)

# Needs uv. Pins without index addresses; the images have the versions of requirements.lock. Its hashes lie in a file of
# their own, because pip refuses a local folder beside a constraint that has hashes.
# KerasHub asks for a tensorflow-text that brings a second TensorFlow, so it is installed without its dependencies.
KERAS_HUB := keras-hub==0.32.0
COMPILE := uv pip compile --quiet --python-version 3.11 --no-header --no-annotate --no-emit-index-url
lock:
	$(COMPILE) --extra cpu --extra digits --extra dev --output-file requirements.lock pyproject.toml
	echo $(KERAS_HUB) >> requirements.lock
	$(COMPILE) --no-deps --generate-hashes --output-file requirements-hashed.lock requirements.lock
	for lock in containers/locks/*.lock; do \
		$(COMPILE) --python-platform x86_64-manylinux_2_28 --constraint requirements.lock \
			--generate-hashes --output-file $$lock $${lock%.lock}.in || exit; \
	done

clean:
	rm -rf $(VENV) .bench *.egg-info
