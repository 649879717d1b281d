"""The messages of `GenerateMany`: the outputs of many requests in one, as lists over all of them.

Like `wire.py`, whose messages are parts of these.
"""

from collections.abc import Iterator, Sequence

import grpc
from google.protobuf.duration_pb2 import Duration

from specgw import wire
from specgw.channel import MAX_MESSAGE_BYTES, build_error, too_large
from specgw.errors import InvalidRequest, Overloaded, SpecgwError
from specgw.types import GenerateOutput, GenerateRequest, Round
from specgw.v1 import verifier_pb2

_CODES = {code.value[0]: code for code in grpc.StatusCode}
_NANOS = 10**9

Answer = GenerateOutput | SpecgwError
"""What one step gave to one call; an error ends it."""


def start_call_to_pb(
    call_id: int, request: GenerateRequest, timeout_s: float
) -> verifier_pb2.GenerateManyRequest:
    """Packs a request.

    Raises:
        InvalidRequest: if the message would be over the limit.
    """
    pb = verifier_pb2.GenerateManyRequest(
        start=verifier_pb2.StartCall(
            call_id=call_id,
            request=wire.generate_request_to_pb(request),
            timeout=_duration(timeout_s),
        )
    )
    if pb.ByteSize() > MAX_MESSAGE_BYTES:
        raise too_large(f"{pb.ByteSize()} bytes")
    return pb


def cancel_call_to_pb(call_id: int) -> verifier_pb2.GenerateManyRequest:
    return verifier_pb2.GenerateManyRequest(cancel=verifier_pb2.CancelCall(call_id=call_id))


def timeout_from_pb(pb: verifier_pb2.StartCall) -> float | None:
    """Returns the seconds that a call may take; None for any number."""
    return _seconds(pb.timeout) if pb.HasField("timeout") else None


def answers_to_pb(
    answers: Sequence[tuple[int, Answer]],
) -> Iterator[verifier_pb2.GenerateManyResponse]:
    """Packs what a step gave to each call: one message, and one for each output that may be large.

    An output that no message can carry becomes an error.
    """
    small = []
    for call_id, answer in answers:
        if isinstance(answer, GenerateOutput) and (answer.logprobs or answer.prompt_logprobs):
            pb = _pack([(call_id, answer)])
            if pb.ByteSize() > MAX_MESSAGE_BYTES:
                pb = _pack([(call_id, too_large(f"an output of {pb.ByteSize()} bytes"))])
            yield pb
        else:
            small.append((call_id, answer))
    if small:
        yield _pack(small)


def answers_from_pb(pb: verifier_pb2.GenerateManyResponse) -> list[tuple[int, Answer]]:
    """Unpacks what a step gave to each call.

    Raises:
        InvalidRequest: naming a list that does not match the others.
    """
    answers: list[tuple[int, Answer]] = list(zip(pb.call_ids, _outputs_from_pb(pb), strict=True))
    for error in pb.errors:
        answers.append((error.call_id, _error_from_pb(error)))
    return answers


def _pack(answers: Sequence[tuple[int, Answer]]) -> verifier_pb2.GenerateManyResponse:
    pb = verifier_pb2.GenerateManyResponse()
    outputs: list[GenerateOutput] = []
    call_ids = []
    for call_id, answer in answers:
        if isinstance(answer, SpecgwError):
            pb.errors.append(_error_to_pb(call_id, answer))
            continue
        if _has_details(answer):
            details = wire.generate_output_to_pb(answer._replace(token_ids=()))
            details.ClearField("token_ids")
            pb.details.add(index=len(outputs), response=details)
        call_ids.append(call_id)
        outputs.append(answer)
    pb.call_ids.extend(call_ids)
    pb.token_counts.extend([len(output.token_ids) for output in outputs])
    pb.token_ids.CopyFrom(wire.token_ids_to_pb([i for one in outputs for i in one.token_ids]))
    rounds = [output.round for output in outputs]
    pb.draft_token_counts.extend([one.num_drafted for one in rounds])
    pb.accepted_token_counts.extend([one.num_accepted for one in rounds])
    pb.undrafted_reasons.extend([wire.undrafted_reason_to_pb(one.undrafted) for one in rounds])
    pb.is_synthetic = any(one.is_synthetic for one in rounds)
    return pb


def _has_details(output: GenerateOutput) -> bool:
    is_end = output.finish_reason is not None or output.seed is not None
    has_extra = output.cached_token_count is not None or output.stop_token_id is not None
    return is_end or has_extra or bool(output.logprobs or output.prompt_logprobs)


def _outputs_from_pb(pb: verifier_pb2.GenerateManyResponse) -> list[GenerateOutput]:
    count = len(pb.call_ids)
    for name in (
        "token_counts",
        "draft_token_counts",
        "accepted_token_counts",
        "undrafted_reasons",
    ):
        if len(getattr(pb, name)) != count:
            raise InvalidRequest(name, f"{len(getattr(pb, name))} entries", f"must have {count}")
    token_ids = wire.token_ids_from_pb(pb.token_ids, "token_ids")
    if sum(pb.token_counts) != len(token_ids) or min(pb.token_counts, default=0) < 0:
        rule = f"must not be negative, with sum {len(token_ids)}"
        raise InvalidRequest("token_counts", list(pb.token_counts), rule)
    outputs, end, is_synthetic = [], 0, pb.is_synthetic
    for num_tokens, num_drafted, num_accepted, reason in zip(
        pb.token_counts,
        pb.draft_token_counts,
        pb.accepted_token_counts,
        pb.undrafted_reasons,
        strict=True,
    ):
        start, end = end, end + num_tokens
        undrafted = wire.undrafted_reason_from_pb(reason)
        round = Round(num_drafted, num_accepted, undrafted, is_synthetic)
        outputs.append(GenerateOutput(token_ids[start:end], round=round))
    for details in pb.details:
        if not 0 <= details.index < count:
            raise InvalidRequest("details.index", details.index, f"must be in [0, {count})")
        plain = outputs[details.index]
        outputs[details.index] = wire.generate_output_from_pb(details.response)._replace(
            token_ids=plain.token_ids, round=plain.round
        )
    return outputs


def _error_to_pb(call_id: int, error: SpecgwError) -> verifier_pb2.CallError:
    retry_after_s = error.retry_after_s if isinstance(error, Overloaded) else None
    return verifier_pb2.CallError(
        call_id=call_id,
        status_code=grpc.StatusCode[error.status].value[0],
        message=str(error),
        retry_after=None if retry_after_s is None else _duration(retry_after_s),
    )


def _error_from_pb(pb: verifier_pb2.CallError) -> SpecgwError:
    """Unpacks an error. A status that gRPC does not know counts as UNKNOWN."""
    code = _CODES.get(pb.status_code, grpc.StatusCode.UNKNOWN)
    return build_error(
        code, pb.message, _seconds(pb.retry_after) if pb.HasField("retry_after") else None
    )


def _duration(seconds: float) -> Duration:
    whole, nanos = divmod(round(max(seconds, 0.0) * _NANOS), _NANOS)
    return Duration(seconds=whole, nanos=nanos)


def _seconds(pb: Duration) -> float:
    return pb.seconds + pb.nanos / _NANOS
