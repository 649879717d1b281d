"""Decides which draft tokens survive. Pure functions: no model, no session, no clock.

One-hot rule (Leviathan et al., 2023, arXiv:2211.17192, with q a point mass on the draft x_i): draw
y_i ~ p_i at every position, accept x_i iff x_i = y_i, emit y_i at the first mismatch. It accepts
with probability p_i(x_i), and is lossless for any proposer, since y_i never depends on x_i. Because
y_i is drawn with noise keyed by (seed, position), the output does not depend on the drafts at all.
"""

from collections.abc import Sequence


def count_matching(draft_token_ids: Sequence[int], target_token_ids: Sequence[int]) -> int:
    """Applies the one-hot rule to one block: returns how many draft tokens are accepted.

    Args:
        draft_token_ids: The draft tokens x_1..x_K.
        target_token_ids: Draws y_1..y_K+1 from the target. The output tokens are those up to the
            first that differs from its draft token, or all.
    """
    pairs = zip(draft_token_ids, target_token_ids, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), len(draft_token_ids))
