# make small      set up, prepare the default data, train config/small.py, print a sample
# make test       set up, lint, and run the tests that need no GPU
# make test-slow  tests that take minutes
# make test-gpu   the tests that need a CUDA GPU, with the packages of $(PYTHON): make test-gpu PYTHON=python3

PYTHON ?= python3
TORCH  ?= torch==2.13.0
BIN     = .venv/bin

# On Linux, PyPI's torch brings 3 GB of CUDA; without an NVIDIA driver, PyTorch's own index has a build for the CPU.
# (The index is only added: where it cannot be reached, pip goes on with its default one.)
ifeq ($(shell uname -s),Linux)
ifeq ($(shell command -v nvidia-smi),)
TORCH_INDEX = --retries 0 --timeout 10 --extra-index-url https://download.pytorch.org/whl/cpu
endif
endif
# The CPU build does not pin triton as the CUDA build does: there the tests do, so that they lint what they run.
CONSTRAINTS = $$($(BIN)/python -c "import torch; print('' if torch.version.cuda else '-c tests/constraints.txt')")

.PHONY: small test test-slow test-gpu clean

small: .venv/ready
	$(BIN)/python train.py config/small.py $$(test -d out/small/last && echo --resume)
	$(BIN)/python generate.py --checkpoint out/small --prompt "def main(" --seed 1

test: .venv/ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile

test-slow: .venv/ready-dev
	$(BIN)/python -m pytest -m slow

test-gpu:
	$(PYTHON) -m pytest -m gpu tests

.venv/torch:
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet $(TORCH_INDEX) "$(TORCH)"
	touch $@

.venv/ready: .venv/torch pyproject.toml
	$(BIN)/pip install --quiet $(CONSTRAINTS) -e ".[plots]"
	touch $@

.venv/ready-dev: .venv/torch pyproject.toml tests/constraints.txt
	$(BIN)/pip install --quiet $(CONSTRAINTS) -e ".[dev]"
	touch $@

clean:
	rm -rf .venv .pytest_cache .ruff_cache *.egg-info
