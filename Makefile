# make demo: the main job on the embedded data set.   make test: lint, spelling, types, tests.
# make thorough: all tests but the engines', more than half an hour on two slow cores. make test leaves out what takes long beside what
# it finds: some cases and pages, the pictures of most comparisons, and three of five examples of a property.
# make results: every committed page and table from the committed records, without data sets; git diff shows changes.
# make docs: the site, in build/site; a warning is an error.
# make links: asks every address on the site's pages whether it is still there; needs the internet.
# make package: the package, built, installed and used, in seconds.
# make dist-check PYTHONS="python3.11 python3.13": sdist and wheel, the wheel installed with each extra.
# make versions: the tests with the oldest and the newest packages that pyproject.toml allows, about twenty minutes.
# make pfl: the tests of pfl as a host, in .peers/pfl, as pfl wants older packages than the development set has.
# make nvflare: the slow tests of hosts, NVFlare's simulator and its Flower integration included, about five minutes.
# All but pfl, versions and dist-check set up .venv themselves; nothing else needs to be installed but Python >= 3.11.

PYTHON ?= python3
VENV ?= .venv
# Tests side by side, one thread each: torch's own threads in two processes only wait for each other.
JOBS ?= 2

# Set in many containers, it would let every process compile the sources anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test types unit thorough simulation results docs links package pfl nvflare versions dist-check clean

demo: $(VENV)/.installed
	rm -rf runs/demo
	$(VENV)/bin/deltafl compare --out runs/demo

test: $(VENV)/.installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/codespell
	$(MAKE) -j 2 types unit

# Side by side, as mypy keeps one core busy for a minute.
types: $(VENV)/.installed
	$(VENV)/bin/mypy

unit: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(VENV)/bin/pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --max-worker-restart=0

# Of the slow tests: Flower's simulation engine beside our simulator, with the sampler that asks most of it; about a minute.
simulation: $(VENV)/.installed
	$(VENV)/bin/pytest -m slow tests/flower/test_engines.py -k 'simulation and scaffold'

thorough: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(VENV)/bin/pytest --thorough -n $(JOBS) --dist loadfile --no-loadscope-reorder --max-worker-restart=0

results: $(VENV)/.installed
	$(VENV)/bin/python -m reproduction all --scale cpu --only-page
	git diff --stat --exit-code -- results

docs: $(VENV)/.installed
	$(VENV)/bin/python docs/pages.py build/pages
	$(VENV)/bin/sphinx-build -q -W --keep-going -j $(JOBS) -c docs build/pages build/site
	@echo "Look at build/site/index.html"

links: $(VENV)/.installed
	$(VENV)/bin/python docs/pages.py build/pages
	$(VENV)/bin/sphinx-build -q --keep-going -b linkcheck -c docs build/pages build/links

# With the packages of .venv, but away from the sources: a file that the wheel lacks is missed.
package: $(VENV)/.installed
	rm -rf build/package build/lib
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps --target build/package .
	cd build/package && $(abspath $(VENV))/bin/python -c 'import deltafl; assert "build/package" in deltafl.__file__'
	cd build/package && $(abspath $(VENV))/bin/python -m deltafl compare --task toy --seeds 1 --rounds 2 --processes 1 --out out

pfl: .peers/pfl/.installed
	OMP_NUM_THREADS=1 .peers/pfl/bin/pytest tests/test_pfl.py

.peers/pfl/.installed: pyproject.toml constraints-pfl.txt
	$(PYTHON) -m venv .peers/pfl
	.peers/pfl/bin/pip install --quiet --disable-pip-version-check --constraint constraints-pfl.txt --editable '.[pfl,sim]' hypothesis pytest pytest-timeout
	touch $@

nvflare: .peers/nvflare/.installed
	OMP_NUM_THREADS=1 $(VENV)/bin/pytest -m slow tests/hosts

# The development set with an older Flower, see tests/hosts/test_flower_in_nvflare.py.
.peers/nvflare/.installed: $(VENV)/.installed tests/hosts/flower_options.sh
	$(VENV)/bin/python -m venv .peers/nvflare
	.peers/nvflare/bin/pip install --quiet --disable-pip-version-check --no-deps flwr==1.39.0
	where='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	$(VENV)/bin/python -c "$$where" > "$$(.peers/nvflare/bin/python -c "$$where")/development.pth"
	install tests/hosts/flower_options.sh .peers/nvflare/bin/flower-superlink
	install tests/hosts/flower_options.sh .peers/nvflare/bin/flower-supernode
	touch $@

versions:
	PYTHON=$(PYTHON) .ci/versions oldest newest

PYTHONS ?= $(PYTHON)
dist-check:
	.ci/dist-check $(PYTHONS)

# A new pip takes half the time of Python's own. What is pinned is installed three pips at a time, which halves it again; the last one
# resolves what that leaves out, on other systems for instance. Compiled on all cores, without tests and what is rarely imported.
RARE = tests|_inductor|Crypto|dask/(array|dataframe)|databricks|debugpy|fontTools|gunicorn|IPython|jedi|mlflow|mypy|mypyc|networkx|nvflare|opentelemetry|pip|prompt_toolkit|pyasn1_modules|ray|selenium|setuptools|sqlalchemy|sympy|tensorboard|torch/testing|torchgen|transformers/models|trio|wcwidth
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "deltafl needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --upgrade pip
	-grep -v '^#' constraints.txt | xargs -n 20 -P 3 $(VENV)/bin/pip install --quiet --disable-pip-version-check --no-compile --no-deps
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt --editable '.[dev]'
	$(VENV)/bin/python -m compileall -qq -j 0 -x '/($(RARE))/' $(VENV)/lib || true
	touch $@

clean:
	rm -rf $(VENV) runs build dist src/*.egg-info
