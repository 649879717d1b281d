"""Runs vLLM as a child process that speaks JSON lines: one request on stdin, one answer on stdout.

Executed as a file by the interpreter of vLLM's own environment, so it imports nothing of specgw.
The caller is `systems.py`. vLLM's logs go to stderr. While it waits for a line it computes nothing.

    {"op": "load", "llm": {...}}                   -> {"vllm_version"}
    {"op": "generate", "prompts", "max_tokens"}    -> {"seconds", "outputs", "speculation"}
"""

import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, TextIO

_COUNTERS = {
    "draft_count": "vllm:spec_decode_num_drafts",
    "draft_token_count": "vllm:spec_decode_num_draft_tokens",
    "accepted_token_count": "vllm:spec_decode_num_accepted_tokens",
}

Answer = dict[str, Any]


class Peer:
    """One vLLM engine, loaded once, and the operations on it."""

    def __init__(self) -> None:
        self._vllm: Any = importlib.import_module("vllm")
        self._llm: Any = None

    def load(self, llm: dict[str, Any]) -> Answer:
        """Builds the engine. `llm` holds keyword arguments of `vllm.LLM`."""
        self._llm = self._vllm.LLM(disable_log_stats=False, **llm)
        return {"vllm_version": self._vllm.__version__}

    def generate(self, prompts: list[str], max_tokens: int) -> Answer:
        """Completes all prompts as one batch, greedily, past the end token."""
        params = self._vllm.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        before = self._speculation()
        began = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        after = self._speculation()
        return {
            "seconds": seconds,
            "outputs": [_describe(output) for output in outputs],
            "speculation": {name: after[name] - before[name] for name in after},
        }

    def _speculation(self) -> dict[str, int]:
        totals = {metric.name: metric for metric in self._llm.get_metrics()}
        return {
            name: int(totals[metric].value) if metric in totals else 0
            for name, metric in _COUNTERS.items()
        }


def _describe(output: Any) -> Answer:
    return {
        "prompt_token_ids": list(output.prompt_token_ids),
        "token_ids": list(output.outputs[0].token_ids),
    }


def serve(requests: Iterable[str], answers: TextIO) -> None:
    """Answers each line in turn. An operation that fails answers with `error` and goes on."""
    peer = Peer()
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
    serve(sys.stdin, _take_stdout())
