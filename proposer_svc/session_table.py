"""The sessions that verifiers keep open on this proposer, within the slots there are.

Holds contexts and what is asked for; knows nothing of drafting.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from specgw.hidden import HiddenStates
from specgw.structured_outputs import StructuredOutputsParams
from specgw.types import DraftSampling, UndraftedReason

_MAX_REFUSALS = 4096
_IDLE_TURNS = 2  # a session is idle once others were asked about this often each, and it was not


@dataclass(slots=True, eq=False)
class Session:
    """One request of one verifier, as the verifier sees it: token ids are the target's."""

    verifier_id: str
    session_id: int
    token_ids: list[int]
    num_ids: int  # ids from here on are the target's alone
    cache_salt: str = ""
    sampling: DraftSampling | None = None  # none means greedy
    structured_outputs: StructuredOutputsParams | None = None
    prompt_length: int = 0  # leading tokens that are no output
    num_wanted: int = 0  # draft tokens asked for; 0 while no block is
    has_ended: bool = False  # its verifier closed it; else it may be opened anew
    hidden: HiddenStates | None = None  # the target's, as the newest commit brought them
    last_used: int = 0  # when a block was last asked for, by the table's count

    @property
    def temperature(self) -> float:
        """That of the request; 0 is greedy."""
        return 0.0 if self.sampling is None else self.sampling.temperature


class SessionTable:
    """Sessions by verifier and id, and why others are not held."""

    def __init__(self, max_sessions: int, on_remove: Callable[[Session], None]) -> None:
        self.max_sessions = max_sessions
        self._on_remove = on_remove
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

    @property
    def idle_before(self) -> int:
        """Sessions last used before this count are idle.

        A session that takes its turns is not idle while its verifier is at work: taking its memory
        would cost a prefill each round.
        """
        return self._num_asked - _IDLE_TURNS * len(self)

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
            self.use(session)

    def use(self, session: Session) -> None:
        """Notes that a session takes its turn."""
        self._num_asked += 1
        session.last_used = self._num_asked

    def refuse(self, verifier_id: str, session_id: int, reason: UndraftedReason) -> None:
        """Drops a session, if it is held, and remembers why until it is opened anew or closed."""
        self.remove(verifier_id, session_id)
        self._refusals[verifier_id, session_id] = reason
        if len(self._refusals) > _MAX_REFUSALS:  # a forgotten one is asked to resync
            del self._refusals[next(iter(self._refusals))]

    def refusal(self, verifier_id: str, session_id: int) -> UndraftedReason:
        """Returns why a session is not held."""
        return self._refusals.get((verifier_id, session_id), UndraftedReason.RESYNC)

    def end(self, verifier_id: str, session_id: int) -> None:
        """Removes a session that its verifier has closed."""
        if session := self.get(verifier_id, session_id):
            session.has_ended = True
        self.remove(verifier_id, session_id)

    def remove(self, verifier_id: str, session_id: int) -> None:
        """Frees a session's slot, if it is held, and forgets a refusal."""
        key = verifier_id, session_id
        self._refusals.pop(key, None)
        if session := self._sessions.pop(key, None):
            self._on_remove(session)

    def remove_verifier(self, verifier_id: str) -> None:
        """Removes every session of a verifier."""
        for owner, session_id in [*self._sessions, *self._refusals]:
            if owner == verifier_id:
                self.remove(owner, session_id)
