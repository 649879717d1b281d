"""Runs an engine as a child process that speaks JSON lines: requests on stdin, answers on stdout.

    python engine_peer.py vllm|transformers|specgw

Executed as a file by the interpreter that has the engine, vLLM's own environment for one, so each
engine is imported by itself. The caller is `systems.py`. Logs go to stderr. While it waits for a
line it computes nothing.

    {"op": "load", "arguments": {...}}             -> {"version"}
    {"op": "generate", "prompts", "max_tokens"}    -> {"seconds", "outputs", "speculation"}
"""

import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TextIO

_COUNTERS = {
    "draft_count": "vllm:spec_decode_num_drafts",
    "draft_token_count": "vllm:spec_decode_num_draft_tokens",
    "accepted_token_count": "vllm:spec_decode_num_accepted_tokens",
}

Answer = dict[str, Any]


class Peer(Protocol):
    """One engine, loaded once, and the operations on it."""

    def load(self, arguments: dict[str, Any]) -> Answer:
        """Builds the engine."""

    def generate(self, prompts: list[str], max_tokens: int) -> Answer:
        """Completes all prompts as one batch, greedily, past the end token."""


class VllmPeer:
    """`vllm.LLM`. The arguments are its keyword arguments."""

    def __init__(self) -> None:
        self._vllm: Any = importlib.import_module("vllm")
        self._llm: Any = None

    def load(self, arguments: dict[str, Any]) -> Answer:
        self._llm = self._vllm.LLM(disable_log_stats=False, **arguments)
        return {"version": self._vllm.__version__}

    def generate(self, prompts: list[str], max_tokens: int) -> Answer:
        params = self._vllm.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        before = self._speculation()
        began = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        after = self._speculation()
        return {
            "seconds": seconds,
            "outputs": [_output(one.prompt_token_ids, one.outputs[0].token_ids) for one in outputs],
            "speculation": {name: after[name] - before[name] for name in after},
        }

    def _speculation(self) -> dict[str, int]:
        totals = {metric.name: metric for metric in self._llm.get_metrics()}
        return {
            name: int(totals[metric].value) if metric in totals else 0
            for name, metric in _COUNTERS.items()
        }


class SpecgwPeer:
    """`specgw.LLM`: verifier and proposer in one process. The arguments are its own."""

    def __init__(self) -> None:
        self._specgw: Any = importlib.import_module("specgw")
        self._llm: Any = None

    def load(self, arguments: dict[str, Any]) -> Answer:
        self._llm = self._specgw.LLM(**arguments)
        return {"version": self._specgw.__version__}

    def generate(self, prompts: list[str], max_tokens: int) -> Answer:
        params = self._specgw.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        began = time.perf_counter()
        outputs = self._llm.generate(prompts, params)
        seconds = time.perf_counter() - began
        stats = [output.speculation for output in outputs]
        return {
            "seconds": seconds,
            "outputs": [_output(one.prompt_token_ids, one.outputs[0].token_ids) for one in outputs],
            "speculation": {name: sum(getattr(one, name) for one in stats) for name in _COUNTERS},
        }


class TransformersPeer:
    """`generate` of transformers. Arguments: `model`, `dtype`, `threads`, `draft`, `draft_tokens`.

    With `draft` it is assisted, which it can be for one prompt at a time.
    """

    def __init__(self) -> None:
        self._torch: Any = importlib.import_module("torch")
        self._transformers: Any = importlib.import_module("transformers")
        self._model: Any = None
        self._tokenizer: Any = None
        self._dtype = ""
        self._assistant: dict[str, Any] = {}

    def load(self, arguments: dict[str, Any]) -> Answer:
        self._torch.set_num_threads(arguments["threads"])
        self._dtype = arguments["dtype"]
        self._tokenizer = self._transformers.AutoTokenizer.from_pretrained(arguments["model"])
        self._tokenizer.padding_side = "left"
        self._tokenizer.pad_token = self._tokenizer.pad_token or self._tokenizer.eos_token
        self._model = self._load(arguments["model"])
        if arguments.get("draft"):
            assistant = self._load(arguments["draft"])
            assistant.generation_config.num_assistant_tokens = arguments["draft_tokens"]
            assistant.generation_config.num_assistant_tokens_schedule = "constant"
            assistant.generation_config.assistant_confidence_threshold = 0.0
            self._assistant = {"assistant_model": assistant}
        return {"version": self._transformers.__version__}

    def generate(self, prompts: list[str], max_tokens: int) -> Answer:
        inputs = self._tokenizer(prompts, return_tensors="pt", padding=True)
        began = time.perf_counter()
        rows = self._model.generate(
            **inputs,
            **self._assistant,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            repetition_penalty=1.0,
            min_new_tokens=max_tokens,
            max_new_tokens=max_tokens,
            pad_token_id=self._tokenizer.pad_token_id,
        )
        seconds = time.perf_counter() - began
        num_padded = inputs["input_ids"].shape[1]
        prompt_token_ids = [self._tokenizer(prompt)["input_ids"] for prompt in prompts]
        return {
            "seconds": seconds,
            "outputs": [
                _output(ids, row[num_padded:].tolist())
                for ids, row in zip(prompt_token_ids, rows, strict=True)
            ],
            "speculation": {},
        }

    def _load(self, model: str) -> Any:
        load = self._transformers.AutoModelForCausalLM.from_pretrained
        return load(model, dtype=getattr(self._torch, self._dtype)).eval()


def _output(prompt_token_ids: Sequence[int], token_ids: Sequence[int]) -> Answer:
    return {"prompt_token_ids": list(prompt_token_ids), "token_ids": list(token_ids)}


_PEERS: dict[str, Callable[[], Peer]] = {
    "vllm": VllmPeer,
    "specgw": SpecgwPeer,
    "transformers": TransformersPeer,
}


def serve(peer: Peer, requests: Iterable[str], answers: TextIO) -> None:
    """Answers each line in turn. An operation that fails answers with `error` and goes on."""
    operations: dict[str, Callable[..., Answer]] = {"load": peer.load, "generate": peer.generate}
    for line in requests:
        request = json.loads(line)
        try:
            answer = operations[request.pop("op")](**request)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _take_stdout() -> TextIO:
    """Returns a stream on the real stdout and lets whatever else prints go to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


if __name__ == "__main__":
    output = _take_stdout()
    serve(_PEERS[sys.argv[1]](), sys.stdin, output)
