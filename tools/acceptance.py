"""Greedy acceptance by plain transformers, outside of specgw: what a draft is worth to a target."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import click
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tools.pard.rollouts import continue_greedily

# (rows, starts, k): k draft tokens for each row, after its prompt and `start` more tokens
Draft = Callable[[list[int], list[int], int], list[list[int]]]


@dataclass
class Acceptance:
    """Counts over rounds of `k` draft tokens."""

    k: int
    rounds: int = 0
    per_position: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.per_position = [0] * self.k

    def add(self, accepted: int) -> None:
        self.rounds += 1
        for position in range(accepted):
            self.per_position[position] += 1

    @property
    def per_round(self) -> float:
        return sum(self.per_position) / max(1, self.rounds)

    @property
    def rate(self) -> float:
        return self.per_round / self.k


@dataclass(frozen=True)
class Reference:
    """What the target writes after each held-out prompt."""

    token_ids: Tensor  # [num_prompts, prompt_length + continuation_length]
    prompt_length: int
    lengths: list[int]  # tokens of each continuation before its EOS

    def context(self, row: int, start: int) -> list[int]:
        return self.token_ids[row, : self.prompt_length + start].tolist()

    def continuation(self, row: int, start: int, count: int) -> list[int]:
        return self.token_ids[row, self.prompt_length + start :][:count].tolist()


def reference(target: PreTrainedModel, prompts: Tensor, num_new_tokens: int) -> Reference:
    """Lets the target answer prompts, [num_prompts, prompt_length]."""
    prompt_length = prompts.shape[1]
    token_ids = continue_greedily(target, prompts, num_new_tokens).token_ids
    config: Any = target.generation_config
    end_ids = torch.tensor([] if config.eos_token_id is None else config.eos_token_id).reshape(-1)
    ended = torch.isin(token_ids[:, prompt_length:], end_ids)
    ended = torch.cat((ended, torch.ones_like(ended[:, :1])), dim=1)
    return Reference(token_ids, prompt_length, ended.int().argmax(dim=1).tolist())


def play(reference: Reference, draft: Draft, k: int) -> Acceptance:
    """Plays whole rounds, prompts side by side: draft, compare, commit accepted and one more."""
    acceptance = Acceptance(k)
    starts = [0] * len(reference.lengths)
    while rows := [row for row, end in enumerate(reference.lengths) if starts[row] + k <= end]:
        drafts = draft(rows, [starts[row] for row in rows], k)
        for row, draft_token_ids in zip(rows, drafts, strict=True):
            expected = reference.continuation(row, starts[row], k)
            accepted = _common_prefix(draft_token_ids, expected)
            acceptance.add(accepted)
            starts[row] += accepted + 1
    return acceptance


def _common_prefix(left: list[int], right: list[int]) -> int:
    pairs = zip(left, right, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


@torch.inference_mode()
def autoregressive(model: PreTrainedModel, reference: Reference) -> Draft:
    """Drafts from one teacher-forced pass: a token counts only while all before it were right."""
    guesses = [
        model(input_ids=chunk.to(model.device))
        .logits[:, reference.prompt_length - 1 : -1]
        .argmax(-1)
        for chunk in torch.split(reference.token_ids, 8)
    ]
    table = torch.cat(guesses)  # [num_prompts, continuation_length]

    def draft(rows: list[int], starts: list[int], k: int) -> list[list[int]]:
        pairs = zip(rows, starts, strict=True)
        return [table[row, start : start + k].tolist() for row, start in pairs]

    return draft


def parallel(model: Any, reference: Reference, mask_id: int) -> Draft:
    """Drafts k tokens in one pass: k - 1 masks after the context."""

    @torch.inference_mode()
    def draft(rows: list[int], starts: list[int], k: int) -> list[list[int]]:
        width = reference.prompt_length + max(starts) + k - 1
        token_ids = torch.full((len(rows), width), mask_id)
        for index, (row, start) in enumerate(zip(rows, starts, strict=True)):
            end = reference.prompt_length + start
            token_ids[index, :end] = reference.token_ids[row, :end]
        last = torch.tensor(starts)[:, None] + reference.prompt_length - 1 + torch.arange(k)
        hidden = model.base_model(input_ids=token_ids.to(model.device)).last_hidden_state
        logits = model.get_output_embeddings()(hidden[torch.arange(len(rows))[:, None], last])
        logits[..., mask_id] = -torch.inf  # [rows, k, vocab_size]
        drafted: list[list[int]] = logits.argmax(-1).tolist()
        return drafted

    return draft


def print_acceptance(
    reference: Reference, drafts: Mapping[str, Draft], num_tokens: Sequence[int]
) -> None:
    """Prints a line for each draft and number of draft tokens."""
    click.echo("\n| draft | K | accepted per draft token | per round | rounds | by position |")
    click.echo("|---|---|---|---|---|---|")
    for name, draft in drafts.items():
        for k in num_tokens:
            played = play(reference, draft, k)
            shares = (count / max(1, played.rounds) for count in played.per_position)
            positions = " ".join(f"{share:.2f}" for share in shares)
            click.echo(
                f"| {name} | {k} | {played.rate:.3f} | {played.per_round:.2f} "
                f"| {played.rounds} | {positions} |"
            )
