# make demo   a relay, a bridge and three stages on this machine answer a question with a real model
# make demo-experts   volunteers share the experts of a busy coordinator, and leave when it is calm
# make test   lint, types and all tests
# make lint   ruff and mypy only
# make model  bring the model of the demo and the tests
# make clean  remove everything that these made

VENV ?= .venv
BIN := $(VENV)/bin
MODEL := .cache/models/SmolLM2-135M-Instruct.Q4_1.gguf
EXPERTS := .cache/models/SmolLM2-135M-Instruct.Q4_1.experts16.gguf
PROMPT ?= Why is the sky blue? Answer in one short sentence.
# Two processes: the tests wait for other processes about as often as they compute.
PYTEST_FLAGS ?= -n 2 --dist loadfile
PACKAGES := kvasir_peer relay/kvasir_relay

.PHONY: demo demo-experts test lint model clean environment

demo:
	@sh packaging/prepare.sh demo $(VENV)
	@$(BIN)/python packaging/get_model.py
	@$(BIN)/kvasir-peer swarm --model $(MODEL) --stages 3 --engine onnx --prompt "$(PROMPT)"

$(EXPERTS): $(MODEL)
	@$(BIN)/kvasir-peer models split-experts $(MODEL) $(EXPERTS) --experts 16

$(MODEL):
	@$(BIN)/python packaging/get_model.py

demo-experts:
	@sh packaging/prepare.sh demo $(VENV)
	@$(MAKE) --no-print-directory $(EXPERTS)
	@$(BIN)/python bench/elastic.py --demo --model $(EXPERTS) --volunteers 4 --disk 45M --prompt "$(PROMPT)"

environment:
	@sh packaging/prepare.sh test $(VENV)

model: environment
	@$(BIN)/python packaging/get_model.py

lint: environment
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(PACKAGES)

test: lint model
	$(BIN)/python -m pytest $(PYTEST_FLAGS)

clean:
	rm -rf $(VENV) .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
