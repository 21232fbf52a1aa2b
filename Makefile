# Everything a contributor types. `make demo` and `make test` prepare what they need.
.PHONY: help demo test test-lab test-all mutation lint format pages docs pictures house dist bench lock clean

help:
	@echo 'make demo      a lab of three nodes: audit, deploy, deploy again, audit, ready'
	@echo 'make test      the unit tests, and each command on nodes of the lab (minutes)'
	@echo 'make test-lab  the rest of the lab, attacks, Slurm, the virtual machine, torch'
	@echo 'make test-all  all tests: every fault, every hang, on every Python (hours)'
	@echo 'make mutation  how many small faults in the product make test notices (hours)'
	@echo 'make lint      formatting, lint, types, shell scripts, generated pages'
	@echo 'make format    format the code'
	@echo 'make docs      the documentation as a site with a search, in site/'
	@echo 'make pages     write the pages that are generated from the code'
	@echo 'make house     the picture of the packages, from their imports'
	@echo 'make pictures  record the pictures of real runs, on nodes of the lab'
	@echo 'make dist      the wheel and the sdist, checked, in dist/, with a bill of materials'
	@echo 'make bench     the benchmarks (minutes); tables for benchmarks/HISTORY.md'
	@echo 'make lock      pin the dependencies anew'

demo:
	@scripts/demo.sh

# TESTS: what to run instead, as pytest takes it: `make test TESTS=tests/unit/subjects`.
test:
	@scripts/setup.sh test
	@scripts/test.sh $(if $(TESTS),all $(TESTS),test)

test-lab:
	@scripts/setup.sh lab
	@scripts/test.sh $(if $(TESTS),all $(TESTS),lab)

test-all:
	@scripts/setup.sh all
	@scripts/test.sh all $(TESTS)

mutation:
	@scripts/setup.sh test
	.venv/bin/python scripts/mutation.py map build/mutation-map.json --tier test -n 2 --dist loadgroup
	.venv/bin/python scripts/mutation.py run build/mutation-map.json --jobs 2 -o build/mutation.json

lint:
	@scripts/setup.sh python
	@scripts/lint.sh

format:
	@scripts/setup.sh python
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

pages:
	@scripts/setup.sh python
	.venv/bin/python scripts/make_docs.py

docs: pages
	@scripts/setup.sh docs
	NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build --quiet --strict

house:
	@scripts/setup.sh python
	.venv/bin/python scripts/draw_house.py

pictures:
	@scripts/setup.sh demo
	.venv/bin/python scripts/pictures.py

dist:
	@scripts/setup.sh dist
	@scripts/dist.sh

bench:
	@scripts/setup.sh lab
	@for name in local audit deploy simulated memory; do benchmarks/run $$name || exit 1; done

# The extra ones are held to the versions of the first, so that all fit into one environment. Every
# file has its sha256 there, and pip takes no other. What is installed without this project's own
# tools still needs its build backend. The torch that hangs has environments of its own. The other
# paramiko that nodeready works with is for tests/lab/test_other_paramiko.py.
UV = .venv/bin/uv
PIN = $(UV) pip compile --quiet --universal --python-version 3.10 --no-header --generate-hashes
COMPILE = $(PIN) pyproject.toml
lock:
	$(UV) --version 2>/dev/null || .venv/bin/python -m pip install --quiet uv
	$(COMPILE) --extra dev --output-file requirements.lock
	echo hatchling | $(COMPILE) - --constraints requirements.lock --output-file requirements-install.lock
	$(COMPILE) --extra docs --constraints requirements.lock --output-file requirements-docs.lock
	$(COMPILE) --extra dist --constraints requirements.lock --output-file requirements-dist.lock
	echo 'paramiko>=5,<6' | $(PIN) - --no-deps --output-file requirements-paramiko.lock
	printf 'torch\nnumpy\npyzmq\ngrpcio\n' | $(PIN) - --output-file requirements-torch.lock

clean:
	rm -rf .venv .venv-torch build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache
