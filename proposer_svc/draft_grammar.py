"""Keeps drafts to the constraint on a request's text, so that the verifier need not refuse them.

For draft models with the target's vocabulary. Whatever goes wrong here, a session is drafted
without a mask: the verifier has its own.
"""

import logging
from concurrent.futures import Executor, Future, ThreadPoolExecutor

import torch
from torch import Tensor

from proposer_svc.session_table import Session
from specgw.engine.token_mask import allowed_tokens
from specgw.grammar import GrammarCompiler, GrammarMatcher

logger = logging.getLogger(__name__)


class DraftGrammars:
    """Where the outputs of all sessions stand in their grammars. For the drafter's thread."""

    def __init__(self, compiler: GrammarCompiler, executor: Executor | None = None) -> None:
        """Takes what compiles, and where; by default in a thread of its own."""
        self._compiler = compiler
        self._executor = executor or ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._matchers: dict[Session, Future[GrammarMatcher]] = {}

    def open(self, session: Session) -> None:
        """Begins to compile a session's constraint, if it has one; drafts do not wait for it."""
        if session.structured_outputs is not None:
            compiling = self._executor.submit(self._compiler.compile, session.structured_outputs)
            self._matchers[session] = compiling

    def close(self, session: Session) -> None:
        """Forgets a session."""
        if compiling := self._matchers.pop(session, None):
            compiling.cancel()

    def applies_to(self, session: Session) -> bool:
        """Whether drafts of the session are to be masked."""
        return session in self._matchers

    @torch.inference_mode()
    def mask(
        self,
        logits: Tensor,  # [vocab_size], -inf for ids that must not be drafted
        session: Session,
        draft_token_ids: list[int],
    ) -> None:
        """Takes the tokens from a row, in place, that cannot follow the context and these drafts.

        Leaves it as it is where nothing can.
        """
        compiling = self._matchers.get(session)
        if compiling is None or not compiling.done():
            return
        output = session.token_ids[session.prompt_length :]
        try:
            matcher = compiling.result()
            if not matcher.follow(output + draft_token_ids):
                return
            mask = matcher.mask()
        except Exception as error:  # whatever it is, drafts do without
            logger.info("drafts are not masked", extra={"reason": str(error)})
            del self._matchers[session]
            return
        allowed = allowed_tokens(mask, len(logits), logits.device)
        goes_on = (allowed & logits.isfinite()).any()
        logits.masked_fill_(~allowed & goes_on, -torch.inf)
