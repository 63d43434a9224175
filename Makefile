# Thin: everything is a command that you can also type.
PYTHON ?= python3.11
VENV ?= .venv
RUN := $(VENV)/bin
CONSTRAINTS := constraints/py311.txt
TREE := .mypy_cache/tree/concord# the package as it is installed

.PHONY: check test slow lint golden cases readme readme-criteria readme-speed speed clean

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

readme-speed: $(VENV)/installed
	$(RUN)/concord speed --json conformance/results/speed.json --markdown README.md

speed: $(VENV)/installed
	$(RUN)/concord speed --json speed.json --html speed.html

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
