"""Offline generation: the cores of verifier and proposer in one process, over the in-process link.

The interface is that of vLLM's `LLM`. One thread, no event loop, no sockets: draft and target take
turns on the same cores.
"""

import functools
import itertools
import random
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gateway.detokenizer import Detokenizer
from gateway.tokenizer import Tokenizer, load_tokenizer
from proposer_svc.proposer import build_proposer
from specgw.config import parse_config
from specgw.engine.loading import load_model, target_options
from specgw.errors import SpecgwError
from specgw.grammar import GrammarMatcher, compiler_for
from specgw.handshake import build_hello
from specgw.link import InProcessLink
from specgw.lookup.prediction import Prediction, num_agreed
from specgw.request_output import (
    CompletionOutput,
    Logprobs,
    RequestOutput,
    logprobs_by_token,
)
from specgw.types import (
    GenerateOutput,
    GenerateRequest,
    SamplingParams,
    SpeculationStats,
    TokenLogprobs,
)
from verifier_svc.acceptance import build_acceptance
from verifier_svc.custom_processors import load_processors
from verifier_svc.draft_length import build_draft_length
from verifier_svc.drafting import Drafting
from verifier_svc.local_drafts import build_local_drafts
from verifier_svc.scheduler import Scheduler, SchedulerLimits
from verifier_svc.session import check_request
from verifier_svc.verifier import Verifier

Prompt = str | Sequence[int] | Mapping[str, Any]


