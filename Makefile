# Every habit of the project as a command; `make help` lists them.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= $(or $(wildcard $(BIN)/python),$(shell command -v python3.11 || command -v python3.12 || command -v python3))
# Of `make warm-start`: qwen3_vl or qwen3_5, whose linear attention vLLM computes on the CPU in bfloat16 only.
ARCHITECTURE ?= qwen3_vl
OTHER := $(filter-out qwen3_vl,$(ARCHITECTURE))
MODEL := runs/models/tiny$(addprefix -,$(OTHER))
WARM_MODEL := models/miniwob$(addprefix -,$(OTHER))
NOTES_MODEL := models/quickstart
WARM_SETTINGS := $(if $(OTHER),rollout.dtype=bfloat16)
ROUNDS := runs/warm_start$(addprefix -,$(OTHER))
DEMONSTRATE = $(BIN)/webrl demonstrate configs/warm_start.yaml model.path=$(MODEL) $(WARM_SETTINGS)
DEMONSTRATE_NOTES = $(BIN)/webrl demonstrate configs/warm_start_notes.yaml model.path=$(MODEL)
PRETRAIN = $(BIN)/python -m tools.pretrain_tiny_model
# An environment of `make install-gpu` stays one: every later target installs CUDA builds into it.
PLATFORM := $(if $(wildcard $(VENV)/.installed-gpu),gpu,cpu)
INSTALLED := $(VENV)/.installed-$(PLATFORM)
# Where pip has a folder of wheels, torch is taken from it, or as a CUDA build from the index; elsewhere uv finds the
# CPU build by name (make install TORCH_BACKEND=--torch-backend=cpu). The index itself has the CUDA build.
TORCH_BACKEND := $(if $(or $(PIP_FIND_LINKS),$(filter gpu,$(PLATFORM))),,--torch-backend=cpu)
ifdef PIP_FIND_LINKS
export UV_FIND_LINKS := $(PIP_FIND_LINKS)
endif

.PHONY: help install install-gpu system slurm quickstart warm-start test first-tier test-all test-versions test-v2 gpu-proof test-times soak lint format docs docs-site docs-serve locks check clean

help: ## list the commands
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

install: $(INSTALLED) system ## create .venv with everything; find or install Chromium and two libraries

install-gpu: ## the same for machines with GPUs: CUDA builds, without the tools of development
	@$(MAKE) --no-print-directory install PLATFORM=gpu

