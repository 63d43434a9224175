# Thin: everything is a command that you can also type.
PYTHON ?= python3.11
VENV ?= .venv
RUN := $(VENV)/bin
CONSTRAINTS := constraints/py311.txt
TREE := .mypy_cache/tree/concord# the package as it is installed

.PHONY: check test slow lint golden cases readme readme-criteria speed-measured speed gpu-records clean

check: $(VENV)/installed
	$(RUN)/concord check

test: $(VENV)/installed
	$(RUN)/python -m pytest -n 2 --dist loadgroup

slow: $(VENV)/installed
	$(RUN)/python -m pytest -n 2 --dist loadgroup -m slow

lint: $(VENV)/installed
	$(RUN)/ruff check .
	rm -rf $(TREE) && mkdir -p $(TREE)
	ln -s $(CURDIR)/concord/* $(addprefix $(CURDIR)/,spec backends conformance speed) $(TREE)
	$(RUN)/mypy

golden: $(VENV)/installed
	$(RUN)/concord golden

cases: $(VENV)/installed
	$(RUN)/python -m concord.spec.cases

readme: $(VENV)/installed
	$(RUN)/concord check --markdown README.md

$(VENV)/installed: pyproject.toml setup.py $(CONSTRAINTS)
	test -x $(RUN)/python || $(PYTHON) -m venv $(VENV)
	$(RUN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e ".[all,dev]"
	touch $@

readme-criteria: $(VENV)/installed
	$(RUN)/concord mutants --criteria --json conformance/results/criteria.json --markdown README.md

speed-measured: $(VENV)/installed
	$(RUN)/concord speed --json conformance/results/speed.json --markdown docs/guides/speed-measured.md

speed: $(VENV)/installed
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

gpu-records: $(GPU)/doctor.txt $(foreach record,$(GPU_RECORDS),$(GPU_BACKENDS:%=$(GPU)/$(record).%.json))

$(GPU)/doctor.txt:
	mkdir -p $(GPU)
	$(ON_GPU) doctor --device $(DEVICE) $(GPU_BACKENDS:%=--backend %) > $@.part
	mv $@.part $@

# Exit code 1 says that something diverges: that is recorded too.
$(GPU)/%.json: $(GPU)/doctor.txt
	$(ON_GPU) $(GPU_$(basename $*)) --backend $(subst .,,$(suffix $*)) --device $(DEVICE) --json $@.part || test $$? -eq 1
	mv $@.part $@

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
