"""Tokens drafted one after another: a block in the making. Knows neither caches nor contexts."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from proposer_svc.draft_sampling import DraftToken
from specgw.types import TokenProbs


@dataclass(slots=True, eq=False)
class Drafted:
    """Draft tokens and what is known of each of their places."""

    token_ids: list[int] = field(default_factory=list)
    probs: list[TokenProbs] = field(default_factory=list)  # of all tokens, or of none
    runner_ups: list[Sequence[int]] = field(default_factory=list)  # of all places, maybe none known
    """What else the target may say there, the likeliest first."""

    def extend(self, token: DraftToken | None, runner_ups: Sequence[int] = ()) -> None:
        """Appends a token; a missing one makes all of them unusable: they are dropped."""
        if token is None:
            self.clear()
            return
        self.token_ids.append(token.token_id)
        if token.probs is not None:
            self.probs.append(token.probs)
        self.runner_ups.append(runner_ups)

    def drop_first(self, count: int) -> None:
        """Drops leading tokens."""
        for kept in (self.token_ids, self.probs, self.runner_ups):
            del kept[:count]

    def cut(self, length: int) -> None:
        """Drops all tokens but the leading ones."""
        for kept in (self.token_ids, self.probs, self.runner_ups):
            del kept[length:]

    def clear(self) -> None:
        """Drops all tokens."""
        self.cut(0)
