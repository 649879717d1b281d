"""Text for the draft with another tokenizer: the same files and rollouts, spelled its way."""

import random
from itertools import pairwise

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tools.tiny.tokenizers import FOREIGN_BOS_ID, FOREIGN_END_ID

MEAN_PIECE = 10  # target tokens between two cuts


def encode_files(foreign: Tokenizer, texts: tuple[str, ...]) -> Tensor:
    """Returns all files as one stream, each between BOS and EOS."""
    encodings = foreign.encode_batch_fast(list(texts))
    streams = [[*encoding.ids, FOREIGN_END_ID] for encoding in encodings]
    return torch.tensor([token for stream in streams for token in stream])


def encode_rollouts(rollouts: Tensor, target: Tokenizer, foreign: Tokenizer, seed: int) -> Tensor:
    """Returns rollouts, [num_rollouts, length], as one stream in the foreign vocabulary.

    Every second rollout is cut at random target-token boundaries and its pieces are encoded one by
    one: a foreign draft goes on from where the target stopped, not where its tokenizer would.
    """
    generator = random.Random(seed)
    stream: list[int] = []
    for index, token_ids in enumerate(rollouts.tolist()):
        pieces = _pieces(token_ids, generator) if index % 2 else [token_ids]
        stream.append(FOREIGN_BOS_ID)
        for text in target.decode_batch(pieces):
            stream += foreign.encode(text, add_special_tokens=False).ids
    return torch.tensor(stream)


def _pieces(token_ids: list[int], generator: random.Random) -> list[list[int]]:
    cuts = [0]
    while cuts[-1] < len(token_ids):
        cuts.append(cuts[-1] + 1 + int(generator.expovariate(1 / MEAN_PIECE)))
    return [token_ids[start:end] for start, end in pairwise(cuts)]
