"""A verifier's core in the test's own thread: no sockets, every step under control."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from specgw.engine.model_runner import ModelRunner
from specgw.errors import SpecgwError
from specgw.grammar import GrammarCompiler
from specgw.link import ProposerLink
from specgw.lookup.prediction import Prediction
from specgw.types import (
    FinishReason,
    GenerateOutput,
    GenerateRequest,
    Hello,
    SamplingParams,
    SpeculationStats,
    TokenLogprobs,
)
from verifier_svc.acceptance import Acceptance
from verifier_svc.custom_processors import CustomLogitsProcessor
from verifier_svc.drafting import Drafting
from verifier_svc.local_drafts import LocalDrafts
from verifier_svc.scheduler import Scheduler, SchedulerLimits
from verifier_svc.verifier import Verifier

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@dataclass
class Answer:
    """What one request got."""

    token_ids: list[int] = field(default_factory=list)
    blocks: list[Sequence[int]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    seed: int | None = None
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    error: SpecgwError | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return self.finish_reason is not None or self.error is not None


class InlineVerifier:
    """A scheduler whose steps the test takes."""

    def __init__(
        self,
        runner: ModelRunner,
        links: Sequence[ProposerLink] = (),
        *,
        max_draft_tokens: int = 4,
        max_num_seqs: int = 16,
        max_num_batched_tokens: int = 512,
        max_waiting_requests: int = 1_000,
        max_prefill_tokens_beside_decodes: int | None = 512,
        clock: Callable[[], float] = time.monotonic,
        wait_for_slow_drafts: bool = True,
        draft_timeout_s: float = 10.0,
        custom_processors: Sequence[CustomLogitsProcessor] = (),
        acceptance: Acceptance | None = None,
        grammars: GrammarCompiler | None = None,
        local: LocalDrafts | None = None,
        takes_blocks_ahead: bool = True,
    ) -> None:
        self.runner = runner
        self.grammars = grammars
        self.answers: dict[int, Answer] = {}
        self.drafting = Drafting(
            links,
            runner.vocab_size,
            draft_timeout_s,
            wait_for_slow_drafts,
            local=local,
            uses_draft_probs=acceptance is not None and acceptance.uses_draft_probs,
        )
        self.scheduler = Scheduler(
            Verifier(runner, custom_processors, acceptance),
            self.drafting,
            SchedulerLimits(
                max_num_seqs,
                max_num_batched_tokens,
                max_waiting_requests,
                max_draft_tokens,
                max_prefill_tokens_beside_decodes,
            ),
            self._deliver,
            clock=clock,
        )
        for link in links:
            hello = Hello(
                *("verifier-1", runner.description, max_draft_tokens),
                hidden=runner.hidden,
                takes_blocks_ahead=takes_blocks_ahead,
            )
            link.start(hello, self.scheduler.inbox)

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams = GREEDY,
        *,
        output: Sequence[int] = (),
        max_draft_tokens: int | None = None,
        prediction: Sequence[int] = (),
    ) -> int:
        """Brings a request; an unseeded one gets its session id for a seed."""
        session_id = len(self.answers) + 1
        self.answers[session_id] = Answer()
        request = GenerateRequest(
            f"request-{session_id}",
            tuple(prompt),
            params,
            output_token_ids=tuple(output),
            max_draft_tokens=max_draft_tokens,
            prediction=prediction,
        )
        seed = session_id if params.seed is None else params.seed
        grammar = self.grammars.start(request) if self.grammars else None
        self.scheduler.inbox.submit(session_id, request, seed, grammar, Prediction.of(request))
        return session_id

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.scheduler.step()

    def run(self, max_steps: int = 10_000) -> None:
        """Steps until every request is answered."""
        for _ in range(max_steps):
            if all(answer.is_done for answer in self.answers.values()):
                return
            self.scheduler.step()
        raise AssertionError(f"requests unanswered after {max_steps} steps")

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams = GREEDY
    ) -> list[Answer]:
        """Answers the prompts together."""
        ids = [self.submit(prompt, params) for prompt in prompts]
        self.run()
        return [self.answers[session_id] for session_id in ids]

    def _deliver(self, outputs: Sequence[tuple[int, GenerateOutput | SpecgwError]]) -> None:
        for session_id, output in outputs:
            answer = self.answers[session_id]
            assert not answer.is_done, "an answer went on after its end"
            if isinstance(output, SpecgwError):
                answer.error = output
                continue
            answer.token_ids += output.token_ids
            answer.blocks.append(output.token_ids)
            answer.finish_reason = output.finish_reason
            answer.stop_token_id = output.stop_token_id
            answer.seed = answer.seed if output.seed is None else output.seed
            answer.speculation.count(output.round)
            answer.logprobs += output.logprobs
            answer.prompt_logprobs += output.prompt_logprobs


def plain_answers(
    runner: ModelRunner,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams = GREEDY,
    grammars: GrammarCompiler | None = None,
) -> dict[tuple[int, ...], list[int]]:
    """Returns what the target says to each prompt alone, without speculation: the baseline."""
    answers = {}
    for prompt in prompts:
        [answer] = InlineVerifier(runner, grammars=grammars).generate([prompt], params)
        answers[tuple(prompt)] = answer.token_ids
    return answers
