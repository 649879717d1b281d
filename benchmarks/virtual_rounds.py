"""Rounds of draft and verify in VIRTUAL time: `python -m benchmarks.virtual_rounds`.

The real scheduler, drafter and run-ahead on SIMULATED devices, with a clock that only the devices
and the wire advance. What Python costs does not count, nor what else the machine does: the figures
are those of the policy alone, the limit that `benchmarks.scale rounds` can come near to.
"""

import itertools
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import click

from proposer_svc.proposer import build_proposer
from specgw.config import EngineArgs, parse_config
from specgw.engine.loading import load_model, target_options
from specgw.engine.simulation import SimulatedRunner
from specgw.errors import SpecgwError
from specgw.link import LinkListener
from specgw.types import (
    AnyBlock,
    GenerateOutput,
    GenerateRequest,
    Hello,
    HelloAck,
    ProposeStep,
    SamplingParams,
)
from verifier_svc.draft_length import build_draft_length
from verifier_svc.drafting import Drafting
from verifier_svc.inbox import Blocks, Event, Inbox
from verifier_svc.scheduler import Scheduler, SchedulerLimits
from verifier_svc.verifier import Verifier

_ADDRESS = "virtual"
_PROMPT_TOKENS = 32
_WARM_UP_S = 0.4
_PARAMS = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)


