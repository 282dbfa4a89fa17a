# One list of commands, used by people and CI alike. Every target sets up what it needs.
.PHONY: setup demo test cases exhaustive families unit coverage gpu-test ui-test lint types protos imports wheel wheel-test sweep bench bench-smoke simulate explore chaos chaos-takeovers chaos-transformations chaos-compressions chaos-pairs partitions soak storm bench-recovery fuzz fresh-cases e2e-docker digests docs notebooks chart slurm-test skew-test clean help

PYTHON ?= python3
VENV := .venv
# One more than the two cores: tests of processes wait for most of their time.
WORKERS ?= 3
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

help:
	@echo "make setup   .venv with the package, examples and development tools; redis-server where missing"
	@echo "make demo    set up, then train a digit classifier on an emulated unequal cluster (about a minute)"
	@echo "make test    set up, then lint, types, import contracts, proto freshness and all tests"
	@echo "make exhaustive   the tests that make test leaves out: whole products, long runs, more of real processes (half an hour; PART=2/6: a sixth; docs/testing.md)"
	@echo "make families   twenty families of models, unmodified: every cut, three weight policies, 1, 2 and 4 stages (some ten minutes of a core)"
	@echo "make sweep   plans of ten clusters, four models and three bounds against all their alternatives (about an hour)"
	@echo "make unit    the fast tests only: no real processes, no runs compared with the reference (a minute or two)"
	@echo "make coverage   the tests of make test with what they cover, processes included: build/coverage/html (a quarter of an hour)"
	@echo "make wheel   dist/hetpipe-VERSION-py3-none-any.whl from this source"
	@echo "make wheel-test   the wheel, installed into a clean environment, does without the source (some minutes, most of them pip's)"
	@echo "make bench   the speed figures, side by side in one run"
	@echo "make bench-smoke   each benchmark, small: whether it still works (some minutes)"
	@echo "make simulate   10,000 simulated histories with faults of every kind, by seed (two minutes)"
	@echo "make explore    200,000 states of three virtual workers and two shards (a minute)"
	@echo "make chaos   kill -9 and pause of every process at every failpoint, real processes, TLS (a quarter of an hour)"
	@echo "make chaos-takeovers   kill -9 and pause while virtual workers take over from one that leaves (some minutes)"
	@echo "make chaos-transformations   the same while layers freeze, and pipelines of half as many stages begin a clock later"
	@echo "make chaos-compressions   the same in a job with freeze.compress: who leaves, who waits and joins, and everybody else"
	@echo "make chaos-pairs   two faults at once, or one while the job gets over the other; ARGS=\"--count 40\" for some"
	@echo "make partitions   the wires between them cut, in network namespaces: needs root (some minutes)"
	@echo "make soak    half an hour with a fault a minute; make soak MINUTES=5 for less"
	@echo "make storm   half an hour of kills, pauses, lost and full disks, a Redis that restarts or forgets; MINUTES, ARGS=\"--seed 7\""
	@echo "make bench-recovery   how long what takes when somebody dies, and what surviving costs, medians (a quarter of an hour)"
	@echo "make e2e-docker   the image and docker-compose.yml for real, each container restarted: needs dockerd and root (a quarter of an hour)"
	@echo "make digests   the images that others make, pinned by digest: needs dockerd and a registry in reach"
	@echo "make fresh-cases   all tests without processes, with cases of property tests that nobody has seen (ten minutes)"
	@echo "make docs   the documentation as a site in build/docs/site, its links checked (a minute, and pip's the first time)"
	@echo "make notebooks   the notebooks of examples/notebooks from their first cell to the last (some minutes)"
	@echo "make chart   the Helm chart of k8s/chart, rendered by Helm's own code and checked as the manifests are (a minute, and pip's the first time)"
	@echo "make ui-test   the pages of hetpipe ui in headless Chromium: widths, contrast, keyboard, screenshots in build/ui, and the site of make docs at both widths; needs chromium (some minutes)"
	@echo "make slurm-test   the script of hetpipe render slurm on a Slurm of two nodes, started for it; needs slurm-wlm and munge (two minutes)"
	@echo "make skew-test   services and commands of other versions meet those of this one (some minutes; needs the history of git)"
	@echo "make gpu-test   runs and bits on one GPU; needs one (some minutes)"
	@echo "make fuzz    100,000 mutated inputs to each decoder of what peers send (minutes)"

