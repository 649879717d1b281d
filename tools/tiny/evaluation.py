"""The figures of docs/models.md: greedy acceptance on held-out files, by plain transformers."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM

from tools.tiny.corpus import load_corpus
from tools.tiny.tokenizers import END_ID

NUM_PROMPTS, PROMPT_LENGTH, CONTINUATION_LENGTH = 32, 256, 128
STEP_CONTEXT, STEP_REPEATS = 256, 100
LOSS_CHARACTERS, LOSS_WINDOW = 120_000, 512

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
        return sum(self.per_position) / self.rounds

    @property
    def rate(self) -> float:
        return self.per_round / self.k


@dataclass(frozen=True)
class Reference:
    """What the target writes after each held-out prompt."""

    token_ids: Tensor  # [num_prompts, PROMPT_LENGTH + CONTINUATION_LENGTH]
    lengths: list[int]  # tokens of each continuation before its EOS

    def context(self, row: int, start: int) -> list[int]:
        return self.token_ids[row, : PROMPT_LENGTH + start].tolist()

    def continuation(self, row: int, start: int, count: int) -> list[int]:
        return self.token_ids[row, PROMPT_LENGTH + start :][:count].tolist()


def held_out_prompts(tokenizer: Tokenizer, seed: int) -> Tensor:  # [NUM_PROMPTS, PROMPT_LENGTH]
    """Returns cuts from held-out files, spread evenly over the files that are long enough."""
    encodings = tokenizer.encode_batch_fast(list(load_corpus().held_out))
    files = [encoding.ids for encoding in encodings if len(encoding.ids) > 2 * PROMPT_LENGTH]
    generator = torch.Generator().manual_seed(seed)
    prompts = []
    for index in range(NUM_PROMPTS):
        file = files[index % len(files)]
        start = int(torch.randint(len(file) - PROMPT_LENGTH, (1,), generator=generator))
        prompts.append(file[start : start + PROMPT_LENGTH])
    return torch.tensor(prompts)


def load(folder: Path) -> LlamaForCausalLM:
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return model


@torch.inference_mode()
def bits_per_byte(model: LlamaForCausalLM, tokenizer: Tokenizer) -> float:
    """Returns the cross-entropy of held-out text, comparable across tokenizers."""
    text = "".join(load_corpus().held_out)[:LOSS_CHARACTERS]
    token_ids = torch.tensor(tokenizer.encode(text).ids)
    windows = token_ids[: len(token_ids) // LOSS_WINDOW * LOSS_WINDOW].view(-1, LOSS_WINDOW)
    nats = 0.0
    for window in windows:
        logits = model(input_ids=window[None, :-1]).logits[0].float()
        nats += float(F.cross_entropy(logits, window[1:], reduction="sum"))
    num_bytes = sum(len(tokenizer.decode(window[1:].tolist()).encode()) for window in windows)
    return nats / math.log(2) / num_bytes


@torch.inference_mode()
def continue_greedily(target: LlamaForCausalLM, prompts: Tensor) -> Reference:
    token_ids = target.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=CONTINUATION_LENGTH,
        do_sample=False,
        pad_token_id=END_ID,
    )
    width = PROMPT_LENGTH + CONTINUATION_LENGTH - token_ids.shape[1]
    token_ids = F.pad(token_ids, (0, width), value=END_ID)
    ended = token_ids[:, PROMPT_LENGTH:] == END_ID
    ended = torch.cat((ended, torch.ones_like(ended[:, :1])), dim=1)
    return Reference(token_ids, ended.int().argmax(dim=1).tolist())


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
def autoregressive(model: LlamaForCausalLM, reference: Reference) -> Draft:
    """Drafts from one teacher-forced pass: a token counts only while all before it were right."""
    guesses = [
        model(input_ids=chunk).logits[:, PROMPT_LENGTH - 1 : -1].argmax(-1)
        for chunk in torch.split(reference.token_ids, 8)
    ]
    table = torch.cat(guesses)  # [num_prompts, CONTINUATION_LENGTH]

    def draft(rows: list[int], starts: list[int], k: int) -> list[list[int]]:
        pairs = zip(rows, starts, strict=True)
        return [table[row, start : start + k].tolist() for row, start in pairs]

    return draft


def parallel(model: LlamaForCausalLM, reference: Reference, mask_id: int) -> Draft:
    """Drafts k tokens in one pass: k - 1 masks after the context."""

    @torch.inference_mode()
    def draft(rows: list[int], starts: list[int], k: int) -> list[list[int]]:
        width = PROMPT_LENGTH + max(starts) + k - 1
        token_ids = torch.full((len(rows), width), mask_id)
        for index, (row, start) in enumerate(zip(rows, starts, strict=True)):
            end = PROMPT_LENGTH + start
            token_ids[index, :end] = reference.token_ids[row, :end]
        last = torch.tensor(starts)[:, None] + PROMPT_LENGTH - 1 + torch.arange(k)  # [rows, k]
        hidden = model.model(input_ids=token_ids).last_hidden_state  # [rows, width, hidden_size]
        logits = model.lm_head(hidden[torch.arange(len(rows))[:, None], last])
        drafted: list[list[int]] = logits.argmax(-1).tolist()
        return drafted

    return draft


def foreign(
    model: LlamaForCausalLM, reference: Reference, target: Tokenizer, tokenizer: Tokenizer
) -> Draft:
    """Drafts through text: re-tokenizes the context, writes on, re-tokenizes the answer."""

    @torch.inference_mode()
    def draft(rows: list[int], starts: list[int], k: int) -> list[list[int]]:
        pairs = zip(rows, starts, strict=True)
        texts = target.decode_batch([reference.context(row, start) for row, start in pairs])
        contexts = [encoding.ids for encoding in tokenizer.encode_batch_fast(texts)]
        width = max(map(len, contexts))
        token_ids = torch.tensor([[0] * (width - len(ids)) + ids for ids in contexts])
        visible = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in contexts])
        written = model.generate(
            token_ids,
            attention_mask=visible,
            max_new_tokens=2 * k + 2,
            do_sample=False,
            pad_token_id=0,
        )
        answers = tokenizer.decode_batch(written[:, width:].tolist())
        return [encoding.ids[:k] for encoding in target.encode_batch_fast(answers)]

    return draft


@torch.inference_mode()
def step_milliseconds(model: LlamaForCausalLM) -> float:
    """Returns the shortest time of a one-token step, the one that no neighbor disturbed."""
    cache = DynamicCache(config=model.config)
    model(input_ids=torch.full((1, STEP_CONTEXT), 5), cache=cache, use_cache=True)
    token = torch.full((1, 1), 5)
    times = []
    for _ in range(STEP_REPEATS):
        started = time.perf_counter()
        model(input_ids=token, cache=cache, use_cache=True)
        times.append(time.perf_counter() - started)
    return min(times) * 1000
