"""One request's state on the verifier. Owned and changed by the scheduler's thread only."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from specgw.engine.block_hashes import BlockHashes
from specgw.engine.hidden_rows import HiddenRows
from specgw.engine.kv_cache import SequenceCache
from specgw.errors import InvalidRequest
from specgw.lookup.prediction import Prediction
from specgw.types import (
    MAX_BLOCKS_AHEAD,
    BlocksAhead,
    DraftSampling,
    FinishReason,
    GenerateRequest,
    TokenLogprobs,
    TokenProbs,
    UndraftedReason,
)
from verifier_svc.draft_length import SessionHistory
from verifier_svc.logits_processors import RowProcessors


@dataclass(slots=True)
class DraftState:
    """How a session stands with its proposer.

    At most one block is asked for at a time: `asked_length` is the context length it continues and
    stays set until the answer comes, however late. `deadline` is how long the session waits for it.
    """

    address: str = ""
    is_open: bool = False
    known_length: int = 0
    asked_length: int | None = None
    asked_at: float = 0.0
    asked_tokens: int = 0
    is_first: bool = True
    deadline: float | None = None
    retry_at: float = 0.0
    token_ids: Sequence[int] = ()
    probs: Sequence[TokenProbs] = ()  # the laws of `token_ids`, if they are known
    source: str = ""  # of the newest block
    reason: UndraftedReason = UndraftedReason.UNAVAILABLE
    hidden: HiddenRows = field(default_factory=HiddenRows)  # for a proposer that needs them
    block: Sequence[int] = ()  # the newest of the proposer's, which `known_length` tokens go before
    ahead: list[BlocksAhead] = field(default_factory=list)  # what may follow it

    def reset(self, address: str = "") -> None:
        """Forgets the proposer's side: nothing is open there."""
        self.address = address
        self.is_open = False
        self.asked_length = None
        self.deadline = None
        self.is_first = True
        self.token_ids, self.probs = (), ()
        self.hidden.clear()
        self.block = ()
        self.ahead.clear()

    def take(self) -> tuple[Sequence[int], Sequence[TokenProbs]]:
        """Returns the block that has arrived, if any, and forgets it. The session waits no more."""
        taken = self.token_ids, self.probs
        self.token_ids, self.probs = (), ()
        self.deadline = None
        return taken

    def keep_ahead(self, blocks: BlocksAhead) -> None:
        """Keeps blocks that may follow the newest block, as far as the agreed number goes."""
        num_kept = sum(len(one.accepted_counts) for one in (*self.ahead, blocks))
        is_next = self.is_open and blocks.base_length == self.known_length
        if is_next and num_kept <= MAX_BLOCKS_AHEAD:
            self.ahead.append(blocks)

    def find_ahead(self, context: Sequence[int]) -> Sequence[int]:
        """Returns the block that was sent ahead for the context, if any: no tokens if not.

        The context goes on from where it was known with what was accepted of the newest block, and
        one more token.
        """
        missing = context[self.known_length :]
        if not (self.ahead and missing):
            return ()
        *accepted, token_id = missing
        if list(self.block[: len(accepted)]) != accepted:
            return ()
        found = (one.find(len(accepted), token_id) for one in self.ahead)
        return next((token_ids for token_ids in found if token_ids), ())


