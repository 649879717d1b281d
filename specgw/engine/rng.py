"""Random numbers that are a function of what they are for, not of when they are drawn.

Philox (Salmon et al., 2011) is a block cipher of a counter: the noise of a position can be had in
any order, in any process, on any machine, and is always the same.
"""

import numpy as np
import numpy.typing as npt

_SAMPLING_STREAM = 0x5A3D1E5
_UINT64_MASK = 2**64 - 1
_LARGEST = np.float32(1 - 2**-24)  # below one


def uniform_noise(seed: int, position: int, vocab_size: int) -> npt.NDArray[np.float32]:
    """Returns a number in (0, 1) for each token of the vocabulary.

    It is (n + 0.5) / 2**32 for 32 random bits n, so that small numbers are as precise as large
    ones.
    """
    key = np.array((seed & _UINT64_MASK, _SAMPLING_STREAM), dtype=np.uint64)
    counter = np.array((0, position, 0, 0), dtype=np.uint64)
    words = np.random.Philox(key=key, counter=counter).random_raw((vocab_size + 1) // 2)
    bits = words.astype("<u8", copy=False).view("<u4")[:vocab_size]
    noise = bits.astype(np.float32)
    noise += np.float32(0.5)
    noise *= np.float32(2**-32)
    return np.minimum(noise, _LARGEST, out=noise)


def exponential_noise(seed: int, position: int, vocab_size: int) -> npt.NDArray[np.float32]:
    """Returns a number from Exp(1) for each token of the vocabulary."""
    noise = uniform_noise(seed, position, vocab_size)
    return np.negative(np.log1p(np.negative(noise, out=noise), out=noise), out=noise)
