"""How many draft tokens each acceptance rule accepts: `python -m benchmarks.acceptance_rules`.

The bundled tiny models in float32 at temperature 1, in one process, as many draft tokens in every
round. The prompts are cut from files that no model was trained on; every rule has the same prompts
and seeds. Then, over the same prompts, what laws of at most n tokens cost. No times are measured,
so any machine gives the same.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import click
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.acceptance import TARGET, prompt_token_ids
from specgw.engine.laws import Laws
from specgw.engine.sampling import RowSampling, build_laws
from specgw.llm import LLM
from specgw.model_files import resolve_model
from specgw.types import SamplingParams, SpeculationStats

DRAFT = "tiny/draft"
RULES = (
    ("greedy", "standard"),
    ("coupled", "standard"),
    ("probabilistic", "standard"),
    ("probabilistic", "block"),
)


@dataclass(frozen=True)
class Estimate:
    """A mean and its standard error."""

    mean: float
    error: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} ± {self.error:.3f}"


@click.command()
@click.option("--draft-tokens", default=4, show_default=True)
@click.option("--num-prompts", default=64, show_default=True)
@click.option("--max-tokens", default=128, show_default=True)
@click.option("--support", "supports", multiple=True, type=int, default=(4, 16, 64, 256))
def main(draft_tokens: int, num_prompts: int, max_tokens: int, supports: Sequence[int]) -> None:
    """Measures and prints both tables."""
    prompts = prompt_token_ids(TARGET, None, raw=False, count=num_prompts)
    print("| laws of at most | chance that a token is accepted |\n|---|---|")
    for support, found in zip(supports, acceptance_by_support(prompts, supports), strict=True):
        print(f"| {support} | {found} |", flush=True)
    print("\n| drafts | test | accepted per round | more than the line before |\n|---|---|---|---|")
    before = None
    for draft_sample_method, test in RULES:
        drafting = {
            "model": DRAFT,
            "num_speculative_tokens": draft_tokens,
            "draft_sample_method": draft_sample_method,
            "rejection_sample_method": test,
        }
        stats = measure(drafting, prompts, max_tokens)
        more = "" if before is None else difference(stats, before)
        found = accepted_per_round(stats)
        print(f"| `{draft_sample_method}` | `{test}` | {found} | {more} |", flush=True)
        before = stats


def measure(
    drafting: dict[str, object], prompts: Sequence[Sequence[int]], max_tokens: int
) -> list[SpeculationStats]:
    """Answers all prompts with a speculative configuration."""
    settings = {"verifier": {"draft_length": "fixed"}}
    llm = LLM(TARGET, dtype="float32", speculative_config=drafting, specgw=settings)
    params = [
        SamplingParams(temperature=1, seed=seed, max_tokens=max_tokens, ignore_eos=True)
        for seed in range(len(prompts))
    ]
    return [answer.speculation for answer in llm.generate(prompts, params)]


def accepted_per_round(stats: Sequence[SpeculationStats]) -> Estimate:
    """Returns accepted tokens by drafted rounds; the error is that of a ratio of two sums.

    Answers are independent of one another, at least two; rounds of one answer are not.
    """
    mean, deviations = _ratio(stats)
    return Estimate(mean, _error(deviations))


def difference(stats: Sequence[SpeculationStats], others: Sequence[SpeculationStats]) -> Estimate:
    """Returns how many more are accepted per round than by another rule for the same prompts.

    What makes a prompt easy does so for both: the error is less than that of two means.
    """
    mean, deviations = _ratio(stats)
    other, other_deviations = _ratio(others)
    pairs = zip(deviations, other_deviations, strict=True)
    return Estimate(mean - other, _error([one - less for one, less in pairs]))


def _ratio(stats: Sequence[SpeculationStats]) -> tuple[float, list[float]]:
    """Returns accepted tokens by rounds, and each answer's part in the deviation of that."""
    rounds = sum(one.draft_count for one in stats)
    mean = sum(one.accepted_token_count for one in stats) / rounds
    parts = [(one.accepted_token_count - mean * one.draft_count) / rounds for one in stats]
    return mean, parts


def _error(deviations: Sequence[float]) -> float:
    count = len(deviations)
    return math.sqrt(sum(one**2 for one in deviations) * count / (count - 1))


def acceptance_by_support(
    prompts: Sequence[Sequence[int]], supports: Sequence[int]
) -> list[Estimate]:
    """Returns the chance that the ratio test accepts a token, for laws of at most so many tokens.

    It is the mean, over the prompts' positions, of the sum over x of min(p(x), q(x)).
    """
    chances = torch.tensor([_chances(prompt, supports) for prompt in prompts])  # [prompts, n]
    errors = chances.std(dim=0) / math.sqrt(len(prompts))
    return [Estimate(*pair) for pair in zip(chances.mean(0).tolist(), errors.tolist(), strict=True)]


def _chances(prompt: Sequence[int], supports: Sequence[int]) -> list[float]:
    target, draft = (_laws(model, prompt) for model in (TARGET, DRAFT))
    rows = torch.arange(len(prompt))
    chances = []
    for support in supports:
        ids, q = draft.largest(support)
        chances.append(float(torch.minimum(target.probs_of(rows, ids), q).sum(1).mean()))
    return chances


@torch.inference_mode()
def _laws(name: str, prompt: Sequence[int]) -> Laws:
    """Returns the laws at temperature 1 of what follows each of a prompt's tokens."""
    logits = _load(name)(torch.tensor([prompt])).logits[0]
    return build_laws(logits, [RowSampling(1.0, 1.0, 0, seed=0, position=0)] * len(prompt))


@cache
def _load(name: str) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        resolve_model(name), dtype=torch.float32
    )
    return model


if __name__ == "__main__":
    main()