@dataclass(slots=True, eq=False)
class Session:
    """A request being answered. Its context is the truth; all else can be rebuilt from it."""

    session_id: int
    request: GenerateRequest
    seed: int
    max_draft_tokens: int
    length_limit: int  # The context may not grow longer than this many tokens.
    stop_token_ids: frozenset[int]
    context: list[int]
    block_hashes: BlockHashes
    processors: RowProcessors | None = None
    prediction: Prediction | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    cache: SequenceCache | None = None
    draft: DraftState = field(default_factory=DraftState)
    history: SessionHistory = field(default_factory=SessionHistory)
    local_history: SessionHistory = field(default_factory=SessionHistory)
    num_reused: int | None = None  # rows it began with; none before, and without a prefix cache
    has_started: bool = False
    is_synthetic: bool = False  # whether drafts were tested by given rates

    @property
    def remaining_tokens(self) -> int:
        """Output tokens still to come, at most."""
        return self.length_limit - len(self.context)

    @property
    def num_cached(self) -> int:
        """Tokens of the context whose keys and values are in the cache."""
        return self.cache.length if self.cache else 0

    @property
    def is_decoding(self) -> bool:
        """Whether only the last context token is missing from the cache."""
        return self.num_cached == len(self.context) - 1

    @property
    def draft_sampling(self) -> DraftSampling | None:
        """How drafts may be sampled as the output is; None for greedily."""
        params = self.request.sampling_params
        if params.is_greedy:
            return None
        return DraftSampling(
            params.temperature, params.top_k, params.top_p, params.min_p, self.seed
        )

    def tokens_to_score(self, num_cached: int) -> Sequence[int]:
        """Returns the prompt tokens to compute log probabilities for, if asked for.

        They are those that the first `num_cached` context tokens predict, less those scored before.
        An earlier attempt at the request has delivered them already.
        """
        request = self.request
        if request.sampling_params.prompt_logprobs is None or request.output_token_ids:
            return ()
        return request.prompt_token_ids[1 + len(self.prompt_logprobs) : 1 + num_cached]

    def reusable_blocks(self) -> Sequence[bytes]:
        """Returns the hashes of the blocks that a new cache may begin with if others left them.

        Rows whose logits are needed are computed: the last one, and those that score the prompt.
        """
        length = len(self.context) - 1
        if self.tokens_to_score(length):
            length = len(self.prompt_logprobs)
        return self.block_hashes.within(self.context, length)

    def publish_rows(self) -> None:
        """Lets others use the rows of the context. There must be none of draft tokens."""
        if self.cache is not None:
            length = min(self.cache.length, len(self.context))
            if not self.cache.has_unpublished(length):
                return
            self.cache.publish(self.block_hashes.within(self.context, length))

    def draft_room(self) -> int:
        """Draft tokens that can still be of use: the round adds one token of its own."""
        return min(self.max_draft_tokens, self.remaining_tokens - 1)

    def append(
        self, token_ids: Sequence[int]
    ) -> tuple[Sequence[int], FinishReason | None, int | None]:
        """Appends output tokens up to the end of the output.

        Returns the tokens kept, the finish reason if the output ended, and the token that ended it.
        """
        kept = token_ids[: self.remaining_tokens]
        if not self.stop_token_ids.isdisjoint(kept):
            count = next(i for i, one in enumerate(kept, 1) if one in self.stop_token_ids)
            kept = kept[:count]
            self.context.extend(kept)
            return kept, FinishReason.STOP, kept[-1]
        self.context.extend(kept)
        if self.prediction is not None:
            self.prediction.follow(kept)
        return kept, (None if self.remaining_tokens else FinishReason.LENGTH), None


def open_session(
    session_id: int,
    request: GenerateRequest,
    seed: int,
    *,
    max_draft_tokens: int,
    max_model_len: int,
    eos_token_ids: Sequence[int],
    processors: RowProcessors | None = None,
    prediction: Prediction | None = None,
) -> Session:
    """Builds the session of a request that `check_request` has passed, and its `Prediction.of`."""
    params = request.sampling_params
    limit = max_model_len
    if params.max_tokens is not None:
        limit = min(limit, len(request.prompt_token_ids) + params.max_tokens)
    # Nothing can follow the end of a grammar.
    ignores_eos = params.ignore_eos and params.structured_outputs is None
    if request.max_draft_tokens is not None:
        max_draft_tokens = min(max_draft_tokens, request.max_draft_tokens)
    return Session(
        session_id=session_id,
        request=request,
        seed=seed,
        max_draft_tokens=max_draft_tokens,
        length_limit=limit,
        stop_token_ids=frozenset((*params.stop_token_ids, *(() if ignores_eos else eos_token_ids))),
        context=[*request.prompt_token_ids, *request.output_token_ids],
        block_hashes=BlockHashes(request.cache_salt),
        processors=processors,
        prediction=prediction,
    )


def check_request(
    request: GenerateRequest,
    max_model_len: int,
    vocab_size: int,
    proposers: Sequence[str],
    max_logprobs: int,
) -> None:
    """Refuses a request that can never be served, before any work.

    Raises:
        InvalidRequest: naming the field and its value.
    """
    params = request.sampling_params
    params.check_logprobs(max_logprobs)
    context_length = len(request.prompt_token_ids) + len(request.output_token_ids)
    if not request.prompt_token_ids:
        raise InvalidRequest("prompt_token_ids", [], "must have at least one token")
    if context_length >= max_model_len:
        rule = f"must leave room for output below the context limit of {max_model_len} tokens"
        raise InvalidRequest("prompt_token_ids", f"{context_length} tokens", rule)
    for name, token_ids in (
        ("prompt_token_ids", request.prompt_token_ids),
        ("output_token_ids", request.output_token_ids),
        ("prediction", request.prediction),
        *params.token_ids().items(),
    ):
        for outside in (i for i in token_ids if not 0 <= i < vocab_size):
            raise InvalidRequest(name, outside, f"must be in [0, {vocab_size})")
    if len(request.prediction) > max_model_len:
        rule = f"must have at most {max_model_len} tokens, the context limit"
        raise InvalidRequest("prediction", f"{len(request.prediction)} tokens", rule)
    if params.max_tokens is not None and len(request.output_token_ids) >= params.max_tokens:
        rule = f"must be fewer than max_tokens = {params.max_tokens}"
        raise InvalidRequest("output_token_ids", f"{len(request.output_token_ids)} tokens", rule)
    if request.max_draft_tokens is not None and request.max_draft_tokens < 0:
        raise InvalidRequest("max_draft_tokens", request.max_draft_tokens, "must not be negative")
    if request.proposer_address and request.proposer_address not in proposers:
        rule = f"must be one of the configured proposers {list(proposers)}"
        raise InvalidRequest("proposer_address", request.proposer_address, rule)