class LLM:
    """A target model with an optional draft, in this process.

    Args:
        model: The target: a path, a bundled `tiny/NAME`, or a hub id.
        options: Top-level configuration keys, such as `speculative_config` or `dtype`.

    Attributes:
        proposer: What drafts, with its counts; None without a `speculative_config`.

    Raises:
        ConfigError: with every problem found.
    """

    def __init__(self, model: str, **options: Any) -> None:
        args = parse_config({"model": model, **options})
        settings = args.specgw.verifier
        self._tokenizer = load_tokenizer(args.tokenizer_path)
        has_proposer = args.speculative_config is not None and not args.drafts_locally
        target = target_options(args)
        if has_proposer:  # the draft takes what this leaves of a GPU's share
            share = target.memory_fraction * (1 - args.specgw.proposer.embedded_memory_share)
            target = replace(target, memory_fraction=share)
        self._runner = load_model(target)
        self.proposer = build_proposer(args) if has_proposer else None
        self._links = [] if self.proposer is None else [InProcessLink(self.proposer)]
        acceptance = build_acceptance(args.speculative_config)
        # In one thread a block is there when it is asked for: there is nothing to wait for.
        drafting = Drafting(
            self._links,
            self._runner.vocab_size,
            settings.draft_timeout_s,
            wait_for_slow_drafts=True,
            length=build_draft_length(args),
            local=build_local_drafts(args, self._runner.max_model_len),
            uses_draft_probs=acceptance.uses_draft_probs,
            target_device=self._runner.description.device,
        )
        self._scheduler = Scheduler(
            Verifier(
                self._runner,
                load_processors(settings.logits_processors, self._runner.vocab_size),
                acceptance,
            ),
            drafting,
            SchedulerLimits(
                args.max_num_seqs,
                args.max_num_batched_tokens,
                max_waiting_requests=2**31 - 1,
                max_draft_tokens=args.max_draft_tokens,
                max_prefill_tokens_beside_decodes=args.max_num_batched_tokens,  # nobody watches
            ),
            self._deliver,
        )
        self._grammars = compiler_for(
            args.tokenizer_path,
            self._runner.vocab_size,
            self._runner.eos_token_ids,
            args.structured_outputs_config,
        )
        self._max_logprobs = args.max_logprobs
        self._seeds = random.Random(args.seed)
        self._session_ids = itertools.count(1)
        self._answers: dict[int, _Answer] = {}
        for link in self._links:
            hello = build_hello(
                uuid.uuid4().hex, self._runner.description, args, self._runner.hidden
            )
            link.start(hello, self._scheduler.inbox)
        self._scheduler.calibrate()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Continues each prompt; results come in the order of the prompts.

        Args:
            prompts: Text, token ids, or mappings with `prompt` or `prompt_token_ids`; one or many.
                A mapping may have a `prediction` too, the text that the output may turn out to be.
            sampling_params: For all prompts, or one for each. By default temperature 1, 16 tokens.

        Raises:
            InvalidRequest: naming the field and its value, before any work.
        """
        many = [prompts] if _is_one(prompts) else list(prompts)
        params = _for_each(sampling_params, len(many))
        answers = [
            self._answers_to(prompt, one)  # type: ignore[arg-type]
            for prompt, one in zip(many, params, strict=True)
        ]
        try:
            for answer in itertools.chain.from_iterable(answers):
                self._submit(answer)
            while self._answers:
                self._scheduler.step()
        finally:  # an error or an interrupt must not leave sessions to the next call
            for session_id in self._answers:
                self._scheduler.inbox.cancel(session_id)
            self._answers.clear()
        return [_request_output(samples) for samples in answers]

    def _answers_to(self, prompt: Prompt, params: SamplingParams) -> list["_Answer"]:
        text, token_ids = self._tokenize(prompt)
        params = self._tokenizer.with_bad_words(params)
        if params.seed is None:
            params = replace(params, seed=self._seeds.getrandbits(63))
        request = GenerateRequest(
            uuid.uuid4().hex, token_ids, params, prediction=self._prediction(prompt)
        )
        runner = self._runner
        check_request(request, runner.max_model_len, runner.vocab_size, (), self._max_logprobs)
        return [
            _Answer(request.request_id, sample, text, self._tokenizer, self._grammars.start(sample))
            for sample in request.samples()
        ]

    def _tokenize(self, prompt: Prompt) -> tuple[str | None, Sequence[int]]:
        text: str | None = None
        if isinstance(prompt, str):
            text = prompt
        elif isinstance(prompt, Mapping):
            text = prompt.get("prompt")
        if text is not None:
            return text, self._tokenizer.backend.encode(text).ids
        token_ids = prompt["prompt_token_ids"] if isinstance(prompt, Mapping) else prompt
        return None, [int(token_id) for token_id in token_ids]

    def _prediction(self, prompt: Prompt) -> Sequence[int]:
        text = prompt.get("prediction") if isinstance(prompt, Mapping) else None
        return self._tokenizer.backend.encode(text, add_special_tokens=False).ids if text else ()

    def _submit(self, answer: "_Answer") -> None:
        session_id = next(self._session_ids)
        seed = answer.request.sampling_params.seed
        assert seed is not None
        self._answers[session_id] = answer
        prediction = Prediction.of(answer.request)
        self._scheduler.inbox.submit(session_id, answer.request, seed, answer.grammar, prediction)

    def _deliver(self, outputs: Sequence[tuple[int, GenerateOutput | SpecgwError]]) -> None:
        for session_id, output in outputs:
            answer = self._answers.get(session_id)
            if answer is None:
                continue
            if isinstance(output, SpecgwError):
                raise output  # `generate` gives the other sessions up
            if answer.add(output):
                del self._answers[session_id]
                self._scheduler.inbox.cancel(session_id)


class _Answer:
    """One sample's output as it grows."""

    def __init__(
        self,
        request_id: str,
        request: GenerateRequest,
        prompt: str | None,
        tokenizer: Tokenizer,
        grammar: GrammarMatcher | None,
    ) -> None:
        self.request_id = request_id
        self.request = request
        self.prompt = prompt
        self.grammar = grammar
        self.speculation = SpeculationStats()
        self._detokenizer = Detokenizer(tokenizer.backend, request, tokenizer.eos_token_id)
        self._text_of = tokenizer.text_of
        self._text = ""
        self._token_ids: list[int] = []
        self._finish_reason = ""
        self._stop_reason: int | str | None = None
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs] = []

    def add(self, output: GenerateOutput) -> bool:
        """Takes one step's tokens; returns whether the output has ended."""
        text_output = self._detokenizer.push(output)
        self._text += text_output.text
        self._token_ids += text_output.token_ids
        self._stop_reason = text_output.stop_reason
        self.speculation = text_output.speculation
        self._logprobs += text_output.logprobs
        self._prompt_logprobs += text_output.prompt_logprobs
        if text_output.finish_reason is not None:
            self._finish_reason = text_output.finish_reason.value
        return bool(self._finish_reason)

    @property
    def num_agreed(self) -> int:
        """Tokens of the prediction that the sample has where they were expected."""
        return num_agreed(self.request.prediction, self._token_ids)

    def completion(self, index: int) -> CompletionOutput:
        """Returns the whole sample."""
        has_logprobs = self.request.sampling_params.logprobs is not None
        scored = [logprobs_by_token(one, self._text_of) for one in self._logprobs]
        return CompletionOutput(
            index,
            self._text,
            tuple(self._token_ids),
            self._finish_reason,
            self._stop_reason,
            sum(one.logprobs[0] for one in self._logprobs) if has_logprobs else None,
            scored if has_logprobs else None,
        )

    def prompt_logprobs(self) -> list[Logprobs | None] | None:
        """Returns those of the prompt, if asked for."""
        if self.request.sampling_params.prompt_logprobs is None:
            return None
        return [None, *(logprobs_by_token(one, self._text_of) for one in self._prompt_logprobs)]


def _request_output(samples: Sequence[_Answer]) -> RequestOutput:
    first = samples[0]
    accepted = sum(sample.num_agreed for sample in samples)
    num_predicted = len(samples) * len(first.request.prediction)
    return RequestOutput(
        first.request_id,
        first.prompt,
        first.request.prompt_token_ids,
        [sample.completion(index) for index, sample in enumerate(samples)],
        functools.reduce(SpeculationStats.plus, (sample.speculation for sample in samples)),
        first.prompt_logprobs(),
        accepted_prediction_tokens=accepted,
        rejected_prediction_tokens=num_predicted - accepted,
    )


def _is_one(prompts: Prompt | Sequence[Prompt]) -> bool:
    return isinstance(prompts, str | Mapping) or (
        bool(prompts) and all(isinstance(item, int) for item in prompts)
    )


def _for_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise ValueError(f"sampling_params: {len(params)} given for {count} prompts")
    return params
