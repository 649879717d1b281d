"""Stand-ins for packages of the flash-attention family: their interfaces, checks and meaning.

Written after the documented signatures: `flash_attn.flash_attn_with_kvcache` (2.8),
`flash_attn_interface.flash_attn_with_kvcache` (3.0) and `torch.nn.attention.varlen.varlen_attn`
(torch 2.13). What they refuse, these refuse; computed row by row.
"""

import torch
from torch import Tensor

FLASH2_PAGE = 256


def flash_attn_2(
    q: Tensor,  # [num_sequences, num_rows, num_heads, head_dim]
    k_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    v_cache: Tensor,
    k: None = None,
    v: None = None,
    *,
    cache_seqlens: Tensor,
    block_table: Tensor,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
) -> Tensor:
    if k_cache.shape[1] % FLASH2_PAGE:
        raise RuntimeError("Paged KV cache block size must be divisible by 256")
    assert causal
    return _attend(
        q, k_cache, v_cache, cache_seqlens, block_table, softmax_scale, (window_size[0], 0)
    )


def flash_attn_3(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    page_table: Tensor,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
) -> Tensor:
    assert causal
    return _attend(
        q, k_cache, v_cache, cache_seqlens, page_table, softmax_scale, (window_size[0], 0)
    )


def varlen_attn(
    query: Tensor,  # [num_tokens, num_heads, head_dim]
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor,
    block_table: Tensor,
) -> Tensor:
    if key.shape[1] % FLASH2_PAGE:
        raise RuntimeError("Paged KV cache block size must be divisible by 256")
    if query.shape[1] != key.shape[2] and not enable_gqa:
        raise ValueError("Expect query and key/value to have the same number of heads")
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert max_q == int(cu_seq_q.diff().max())
    assert max_k >= int(seqused_k.max())
    rows = query.view(len(block_table), max_q, *query.shape[1:])
    output = _attend(rows, key, value, seqused_k, block_table, scale, window_size)
    return output.flatten(0, 1)


def _attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    table: Tensor,
    scale: float,
    window: tuple[int, int],
) -> Tensor:
    assert lengths.dtype == table.dtype == torch.int32
    assert q.stride(-1) == k_cache.stride(-1) == v_cache.stride(-1) == table.stride(-1) == 1
    assert lengths.is_contiguous()
    left, right = window
    assert right == 0, "a row would see those after it"
    output = torch.zeros_like(q)
    num_rows, fold = q.shape[1], q.shape[2] // k_cache.shape[2]
    for n in range(len(q)):
        keys, values = (
            k_cache[table[n].long()].flatten(0, 1),
            v_cache[table[n].long()].flatten(0, 1),
        )
        for i in range(num_rows):
            last = int(lengths[n]) - (num_rows - 1 - i)
            first = 0 if left < 0 else max(0, last - 1 - left)
            if last <= 0:
                continue
            for head in range(q.shape[2]):
                seen = keys[first:last, head // fold].float()
                weights = (scale * seen @ q[n, i, head].float()).softmax(0)
                row = weights @ values[first:last, head // fold].float()
                output[n, i, head] = row.to(q.dtype)
    return output
