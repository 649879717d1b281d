"""Proposers that follow a script, and links that fail: the real interfaces, no model.

The names are those of the field's bug reports: ORACLE is always right, LIAR always wrong, HALF(n)
right for n tokens, SCRIPT proposes fixed ids, SLOW is late, DEAD never answers, FLAKY drops the
connection again and again.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from specgw.errors import InvalidRequest
from specgw.hidden import HiddenFormat, HiddenStates
from specgw.link import Proposer
from specgw.types import (
    Commit,
    DraftBlock,
    Hello,
    HelloAck,
    ModelDescription,
    ProposeStep,
    UndraftedReason,
)

Draft = Callable[[Sequence[int], int], Sequence[int]]  # context, max_draft_tokens -> draft tokens
Answers = Mapping[tuple[int, ...], Sequence[int]]  # prompt -> what the target will say

SCRIPTED_MODEL = ModelDescription("scripted", "", 0, "", 2**20, "", "")


def oracle(answers: Answers) -> Draft:
    """Proposes what the target will say."""

    def draft(context: Sequence[int], count: int) -> Sequence[int]:
        for prompt, answer in answers.items():
            whole = (*prompt, *answer)
            if len(context) >= len(prompt) and whole[: len(context)] == tuple(context):
                return whole[len(context) : len(context) + count]
        return ()

    return draft


def half(answers: Answers, num_right: int, vocab_size: int) -> Draft:
    """Is right for `num_right` tokens of each block, then always wrong."""
    right = oracle(answers)

    def draft(context: Sequence[int], count: int) -> Sequence[int]:
        tokens = right(context, count)
        wrong = [(token_id + 1) % vocab_size for token_id in tokens[num_right:]]
        return (*tokens[:num_right], *wrong)

    return draft


def liar(answers: Answers, vocab_size: int) -> Draft:
    """Proposes what the target will not say."""
    return half(answers, 0, vocab_size)


def script(*token_ids: int) -> Draft:
    """Proposes the same ids whatever the context."""
    return lambda context, count: token_ids


class ScriptedProposer:
    """Keeps every session's context as a proposer must, and drafts by a function of it."""

    def __init__(
        self, draft: Draft, max_draft_tokens: int = 16, model: str = SCRIPTED_MODEL.name
    ) -> None:
        self._draft = draft
        self._model = replace(SCRIPTED_MODEL, name=model)
        self._max_draft_tokens = max_draft_tokens
        self._wanted: list[tuple[str, Commit]] = []
        self.contexts: dict[tuple[str, int], list[int]] = {}
        self.num_opened = 0
        self.num_asked = 0

    def connect(self, hello: Hello) -> HelloAck:
        return HelloAck(
            proposer_id="scripted",
            method="draft_model",
            draft_model=self._model,
            max_draft_tokens=self._max_draft_tokens,
            extra_slots_per_session=1,
            max_sessions=1_000,
        )

    def disconnect(self, verifier_id: str) -> None:
        for key in [key for key in self.contexts if key[0] == verifier_id]:
            del self.contexts[key]

    def apply(self, verifier_id: str, step: ProposeStep) -> Sequence[DraftBlock]:
        refusals = []
        for opened in step.open:
            self.contexts[verifier_id, opened.session_id] = list(opened.token_ids)
            self.num_opened += 1
        for commit in step.commit:
            context = self.contexts.get((verifier_id, commit.session_id))
            if context is None or len(context) != commit.base_length:
                length = commit.base_length + len(commit.token_ids)
                refusals.append(
                    DraftBlock(commit.session_id, length, reason=UndraftedReason.RESYNC)
                )
                continue
            context += commit.token_ids
            if commit.max_draft_tokens:
                self.num_asked += 1
                self._wanted.append((verifier_id, commit))
        for session_id in step.close:
            self.contexts.pop((verifier_id, session_id), None)
        return refusals

    def step(self) -> Sequence[tuple[str, DraftBlock]]:
        wanted, self._wanted = self._wanted, []
        return [
            (verifier_id, self._block(verifier_id, commit))
            for verifier_id, commit in wanted
            if (verifier_id, commit.session_id) in self.contexts
        ]

    def has_work(self) -> bool:
        return bool(self._wanted)

    def _block(self, verifier_id: str, commit: Commit) -> DraftBlock:
        context = self.contexts[verifier_id, commit.session_id]
        tokens = self._draft(context, commit.max_draft_tokens)
        reason = None if tokens else UndraftedReason.EMPTY
        return DraftBlock(commit.session_id, len(context), tokens, reason)


class HiddenProposer(ScriptedProposer):
    """Needs the target's hidden states, and keeps what each commit brought of them."""

    def __init__(self, draft: Draft, hidden: HiddenFormat) -> None:
        super().__init__(draft)
        self._hidden = hidden
        self.received: dict[int, list[tuple[int, HiddenStates | None]]] = {}

    def connect(self, hello: Hello) -> HelloAck:
        return replace(super().connect(hello), hidden=self._hidden)

    def apply(self, verifier_id: str, step: ProposeStep) -> Sequence[DraftBlock]:
        for commit in step.commit:
            length = commit.base_length + len(commit.token_ids)
            self.received.setdefault(commit.session_id, []).append((length, commit.hidden))
        return super().apply(verifier_id, step)


class DeadProposer(ScriptedProposer):
    """Takes everything and never answers."""

    def __init__(self) -> None:
        super().__init__(script())

    def has_work(self) -> bool:
        return False


class FlakyProposer(ScriptedProposer):
    """Fails on every `every`-th step, which ends the stream it came on."""

    def __init__(self, draft: Draft, every: int) -> None:
        super().__init__(draft)
        self._every = every
        self._num_steps = 0

    def apply(self, verifier_id: str, step: ProposeStep) -> Sequence[DraftBlock]:
        self._num_steps += 1
        if self._num_steps % self._every == 0:
            raise InvalidRequest("step", self._num_steps, "fails by script")
        return super().apply(verifier_id, step)


def is_proposer(proposer: ScriptedProposer) -> Proposer:
    """Lets the type checker confirm that the double implements the interface."""
    return proposer
