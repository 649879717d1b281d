"""What a lookup costs, and which of several matches is worth most: `python -m benchmarks.lookup`.

The first table is the time of one round on random contexts in which the last tokens occurred
before; it should not grow with the context. The second replays the greedy answers of a target to
the prompts of the demo: which draft tokens would have been accepted.
"""

import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence

import click

from benchmarks.demo import PROMPTS
from specgw import LLM, SamplingParams
from specgw.lookup.match import MAX_NEW_TOKENS, Lookup
from specgw.lookup.ngram import NgramContext, NgramLookup
from specgw.lookup.suffix import SuffixLookup, SuffixSettings

_ROUNDS = 200
_TOKENS_PER_ROUND = 4
_NUM_IDS = 5_000

Answer = tuple[Sequence[int], Sequence[int]]  # prompt and answer


class EarliestNgramLookup(NgramLookup):
    """Takes the earliest of several occurrences, as vLLM's first runner does."""

    def open(
        self, token_ids: list[int], prompt_length: int, *, is_private: bool = False
    ) -> NgramContext:
        return _EarliestNgramContext(token_ids, self._min_size, self._max_size)


class _EarliestNgramContext(NgramContext):
    def _extend(self) -> bool:
        before = {size: dict(ends) for size, ends in self._ends.items()}
        has_read_all = super()._extend()
        for size, ends in self._ends.items():
            ends.update(before[size])
        return has_read_all


def suffix(max_cached_requests: int = 10_000) -> SuffixLookup:
    """Returns the suffix method with vLLM's defaults."""
    return SuffixLookup(SuffixSettings(24, max_cached_requests, 1.0, 0.1))


METHODS: dict[str, Callable[[], Lookup]] = {
    "ngram 5..5": lambda: NgramLookup(5, 5),
    "ngram 2..4": lambda: NgramLookup(2, 4),
    "suffix": suffix,
}
CHOICES: dict[str, Callable[[], Lookup]] = {
    "ngram 5..5, earliest": lambda: EarliestNgramLookup(5, 5),
    "ngram 5..5, latest": lambda: NgramLookup(5, 5),
    "ngram 2..4, earliest": lambda: EarliestNgramLookup(2, 4),
    "ngram 2..4, latest": lambda: NgramLookup(2, 4),
    "suffix, own context": lambda: suffix(0),
    "suffix": suffix,
}


@click.command()
@click.option("--length", "lengths", multiple=True, default=(1_000, 10_000, 100_000))
@click.option("--model", default="tiny/target", show_default=True)
@click.option("--max-tokens", default=256, show_default=True)
def main(lengths: Sequence[int], model: str, max_tokens: int) -> None:
    """Measures and prints both tables."""
    print(f"{'method':<24}{'context':>9}{'index, ms':>11}{'round, us':>11}")
    for name, build in METHODS.items():
        for length in lengths:
            index_s, round_s = cost(build(), length)
            print(f"{name:<24}{length:>9}{index_s * 1e3:>11.1f}{round_s * 1e6:>11.1f}")
    answers = generate(model, max_tokens)
    print(f"\n{'method':<24}{'K':>3}{'rounds':>8}{'accepted/round':>16}{'rate':>7}")
    for count in (4, 8):
        for name, build in CHOICES.items():
            rounds, drafted, accepted = replay(build(), answers, count)
            rate = accepted / max(1, drafted)
            print(f"{name:<24}{count:>3}{rounds:>8}{accepted / rounds:>16.2f}{rate:>7.2f}")


def cost(lookup: Lookup, length: int) -> tuple[float, float]:
    """Returns the seconds to index a context, and the median of those that a round takes."""
    numbers = random.Random(length)
    text = numbers.choices(range(_NUM_IDS), k=length)
    context = list(text)
    opened = lookup.open(context, length)
    began = time.perf_counter()
    for _ in range(length // MAX_NEW_TOKENS + 1):
        opened.find(8)
    index_s = time.perf_counter() - began
    rounds = []
    for _ in range(_ROUNDS):
        start = numbers.randrange(length - _TOKENS_PER_ROUND)
        context += text[start : start + _TOKENS_PER_ROUND]
        began = time.perf_counter()
        opened.find(8)
        rounds.append(time.perf_counter() - began)
    return index_s, statistics.median(rounds)


def generate(model: str, max_tokens: int) -> list[Answer]:
    """Returns the greedy answers of a model to the prompts of the demo."""
    llm = LLM(model, dtype="float32")
    outputs = llm.generate(list(PROMPTS), SamplingParams(temperature=0, max_tokens=max_tokens))
    return [(one.prompt_token_ids, one.outputs[0].token_ids) for one in outputs]


def replay(lookup: Lookup, answers: Sequence[Answer], max_tokens: int) -> tuple[int, int, int]:
    """Returns rounds, tokens drafted and tokens accepted if a target gave these answers."""
    rounds = drafted = accepted = 0
    for prompt, answer in answers:
        context = [*prompt, answer[0]]
        opened = lookup.open(context, len(prompt))
        while (position := len(context) - len(prompt)) < len(answer):
            draft = opened.find(max_tokens).token_ids
            pairs = zip(draft, answer[position:], strict=False)
            agreed = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            context += answer[position : position + agreed + 1]
            rounds, drafted, accepted = rounds + 1, drafted + len(draft), accepted + agreed
        opened.close()
    return rounds, drafted, accepted


if __name__ == "__main__":
    main()
