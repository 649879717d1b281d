"""What two services compare before they work together. Pure: one readable line per mismatch.

The same lines are found on both sides of a greeting: by the proposer before it answers, and by the
verifier in the answer, which an older proposer may have given without looking.
"""

from pathlib import PurePath

from specgw.budget import DraftSlots, draft_slots
from specgw.config import EngineArgs
from specgw.hidden import HiddenFormat, hidden_mismatches
from specgw.types import PROTOCOL_VERSION, Hello, HelloAck, ModelDescription, VerifierInfo


def build_hello(
    verifier_id: str,
    target_model: ModelDescription,
    args: EngineArgs,
    hidden: HiddenFormat | None = None,
) -> Hello:
    """Returns a verifier's greeting: what it has loaded, and the drafting it reckons with.

    `hidden` says which of the target's hidden states it can send.
    """
    config = args.speculative_config
    assert config is not None, "without speculation there is nobody to greet"
    return Hello(
        verifier_id,
        target_model,
        config.num_speculative_tokens,
        method=config.method,
        draft_model=config.model if config.has_draft_checkpoint else "",
        extra_slots_per_session=draft_slots(config).extra_rows,
        draft_sample_method=config.draft_sample_method if config.has_draft_checkpoint else "",
        hidden=hidden,
        takes_blocks_ahead=True,
    )


def greeting_mismatches(hello: Hello, ack: HelloAck) -> list[str]:
    """Compares what a verifier reckons with and what a proposer offers, but for vocabularies.

    A verifier that names no method reckons with nothing: the smaller number of draft tokens holds.
    """
    mismatches = []
    if hello.protocol_version != ack.protocol_version:
        mismatches.append(
            f"protocol_version: the verifier speaks {hello.protocol_version}, "
            f"the proposer {ack.protocol_version}"
        )
    for count in (hello.max_draft_tokens, ack.max_draft_tokens):
        if count < 1:
            mismatches.append(f"max_draft_tokens: must be at least 1, got {count}")
    if hello.method and hello.max_draft_tokens > ack.max_draft_tokens:
        mismatches.append(
            f"num_speculative_tokens: the verifier asks for up to {hello.max_draft_tokens}, "
            f"the proposer drafts {ack.max_draft_tokens}"
        )
    if hello.method and hello.method != ack.method:
        mismatches.append(
            f"method: the verifier is configured with {hello.method}, the proposer runs "
            f"{ack.method}"
        )
    elif hello.extra_slots_per_session not in (None, ack.extra_slots_per_session):
        mismatches.append(
            f"slots: the verifier reckons with {hello.extra_slots_per_session} extra rows per "
            f"session, the proposer with {ack.extra_slots_per_session}"
        )
    # Text of another vocabulary is drafted greedily, whatever both are configured with.
    is_text = ack.vocab_mapping is not None and ack.vocab_mapping.method == "string"
    if not is_text and len({hello.draft_sample_method, ack.draft_sample_method} - {""}) > 1:
        mismatches.append(
            f"draft_sample_method: the verifier is configured with {hello.draft_sample_method}, "
            f"the proposer with {ack.draft_sample_method}"
        )
    if hello.target_model.is_simulated != ack.draft_model.is_simulated:
        which = "target" if hello.target_model.is_simulated else "draft model"
        mismatches.append(f"simulation: only the {which} is simulated")
    if hello.draft_model and not is_same_model(hello.draft_model, ack.draft_model.name):
        mismatches.append(
            f"draft model: the verifier is configured with {hello.draft_model}, the proposer has "
            f"loaded {ack.draft_model.name}"
        )
    return mismatches + hidden_mismatches(hello.hidden, ack.hidden)


def vocabulary_mismatches(target: ModelDescription, draft_model: ModelDescription) -> list[str]:
    """Returns why a draft model's ids do not mean to the target what they mean to it."""
    mismatches = []
    if target.vocab_size < 1:
        mismatches.append(f"target_model.vocab_size: must be at least 1, got {target.vocab_size}")
    fingerprints = {target.vocab_fingerprint, draft_model.vocab_fingerprint} - {""}
    if len(fingerprints) > 1:
        mismatches.append(
            f"vocabulary: {_vocabulary(target)} is the target's, {_vocabulary(draft_model)} the "
            "draft's; the draft_model method needs the same tokens under the same ids"
        )
    return mismatches


def verifier_mismatches(
    args: EngineArgs, vocab_fingerprint: str, tokenizer_size: int, verifier: VerifierInfo
) -> list[str]:
    """Compares a gateway's configuration and tokenizer with what a verifier has loaded."""
    model = verifier.target_model
    mismatches = []
    if verifier.protocol_version != PROTOCOL_VERSION:
        mismatches.append(
            f"protocol_version: the verifier speaks {verifier.protocol_version}, "
            f"the gateway {PROTOCOL_VERSION}"
        )
    if not is_same_model(args.model, model.name):
        mismatches.append(
            f"model: the gateway is configured with {args.model}, the verifier has loaded "
            f"{model.name}"
        )
    if model.is_simulated != (args.specgw.simulation is not None):
        which = "verifier" if model.is_simulated else "gateway"
        mismatches.append(f"simulation: only the {which} is configured with specgw.simulation")
    if model.vocab_fingerprint and model.vocab_fingerprint != vocab_fingerprint:
        mismatches.append(
            f"vocabulary: the verifier's {model.name} has vocabulary "
            f"{model.vocab_fingerprint[:12]}, the gateway's tokenizer {vocab_fingerprint[:12]}"
        )
    elif model.vocab_size < tokenizer_size:
        mismatches.append(
            f"vocabulary: the verifier's {model.name} has {model.vocab_size} ids, the gateway's "
            f"tokenizer {tokenizer_size}"
        )
    if verifier.max_draft_tokens != args.max_draft_tokens:
        mismatches.append(
            f"num_speculative_tokens: the gateway is configured with {args.max_draft_tokens}, "
            f"the verifier with {verifier.max_draft_tokens}"
        )
    lookahead = draft_slots(args.speculative_config).kv_lookahead
    if args.max_draft_tokens and verifier.kv_lookahead_per_session != lookahead:
        mismatches.append(
            f"slots: the gateway reckons with {lookahead} KV slots of lookahead, the verifier with "
            f"{verifier.kv_lookahead_per_session}"
        )
    return mismatches + _slot_mismatches(draft_slots(args.speculative_config), verifier)


def is_same_model(one: str, other: str) -> bool:
    """Whether two names end alike: services may see one checkpoint under different directories."""
    return PurePath(one).name == PurePath(other).name


def _slot_mismatches(slots: DraftSlots, verifier: VerifierInfo) -> list[str]:
    return [
        f"slots: the gateway reckons with {slots.extra_rows} extra rows per session, the proposer "
        f"{proposer.address} with {proposer.offer.extra_slots_per_session}"
        for proposer in verifier.proposers
        if proposer.is_connected
        and proposer.offer is not None
        and proposer.offer.extra_slots_per_session != slots.extra_rows
    ]


def _vocabulary(model: ModelDescription) -> str:
    return f"that of {model.name} ({model.vocab_size} ids, sha256 {model.vocab_fingerprint[:12]})"
