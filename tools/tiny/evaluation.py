"""The figures of docs/models.md: greedy acceptance on held-out files, by plain transformers."""

import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM

from tools.acceptance import Draft, Reference
from tools.tiny.corpus import load_corpus

NUM_PROMPTS, PROMPT_LENGTH, CONTINUATION_LENGTH = 32, 256, 128
STEP_CONTEXT, STEP_REPEATS = 256, 100
LOSS_CHARACTERS, LOSS_WINDOW = 120_000, 512


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
