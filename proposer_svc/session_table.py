"""The sessions that verifiers keep open on this proposer, within the slots there are.

Holds contexts and their rows in the KV cache; knows nothing of drafting.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from specgw.engine.kv_cache import SequenceCache
from specgw.types import UndraftedReason

_MAX_REFUSALS = 4096
_IDLE_TURNS = 2  # a session is idle once others were asked about this often each, and it was not


@dataclass(slots=True, eq=False)
class Session:
    """One request of one verifier.

    The rows of `cache` are those of `token_ids` and then of the leading `draft_token_ids`, as far
    as they were fed. They are kept from round to round.
    """

    verifier_id: str
    session_id: int
    token_ids: list[int]
    cache: SequenceCache
    num_draftable_ids: int  # ids from here on must not be drafted
    prefill_length: int  # rows to feed even if no block is asked for
    num_wanted: int = 0  # draft tokens asked for; 0 while no block is
    last_used: int = 0  # when a block was last asked for, by the table's count
    draft_token_ids: list[int] = field(default_factory=list)

    @property
    def num_missing(self) -> int:
        """Rows to feed before the next token can be drafted. At least one while a block is due."""
        return len(self.token_ids) - self.cache.length

    @property
    def has_work(self) -> bool:
        """Whether a block is asked for, or the first prefill is not over."""
        return self.num_wanted > 0 or self.cache.length < self.prefill_length

    def commit(self, token_ids: Sequence[int]) -> None:
        """Appends output tokens; keeps the rows of the draft tokens that they agree with."""
        num_agreed = 0
        for drafted, committed in zip(self.draft_token_ids, token_ids, strict=False):
            if drafted != committed:
                break
            num_agreed += 1
        num_right = len(self.token_ids) + num_agreed
        self.token_ids.extend(token_ids)
        self.draft_token_ids = []
        # The last token is always fed again: the next draft token comes from its logits.
        self.cache.truncate(min(num_right, len(self.token_ids) - 1))

    def forget_rows(self) -> None:
        """Stops work and gives the KV cache back; the next block begins with a prefill."""
        self.cache.release()
        self.draft_token_ids = []
        self.num_wanted = self.prefill_length = 0


class SessionTable:
    """Sessions by verifier and id, and why others are not held."""

    def __init__(self, max_sessions: int) -> None:
        self.max_sessions = max_sessions
        self._sessions: dict[tuple[str, int], Session] = {}
        self._refusals: dict[tuple[str, int], UndraftedReason] = {}
        self._num_asked = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    @property
    def is_full(self) -> bool:
        """Whether every slot is taken."""
        return len(self._sessions) >= self.max_sessions

    def get(self, verifier_id: str, session_id: int) -> Session | None:
        """Returns a session, if it is held."""
        return self._sessions.get((verifier_id, session_id))

    def add(self, session: Session) -> None:
        """Gives a slot to a session. There must be one."""
        assert not self.is_full
        session.last_used = self._num_asked
        self._sessions[session.verifier_id, session.session_id] = session

    def ask(self, session: Session, num_tokens: int) -> None:
        """Asks for a block in place of any asked for before; 0 tokens ask for none."""
        session.num_wanted = num_tokens
        if num_tokens:
            self._num_asked += 1
            session.last_used = self._num_asked

    def forget_an_idle_session(self) -> bool:
        """Frees the rows of the session that was not asked for the longest time, if one is idle.

        A session that takes its turns is not idle while its verifier is at work: taking its rows
        would cost a prefill each round.
        """
        idle_before = self._num_asked - _IDLE_TURNS * len(self)
        idle = [
            session
            for session in self
            if session.cache.length and not session.has_work and session.last_used < idle_before
        ]
        if not idle:
            return False
        min(idle, key=lambda session: session.last_used).forget_rows()
        return True

    def refuse(self, verifier_id: str, session_id: int, reason: UndraftedReason) -> None:
        """Drops a session, if it is held, and remembers why until it is opened anew or closed."""
        self.remove(verifier_id, session_id)
        self._refusals[verifier_id, session_id] = reason
        if len(self._refusals) > _MAX_REFUSALS:  # a forgotten one is asked to resync
            del self._refusals[next(iter(self._refusals))]

    def refusal(self, verifier_id: str, session_id: int) -> UndraftedReason:
        """Returns why a session is not held."""
        return self._refusals.get((verifier_id, session_id), UndraftedReason.RESYNC)

    def remove(self, verifier_id: str, session_id: int) -> None:
        """Frees a session's slot and rows, if it is held, and forgets a refusal."""
        key = verifier_id, session_id
        self._refusals.pop(key, None)
        if session := self._sessions.pop(key, None):
            session.cache.release()

    def remove_verifier(self, verifier_id: str) -> None:
        """Removes every session of a verifier."""
        for owner, session_id in [*self._sessions, *self._refusals]:
            if owner == verifier_id:
                self.remove(owner, session_id)
