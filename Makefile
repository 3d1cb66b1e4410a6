# Everything runs in .venv, which `make venv` provides; the other targets ask for it themselves.
# ARGS goes to the command of demo, models, test and parity: make test ARGS="-k sampling"

PY := .venv/bin/python
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help venv models demo test quality parity clean

help:
	@echo "make demo     chat with a FASER server on the CPU, beside a run without speculation"
	@echo "make test     all tests"
	@echo "make venv     .venv, on top of a cached environment (built when missing)"
	@echo "make models   the demo models, into the cache"
	@echo "make parity   greedy ids against the target's own, float32"
	@echo "make quality  ruff check and ruff format --check"
	@echo "make clean    remove .venv and build leftovers; the caches outside stay"

venv:
	@launch/venv.sh

models: venv
	@$(PY) -m launch.demo_models $(ARGS)

demo: venv
	@$(PY) -m launch.serve_demo $(ARGS)

test: venv
	@$(PY) -m pytest $(ARGS)

quality: venv
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .

parity: venv
	@$(PY) bench/parity.py $(ARGS)

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
