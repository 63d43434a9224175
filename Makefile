# Thin: everything is a command that you can also type. `make help` lists it.
PYTHON ?= python3.11
VENV ?= .venv
RUN := $(VENV)/bin
CONSTRAINTS := constraints/py311.txt
SITE := $(CURDIR)/site
TREE := .mypy_cache/tree/concord# the package as it is installed

# What JAX compiles is kept beside the cache of the tests.
COMPILED := JAX_COMPILATION_CACHE_DIR=.pytest_cache/d/jax JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES=-1

.PHONY: help check test slow kernels machines lint coverage golden cases site tree readme criteria speed-measured speed any gpu-any gpu-records clean

help: ## say what there is to make
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

check: $(VENV)/installed ## compare the four frameworks with the reference: the table of the README
	$(COMPILED) $(RUN)/concord check

test: $(VENV)/installed ## run the ordinary tests: 5 minutes on two cores
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
	ln -s $(CURDIR)/concord/* $(addprefix $(CURDIR)/,spec backends conformance porting speed) $(TREE)

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
	mkdir -p build
	$(RUN)/concord check --json build/check.json
	$(RUN)/concord show report build/check.json --markdown README.md

$(VENV)/installed: pyproject.toml setup.py $(CONSTRAINTS)
	test -x $(RUN)/python || $(PYTHON) -m venv $(VENV)
	$(RUN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e ".[all,dev,docs]"
	$(RUN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) --no-deps onnx2pytorch # its torchvision needs PyTorch for CUDA
	touch $@

criteria: $(VENV)/installed ## write docs/guides/criteria.md, the comparison with usual criteria, anew
	$(RUN)/python -m examples.criteria docs/guides/criteria.md

wild: $(VENV)/installed ## write the table of docs/guides/found-in-the-wild.md anew
	cd examples/wild && $(abspath $(RUN))/python wild.py && $(abspath $(RUN))/concord compare --json build/compare.json
	$(RUN)/concord show report examples/wild/build/compare.json --markdown docs/guides/found-in-the-wild.md

SPEED := speed --preset minilm --implementation library
MACHINE ?= amd-epyc-26-2
MEASURED = conformance/results/speed/$(MACHINE)
RECORD = --json $(MEASURED)/$1.json && $(RUN)/concord show report $(MEASURED)/$1.json --markdown docs/guides/speed-$1.md

speed-measured: $(VENV)/installed ## write a machine's records of speed and their guides anew, while it is idle
	mkdir -p $(MEASURED)
	$(RUN)/concord $(SPEED) --preset bert-base --implementation library:onednn --implementation explicit --execution compiled --execution unpadded-compiled --lengths full --lengths ragged $(call RECORD,forward)
	$(RUN)/concord $(SPEED) --preset bert-base --execution compiled --execution unpadded-compiled --lengths full --lengths ragged --dtype bfloat16 $(call RECORD,bfloat16)
	$(RUN)/concord $(SPEED) --kind training --preset nndl --implementation explicit --execution compiled --execution eager $(call RECORD,training)
	$(RUN)/python docs/fastest_modes.py

speed: $(VENV)/installed ## measure the frameworks side by side, into speed.json and speed.html
	$(RUN)/concord speed --json speed.json --html speed.html

any: $(VENV)/installed ## measure what a comparison of any model costs: seconds, memory, verdicts
	$(RUN)/python -m examples.any_model

gpu-any: ## the same with the reference on a GPU, from a plain checkout
	PYTHONPATH=. $(GPU_PYTHON) -m examples.any_model --device $(DEVICE)

# On a machine with a GPU, from a plain checkout. Each step has its time limit, the most telling come first, and what one has judged when it
# is ended is kept as .unfinished.json; called again, only what is missing is made.
GPU_PYTHON ?= python3
GPU_BACKENDS ?= torch jax
GPU_LIMIT ?= 120
GPU_CASES ?=
GPU_FUZZ ?= 150
GPU_STEPS ?= 20
DEVICE ?= cuda
GPU := build/gpu
ON_GPU = PYTHONPATH=. timeout -k 20 $(GPU_LIMIT) $(GPU_PYTHON) -m concord
GPU_HALF_1 := $(foreach variant,tf1-text-classifier bert-pytorch vanilla-encoder nndl-paddle nndl-paddle-api,--variant $(variant))
GPU_HALF_2 := $(foreach variant,keras-attention bert roberta distilbert sentence-bert,--variant $(variant))
GPU_strict-float32 = check --dtype float32
GPU_strict-float64 = check --dtype float64
GPU_tf32 = check --precision tf32 --dtype float32
GPU_bfloat16 = check --dtype bfloat16
GPU_float16 = check --dtype float16
GPU_repeat = check --dtype float32 --repeat 10
GPU_deterministic = check --dtype float32 --repeat 10 --deterministic
GPU_default = check --precision default --dtype float32
GPU_golden = golden
GPU_fuzz = fuzz --cases $(GPU_FUZZ) --shapes 4 --out $(GPU)/failures
GPU_lockstep = lockstep --steps $(GPU_STEPS)
GPU_speed = speed --budget 100 $(GPU_BACKENDS:%=--backend %)
halves = $(foreach record,$1,$(foreach half,1 2,$(GPU_BACKENDS:%=$(record).$(half).%)))
whole = $(foreach record,$1,$(GPU_BACKENDS:%=$(record).%))
GPU_RECORDS = $(call halves,strict-float32 strict-float64 tf32 bfloat16 float16) $(call whole,golden fuzz) \
	$(call halves,repeat deterministic) $(call whole,lockstep) $(call halves,default) speed.hf

gpu-records: $(GPU)/doctor.txt $(GPU_RECORDS:%=$(GPU)/%.json) ## on a machine with a GPU: all its records, into build/gpu, two minutes each at most

# Pydantic reads the tables of golden files and hypothesis draws random cases; all else is recorded without them.
$(GPU)/doctor.txt:
	mkdir -p $(GPU)
	@for package in pydantic hypothesis; do $(GPU_PYTHON) -c "import $$package" 2> /dev/null || \
	echo "lacks $$package: golden needs pydantic, fuzz hypothesis; bring them as wheels (pip download $$package), or go on without"; done
	-$(ON_GPU) doctor --device $(DEVICE) $(GPU_BACKENDS:%=--backend %) > $@.part
	mv $@.part $@

# Exit code 1 says that something diverges, 3 that something was not determined: that is recorded too. 124: the time was up.
$(GPU)/%.json: $(GPU)/doctor.txt
	@echo "$*"; $(ON_GPU) $(GPU_$(word 1,$(subst ., ,$*))) $(if $(word 3,$(subst ., ,$*)),$(or $(GPU_CASES),$(GPU_HALF_$(word 2,$(subst ., ,$*))))) \
	--backend $(lastword $(subst ., ,$*)) --device $(DEVICE) --json $@.part > $(GPU)/$*.txt 2>&1; code=$$?; \
	if test -e $@.part; then case $$code in 0|1|3) mv $@.part $@;; *) mv $@.part $(GPU)/$*.unfinished.json;; esac; fi; \
	test -e $@ || echo "$*: not recorded, exit code $$code: $$(tail -n 1 $(GPU)/$*.txt)"

clean: ## remove the virtual environment and what tools leave behind
	rm -rf $(VENV) build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