class VirtualTimer:
    """One side's time. Implements `Timer` of a simulated device."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def now(self) -> float:
        return self.time_s

    def wait_until(self, deadline: float) -> None:
        self.time_s = max(self.time_s, deadline)


class VirtualProposer:
    """A proposer in its own time, and the link to it. Runs when its answers are looked for."""

    def __init__(self, args: EngineArgs, verifier: VirtualTimer, rtt_s: float) -> None:
        self.address = _ADDRESS
        self.core = build_proposer(args)
        self.timer = VirtualTimer()
        drafter: Any = self.core._drafter
        drafter._runner.timer = self.timer
        drafter.ahead.clock = self.timer.now
        self._verifier = verifier
        self._rtt_s = rtt_s
        self._steps: deque[tuple[float, ProposeStep]] = deque()
        self.answers: deque[tuple[float, Sequence[AnyBlock]]] = deque()  # by arrival

    def start(self, hello: Hello, listener: LinkListener) -> None:
        listener.link_up(self, self.core.connect(hello))

    def send(self, step: ProposeStep, ack: HelloAck) -> None:
        self._steps.append((self._verifier.now(), step))

    def stop(self) -> None:
        """Nothing runs by itself."""

    async def wait_stopped(self) -> None:
        """Nothing runs by itself."""

    def run(self, until: float, *, to_first_answer: bool = False) -> None:
        """Does what the engine thread does up to a time; a pass under way is finished."""
        while self.timer.now() < until and not (to_first_answer and self.answers):
            while self._steps and self._steps[0][0] <= self.timer.now():
                self._answer(self.core.apply("v", self._steps.popleft()[1]))
            if self.core.has_work():
                self._answer([block for _, block in self.core.step()])
            elif self.core.can_run_ahead():
                self.core.run_ahead()
            elif self._steps and self._steps[0][0] < until:
                self.timer.wait_until(self._steps[0][0])
            else:
                return
            self._answer([block for _, block in self.core.blocks_ahead()])

    def _answer(self, blocks: Sequence[AnyBlock]) -> None:
        if blocks:
            self.answers.append((self.timer.now() + self._rtt_s, blocks))


class VirtualInbox(Inbox):
    """An inbox that blocks get into in virtual time."""

    def __init__(self, verifier: VirtualTimer, proposer: VirtualProposer) -> None:
        super().__init__(verifier.now)
        self._verifier = verifier
        self._proposer = proposer

    def waiting(self) -> Iterator[Event]:
        now, answers = self._verifier.now(), self._proposer.answers
        self._proposer.run(now)
        while answers and answers[0][0] <= now:
            arrived_at, blocks = answers.popleft()
            self._events.put(Blocks(_ADDRESS, blocks, arrived_at))
        yield from super().waiting()

    def wait(self, timeout_s: float | None) -> Event | None:
        until = math.inf if timeout_s is None else self._verifier.now() + timeout_s
        self._proposer.run(until, to_first_answer=True)
        answers = self._proposer.answers
        if not answers or answers[0][0] > until:
            assert timeout_s is not None, "both sides wait"
            self._verifier.wait_until(until)
            return None
        arrived_at, blocks = answers.popleft()
        self._verifier.wait_until(arrived_at)
        return Blocks(_ADDRESS, blocks, arrived_at)


@dataclass(frozen=True)
class Figures:
    """What came of some time of rounds."""

    tokens_per_s: float
    round_s: float  # of a session
    hit_rate: float  # of rounds
    wasted: float  # of the tokens drafted ahead
    tokens_per_round: float


def measure(args: EngineArgs, sessions: int, rtt_s: float, seconds: float) -> Figures:
    """Runs that many sessions for some virtual seconds."""
    timer = VirtualTimer()
    runner = load_model(target_options(args))
    assert isinstance(runner, SimulatedRunner), "only simulated devices have a time of their own"
    runner.timer = timer
    proposer = VirtualProposer(args, timer, rtt_s)
    drafting = Drafting([proposer], runner.vocab_size, 10.0, length=build_draft_length(args))
    limits = SchedulerLimits(sessions, args.max_num_batched_tokens, sessions, args.max_draft_tokens)
    numbers = itertools.count()

    def submit() -> None:
        number = next(numbers)
        prompt = [(number * 7 + i) % 2000 for i in range(_PROMPT_TOKENS)]
        scheduler.inbox.submit(number, GenerateRequest(f"r{number}", prompt, _PARAMS), seed=0)

    def deliver(outputs: Sequence[tuple[int, GenerateOutput | SpecgwError]]) -> None:
        for _, output in outputs:
            if isinstance(output, SpecgwError):
                raise output
            if output.finish_reason is not None:
                submit()

    scheduler = Scheduler(Verifier(runner), drafting, limits, deliver, clock=timer.now)
    scheduler.inbox = VirtualInbox(timer, proposer)
    hello = Hello("v", runner.description, args.max_draft_tokens, takes_blocks_ahead=True)
    proposer.start(hello, scheduler.inbox)
    scheduler.calibrate()
    for _ in range(sessions):
        submit()
    begin_s = timer.now() + _WARM_UP_S
    while timer.now() < begin_s:
        scheduler.step()
    before, ahead, began = scheduler.snapshot, proposer.core.ahead, timer.now()
    while timer.now() < began + seconds:
        scheduler.step()
    after, gone_s = scheduler.snapshot, timer.now() - began
    rounds = after.speculation.draft_count - before.speculation.draft_count
    tokens = after.output_token_count - before.output_token_count
    drafted = proposer.core.ahead.token_count - ahead.token_count
    used = proposer.core.ahead.used_token_count - ahead.used_token_count
    return Figures(
        tokens_per_s=tokens / gone_s,
        round_s=sessions * gone_s / max(1, rounds),
        hit_rate=(proposer.core.ahead.hit_count - ahead.hit_count) / max(1, rounds),
        wasted=1 - used / drafted if drafted else 0.0,
        tokens_per_round=tokens / max(1, rounds),
    )


@click.command()
@click.option("--sessions", multiple=True, default=(1, 16, 128), show_default=True)
@click.option("--branches", multiple=True, default=(0, 1, 8, 22), show_default=True)
@click.option("--verify-ms", default=11.0, show_default=True)
@click.option("--draft-step-ms", default=1.2, show_default=True)
@click.option("--rtt-ms", default=0.3, show_default=True)
@click.option("--acceptance", default=0.8, show_default=True)
@click.option("--runner-up-rate", "runner_up_rates", type=float, multiple=True)
@click.option("-k", "draft_tokens", default=6, show_default=True)
@click.option("--seconds", default=1.0, show_default=True, help="Virtual ones.")
def main(
    sessions: Sequence[int],
    branches: Sequence[int],
    verify_ms: float,
    draft_step_ms: float,
    rtt_ms: float,
    acceptance: float,
    runner_up_rates: Sequence[float],
    draft_tokens: int,
    seconds: float,
) -> None:
    """Prints tokens/s beside the overlapped ideal, a round in the longer of draft and verify."""
    simulation: dict[str, Any] = {
        "verify_ms": verify_ms,
        "draft_step_ms": draft_step_ms,
        "acceptance_rate": acceptance,
    }
    if runner_up_rates:
        simulation["runner_up_rates"] = runner_up_rates
    per_round = sum(acceptance**i for i in range(draft_tokens + 1))
    ideal = per_round / max(verify_ms, draft_tokens * draft_step_ms + rtt_ms) * 1e3
    print(f"SIMULATION in virtual time: {simulation}, RTT {rtt_ms} ms, K={draft_tokens}")
    print("branches sessions  of ideal  round ms  tokens/round  hits  wasted")
    for max_branches in branches:
        for count in sessions:
            args = _args(simulation, count, max_branches, draft_tokens)
            found = measure(args, count, rtt_ms / 1e3, seconds)
            print(
                f"{max_branches:>8}{count:>9}{found.tokens_per_s / count / ideal:>10.3f}"
                f"{1e3 * found.round_s:>10.2f}{found.tokens_per_round:>14.2f}"
                f"{found.hit_rate:>6.2f}{found.wasted:>8.2f}",
                flush=True,
            )


def _args(
    simulation: dict[str, Any], sessions: int, branches: int, draft_tokens: int
) -> EngineArgs:
    return parse_config({
        "model": "tiny/target",
        "max_num_seqs": sessions,
        "max_num_batched_tokens": max(2048, (draft_tokens + 1) * sessions + 512),
        "speculative_config": {"model": "tiny/draft", "num_speculative_tokens": draft_tokens},
        "specgw": {
            "simulation": simulation,
            "proposer": {
                "max_sessions": sessions,
                "kv_cache_tokens": sessions * (2048 + 32 * branches),
                "max_num_batched_tokens": max(2048, max(branches, 1) * sessions),
                "run_ahead": "on" if branches else "off",
                "run_ahead_branches": max(branches, 1),
            },
        },
    })  # fmt: skip


if __name__ == "__main__":
    main()
