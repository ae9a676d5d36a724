# make demo: set everything up and train the MovieLens example. make test: set everything up, lint, type-check and test.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TESTERS := $(shell n=$$(nproc); echo $$((n < 12 ? n + 1 : 12)))
DATA ?= $(if $(TIERBED_DATA),$(TIERBED_DATA)/ml-100k)
# where folders of tests are: in memory where it has 4 GiB of room, as disks take longer to sync than tests to work
PLACE := $(shell test -w /dev/shm && [ $$(df -Pk /dev/shm | awk 'END {print $$4}') -gt 4194304 ] && echo /dev/shm || echo /tmp)
NATIVE := $(wildcard engine/_core.cpp engine/*/native/* engine/*/kernels/* engine/optim/*.py serving/native/*)

.PHONY: demo test test-slow test-wheel test-arm check crash sanitize lint types costs instructions peers install clean
.DELETE_ON_ERROR:

demo: install
	$(BIN)/python examples/movielens.py $(if $(DATA),--data $(DATA)) --store ssd --out build/movielens

# processes of one thread each, one more than cores, since tests wait for disks and children: each process imports torch
# and collects all tests. Tests of threads set their number.
# Bytecode is kept whatever the environment says: each process would compile all tests
test: install peers
	$(MAKE) --jobs=2 types lint
	folder=$$(mktemp -d $(PLACE)/tierbed-XXXXXX) && trap 'rm -rf "$$folder"' EXIT && trap 'exit 130' INT TERM && \
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow" -n $(TESTERS) --dist worksteal \
		--basetemp="$$folder/tests"

# the wheel in an environment of its own, where it runs the README's example
test-wheel: install
	rm -rf build/wheel-test
	DIST=build/wheel-test/dist scripts/wheel $(BIN)/python
	$(BIN)/python -m venv build/wheel-test
	build/wheel-test/bin/pip install --quiet --constraint constraints.txt build/wheel-test/dist/*.whl
	sed -n '/^```python/,/^```$$/p' README.md | grep -v '^```' >build/wheel-test/train.py
	cd build/wheel-test && bin/tierbed doctor && bin/python train.py

# native tests on aarch64, under qemu; as root, and a quarter of an hour
test-arm: install
	scripts/arm

test-slow: install peers
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "slow or hypothesis" --hypothesis-profile=slow -n $(TESTERS) --dist worksteal

# what a new op, optimizer or tier must pass: WHAT=op, optimizer or tier; NAME=adam runs only the tests whose names
# contain adam, slow ones too
check: install peers
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TESTERS) --dist worksteal $(if $(NAME),-m "$(WHAT)" -k "$(NAME)",-m "$(WHAT) and not slow")

# rounds of the crash harness; SEED=7 N=1 repeats one, RANKS=2 is of ranks that share the rows, MODEL=1 of embeddings
# that are trained together, SERVING=1 of a publisher with a reader
crash: install
	PYTHONPATH=tests $(BIN)/python -P -m crash -n $(or $(N),200) --seed $(or $(SEED),1) $(if $(RANKS),--ranks $(RANKS)) $(if $(MODEL),--model) $(if $(SERVING),--serving)

# the native tests under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer
sanitize: install
	PYTHON=$(BIN)/python scripts/sanitize

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python scripts/layers
	$(BIN)/python scripts/mutations --check

types: install
	$(BIN)/python -m mypy -p tierbed
	$(BIN)/python -m mypy tests/house/user_script.py

# what does not vary between machines: the native core's instructions in fixed workloads, against
# benchmarks/instructions.json (RENEW=1 writes that file), and the calls and bytecodes of a training step. CI runs it
costs: instructions
	$(BIN)/python scripts/walk

instructions: install
	$(BIN)/python benchmarks/instructions.py $(if $(RENEW),--renew)

# what tests and benchmarks compare with; no extra can leave out what these packages require
peers: $(VENV)/.peers

$(VENV)/.peers: benchmarks/peers.txt $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --no-deps --requirement $<
	touch $@

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml CMakeLists.txt constraints.txt scripts/system-packages $(NATIVE)
	scripts/system-packages $(PYTHON)
	@echo "python packages: installing into $(VENV)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build dist
