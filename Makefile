# Everything a contributor types. `make demo` and `make test` prepare what they need.
.PHONY: help demo test lint format docs bench lock clean

help:
	@echo 'make demo    a lab of three nodes: audit, deploy, deploy again, audit, ready'
	@echo 'make test    all tests, with the lab and the virtual machine'
	@echo 'make lint    formatting, lint, types, shell scripts'
	@echo 'make format  format the code'
	@echo 'make docs    write the pages that are generated from the code'
	@echo 'make bench   the benchmarks (minutes); tables for docs/benchmarks.md'
	@echo 'make lock    pin the dependencies anew'

demo:
	@scripts/demo.sh

test:
	@scripts/setup.sh test
	@scripts/test.sh $(TESTS)

lint:
	@scripts/setup.sh test
	@scripts/lint.sh

format:
	@scripts/setup.sh test
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

docs:
	@scripts/setup.sh test
	.venv/bin/python scripts/make_docs.py

bench:
	@scripts/setup.sh test
	@benchmarks/run

lock:
	.venv/bin/python -m pip install --quiet uv
	.venv/bin/uv pip compile --quiet --universal --python-version 3.10 --extra dev --no-header \
		--output-file requirements.lock pyproject.toml

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