$(INSTALLED): setup.py $(wildcard requirements/*.txt) tools/install.sh
	PYTHON="$(PYTHON)" TORCH_BACKEND="$(TORCH_BACKEND)" tools/install.sh $(VENV) $(PLATFORM)
	touch $@

system:
	@PYTHON="$(PYTHON)" tools/install_system.sh

$(MODEL)/config.json: tools/make_tiny_model.py tools/tiny_tokenizer.py | $(INSTALLED)
	$(BIN)/python -m tools.make_tiny_model $(MODEL) --architecture $(ARCHITECTURE) --linear-value-heads 2 --full-attention-interval 2 --force

quickstart: install ## a tiny agent learns from rewards to note what it sees, in real Chromium, on the CPU
	$(BIN)/webrl train configs/quickstart.yaml $(ARGS)

# Another architecture takes the first round of models/miniwob only.
warm-start: install $(MODEL)/config.json ## rebuild models/miniwob, and from it models/quickstart, where quickstart starts (four hours)
	mkdir -p $(ROUNDS)
	$(DEMONSTRATE) --out $(ROUNDS)/clicks.records
	$(PRETRAIN) $(MODEL) $(ROUNDS)/clicks.records $(if $(OTHER),$(WARM_MODEL),$(ROUNDS)/first)
ifeq ($(OTHER),)
	$(DEMONSTRATE) --out $(ROUNDS)/pages.records run.seed=1 trainer.warm_start.demonstrations=2700
	$(DEMONSTRATE) --out $(ROUNDS)/game.records tasks.max_steps=6 trainer.warm_start.demonstrations=1500 \
		"tasks.environments=[tic-tac-toe]"
	$(DEMONSTRATE) --out $(ROUNDS)/date.records tasks.max_steps=6 trainer.warm_start.demonstrations=2500 \
		"tasks.environments=[choose-date-easy]" trainer.warm_start.premature_submit_probability=0.5
	$(DEMONSTRATE) --out $(ROUNDS)/form.records tasks.max_steps=6 trainer.warm_start.demonstrations=2500 \
		"tasks.environments=[form-sequence-2]" trainer.warm_start.premature_submit_probability=0.5
	$(PRETRAIN) $(ROUNDS)/first $(ROUNDS)/{pages,game,date,form}.records $(ROUNDS)/second --steps 3600
	$(PRETRAIN) $(ROUNDS)/second $(ROUNDS)/{pages,game,date}.records $(ROUNDS)/third --steps 3200
	$(DEMONSTRATE) --out $(ROUNDS)/circle.records run.seed=2 trainer.warm_start.demonstrations=4000 \
		"tasks.environments=[circle-center]"
	$(DEMONSTRATE) --out $(ROUNDS)/more_games.records run.seed=2 tasks.max_steps=6 trainer.warm_start.demonstrations=2000 \
		"tasks.environments=[tic-tac-toe]"
	$(PRETRAIN) $(ROUNDS)/third $(ROUNDS)/{pages,game,more_games,date,circle,circle}.records $(WARM_MODEL) --steps 3600
	$(DEMONSTRATE_NOTES) --out $(ROUNDS)/notes.records
	$(DEMONSTRATE_NOTES) --out $(ROUNDS)/more_notes.records run.seed=1
	$(DEMONSTRATE_NOTES) --out $(ROUNDS)/others.records run.seed=1 tasks.max_steps=4 trainer.warm_start.demonstrations=1200 \
		"tasks.environments=[click-collapsible,circle-center]" trainer.warm_start.premature_submit_probability=0.6
	$(PRETRAIN) $(WARM_MODEL) $(ROUNDS)/notes.records $(ROUNDS)/noting --steps 2000 --last-steps 3
	$(PRETRAIN) $(ROUNDS)/noting $(ROUNDS)/{notes,more_notes,others}.records $(ROUNDS)/pressing --steps 2600 --last-steps 3
	$(DEMONSTRATE_NOTES) --out $(ROUNDS)/names.records run.seed=3 trainer.warm_start.demonstrations=1600 \
		"tasks.environments=[name-sign-4,name-sign-8]"
	$(PRETRAIN) $(ROUNDS)/pressing $(ROUNDS)/{more_notes,others,names,names}.records $(NOTES_MODEL) --steps 700 --last-steps 3
	$(BIN)/webrl eval $(NOTES_MODEL) configs/warm_start_notes.yaml $(ARGS)
endif
	$(BIN)/webrl eval $(WARM_MODEL) configs/warm_start.yaml $(WARM_SETTINGS) $(ARGS)

# Two processes, which take 12 GiB at most. Hundreds of others import the project: without its cache each compiles it.
TESTS = env -u MAKEFLAGS -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n $(or $(TEST_PROCESSES),2) --dist loadfile --no-loadscope-reorder

test: install slurm ## lint, types, the tests that prove the system
	@$(MAKE) --no-print-directory -j2 lint first-tier

first-tier:
	$(TESTS) -m "not slow and not soak" --junitxml=build/tests/first.xml $(ARGS)

test-all: install slurm ## the other tests: layout matrix, every failure of a job; what fails runs once more and is listed
	$(TESTS) -m "slow and not soak" --junitxml=build/tests/second.xml --reruns 1 $(ARGS)

# Python 3.12 has its megatron-core, and the CUDA build of torch, which computes on the CPU, too.
VERSIONS := build/python3.12
test-versions: slurm ## the first tier of model, trainer and weights on the versions of GPU nodes
	@python=$$(tools/find_python.sh 3.12) && $(MAKE) --no-print-directory install VENV=$(VERSIONS) PYTHON="$$python"
	@$(MAKE) --no-print-directory first-tier VENV=$(VERSIONS) ARGS="tests/model tests/trainer tests/weights --junitxml=build/tests/versions.xml $(ARGS)"

gpu-proof: install ## what can be proven of the GPU path without a GPU; installs the packages of GPU nodes (17 GB)
	$(BIN)/python -m tools.gpu_proof $(ARGS)

test-v2: install ## every test of engines with vLLM's model runner V2, through Triton's interpreter
	$(TESTS) --v2 --timeout=1800 --junitxml=build/tests/v2.xml $(ARGS)

test-times: ## the slowest tests and files of the last runs of tests, and what they waited for
	@$(BIN)/python -m tools.test_times

slurm: # for tests of jobs on virtual nodes
	@tools/install_slurm.sh

soak: install ## what tests leave out for its length: kills by the dozen, more models
	$(BIN)/python -m pytest -m soak --timeout=3000 $(ARGS)

lint: $(INSTALLED) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED) ## let ruff put the code in shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(INSTALLED) ## write the generated pages of docs/
	$(BIN)/python -m tools.documentation

docs-site: $(INSTALLED) ## build the documentation site in build/site; a warning is an error
	$(BIN)/python -m sphinx -q -n -W --keep-going docs build/site

docs-serve: $(INSTALLED) ## build the site, serve it on http://127.0.0.1:8000, and rebuild it when a page changes
	$(BIN)/sphinx-autobuild -n --host 127.0.0.1 --port $(or $(PORT),8000) docs build/site

locks: $(INSTALLED) ## rewrite requirements/ from setup.py, for both Pythons; ARGS=--upgrade for the newest versions
	PYTHON=$(BIN)/python tools/lock_requirements.sh $(ARGS)

check: install ## say what is installed and which roles can run
	$(BIN)/webrl check

clean: ## remove .venv and caches; runs/ stays
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
