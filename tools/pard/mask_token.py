"""Gives a model a mask token: an id that no text holds, with a row of the embedding."""

from typing import Any

import torch

from specgw.model_checks import mask_token


def add_mask_token(model: Any, tokenizer_size: int, wanted: int | None = None) -> tuple[int, str]:
    """Chooses the mask token, and makes its row if it has none or none that was trained.

    In order: the id that is asked for, the one that `config.json` names, the first row beyond the
    tokenizer (most vocabularies are padded), a row more. The last makes the embedding larger than
    the target's, which vLLM refuses and specgw does not.

    Returns:
        The id, and for people where it is from.
    """
    size = num_embeddings(model)
    if wanted is not None:
        if not 0 <= wanted < size:
            raise ValueError(f"mask token {wanted}: must be in [0, {size})")
        return wanted, "as asked for"
    if (found := mask_token(model.config.to_dict())) is not None:
        return int(str(found[1])), f"{found[0]} of config.json"
    if tokenizer_size >= size:
        model.resize_token_embeddings(size + 1, mean_resizing=False)
        size += 1
        source = "a new row of the embedding"
    else:
        source = "an unused row of the embedding"
    _set_to_mean(model, tokenizer_size)
    return tokenizer_size, source


def num_embeddings(model: Any) -> int:
    """Returns how many rows the embedding has."""
    return int(model.get_input_embeddings().weight.shape[0])


@torch.no_grad()
def _set_to_mean(model: Any, token_id: int) -> None:
    """An untrained row may be anything; the mean of the trained ones is of their size."""
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        weight = layer.weight
        weight[token_id] = weight[:token_id].mean(0)
