# Two commands on a fresh machine: `make quickstart` and `make test`. Both set up what they need.

PYTHON ?= python3
VENV   := .venv
RUN    := $(VENV)/bin
READY  := $(VENV)/.ready

# Tests start many programs, and each of them would compile what is not compiled yet; so would each process of pytest, with
# the tests rewritten, which takes ten seconds. That is why they may write bytecode wherever Python otherwise must not. A
# process that has no tests left takes over half of another's, so that none waits for the file of the other.
TESTS  = $(RUN)/python -m compileall -q luthier tests && \
  PYTHONDONTWRITEBYTECODE= $(RUN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal

.PHONY: setup quickstart quickstart-vl quickstart-audio test check format bench docs site clean
.DEFAULT_GOAL := help

help:
	@echo "make setup       a virtual environment in .venv with all that is needed"
	@echo "make quickstart  train a tiny model on embedded data, offline, and show that it learned"
	@echo "make quickstart-vl, make quickstart-audio   the same with pictures, with sounds"
	@echo "make test        all tests"
	@echo "make check       format, lint, types, and all tests"
	@echo "make bench       benchmarks, one table each"
	@echo "make docs        regenerate the pages that are generated from code"
	@echo "make site        build the documentation with search into site/, offline; SERVE=1 serves it besides"

setup: $(READY)

# uv installs in seconds; where it cannot be used, pip does the same. What is compiled now is not compiled at each start,
# which would take a second of `luthier prepare` wherever Python must not write bytecode.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN)/python -m pip install --quiet uv -c constraints.txt
	$(RUN)/uv pip install --quiet --compile-bytecode --python $(RUN)/python -c constraints.txt -e '.[all,dev]' \
	  || $(RUN)/python -m pip install --quiet -c constraints.txt -e '.[all,dev]'
	@$(RUN)/python -m compileall -q luthier
	@touch $(READY)

quickstart: $(READY)
	$(RUN)/luthier quickstart --out output/quickstart

quickstart-vl: $(READY)
	$(RUN)/luthier quickstart vl --out output/quickstart_vl

quickstart-audio: $(READY)
	$(RUN)/luthier quickstart audio --out output/quickstart_audio

test: $(READY)
	$(TESTS)

check: $(READY)
	$(RUN)/ruff format --check .
	$(RUN)/ruff check .
	$(RUN)/mypy
	$(TESTS)

format: $(READY)
	$(RUN)/ruff format .
	$(RUN)/ruff check --fix .

bench: $(READY)
	@for script in benchmarks/*.py; do echo; $(RUN)/python -m benchmarks.$$(basename $$script .py) || exit 1; done

docs: $(READY)
	$(RUN)/python scripts/write_docs.py

# Search needs a server: browsers let no page that was opened as a file read another one.
site: $(READY)
	NO_MKDOCS_2_WARNING=1 $(RUN)/mkdocs build --strict --site-dir site
	@if [ -n "$(SERVE)" ]; then $(RUN)/python -m http.server --bind 127.0.0.1 --directory site 8080; fi

clean:
	rm -rf $(VENV) build dist output site .pytest_cache .mypy_cache .ruff_cache .hypothesis
