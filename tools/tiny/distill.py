"""What autoregressive models learn: next tokens, and the target's opinion of them."""

import torch.nn.functional as F
from torch import Tensor

from tools.pard.layout import opinion_loss
from tools.tiny.model import TinyLlama
from tools.training import Batch


def next_token_loss(model: TinyLlama, batch: Batch) -> Tensor:
    (token_ids,) = batch  # [batch, length]
    logits = model(token_ids[:, :-1]).float()
    return F.cross_entropy(logits.flatten(0, 1), token_ids[:, 1:].flatten())


def distillation_loss(model: TinyLlama, batch: Batch) -> Tensor:
    token_ids, top_ids, top_logprobs = batch
    return opinion_loss(model(token_ids), top_ids, top_logprobs)
