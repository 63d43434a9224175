# Thin: everything is a command that you can also type. `make help` lists it.
PYTHON ?= python3.11
VENV ?= .venv
RUN := $(VENV)/bin
CONSTRAINTS := constraints/py311.txt
SITE := $(CURDIR)/site
TREE := .mypy_cache/tree/concord# the package as it is installed

# What JAX compiles is kept beside the cache of the tests.
COMPILED := JAX_COMPILATION_CACHE_DIR=.pytest_cache/d/jax JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES=-1

.PHONY: help check test slow kernels machines lint coverage golden cases site tree readme criteria speed-measured speed gpu-records clean

help: ## say what there is to make
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

check: $(VENV)/installed ## compare the four frameworks with the oracle: the table of the README
	$(COMPILED) $(RUN)/concord check

test: $(VENV)/installed ## run the ordinary tests: 9 minutes on two cores, 10 the first time
	$(RUN)/python -m pytest -n 2 --dist loadgroup

slow: $(VENV)/installed ## run all other tests: every backend on every entry, and long campaigns
	$(RUN)/python -m pytest -n 2 --dist loadgroup -m slow

kernels: $(VENV)/installed ## run tests of NumPy alone under each kernel of its BLAS that this processor has
	$(RUN)/python -m pytest -m "" tests/test_machines.py -k kernel -rs

machines: $(VENV)/installed ## judge the four backends as on other processors
	$(RUN)/python -m pytest -m "" tests/test_machines.py -k verdicts -rs

lint: $(VENV)/installed tree ## ruff and mypy
	$(RUN)/ruff check .
	$(RUN)/ruff format --check --quiet .
	$(RUN)/mypy

tree:
	rm -rf $(TREE) && mkdir -p $(TREE)
	ln -s $(CURDIR)/concord/* $(addprefix $(CURDIR)/,spec backends conformance training porting speed) $(TREE)

coverage: $(VENV)/installed ## run the tests, and say which lines none of them reached
	$(RUN)/coverage erase
	$(RUN)/coverage run -m pytest -n 2 --dist loadgroup
	$(RUN)/coverage combine --quiet
	$(RUN)/coverage report

golden: $(VENV)/installed ## compare with tensors that the published sources computed
	$(RUN)/concord golden

cases: $(VENV)/installed ## write spec/cases anew
	$(RUN)/python -m concord.spec.cases

site: $(VENV)/installed tree ## build guides and reference as a site, into site/
	NO_MKDOCS_2_WARNING=1 $(RUN)/mkdocs build --strict --site-dir $(SITE)

readme: $(VENV)/installed ## write the table of the README anew
	$(RUN)/concord check --markdown README.md

$(VENV)/installed: pyproject.toml setup.py $(CONSTRAINTS)
	test -x $(RUN)/python || $(PYTHON) -m venv $(VENV)
	$(RUN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e ".[all,dev,docs]"
	touch $@

criteria: $(VENV)/installed ## write docs/guides/criteria.md, the comparison with usual criteria, anew
	$(RUN)/python examples/criteria.py docs/guides/criteria.md

SPEED := speed --preset minilm --profile tuned --implementation library
RECORD = --json conformance/results/$1.json --markdown docs/guides/$1.md

speed-measured: $(VENV)/installed ## write the records of speed and their guides anew, on a quiet machine
	$(RUN)/concord $(SPEED) --preset bert-base --implementation library:onednn --execution compiled --execution unpadded-compiled --lengths full --lengths ragged $(call RECORD,speed-forward)
	$(RUN)/concord $(SPEED) --preset bert-base --execution compiled --execution unpadded-compiled --lengths full --lengths ragged --dtype bfloat16 $(call RECORD,speed-bfloat16)
	$(RUN)/concord $(SPEED) --kind training --preset nndl --execution compiled --execution eager $(call RECORD,speed-training)

speed: $(VENV)/installed ## measure the frameworks side by side, into speed.json and speed.html
	$(RUN)/concord speed --json speed.json --html speed.html

# On a machine with a GPU, from a plain checkout; what has been written is not made again. Each step stays below ten minutes.
GPU_PYTHON ?= python3
GPU_BACKENDS ?= torch jax
DEVICE ?= cuda
GPU := conformance/results/gpu
ON_GPU = PYTHONPATH=. timeout 590 $(GPU_PYTHON) -m concord
GPU_strict = check
GPU_tf32 = check --precision tf32 --dtype float32
GPU_default = check --precision default --dtype float32
GPU_bfloat16 = check --dtype bfloat16
GPU_repeat = check --dtype float32 --repeat 10
GPU_golden = golden
GPU_fuzz = fuzz --cases 500 --shapes 4 --out $(GPU)/failures
GPU_speed-float32 = speed --dtype float32 --budget 540
GPU_speed-bfloat16 = speed --dtype bfloat16 --budget 540
GPU_RECORDS := strict tf32 default bfloat16 repeat golden fuzz speed-float32 speed-bfloat16

gpu-records: $(GPU)/doctor.txt $(foreach record,$(GPU_RECORDS),$(GPU_BACKENDS:%=$(GPU)/$(record).%.json)) ## on a machine with a GPU: all its records, into conformance/results/gpu

$(GPU)/doctor.txt:
	mkdir -p $(GPU)
	$(ON_GPU) doctor --device $(DEVICE) $(GPU_BACKENDS:%=--backend %) > $@.part
	mv $@.part $@

# Exit code 1 says that something diverges: that is recorded too.
$(GPU)/%.json: $(GPU)/doctor.txt
	$(ON_GPU) $(GPU_$(basename $*)) --backend $(subst .,,$(suffix $*)) --device $(DEVICE) --json $@.part || test $$? -eq 1
	mv $@.part $@

clean: ## remove the virtual environment and what tools leave behind
	rm -rf $(VENV) build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
