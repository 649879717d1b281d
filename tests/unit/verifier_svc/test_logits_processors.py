"""Processed logits equal those of plain loops over the prefix, row by row, whatever was drafted."""

import math
from collections.abc import Callable, Mapping, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from specgw.types import GenerateRequest, SamplingParams
from verifier_svc.logits_processors import RowProcessors, build_processors

VOCAB_SIZE = 8
EOS = 7
token_ids = st.integers(0, VOCAB_SIZE - 1)
sequences = st.lists(token_ids, max_size=8)
params_of_all_kinds = st.builds(
    SamplingParams,
    temperature=st.just(0),
    max_tokens=st.none(),
    min_tokens=st.integers(0, 6),
    stop_token_ids=st.lists(token_ids, max_size=2),
    ignore_eos=st.booleans(),
    presence_penalty=st.sampled_from([0, -2, 0.5]),
    frequency_penalty=st.sampled_from([0, -0.25, 2]),
    repetition_penalty=st.sampled_from([1, 0.5, 1.75]),
    logit_bias=st.dictionaries(token_ids, st.sampled_from([-100.0, -1.5, 3.0]), max_size=3),
    bad_words_token_ids=st.lists(st.lists(token_ids, min_size=1, max_size=3), max_size=3),
    allowed_token_ids=st.none() | st.lists(token_ids, min_size=1),
)


def reference(
    logits: Tensor, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> list[float]:
    """Follows vLLM's definitions, one token at a time."""
    expected = []
    for token_id, value in enumerate(logits.tolist()):
        x = value + params.logit_bias.get(token_id, 0.0)
        if token_id in prompt or token_id in output:
            x = x / params.repetition_penalty if x > 0 else x * params.repetition_penalty
        x -= params.frequency_penalty * output.count(token_id)
        x -= params.presence_penalty * (token_id in output)
        is_end = token_id == EOS or token_id in params.stop_token_ids
        is_masked = (
            (params.allowed_token_ids is not None and token_id not in params.allowed_token_ids)
            or (is_end and len(output) < params.min_tokens)
            or any(
                [*output, token_id][-len(word) :] == list(word)
                for word in params.bad_words_token_ids
            )
        )
        expected.append(-math.inf if is_masked else x)
    return expected


def build(
    params: SamplingParams, prompt: Sequence[int] = (1, 2), output: Sequence[int] = ()
) -> RowProcessors | None:
    request = GenerateRequest("request", prompt, params, output_token_ids=output)
    return build_processors(request, (), VOCAB_SIZE, (EOS,), torch.device("cpu"))


@given(
    params_of_all_kinds,
    st.lists(token_ids, min_size=1, max_size=5),
    sequences,
    st.lists(st.tuples(sequences, st.integers(0, 8), token_ids), min_size=1, max_size=3),
    st.integers(0, 2**31),
)
def test_every_row_is_judged_by_its_own_prefix(
    params: SamplingParams,
    prompt: list[int],
    resumed: list[int],
    rounds: list[tuple[list[int], int, int]],
    seed: int,
) -> None:
    processors = build(params, prompt, resumed)
    if processors is None:
        return
    generator = torch.Generator().manual_seed(seed)
    output = list(resumed)
    for drafts, num_accepted, own in rounds:
        logits = torch.randn(len(drafts) + 1, VOCAB_SIZE, generator=generator)
        num_accepted = min(num_accepted, len(drafts))
        rows = processors.rows(logits.clone(), drafts)

        for offset in range(num_accepted + 1):  # the rows after a mismatch are never asked for
            expected = reference(logits[offset], params, prompt, [*output, *drafts[:offset]])
            assert next(rows).tolist() == pytest.approx(expected, rel=1e-6, abs=1e-5)

        committed = [*drafts[:num_accepted], own]
        processors.commit(committed)
        output += committed


@given(params_of_all_kinds, sequences, st.integers(0, 8))
def test_rows_that_were_looked_at_too_far_leave_no_trace(
    params: SamplingParams, drafts: list[int], num_accepted: int
) -> None:
    looked, fresh = build(params), build(params)
    if looked is None or fresh is None:
        return
    logits = torch.linspace(-2, 2, VOCAB_SIZE).expand(len(drafts) + 1, -1)
    committed = [*drafts[: min(num_accepted, len(drafts))], 3]

    list(looked.rows(logits.clone(), drafts))
    looked.commit(committed)
    fresh.commit(committed)

    assert torch.equal(next(looked.rows(logits.clone(), ())), next(fresh.rows(logits.clone(), ())))


def test_parameters_that_change_no_logits_need_no_processors() -> None:
    params = SamplingParams(
        temperature=0.3, top_p=0.5, top_k=3, seed=1, stop_token_ids=(3,), logprobs=2
    )

    assert build(params) is None


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_min_tokens_holds_back_the_end_for_exactly_that_many(ignore_eos: bool) -> None:
    params = SamplingParams(min_tokens=3, ignore_eos=ignore_eos, stop_token_ids=(2,))
    processors = build(params)
    assert processors is not None

    rows = processors.rows(torch.zeros(5, VOCAB_SIZE), [1, 1, 1, 1])

    finite = [row.isfinite().tolist() for row in rows]
    assert [row[EOS] for row in finite] == [False, False, False, True, True]
    assert [row[2] for row in finite] == [False, False, False, True, True]
    assert all(row[1] for row in finite)


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the calls of torch operators."""

    num_calls = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        self.num_calls += 1
        return func(*args, **(kwargs or {}))


def test_a_long_output_is_resumed_with_no_more_operations_than_a_short_one() -> None:
    params = SamplingParams(presence_penalty=1.0)
    counts = []
    for length in (4, 400):
        with Operations() as operations:  # type: ignore[no-untyped-call]
            build(params, output=[3] * length)
        counts.append(operations.num_calls)

    assert counts[0] == counts[1] > 0


def test_repetition_counts_the_prompt_and_the_others_do_not() -> None:
    logits = torch.ones(1, VOCAB_SIZE)
    repetition, presence = (
        build(SamplingParams(repetition_penalty=2.0), prompt=(4,)),
        build(SamplingParams(presence_penalty=1.0), prompt=(4,)),
    )
    assert repetition is not None
    assert presence is not None

    assert next(repetition.rows(logits.clone(), ()))[4] == 0.5
    assert next(presence.rows(logits.clone(), ()))[4] == 1.0
