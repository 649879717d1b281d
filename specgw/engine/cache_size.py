"""How many tokens a KV cache holds, where others use the same memory."""

import os
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from specgw.engine import decoder
from specgw.engine.attention_kernels import PagedKernel
from specgw.engine.kv_cache import BLOCK_SIZE, KVCache
from specgw.engine.model_runner import ModelRunner, SequenceChunk


@dataclass(frozen=True, slots=True)
class PoolShape:
    """What a KV cache is, but for its capacity. `is_paged` says that a kernel reads its blocks."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    block_size: int = BLOCK_SIZE
    is_paged: bool = False
    has_prefix_cache: bool = True

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def tokens_in(self, num_bytes: int) -> int:
        """Returns the capacity of the cache that takes so much memory, the scratch block in it."""
        num_blocks = num_bytes // (self.token_bytes * self.block_size)
        return max(0, num_blocks - self.is_paged) * self.block_size

    def build(self, capacity_tokens: int) -> KVCache:
        """Returns a cache that holds at least so many tokens."""
        num_blocks = -(-capacity_tokens // self.block_size)
        return KVCache(
            self.num_layers,
            self.num_kv_heads,
            self.head_dim,
            num_blocks * self.block_size,
            self.dtype,
            self.device,
            block_size=self.block_size,
            has_prefix_cache=self.has_prefix_cache,
            has_scratch=self.is_paged,
        )


def pool_shape(
    config: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    kernel: PagedKernel | None,
    *,
    has_prefix_cache: bool,
) -> PoolShape:
    """Returns the shape for a model, with blocks that the kernel can read."""
    return PoolShape(
        config.num_hidden_layers,
        decoder.num_kv_heads(config),
        decoder.head_dim(config),
        dtype,
        device,
        block_size=max(BLOCK_SIZE, kernel.block_size if kernel else 0),
        is_paged=kernel is not None,
        has_prefix_cache=has_prefix_cache,
    )


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A GPU's memory in bytes.

    Attributes:
        total: All of it.
        free: What no process holds.
        held: What this process holds: weights, and what its allocator keeps.
    """

    total: int
    free: int
    held: int


def device_memory(device: torch.device) -> DeviceMemory:
    """Reads what a GPU has, and what this process holds of it."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemory(total, free, torch.cuda.memory_reserved(device))


def room_on_device(memory: DeviceMemory, share: float, workspace: int) -> int:
    """Returns the bytes that a KV cache may have on a GPU; 0 if there is no room.

    Each process that shares the GPU keeps within its own share, so that it does not matter who
    starts first. What the shares leave is for the driver's contexts and for recorded graphs.

    Args:
        memory: As it is with the weights loaded.
        share: Of all memory, for this process.
        workspace: Bytes that the largest pass needs beside weights and cache.
    """
    own = int(share * memory.total) - memory.held
    return max(0, min(own, memory.free) - workspace)


def room_on_host(share: float) -> int:
    """Returns the bytes of a share of the host's memory."""
    return int(share * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def full_contexts(num_sequences: int, max_model_len: int) -> int:
    """Returns the tokens of so many contexts of full length, in whole blocks of `BLOCK_SIZE`."""
    return num_sequences * -(-max_model_len // BLOCK_SIZE) * BLOCK_SIZE


def largest_pass(runner: ModelRunner, num_tokens: int, num_logits: int) -> None:
    """Runs a pass of so many rows and logits, and what sampling copies of these.

    It takes no more sequences than there is room for in the runner's cache, which is as it was.
    """
    lengths = [runner.max_model_len] * (num_tokens // runner.max_model_len)
    lengths += [rest] if (rest := num_tokens % runner.max_model_len) else []
    wanted = [min(num_logits, length) for length in lengths[:1]] + [0] * (len(lengths) - 1)
    caches = [runner.kv_cache.new_sequence() for _ in lengths]
    chunks = [
        SequenceChunk(cache, [0] * length, count)
        for cache, length, count in zip(caches, lengths, wanted, strict=True)
    ]
    logits = runner.forward(chunks)
    _ = logits.float(), logits.float()  # processed, and their probabilities
    for cache in caches:
        cache.release()


def measure_workspace(runner: ModelRunner, num_tokens: int, num_logits: int) -> int:
    """Returns the bytes on the GPU that the largest pass needs beside weights and cache."""
    device = runner.device
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    largest_pass(runner, num_tokens, num_logits)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
