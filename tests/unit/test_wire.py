"""Every value survives the wire, and malformed messages are refused by the name of their field."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specgw import wire
from specgw.errors import InvalidRequest
from specgw.hidden import DTYPE_BYTES, MAX_COMMIT_BYTES, HiddenFormat, HiddenStates
from specgw.structured_outputs import StructuredOutputsParams
from specgw.types import (
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
    Round,
    SamplingParams,
    SpeculationStats,
    TokenLogprobs,
    TokenProbs,
    UndraftedReason,
    VerifierInfo,
    VocabMappingSummary,
)
from specgw.v1 import proposer_pb2, types_pb2, verifier_pb2

int32s = st.integers(-(2**31), 2**31 - 1)
counts = st.integers(0, 2**31 - 1)
int64s = st.integers(-(2**63), 2**63 - 1)
session_ids = st.integers(1, 2**63 - 1)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
names = texts.filter(bool)
token_ids = st.lists(int32s, max_size=6)
some_token_ids = st.lists(int32s, min_size=1, max_size=6)
models = st.builds(
    ModelDescription, texts, texts, counts, texts, counts, texts, st.sampled_from(["cpu", "cuda:0"])
)
hidden_formats = st.builds(
    HiddenFormat,
    st.lists(st.integers(-1, 200), min_size=1, max_size=3, unique=True).map(tuple),
    st.integers(1, 2**31 - 1),
    texts,
)
hidden_states = st.builds(
    lambda dtype, rows, size: HiddenStates(
        bytes(rows * size * DTYPE_BYTES[dtype]), dtype, (rows, size)
    ),
    st.sampled_from(list(DTYPE_BYTES)),
    st.integers(1, 3),
    st.integers(1, 5),
)
hellos = st.builds(
    Hello,
    *(names, models, int32s, int32s, texts, texts),
    st.none() | st.integers(0, 2**31 - 1),
    st.none() | hidden_formats,
    draft_sample_method=texts,
    takes_blocks_ahead=st.booleans(),
)
sizes = st.integers(0, 2**63 - 1)
offers = st.builds(
    HelloAck, names, texts, models, counts, counts, counts, counts, counts, sizes, st.just(1)
)
shares = st.floats(0, 1)
acks = st.builds(
    HelloAck,
    *(texts, texts, models, counts, counts, counts, counts, counts, sizes, counts),
    st.none() | hidden_formats,
    st.none() | st.builds(VocabMappingSummary, texts, texts, shares, shares),
    draft_sample_method=texts,
)
statuses = st.builds(ProposerStatus, texts, st.booleans(), counts, texts, st.none() | offers)
verifier_infos = st.builds(
    VerifierInfo,
    *(texts, models, counts, counts, sizes, counts, counts),
    st.lists(statuses, max_size=3),
    counts,
)
constraints = st.one_of(
    st.builds(
        StructuredOutputsParams,
        json=texts,
        disable_any_whitespace=st.booleans(),
        disable_additional_properties=st.booleans(),
    ),
    st.builds(StructuredOutputsParams, json=texts, whitespace_pattern=st.none() | texts),
    st.builds(StructuredOutputsParams, json_object=st.just(True)),
    st.builds(StructuredOutputsParams, regex=texts),
    st.builds(StructuredOutputsParams, choice=st.lists(texts, min_size=1, max_size=3)),
    st.builds(StructuredOutputsParams, grammar=texts),
)
samplings = st.builds(
    DraftSampling,
    temperature=st.floats(0, 2),
    top_k=counts,
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1),
    seed=int64s,
)
steps = st.builds(
    ProposeStep,
    open=st.lists(
        st.builds(
            *(OpenSession, session_ids, some_token_ids, texts, st.none() | constraints, counts),
            st.none() | samplings,
        ),
        max_size=3,
    ),
    commit=st.lists(
        st.one_of(
            st.builds(
                *(Commit, session_ids, counts, token_ids, counts, st.none() | hidden_states),
                num_taken=st.just(0),
            ),
            st.builds(Commit, session_ids, counts, token_ids, st.just(0), st.none(), counts),
        ),
        max_size=3,
    ),
    close=st.lists(session_ids, max_size=3),
)
durations = st.integers(0, 10**13).map(lambda nanos: nanos // 10**9 + nanos % 10**9 / 10**9)
blocks = st.one_of(
    st.builds(
        *(DraftBlock, session_ids, counts, some_token_ids, st.none(), durations),
        st.sampled_from(AcceptanceRule),
        draft_probs=st.just(()),
    ),
    st.builds(
        *(DraftBlock, session_ids, counts, st.just([]), st.sampled_from(UndraftedReason)),
        durations,
        rule=st.sampled_from(AcceptanceRule),
        draft_probs=st.just(()),
    ),
)


@st.composite
def blocks_ahead(draw: st.DrawFn) -> BlocksAhead:
    """Draws blocks of one size, one for each outcome."""
    count, size = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    accepted = draw(st.lists(counts, min_size=count, max_size=count))
    ids = draw(st.lists(int32s, min_size=count * (1 + size), max_size=count * (1 + size)))
    base_length = draw(counts)
    parts = tuple(accepted), ids[:count], ids[count:]
    return BlocksAhead(draw(session_ids), base_length, *parts)


stats = st.builds(
    SpeculationStats,
    counts,
    counts,
    counts,
    st.lists(counts, max_size=4),
    st.dictionaries(st.sampled_from(UndraftedReason), counts),
)
sampling_params = st.builds(
    SamplingParams,
    temperature=st.floats(0, 2),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=counts,
    min_p=st.floats(0, 1),
    seed=st.none() | int64s,
    max_tokens=st.none() | st.integers(1, 2**31 - 1),
    stop_token_ids=st.lists(counts, max_size=3),
    ignore_eos=st.booleans(),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0, 9, exclude_min=True),
    logit_bias=st.dictionaries(counts, st.floats(-100, 100, width=32), max_size=3),
    bad_words_token_ids=st.lists(st.lists(counts, min_size=1, max_size=3), max_size=3),
    allowed_token_ids=st.none() | st.lists(counts, min_size=1, max_size=3),
    logprobs=st.none() | st.integers(-1, 20),
    prompt_logprobs=st.none() | st.integers(-1, 20),
)
generate_requests = st.builds(
    GenerateRequest,
    request_id=names,
    prompt_token_ids=some_token_ids,
    sampling_params=st.builds(replace, sampling_params, structured_outputs=st.none() | constraints),
    output_token_ids=token_ids,
    proposer_address=texts,
    max_draft_tokens=st.none() | int32s,
    cache_salt=texts,
    prediction=token_ids,
)
finite = st.floats(-1e9, 0, width=32)


@st.composite
def logprobs(draw: st.DrawFn) -> tuple[TokenLogprobs, ...]:
    """Draws log probabilities of as many tokens beside each."""
    width = draw(st.integers(1, 4))
    one = st.builds(
        TokenLogprobs,
        st.tuples(*[int32s] * width),
        st.tuples(*[finite] * width),
        counts,
    )
    return tuple(draw(st.lists(one, max_size=4)))


generate_outputs = st.builds(
    GenerateOutput,
    token_ids=token_ids,
    finish_reason=st.none() | st.sampled_from(FinishReason),
    stop_token_id=st.none() | int32s,
    seed=st.none() | int64s,
    round=st.just(Round()),  # on the wire there are totals
    logprobs=logprobs(),
    prompt_logprobs=logprobs(),
    cached_token_count=st.none() | counts,
)


@given(token_ids)
def test_token_ids_are_little_endian_int32(ids: list[int]) -> None:
    pb = wire.token_ids_to_pb(ids)

    assert pb.int32_le == b"".join(i.to_bytes(4, "little", signed=True) for i in ids)
    assert wire.token_ids_from_pb(pb, "ids") == ids


@pytest.mark.parametrize(("data", "count"), [(b"1234", 2), (b"123", 1), (b"1234", -1), (b"", 1)])
def test_a_count_that_does_not_match_the_bytes_is_refused(data: bytes, count: int) -> None:
    pb = types_pb2.TokenIds(int32_le=data, count=count)

    with pytest.raises(InvalidRequest, match=r"prompt_token_ids\.count: must match"):
        wire.token_ids_from_pb(pb, "prompt_token_ids")


@given(hellos | steps)
def test_propose_requests_survive(message: Hello | ProposeStep) -> None:
    pb = proposer_pb2.ProposeRequest()
    pb.ParseFromString(wire.propose_request_to_pb(message).SerializeToString())

    assert wire.propose_request_from_pb(pb) == message


@given(acks)
def test_hello_acks_survive(ack: HelloAck) -> None:
    pb = proposer_pb2.ProposeResponse(hello_ack=wire.hello_ack_to_pb(ack))

    assert wire.propose_response_from_pb(pb) == ack


@given(verifier_infos)
def test_verifier_descriptions_survive(info: VerifierInfo) -> None:
    assert wire.verifier_info_from_pb(wire.verifier_info_to_pb(info)) == info


@given(st.lists(blocks, max_size=3), counts)
def test_blocks_survive(drafted: list[DraftBlock], queue_depth: int) -> None:
    pb = proposer_pb2.ProposeResponse(blocks=wire.draft_blocks_to_pb(drafted, queue_depth))

    assert wire.propose_response_from_pb(pb) == (drafted, queue_depth)


@given(st.lists(blocks, max_size=2), st.lists(blocks_ahead(), max_size=2), counts)
def test_blocks_ahead_survive_behind_those_asked_for(
    answers: list[DraftBlock], ahead: list[BlocksAhead], queue_depth: int
) -> None:
    sent: list[AnyBlock] = [*ahead, *answers]
    pb = proposer_pb2.ProposeResponse(blocks=wire.draft_blocks_to_pb(sent, queue_depth))

    assert wire.propose_response_from_pb(pb) == ([*answers, *ahead], queue_depth)


def test_a_block_ahead_is_found_by_its_outcome() -> None:
    ahead = BlocksAhead(1, 7, (0, 0, 2), (5, 6, 5), (10, 11, 20, 21, 30, 31))

    found = [ahead.find(*outcome) for outcome in [(0, 5), (0, 6), (2, 5), (2, 6), (1, 5), (-1, 5)]]

    assert found == [(10, 11), (20, 21), (30, 31), (), (), ()]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"accepted_counts": []}, "accepted_counts"),
        ({"accepted_counts": [0] * 65}, "accepted_counts"),
        ({"target_token_ids": types_pb2.TokenIds()}, "target_token_ids"),
        ({"target_token_ids": types_pb2.TokenIds(count=2)}, "target_token_ids.count"),
        ({"token_ids": types_pb2.TokenIds()}, "token_ids"),
        ({"token_ids": wire.token_ids_to_pb([1, 2, 3])}, "token_ids"),
        ({"accepted_counts": [0, -1]}, "accepted_counts"),
    ],
)
def test_malformed_blocks_ahead_are_refused(change: dict[str, Any], field: str) -> None:
    pb = wire.draft_blocks_to_pb([BlocksAhead(1, 7, (0, 1), (5, 6), (10, 11, 20, 21))], 0)
    for name in change:
        pb.ahead[0].ClearField(name)  # type: ignore[arg-type]
    pb.ahead[0].MergeFrom(proposer_pb2.BlocksAhead(**change))

    with pytest.raises(InvalidRequest, match=rf"^ahead\[0\].{field}:"):
        wire.draft_blocks_from_pb(pb)


def _probs_block(supports: list[list[int]], probs: list[list[float]]) -> DraftBlock:
    laws = [
        TokenProbs(np.array(ids, np.int32), np.array(weights, np.float32))
        for ids, weights in zip(supports, probs, strict=True)
    ]
    token_ids = [ids[0] for ids in supports]
    return DraftBlock(1, 7, token_ids, rule=AcceptanceRule.PROBS, draft_probs=laws)


def test_the_laws_of_draft_tokens_survive_to_the_bit() -> None:
    block = _probs_block([[3, 1], [2**31 - 1]], [[0.1, 0.9], [1.0]])

    [found], _ = wire.draft_blocks_from_pb(wire.draft_blocks_to_pb([block], 0))

    assert isinstance(found, DraftBlock)
    assert found.rule is AcceptanceRule.PROBS
    for law, expected in zip(found.draft_probs, block.draft_probs, strict=True):
        np.testing.assert_array_equal(law.token_ids, expected.token_ids)
        np.testing.assert_array_equal(law.probs, expected.probs)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"support_counts": [2]}, "support_counts"),
        ({"support_counts": [3, 0]}, "support_counts"),
        ({"support_counts": [4, -1]}, "support_counts"),
        ({"float32_le": b"1234"}, "float32_le"),
        ({"token_ids": types_pb2.TokenIds(count=3)}, "token_ids.count"),
    ],
)
def test_laws_that_do_not_match_their_counts_are_refused(
    change: dict[str, object], field: str
) -> None:
    pb = wire.draft_blocks_to_pb([_probs_block([[3, 1], [2]], [[0.1, 0.9], [1.0]])], 0)
    for name in change:
        pb.blocks[0].draft_probs.ClearField(name)  # type: ignore[arg-type]
    pb.blocks[0].draft_probs.MergeFrom(proposer_pb2.DraftProbs(**change))  # type: ignore[arg-type]

    with pytest.raises(InvalidRequest, match=rf"blocks\[0\].draft_probs.{field}"):
        wire.draft_blocks_from_pb(pb)


def test_a_draft_sampling_out_of_range_is_refused() -> None:
    pb = proposer_pb2.OpenSession(session_id=1, token_ids=wire.token_ids_to_pb([1]))
    pb.sampling.temperature = -1

    with pytest.raises(InvalidRequest, match=r"step.open\[0\].sampling.temperature"):
        wire.propose_step_from_pb(proposer_pb2.ProposeStep(open=[pb]))


@given(generate_requests)
def test_generate_requests_survive(request: GenerateRequest) -> None:
    assert wire.generate_request_from_pb(wire.generate_request_to_pb(request)) == request


@given(generate_outputs)
def test_generate_outputs_survive(output: GenerateOutput) -> None:
    assert wire.generate_output_from_pb(wire.generate_output_to_pb(output)) == output


def test_absent_sampling_parameters_take_the_defaults_of_the_contract() -> None:
    assert wire.sampling_params_from_pb(types_pb2.SamplingParams()) == SamplingParams(
        max_tokens=None
    )


def test_a_temperature_of_zero_is_not_absent() -> None:
    params = SamplingParams(temperature=0, max_tokens=None)

    assert wire.sampling_params_from_pb(wire.sampling_params_to_pb(params)).is_greedy


def test_top_k_of_minus_one_travels_as_off() -> None:
    assert wire.sampling_params_to_pb(SamplingParams(top_k=-1)).top_k == 0


def test_limits_beyond_int32_travel_as_the_largest() -> None:
    pb = wire.sampling_params_to_pb(SamplingParams(top_k=2**40, max_tokens=2**40))

    assert pb.top_k == pb.max_tokens == 2**31 - 1


def test_a_stop_token_id_beyond_int32_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="stop_token_ids"):
        wire.sampling_params_to_pb(SamplingParams(stop_token_ids=(2**31,)))


def test_a_sampling_parameter_out_of_range_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="top_p: must be in"):
        wire.sampling_params_from_pb(types_pb2.SamplingParams(top_p=1.5))


def test_every_undrafted_reason_has_a_value_on_the_wire() -> None:
    on_the_wire = {wire.undrafted_reason_to_pb(reason) for reason in UndraftedReason}

    assert on_the_wire == set(types_pb2.UndraftedReason.values()) - {0}


def test_what_only_a_newer_peer_knows_is_not_lost() -> None:
    unknown = 99
    response = verifier_pb2.GenerateResponse()
    response.ParseFromString(bytes([0x10, unknown]))  # finish_reason
    block = proposer_pb2.DraftBlock()
    block.ParseFromString(bytes([0x28, unknown, 0x20, unknown]))  # reason, rule
    [drafted], _ = wire.draft_blocks_from_pb(proposer_pb2.DraftBlocks(blocks=[block]))

    assert isinstance(drafted, DraftBlock)
    assert wire.generate_output_from_pb(response).finish_reason is FinishReason.STOP
    assert drafted.reason is UndraftedReason.ERROR
    assert drafted.rule is AcceptanceRule.ONE_HOT


def test_a_block_with_neither_tokens_nor_reason_is_empty() -> None:
    [drafted], _ = wire.draft_blocks_from_pb(
        proposer_pb2.DraftBlocks(blocks=[proposer_pb2.DraftBlock(session_id=1)])
    )

    assert isinstance(drafted, DraftBlock)
    assert drafted.reason is UndraftedReason.EMPTY


def with_hidden(**hidden: Any) -> proposer_pb2.ProposeRequest:
    commit = proposer_pb2.Commit(session_id=1, hidden=proposer_pb2.HiddenStates(**hidden))
    return proposer_pb2.ProposeRequest(step=proposer_pb2.ProposeStep(commit=[commit]))


def taken(**commit: Any) -> proposer_pb2.ProposeRequest:
    step = proposer_pb2.ProposeStep(commit=[proposer_pb2.Commit(session_id=1, **commit)])
    return proposer_pb2.ProposeRequest(step=step)


def hello_with_hidden(**hidden: Any) -> proposer_pb2.ProposeRequest:
    return proposer_pb2.ProposeRequest(
        hello=proposer_pb2.Hello(verifier_id="v", hidden=proposer_pb2.HiddenFormat(**hidden))
    )


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (proposer_pb2.ProposeRequest(), "message"),
        (proposer_pb2.ProposeRequest(hello=proposer_pb2.Hello()), "hello.verifier_id"),
        (
            proposer_pb2.ProposeRequest(
                step=proposer_pb2.ProposeStep(open=[proposer_pb2.OpenSession(session_id=1)])
            ),
            "step.open[0].token_ids.count",
        ),
        (taken(taken_draft_tokens=-1), "step.commit[0].taken_draft_tokens"),
        (taken(taken_draft_tokens=1, max_draft_tokens=1), "step.commit[0].taken_draft_tokens"),
        (
            proposer_pb2.ProposeRequest(
                step=proposer_pb2.ProposeStep(
                    commit=[
                        proposer_pb2.Commit(session_id=1),
                        proposer_pb2.Commit(session_id=1, max_draft_tokens=-1),
                    ]
                )
            ),
            "step.commit[1].max_draft_tokens",
        ),
        (
            proposer_pb2.ProposeRequest(
                step=proposer_pb2.ProposeStep(commit=[proposer_pb2.Commit(session_id=0)])
            ),
            "step.commit[0].session_id",
        ),
        (
            proposer_pb2.ProposeRequest(
                step=proposer_pb2.ProposeStep(
                    commit=[proposer_pb2.Commit(session_id=1, base_length=-5)]
                )
            ),
            "step.commit[0].base_length",
        ),
        (with_hidden(values=b"12345", dtype="float32", row_count=1, row_size=1), "hidden.shape"),
        (with_hidden(values=b"", dtype="float32", row_count=0, row_size=4), "hidden.shape"),
        (with_hidden(values=b"12345678", dtype="float64", row_count=1, row_size=1), "hidden.dtype"),
        (
            with_hidden(
                values=bytes(MAX_COMMIT_BYTES + 2),
                dtype="float16",
                row_count=MAX_COMMIT_BYTES // 2 + 1,
                row_size=1,
            ),
            "hidden.values",
        ),
        (hello_with_hidden(layers=[], size=4, dtype="float32"), "hidden.layers"),
        (hello_with_hidden(layers=[3, 3], size=4, dtype="float32"), "hidden.layers"),
        (hello_with_hidden(layers=[-2], size=4, dtype="float32"), "hidden.layers"),
        (hello_with_hidden(layers=[-1], size=0, dtype="float32"), "hidden.size"),
    ],
)
def test_malformed_requests_are_refused_by_field(
    message: proposer_pb2.ProposeRequest, field: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        wire.propose_request_from_pb(message)

    assert caught.value.field == field


@pytest.mark.parametrize(
    ("request_pb", "field"),
    [
        (verifier_pb2.GenerateRequest(), "request_id"),
        (verifier_pb2.GenerateRequest(request_id="r"), "prompt_token_ids.count"),
    ],
)
def test_malformed_generate_requests_are_refused_by_field(
    request_pb: verifier_pb2.GenerateRequest, field: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        wire.generate_request_from_pb(request_pb)

    assert caught.value.field == field


@pytest.mark.parametrize(
    ("num_ids", "num_values", "num_ranks"), [(3, 3, 2), (2, 3, 1), (2, 0, 0), (0, 1, 1)]
)
def test_log_probabilities_whose_parts_do_not_match_are_refused(
    num_ids: int, num_values: int, num_ranks: int
) -> None:
    pb = types_pb2.TokenLogprobs(
        token_ids=wire.token_ids_to_pb([1] * num_ids),
        float32_le=b"\0\0\0\0" * num_values,
        ranks=[1] * num_ranks,
    )

    with pytest.raises(InvalidRequest, match=r"logprobs\.token_ids\.count: must match"):
        wire.token_logprobs_from_pb(pb, "logprobs")
