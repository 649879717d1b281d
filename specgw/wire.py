"""Turns protobuf messages into the values of `types.py` and back, and refuses malformed ones.

Checks here need the message alone. What needs a model or a session (ids within the vocabulary,
lengths within the context) is checked by the service that has it.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from specgw.errors import InvalidRequest
from specgw.hidden import HiddenFormat, HiddenStates
from specgw.structured_outputs import StructuredOutputsParams
from specgw.types import (
    MAX_BLOCKS_AHEAD,
    AcceptanceRule,
    AnyBlock,
    BlocksAhead,
    Commit,
    DraftBlock,
    DraftSampling,
    FinishReason,
    GenerateOutput,
    GenerateRequest,
    Hello,
    HelloAck,
    ModelDescription,
    OpenSession,
    ProposerStatus,
    ProposeStep,
    SamplingParams,
    SpeculationStats,
    TokenLogprobs,
    TokenProbs,
    UndraftedReason,
    VerifierInfo,
    VocabMappingSummary,
)
from specgw.v1 import proposer_pb2, types_pb2, verifier_pb2

_INT32_MAX = 2**31 - 1
_NANOS = 10**9

_FINISH_TO_PB = {
    FinishReason.STOP: verifier_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: verifier_pb2.FINISH_REASON_LENGTH,
}
_FINISH_FROM_PB = {pb: reason for reason, pb in _FINISH_TO_PB.items()}

_RULE_TO_PB = {
    rule: proposer_pb2.AcceptanceRule.Value(f"ACCEPTANCE_RULE_{rule.name}")
    for rule in AcceptanceRule
}
_RULE_FROM_PB = {pb: rule for rule, pb in _RULE_TO_PB.items()}

_UNDRAFTED_TO_PB = {
    reason: types_pb2.UndraftedReason.Value(f"UNDRAFTED_REASON_{reason.name}")
    for reason in UndraftedReason
}
_UNDRAFTED_FROM_PB = {pb: reason for reason, pb in _UNDRAFTED_TO_PB.items()}


def token_ids_from_pb(pb: types_pb2.TokenIds, field: str) -> list[int]:
    """Unpacks ids.

    Raises:
        InvalidRequest: naming `field`, if the count does not match the bytes.
    """
    num_bytes = len(pb.int32_le)
    if num_bytes != 4 * pb.count:
        raise InvalidRequest(f"{field}.count", pb.count, f"must match {num_bytes} bytes of ids")
    ids: list[int] = np.frombuffer(pb.int32_le, "<i4").tolist()
    return ids


def token_ids_to_pb(token_ids: Sequence[int]) -> types_pb2.TokenIds:
    """Packs ids."""
    packed = np.asarray(token_ids, "<i4").tobytes()
    return types_pb2.TokenIds(int32_le=packed, count=len(token_ids))


def sampling_params_from_pb(pb: types_pb2.SamplingParams) -> SamplingParams:
    return SamplingParams(
        temperature=pb.temperature if pb.HasField("temperature") else 1.0,
        top_p=pb.top_p if pb.HasField("top_p") else 1.0,
        top_k=pb.top_k,
        min_p=pb.min_p,
        seed=pb.seed if pb.HasField("seed") else None,
        max_tokens=pb.max_tokens or None,
        stop_token_ids=tuple(pb.stop_token_ids),
        ignore_eos=pb.ignore_eos,
        presence_penalty=pb.presence_penalty,
        frequency_penalty=pb.frequency_penalty,
        repetition_penalty=pb.repetition_penalty if pb.HasField("repetition_penalty") else 1.0,
        min_tokens=pb.min_tokens,
        logit_bias=dict(pb.logit_bias),
        bad_words_token_ids=tuple(
            tuple(token_ids_from_pb(ids, "bad_words_token_ids")) for ids in pb.bad_words_token_ids
        ),
        allowed_token_ids=(
            tuple(token_ids_from_pb(pb.allowed_token_ids, "allowed_token_ids"))
            if pb.HasField("allowed_token_ids")
            else None
        ),
        logprobs=pb.logprobs if pb.HasField("logprobs") else None,
        prompt_logprobs=pb.prompt_logprobs if pb.HasField("prompt_logprobs") else None,
    )


def sampling_params_to_pb(params: SamplingParams) -> types_pb2.SamplingParams:
    """Packs what a verifier needs; stop strings are not its business."""
    for name, token_ids in params.token_ids().items():
        if any(not 0 <= token_id <= _INT32_MAX for token_id in token_ids):
            raise InvalidRequest(name, token_ids, "must be token ids")
    allowed = params.allowed_token_ids
    return types_pb2.SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=min(max(params.top_k, 0), _INT32_MAX),
        min_p=params.min_p,
        seed=params.seed,
        max_tokens=min(params.max_tokens or 0, _INT32_MAX),
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        min_tokens=min(params.min_tokens, _INT32_MAX),
        logit_bias=params.logit_bias,
        bad_words_token_ids=[token_ids_to_pb(ids) for ids in params.bad_words_token_ids],
        allowed_token_ids=None if allowed is None else token_ids_to_pb(allowed),
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
    )


def structured_outputs_from_pb(pb: types_pb2.StructuredOutputs) -> StructuredOutputsParams:
    constraint = pb.WhichOneof("constraint")
    return StructuredOutputsParams(
        json=pb.json if constraint == "json" else None,
        regex=pb.regex if constraint == "regex" else None,
        choice=tuple(pb.choice.texts) if constraint == "choice" else None,
        grammar=pb.grammar if constraint == "grammar" else None,
        json_object=pb.json_object,
        disable_any_whitespace=pb.disable_any_whitespace,
        disable_additional_properties=pb.disable_additional_properties,
        whitespace_pattern=pb.whitespace_pattern if pb.HasField("whitespace_pattern") else None,
    )


def structured_outputs_to_pb(
    params: StructuredOutputsParams | None,
) -> types_pb2.StructuredOutputs | None:
    if params is None:
        return None
    pb = types_pb2.StructuredOutputs(
        disable_any_whitespace=params.disable_any_whitespace,
        disable_additional_properties=params.disable_additional_properties,
        whitespace_pattern=params.whitespace_pattern,
    )
    if params.choice is not None:
        pb.choice.texts.extend(params.choice)
    else:
        setattr(pb, params.constraint, getattr(params, params.constraint))
    return pb


def token_logprobs_from_pb(pb: types_pb2.TokenLogprobs, field: str) -> tuple[TokenLogprobs, ...]:
    """Unpacks log probabilities.

    Raises:
        InvalidRequest: naming `field`, if the parts do not match.
    """
    ids = token_ids_from_pb(pb.token_ids, f"{field}.token_ids")
    count = len(pb.ranks)
    if len(pb.float32_le) != 4 * len(ids) or (len(ids) % count if count else ids):
        rule = f"must match {count} ranks and {len(pb.float32_le)} bytes of log probabilities"
        raise InvalidRequest(f"{field}.token_ids.count", len(ids), rule)
    values = np.frombuffer(pb.float32_le, "<f4").tolist()
    width = len(ids) // count if count else 0
    return tuple(
        TokenLogprobs(
            tuple(ids[row * width : (row + 1) * width]),
            tuple(values[row * width : (row + 1) * width]),
            rank,
        )
        for row, rank in enumerate(pb.ranks)
    )


def token_logprobs_to_pb(logprobs: Sequence[TokenLogprobs]) -> types_pb2.TokenLogprobs | None:
    """Packs log probabilities, as many for each token."""
    if not logprobs:
        return None
    values = np.asarray([one.logprobs for one in logprobs], "<f4")
    return types_pb2.TokenLogprobs(
        token_ids=token_ids_to_pb([i for one in logprobs for i in one.token_ids]),
        float32_le=values.tobytes(),
        ranks=[one.rank for one in logprobs],
    )


def model_description_from_pb(pb: types_pb2.ModelDescription) -> ModelDescription:
    return ModelDescription(
        name=pb.name,
        architecture=pb.architecture,
        vocab_size=pb.vocab_size,
        vocab_fingerprint=pb.vocab_fingerprint,
        max_model_len=pb.max_model_len,
        dtype=pb.dtype,
        device=pb.device,
    )


def model_description_to_pb(model: ModelDescription) -> types_pb2.ModelDescription:
    return types_pb2.ModelDescription(
        name=model.name,
        architecture=model.architecture,
        vocab_size=model.vocab_size,
        vocab_fingerprint=model.vocab_fingerprint,
        max_model_len=model.max_model_len,
        dtype=model.dtype,
        device=model.device,
    )


def undrafted_reason_from_pb(pb: types_pb2.UndraftedReason.ValueType) -> UndraftedReason | None:
    """Returns None for UNSPECIFIED; a reason that only a newer peer knows counts as ERROR."""
    if pb == types_pb2.UNDRAFTED_REASON_UNSPECIFIED:
        return None
    return _UNDRAFTED_FROM_PB.get(pb, UndraftedReason.ERROR)


def undrafted_reason_to_pb(reason: UndraftedReason | None) -> types_pb2.UndraftedReason.ValueType:
    return _UNDRAFTED_TO_PB[reason] if reason else types_pb2.UNDRAFTED_REASON_UNSPECIFIED


def speculation_stats_from_pb(pb: types_pb2.SpeculationStats) -> SpeculationStats:
    stats = SpeculationStats(
        draft_count=pb.draft_count,
        draft_token_count=pb.draft_token_count,
        accepted_token_count=pb.accepted_token_count,
        accepted_per_position=list(pb.accepted_token_count_per_position),
        is_synthetic=pb.is_synthetic,
    )
    for rounds in pb.undrafted_rounds:
        reason = undrafted_reason_from_pb(rounds.reason) or UndraftedReason.ERROR
        stats.undrafted[reason] = stats.undrafted.get(reason, 0) + rounds.count
    return stats


def speculation_stats_to_pb(stats: SpeculationStats) -> types_pb2.SpeculationStats:
    return types_pb2.SpeculationStats(
        draft_count=stats.draft_count,
        draft_token_count=stats.draft_token_count,
        accepted_token_count=stats.accepted_token_count,
        accepted_token_count_per_position=stats.accepted_per_position,
        undrafted_rounds=[
            types_pb2.UndraftedRounds(reason=undrafted_reason_to_pb(reason), count=count)
            for reason, count in stats.undrafted.items()
        ],
        is_synthetic=stats.is_synthetic,
    )


def propose_request_from_pb(pb: proposer_pb2.ProposeRequest) -> Hello | ProposeStep:
    if pb.HasField("hello"):
        return hello_from_pb(pb.hello)
    if pb.HasField("step"):
        return propose_step_from_pb(pb.step)
    raise InvalidRequest("message", None, "must be hello or step")


def propose_request_to_pb(message: Hello | ProposeStep) -> proposer_pb2.ProposeRequest:
    if isinstance(message, Hello):
        return proposer_pb2.ProposeRequest(hello=hello_to_pb(message))
    return proposer_pb2.ProposeRequest(step=propose_step_to_pb(message))


def propose_response_from_pb(
    pb: proposer_pb2.ProposeResponse,
) -> HelloAck | tuple[list[AnyBlock], int]:
    """Returns the acknowledgement, or the blocks and the queue depth."""
    if pb.HasField("hello_ack"):
        return hello_ack_from_pb(pb.hello_ack)
    if pb.HasField("blocks"):
        return draft_blocks_from_pb(pb.blocks)
    raise InvalidRequest("message", None, "must be hello_ack or blocks")


def hello_from_pb(pb: proposer_pb2.Hello) -> Hello:
    if not pb.verifier_id:
        raise InvalidRequest("hello.verifier_id", pb.verifier_id, "must not be empty")
    return Hello(
        verifier_id=pb.verifier_id,
        target_model=model_description_from_pb(pb.target_model),
        max_draft_tokens=pb.max_draft_tokens,
        protocol_version=pb.protocol_version,
        method=pb.method,
        draft_model=pb.draft_model,
        extra_slots_per_session=(
            pb.extra_slots_per_session if pb.HasField("extra_slots_per_session") else None
        ),
        draft_sample_method=pb.draft_sample_method,
        hidden=_hidden_format_from_pb(pb.hidden) if pb.HasField("hidden") else None,
        takes_blocks_ahead=pb.takes_blocks_ahead,
    )


def hello_to_pb(hello: Hello) -> proposer_pb2.Hello:
    return proposer_pb2.Hello(
        protocol_version=hello.protocol_version,
        verifier_id=hello.verifier_id,
        target_model=model_description_to_pb(hello.target_model),
        max_draft_tokens=hello.max_draft_tokens,
        method=hello.method,
        draft_model=hello.draft_model,
        extra_slots_per_session=hello.extra_slots_per_session,
        draft_sample_method=hello.draft_sample_method,
        hidden=_hidden_format_to_pb(hello.hidden),
        takes_blocks_ahead=hello.takes_blocks_ahead,
    )


def hello_ack_from_pb(pb: proposer_pb2.HelloAck) -> HelloAck:
    return HelloAck(
        proposer_id=pb.proposer_id,
        method=pb.method,
        draft_model=model_description_from_pb(pb.draft_model),
        max_draft_tokens=pb.max_draft_tokens,
        extra_slots_per_session=pb.extra_slots_per_session,
        max_sessions=pb.max_sessions,
        kv_lookahead_per_session=pb.kv_lookahead_per_session,
        max_num_batched_tokens=pb.max_num_batched_tokens,
        kv_capacity_tokens=pb.kv_capacity_tokens,
        protocol_version=pb.protocol_version,
        hidden=_hidden_format_from_pb(pb.hidden) if pb.HasField("hidden") else None,
        vocab_mapping=(
            _vocab_mapping_from_pb(pb.vocab_mapping) if pb.HasField("vocab_mapping") else None
        ),
        draft_sample_method=pb.draft_sample_method,
    )


def hello_ack_to_pb(ack: HelloAck) -> proposer_pb2.HelloAck:
    return proposer_pb2.HelloAck(
        protocol_version=ack.protocol_version,
        proposer_id=ack.proposer_id,
        method=ack.method,
        draft_model=model_description_to_pb(ack.draft_model),
        max_draft_tokens=ack.max_draft_tokens,
        extra_slots_per_session=ack.extra_slots_per_session,
        max_sessions=ack.max_sessions,
        kv_lookahead_per_session=ack.kv_lookahead_per_session,
        max_num_batched_tokens=ack.max_num_batched_tokens,
        kv_capacity_tokens=ack.kv_capacity_tokens,
        draft_sample_method=ack.draft_sample_method,
        hidden=_hidden_format_to_pb(ack.hidden),
        vocab_mapping=_vocab_mapping_to_pb(ack.vocab_mapping) if ack.vocab_mapping else None,
    )


def _vocab_mapping_from_pb(pb: proposer_pb2.VocabMapping) -> VocabMappingSummary:
    return VocabMappingSummary(pb.method, pb.fingerprint, pb.target_coverage, pb.draft_coverage)


def _vocab_mapping_to_pb(summary: VocabMappingSummary) -> proposer_pb2.VocabMapping:
    return proposer_pb2.VocabMapping(
        method=summary.method,
        fingerprint=summary.fingerprint,
        target_coverage=summary.target_coverage,
        draft_coverage=summary.draft_coverage,
    )


def _hidden_format_from_pb(pb: proposer_pb2.HiddenFormat) -> HiddenFormat:
    return HiddenFormat(tuple(pb.layers), pb.size, pb.dtype)


def _hidden_format_to_pb(hidden: HiddenFormat | None) -> proposer_pb2.HiddenFormat | None:
    if hidden is None:
        return None
    return proposer_pb2.HiddenFormat(layers=hidden.layers, size=hidden.size, dtype=hidden.dtype)


def proposer_status_from_pb(pb: verifier_pb2.ProposerStatus) -> ProposerStatus:
    offer = HelloAck(
        proposer_id=pb.proposer_id,
        method=pb.method,
        draft_model=model_description_from_pb(pb.draft_model),
        max_draft_tokens=pb.max_draft_tokens,
        extra_slots_per_session=pb.extra_slots_per_session,
        max_sessions=pb.max_sessions,
        kv_lookahead_per_session=pb.kv_lookahead_per_session,
        max_num_batched_tokens=pb.max_num_batched_tokens,
        kv_capacity_tokens=pb.kv_capacity_tokens,
    )
    return ProposerStatus(
        address=pb.address,
        is_connected=pb.connected,
        session_count=pb.session_count,
        detail=pb.detail,
        offer=offer if pb.proposer_id else None,
    )


def proposer_status_to_pb(status: ProposerStatus) -> verifier_pb2.ProposerStatus:
    pb = verifier_pb2.ProposerStatus(
        address=status.address,
        connected=status.is_connected,
        session_count=status.session_count,
        detail=status.detail,
    )
    if (offer := status.offer) is not None:
        pb.method = offer.method
        pb.proposer_id = offer.proposer_id
        pb.draft_model.CopyFrom(model_description_to_pb(offer.draft_model))
        pb.max_draft_tokens = offer.max_draft_tokens
        pb.extra_slots_per_session = offer.extra_slots_per_session
        pb.kv_lookahead_per_session = offer.kv_lookahead_per_session
        pb.max_sessions = offer.max_sessions
        pb.max_num_batched_tokens = offer.max_num_batched_tokens
        pb.kv_capacity_tokens = offer.kv_capacity_tokens
    return pb


def verifier_info_from_pb(pb: verifier_pb2.GetVerifierInfoResponse) -> VerifierInfo:
    """Unpacks what a verifier has; what it does at the moment is left out."""
    return VerifierInfo(
        verifier_id=pb.verifier_id,
        target_model=model_description_from_pb(pb.target_model),
        max_num_seqs=pb.max_num_seqs,
        max_num_batched_tokens=pb.max_num_batched_tokens,
        kv_capacity_tokens=pb.kv_capacity_tokens,
        max_draft_tokens=pb.max_draft_tokens,
        kv_lookahead_per_session=pb.kv_lookahead_per_session,
        proposers=[proposer_status_from_pb(one) for one in pb.proposers],
        protocol_version=pb.protocol_version,
        generates_many=pb.generates_many,
    )


def verifier_info_to_pb(verifier: VerifierInfo) -> verifier_pb2.GetVerifierInfoResponse:
    return verifier_pb2.GetVerifierInfoResponse(
        protocol_version=verifier.protocol_version,
        verifier_id=verifier.verifier_id,
        target_model=model_description_to_pb(verifier.target_model),
        max_num_seqs=verifier.max_num_seqs,
        max_num_batched_tokens=verifier.max_num_batched_tokens,
        kv_capacity_tokens=verifier.kv_capacity_tokens,
        max_draft_tokens=verifier.max_draft_tokens,
        kv_lookahead_per_session=verifier.kv_lookahead_per_session,
        proposers=[proposer_status_to_pb(one) for one in verifier.proposers],
        generates_many=verifier.generates_many,
    )


def propose_step_from_pb(pb: proposer_pb2.ProposeStep) -> ProposeStep:
    return ProposeStep(
        open=[
            _open_session_from_pb(one, f"step.open[{index}]") for index, one in enumerate(pb.open)
        ],
        commit=[
            _commit_from_pb(one, f"step.commit[{index}]") for index, one in enumerate(pb.commit)
        ],
        close=[one.session_id for one in pb.close],
    )


def propose_step_to_pb(step: ProposeStep) -> proposer_pb2.ProposeStep:
    return proposer_pb2.ProposeStep(
        open=[
            proposer_pb2.OpenSession(
                session_id=one.session_id,
                token_ids=token_ids_to_pb(one.token_ids),
                structured_outputs=structured_outputs_to_pb(one.structured_outputs),
                prompt_length=one.prompt_length,
                cache_salt=one.cache_salt,
                sampling=_draft_sampling_to_pb(one.sampling) if one.sampling else None,
            )
            for one in step.open
        ],
        commit=[
            proposer_pb2.Commit(
                session_id=one.session_id,
                base_length=one.base_length,
                token_ids=token_ids_to_pb(one.token_ids),
                max_draft_tokens=one.max_draft_tokens,
                hidden=_hidden_states_to_pb(one.hidden),
                taken_draft_tokens=one.num_taken,
            )
            for one in step.commit
        ],
        close=[proposer_pb2.CloseSession(session_id=session_id) for session_id in step.close],
    )


def _open_session_from_pb(pb: proposer_pb2.OpenSession, field: str) -> OpenSession:
    _require_at_least(1, pb.session_id, f"{field}.session_id")
    _require_at_least(1, pb.token_ids.count, f"{field}.token_ids.count")
    _require_at_least(0, pb.prompt_length, f"{field}.prompt_length")
    return OpenSession(
        session_id=pb.session_id,
        token_ids=token_ids_from_pb(pb.token_ids, f"{field}.token_ids"),
        cache_salt=pb.cache_salt,
        structured_outputs=(
            structured_outputs_from_pb(pb.structured_outputs)
            if pb.HasField("structured_outputs")
            else None
        ),
        prompt_length=pb.prompt_length,
        sampling=(
            _draft_sampling_from_pb(pb.sampling, f"{field}.sampling")
            if pb.HasField("sampling")
            else None
        ),
    )


def _draft_sampling_from_pb(pb: proposer_pb2.DraftSampling, field: str) -> DraftSampling:
    try:
        params = SamplingParams(
            temperature=pb.temperature,
            top_k=pb.top_k,
            top_p=pb.top_p if pb.HasField("top_p") else 1.0,
            min_p=pb.min_p,
        )
    except InvalidRequest as error:
        raise InvalidRequest(f"{field}.{error.field}", error.value, error.rule) from error
    return DraftSampling(params.temperature, params.top_k, params.top_p, params.min_p, pb.seed)


def _draft_sampling_to_pb(sampling: DraftSampling) -> proposer_pb2.DraftSampling:
    return proposer_pb2.DraftSampling(
        temperature=sampling.temperature,
        top_k=min(max(sampling.top_k, 0), _INT32_MAX),
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
    )


def _commit_from_pb(pb: proposer_pb2.Commit, field: str) -> Commit:
    _require_at_least(1, pb.session_id, f"{field}.session_id")
    _require_at_least(0, pb.base_length, f"{field}.base_length")
    _require_at_least(0, pb.max_draft_tokens, f"{field}.max_draft_tokens")
    _require_at_least(0, pb.taken_draft_tokens, f"{field}.taken_draft_tokens")
    if pb.taken_draft_tokens and pb.max_draft_tokens:
        rule = "must be 0 if max_draft_tokens is not"
        raise InvalidRequest(f"{field}.taken_draft_tokens", pb.taken_draft_tokens, rule)
    return Commit(
        session_id=pb.session_id,
        base_length=pb.base_length,
        token_ids=token_ids_from_pb(pb.token_ids, f"{field}.token_ids"),
        max_draft_tokens=pb.max_draft_tokens,
        hidden=_hidden_states_from_pb(pb.hidden) if pb.HasField("hidden") else None,
        num_taken=pb.taken_draft_tokens,
    )


def _hidden_states_from_pb(pb: proposer_pb2.HiddenStates) -> HiddenStates:
    return HiddenStates(pb.values, pb.dtype, (pb.row_count, pb.row_size))


def _hidden_states_to_pb(states: HiddenStates | None) -> proposer_pb2.HiddenStates | None:
    if states is None:
        return None
    row_count, row_size = states.shape
    return proposer_pb2.HiddenStates(
        values=states.values, dtype=states.dtype, row_count=row_count, row_size=row_size
    )


def draft_blocks_from_pb(pb: proposer_pb2.DraftBlocks) -> tuple[list[AnyBlock], int]:
    """Returns the blocks, those ahead last, and the queue depth.

    A rule that only a newer peer knows counts as ONE_HOT, which is lossless whatever the peer did.
    """
    blocks: list[AnyBlock] = [
        _draft_block_from_pb(one, f"blocks[{i}]") for i, one in enumerate(pb.blocks)
    ]
    blocks += [_blocks_ahead_from_pb(one, f"ahead[{i}]") for i, one in enumerate(pb.ahead)]
    return blocks, pb.queue_depth


def draft_blocks_to_pb(blocks: Sequence[AnyBlock], queue_depth: int) -> proposer_pb2.DraftBlocks:
    return proposer_pb2.DraftBlocks(
        blocks=[_draft_block_to_pb(one) for one in blocks if isinstance(one, DraftBlock)],
        queue_depth=queue_depth,
        ahead=[_blocks_ahead_to_pb(one) for one in blocks if isinstance(one, BlocksAhead)],
    )


def _blocks_ahead_from_pb(pb: proposer_pb2.BlocksAhead, field: str) -> BlocksAhead:
    count = len(pb.accepted_counts)
    if not 1 <= count <= MAX_BLOCKS_AHEAD:
        rule = f"must be for 1 to {MAX_BLOCKS_AHEAD} outcomes"
        raise InvalidRequest(f"{field}.accepted_counts", f"{count} outcomes", rule)
    target_token_ids = token_ids_from_pb(pb.target_token_ids, f"{field}.target_token_ids")
    token_ids = token_ids_from_pb(pb.token_ids, f"{field}.token_ids")
    if len(target_token_ids) != count:
        rule = f"must be one for each of {count} outcomes"
        raise InvalidRequest(f"{field}.target_token_ids", f"{len(target_token_ids)} ids", rule)
    if not token_ids or len(token_ids) % count:
        rule = f"must be as many for each of {count} outcomes, at least one"
        raise InvalidRequest(f"{field}.token_ids", f"{len(token_ids)} ids", rule)
    accepted_counts = tuple(pb.accepted_counts)
    _require_at_least(0, min(accepted_counts), f"{field}.accepted_counts")
    return BlocksAhead(pb.session_id, pb.base_length, accepted_counts, target_token_ids, token_ids)


def _blocks_ahead_to_pb(blocks: BlocksAhead) -> proposer_pb2.BlocksAhead:
    return proposer_pb2.BlocksAhead(
        session_id=blocks.session_id,
        base_length=blocks.base_length,
        accepted_counts=blocks.accepted_counts,
        target_token_ids=token_ids_to_pb(blocks.target_token_ids),
        token_ids=token_ids_to_pb(blocks.token_ids),
    )


def _draft_block_from_pb(pb: proposer_pb2.DraftBlock, field: str) -> DraftBlock:
    token_ids = token_ids_from_pb(pb.token_ids, f"{field}.token_ids")
    reason = undrafted_reason_from_pb(pb.reason)
    if not token_ids and reason is None:
        reason = UndraftedReason.EMPTY
    return DraftBlock(
        session_id=pb.session_id,
        base_length=pb.base_length,
        token_ids=token_ids,
        reason=reason,
        draft_s=pb.draft_time.seconds + pb.draft_time.nanos / _NANOS,
        rule=_RULE_FROM_PB.get(pb.rule, AcceptanceRule.ONE_HOT),
        draft_probs=(
            _draft_probs_from_pb(pb.draft_probs, f"{field}.draft_probs")
            if pb.HasField("draft_probs")
            else ()
        ),
    )


def _draft_probs_from_pb(pb: proposer_pb2.DraftProbs, field: str) -> tuple[TokenProbs, ...]:
    """Unpacks laws as they were sent; whether they are laws is for the verifier to see."""
    token_ids = token_ids_from_pb(pb.token_ids, f"{field}.token_ids")
    if len(pb.float32_le) != 4 * len(token_ids):
        rule = f"must have {4 * len(token_ids)} bytes"
        raise InvalidRequest(f"{field}.float32_le", f"{len(pb.float32_le)} bytes", rule)
    if sum(pb.support_counts) != len(token_ids) or any(n < 1 for n in pb.support_counts):
        rule = f"must be at least 1 each, with sum {len(token_ids)}"
        raise InvalidRequest(f"{field}.support_counts", list(pb.support_counts), rule)
    ends = np.cumsum(pb.support_counts)[:-1]
    supports = np.split(np.asarray(token_ids, np.int32), ends) if pb.support_counts else []
    probs = np.split(np.frombuffer(pb.float32_le, "<f4"), ends)
    return tuple(TokenProbs(*one) for one in zip(supports, probs, strict=False))


def _draft_probs_to_pb(laws: Sequence[TokenProbs]) -> proposer_pb2.DraftProbs | None:
    if not laws:
        return None
    token_ids = np.concatenate([law.token_ids for law in laws]).astype("<i4").tobytes()
    return proposer_pb2.DraftProbs(
        support_counts=[len(law.token_ids) for law in laws],
        token_ids=types_pb2.TokenIds(int32_le=token_ids, count=len(token_ids) // 4),
        float32_le=np.concatenate([law.probs for law in laws]).astype("<f4").tobytes(),
    )


def _draft_block_to_pb(block: DraftBlock) -> proposer_pb2.DraftBlock:
    pb = proposer_pb2.DraftBlock(
        session_id=block.session_id,
        base_length=block.base_length,
        token_ids=token_ids_to_pb(block.token_ids),
        rule=_RULE_TO_PB[block.rule],
        reason=undrafted_reason_to_pb(block.reason),
        draft_probs=_draft_probs_to_pb(block.draft_probs),
    )
    pb.draft_time.seconds, pb.draft_time.nanos = divmod(round(block.draft_s * _NANOS), _NANOS)
    return pb


def generate_request_from_pb(pb: verifier_pb2.GenerateRequest) -> GenerateRequest:
    if not pb.request_id:
        raise InvalidRequest("request_id", pb.request_id, "must not be empty")
    _require_at_least(1, pb.prompt_token_ids.count, "prompt_token_ids.count")
    return GenerateRequest(
        request_id=pb.request_id,
        prompt_token_ids=token_ids_from_pb(pb.prompt_token_ids, "prompt_token_ids"),
        sampling_params=replace(
            sampling_params_from_pb(pb.sampling_params),
            structured_outputs=structured_outputs_from_pb(pb.structured_outputs)
            if pb.HasField("structured_outputs")
            else None,
        ),
        output_token_ids=token_ids_from_pb(pb.output_token_ids, "output_token_ids"),
        proposer_address=pb.proposer_address,
        max_draft_tokens=pb.max_draft_tokens if pb.HasField("max_draft_tokens") else None,
        cache_salt=pb.cache_salt,
        prediction=token_ids_from_pb(pb.prediction, "prediction"),
    )


def generate_request_to_pb(request: GenerateRequest) -> verifier_pb2.GenerateRequest:
    return verifier_pb2.GenerateRequest(
        request_id=request.request_id,
        prompt_token_ids=token_ids_to_pb(request.prompt_token_ids),
        output_token_ids=token_ids_to_pb(request.output_token_ids),
        sampling_params=sampling_params_to_pb(request.sampling_params),
        proposer_address=request.proposer_address,
        max_draft_tokens=request.max_draft_tokens,
        structured_outputs=structured_outputs_to_pb(request.sampling_params.structured_outputs),
        cache_salt=request.cache_salt,
        prediction=token_ids_to_pb(request.prediction) if request.prediction else None,
    )


def generate_output_from_pb(pb: verifier_pb2.GenerateResponse) -> GenerateOutput:
    """Unpacks a response, but for the statistics, which are totals: its round is empty.

    A finish reason that only a newer peer knows counts as STOP.
    """
    finish_reason = None
    if pb.finish_reason != verifier_pb2.FINISH_REASON_UNSPECIFIED:
        finish_reason = _FINISH_FROM_PB.get(pb.finish_reason, FinishReason.STOP)
    return GenerateOutput(
        token_ids=token_ids_from_pb(pb.token_ids, "token_ids"),
        finish_reason=finish_reason,
        stop_token_id=pb.stop_token_id if pb.HasField("stop_token_id") else None,
        seed=pb.seed if pb.HasField("seed") else None,
        logprobs=token_logprobs_from_pb(pb.logprobs, "logprobs"),
        prompt_logprobs=token_logprobs_from_pb(pb.prompt_logprobs, "prompt_logprobs"),
        cached_token_count=pb.cached_token_count if pb.HasField("cached_token_count") else None,
    )


def generate_output_to_pb(
    output: GenerateOutput, speculation: SpeculationStats | None = None
) -> verifier_pb2.GenerateResponse:
    """Packs an output, and the totals over its request so far."""
    reason = output.finish_reason
    return verifier_pb2.GenerateResponse(
        token_ids=token_ids_to_pb(output.token_ids),
        finish_reason=_FINISH_TO_PB[reason] if reason else verifier_pb2.FINISH_REASON_UNSPECIFIED,
        stop_token_id=output.stop_token_id,
        seed=output.seed,
        speculation=speculation_stats_to_pb(speculation) if speculation else None,
        logprobs=token_logprobs_to_pb(output.logprobs),
        prompt_logprobs=token_logprobs_to_pb(output.prompt_logprobs),
        cached_token_count=output.cached_token_count,
    )


def _require_at_least(least: int, value: int, field: str) -> None:
    if value < least:
        raise InvalidRequest(field, value, f"must be at least {least}")