# Where the environment forbids to keep bytecode, each of the many processes that tests start would compile the package.
unexport PYTHONDONTWRITEBYTECODE

# Make cannot do it: a shell is told where its commands are by itself alone.
SAY_ACTIVATE = case ":$$PATH:" in *":$(CURDIR)/$(BIN):"*) ;; *) \
  echo "for the command hetpipe in this shell say: source $(BIN)/activate" ;; esac

setup: $(STAMP)
	@PYTHON=$(BIN)/python scripts/ensure-redis
	@$(SAY_ACTIVATE)

# Another torch than the locked one, as pip writes it: make test TORCH=2.9.1, or TORCH=">=2.9,<3" for the newest.
TORCH ?=

# Bytes are those of the lock, whatever pip's configuration names: a constraint file would only be in the way. What one
# step lacks, a later one installs, so pip need not warn of it.
PIP := PIP_CONSTRAINT=/dev/null $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-warn-conflicts

$(STAMP): pyproject.toml requirements.lock requirements-torch.lock requirements-torchvision.lock
	@command -v $(PYTHON) >/dev/null || { echo "python3 is missing: install Python 3.11 or newer" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; say make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@test -x $(BIN)/python || { echo "making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing the package, examples and development tools into $(VENV) (a few minutes the first time)"
	@$(PIP) --require-hashes --no-deps --only-binary=:all: --requirement requirements.lock
ifeq ($(TORCH),)
	@$(PIP) --only-binary=:all: --requirement requirements-torch.lock
else
	@$(PIP) --only-binary=:all: --upgrade "torch$(if $(filter-out =% >% <% ~%,$(TORCH)),==)$(TORCH)"
endif
	@$(PIP) --no-deps --only-binary=:all: --requirement requirements-torchvision.lock
	@$(PIP) --no-deps --no-build-isolation --editable .
	@touch $(STAMP)

demo: $(STAMP)
	@$(BIN)/hetpipe demo
	@$(SAY_ACTIVATE)

# Two at once, in this order: the type checker has one core for half a minute, and the tests fill the other one meanwhile.
test: setup
	@$(MAKE) --no-print-directory --jobs 2 lint imports protos types cases

cases: $(STAMP)
	@$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal -m "not exhaustive and not sweep"

exhaustive: setup
	@$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal -m exhaustive -o faulthandler_timeout=1800 $(if $(PART),--part $(PART)) tests

families: setup
	@$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal --timeout 1500 -o faulthandler_timeout=1800 tests/model/test_families.py

sweep: setup
	@$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal -m sweep -o faulthandler_timeout=3600 tests/decide/planner

unit: setup
	@$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal -m "not matrix and not processes and not exhaustive and not sweep"

coverage: setup
	@rm -rf build/coverage && mkdir -p build/coverage
	@$(BIN)/coverage run -m pytest --numprocesses 2 --dist worksteal -m "not exhaustive and not sweep" --timeout 600
	@$(BIN)/coverage combine --quiet
	@$(BIN)/coverage html --quiet
	@$(BIN)/coverage report

lint: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(STAMP)
	@$(BIN)/mypy

imports: $(STAMP)
	@$(BIN)/lint-imports --no-logo

protos: $(STAMP)
	@PYTHON=$(BIN)/python scripts/protos --check

wheel: $(STAMP)
	@rm -rf build/lib build/bdist.* dist
	@$(BIN)/python -m pip --disable-pip-version-check wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	@ls dist

wheel-test: $(STAMP)
	@$(BIN)/python -m tests.supply.wheel

bench: $(STAMP)
	@$(BIN)/python -m benchmarks

bench-smoke: $(STAMP)
	@$(BIN)/python -m benchmarks --smoke

simulate: $(STAMP)
	@$(BIN)/python -m tests.simulation

explore: $(STAMP)
	@$(BIN)/python -m tests.simulation.explore

chaos: setup
	@$(BIN)/python -m tests.chaos $(ARGS)

chaos-takeovers: setup
	@$(BIN)/python -m tests.chaos.takeovers $(ARGS)

chaos-transformations: setup
	@$(BIN)/python -m tests.chaos.transformations $(ARGS)

chaos-compressions: setup
	@$(BIN)/python -m tests.chaos.compressions $(ARGS)

chaos-pairs: setup
	@$(BIN)/python -m tests.chaos.pairs $(ARGS)

partitions: setup
	@$(BIN)/python -m tests.chaos.partitions $(ARGS)

MINUTES ?= 30

soak: setup
	@$(BIN)/python -m tests.chaos.soak --minutes $(MINUTES)

storm: setup
	@$(BIN)/python -m tests.chaos.storm --minutes $(MINUTES) $(ARGS)

bench-recovery: setup
	@$(BIN)/python -m tests.chaos.recovery
	@$(BIN)/python -m benchmarks recovery-shard
	@$(BIN)/python -m tests.chaos.costs

fresh-cases: setup
	@$(BIN)/python -m pytest --hypothesis-profile=fresh --numprocesses $(WORKERS) --dist worksteal -m "not processes and not sweep" tests

# In environments of their own: what they need, nothing else does.
build/docs/installed: requirements-docs.lock
	@mkdir -p build/docs
	@test -x build/docs/venv/bin/python || $(PYTHON) -m venv build/docs/venv
	@PIP_CONSTRAINT=/dev/null build/docs/venv/bin/python -m pip --disable-pip-version-check install --quiet --require-hashes --no-deps --only-binary=:all: --requirement requirements-docs.lock
	@touch $@

docs: build/docs/installed
	@build/docs/venv/bin/python -m tests.docs.site

build/notebooks/installed: requirements-notebooks.lock $(STAMP)
	@$(PIP) --require-hashes --no-deps --only-binary=:all: --upgrade --target build/notebooks/packages --requirement requirements-notebooks.lock
	@touch $@

notebooks: build/notebooks/installed
	@PYTHONPATH=$(CURDIR)/build/notebooks/packages $(BIN)/python -m tests.examples.notebooks

build/chart/installed: requirements-chart.lock $(STAMP)
	@$(PIP) --require-hashes --no-deps --only-binary=:all: --upgrade --target build/chart/packages --requirement requirements-chart.lock
	@touch $@

chart: build/chart/installed
	@PYTHONPATH=$(CURDIR)/build/chart/packages $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal tests/deploy/test_chart.py tests/deploy/test_kubernetes.py tests/deploy/test_kubernetes_redis.py

# In a real browser: neither that nor playwright is installed by make setup.
ui-test: $(STAMP) docs
	@$(BIN)/python -m tests.ui.browser
	@$(BIN)/python -m tests.docs.widths

slurm-test: $(STAMP)
	@$(BIN)/python -m pytest -rs tests/processes/test_slurm.py

skew-test: $(STAMP)
	@$(BIN)/python -m pytest -rs tests/processes/test_version_skew.py

gpu-test: setup
	@$(BIN)/python -m pytest --numprocesses 4 --timeout 300 tests/gpu

fuzz: $(STAMP)
	@nice $(BIN)/python -m pytest tests/fuzz --hypothesis-profile=fuzz --timeout=1200 --numprocesses $(WORKERS) --dist worksteal

e2e-docker:
	@PYTHON=$(PYTHON) scripts/e2e-docker

digests:
	@$(PYTHON) -m tests.supply.digests

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
