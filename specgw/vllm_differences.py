"""Where specgw's verdict on a `speculative_config` is not vLLM 0.32.0's, and why.

Data only. docs/configuration.md prints it; `tests/data/speculative_configs.yaml` names an entry for
each configuration that the two judge differently, and `tools.vllm_config_agreement` holds that
against vLLM itself.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Difference:
    """One way in which verdicts differ.

    Attributes:
        id: Short name, for the table of configurations.
        vllm: What vLLM does.
        specgw: What specgw does.
        reason: Why.
    """

    id: str
    vllm: str
    specgw: str
    reason: str


DIFFERENCES = (
    Difference(
        "names",
        "`eagle-`, `eagle3`, `dflash` or `dspark` in the draft's path choose the method, whatever "
        "`method` says.",
        "A given `method` stands. Without one, `config.json` decides, never a path.",
        "A folder's name says nothing about what is in it.",
    ),
    Difference(
        "vocab-padded",
        "Refuses a draft with another `vocab_size`.",
        "Accepts it if every token has the same id in both.",
        "Models of one family pad the same vocabulary to different sizes.",
    ),
    Difference(
        "vocab-foreign",
        "Accepts any draft with the same `vocab_size`.",
        "Refuses it if some id stands for another token, and names the first ones.",
        "Such drafts are hardly ever accepted: they cost time and save none.",
    ),
    Difference(
        "vocab-nothing-common",
        "Maps vocabularies that have no token in common.",
        "Refuses them, and `heterogeneous_vocab_method: token` where the common tokens are too "
        "few; tells how many there are.",
        "Nothing could be drafted.",
    ),
    Difference(
        "k-limit",
        "Accepts any K and asserts K <= 128 while running.",
        "Refuses K over 128.",
        "A limit is told when the configuration is loaded.",
    ),
    Difference(
        "load-time",
        "Accepts the configuration, then fails when the engine starts or runs: schedules by batch "
        "size, a missing mask token, a missing tokenizer, M-RoPE drafts, a draft on 1 of several "
        "GPUs, `disable_padded_drafter_batch` with a draft model, local argmax of probabilistic "
        "drafts, absent weights.",
        "Refuses it.",
        "What is known from the files is told before anything is loaded.",
    ),
    Difference(
        "mask-range",
        "Takes whatever the mask token's field holds.",
        "Refuses what is no token id of the draft model.",
        "It would read beyond the embedding.",
    ),
    Difference(
        "parallel-methods",
        "Accepts `parallel_drafting` with any method and reserves rows for it.",
        "Refuses it except with `draft_model`, `eagle`, `eagle3`, `dflash` and `dspark`.",
        "Other methods have nothing to draft in parallel.",
    ),
    Difference(
        "dspark-keys",
        "Accepts `enable_adaptive_verification` with any method, and `dspark_draft_topk` with "
        "methods without a draft model.",
        "Refuses both except with `dspark`.",
        "They would be ignored.",
    ),
    Difference(
        "suffix-package",
        "Refuses `suffix` unless the package `arctic-inference` is installed.",
        "Needs no package.",
        "specgw does not depend on it.",
    ),
    Difference(
        "internal-keys",
        "Overwrites or keeps `target_model_config`, `target_parallel_config`, "
        "`draft_model_config` and `draft_parallel_config`.",
        "Refuses them and says what to set instead.",
        "They are objects of vLLM's engine, which no user can write down.",
    ),
    Difference(
        "mtp-without-k",
        "Fails with a TypeError if `mtp` is given a model and no K.",
        "Takes K from the model's `config.json`, as vLLM does for other methods.",
        "vLLM's check compares K before it is filled in.",
    ),
    Difference(
        "method-checkpoint",
        "Refuses a draft whose `config.json` is not of the family that the method wants.",
        "Refuses the method, as one that it does not run yet.",
        "A method's own checks come with the method.",
    ),
    Difference(
        "drafts-without-law",
        "Accepts `block` with greedy drafts, and `probabilistic` with lookup methods, and tests "
        "such drafts as certain ones.",
        "Refuses both.",
        "Nothing degrades in silence: block verification and the ratio test need the law that a "
        "draft was drawn from.",
    ),
    Difference(
        "vocab-probabilistic",
        "Refuses `draft_sample_method: probabilistic` with `use_heterogeneous_vocab`.",
        "Accepts it, except with `heterogeneous_vocab_method: string`; with `auto`, sessions that "
        "are drafted for by `token` have laws.",
        "Drafts of common tokens are drawn from a law over the target's ids: the ratio test holds.",
    ),
    Difference(
        "safetensors",
        "Accepts pickled weights.",
        "Refuses them.",
        "Loading a pickle runs whatever code is in it.",
    ),
    Difference(
        "engine",
        "Accepts models and element types that its own engine runs.",
        "Refuses what specgw's engine does not run: M-RoPE, multimodal, quantized and "
        "encoder-decoder models, weights that are no floating point numbers.",
        "What would be computed wrongly is refused by name.",
    ),
    Difference(
        "speculators",
        "Given a draft in the speculators format as `model`, loads the target that it names.",
        "Refuses it and says which keys to set.",
        "The target, its tokenizer, K and the method would follow from a file of the draft.",
    ),
    Difference(
        "rows",
        "Wants `max_num_batched_tokens` over the extra rows of one request, and says so elsewhere.",
        "Wants it over K, and `specgw.proposer.max_num_batched_tokens` over the extra rows.",
        "The verifier tests K + 1 rows in one step; the extra rows are the proposer's.",
    ),
    Difference(
        "additions",
        "Has no `draft_sample_method: coupled` and no `heterogeneous_vocab_method`.",
        "Has them.",
        "They are additions; a configuration that loads in both systems leaves them out.",
    ),
)
