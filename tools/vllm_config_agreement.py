"""Holds the table of configurations against vLLM itself.

`python -m tools.vllm_config_agreement --vllm-python /path/to/vllm/bin/python` gives every row of
`tests/data/speculative_configs.yaml` to specgw and to vLLM's own `SpeculativeConfig`. It exits with
1 unless both say what the table says, so that they disagree exactly where the table names one of
`specgw.vllm_differences`.
"""

import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import click

from tests.speculative_configs import Judgement, Row, judge, rows, save_checkpoints

_ASK_VLLM = Path(__file__).parent / "vllm_verdicts.py"


def vllm_verdicts(python: Path, table: Sequence[Row], checkpoints: Path) -> list[tuple[str, str]]:
    """Returns vLLM's verdict and message for each row."""
    answers = checkpoints.with_suffix(".json")
    questions = [_for_vllm(row, checkpoints) for row in table]
    result = subprocess.run(
        [str(python), str(_ASK_VLLM), str(answers)],
        input=json.dumps(questions),
        capture_output=True,
        text=True,
        cwd=checkpoints,
        check=False,
    )
    if result.returncode:
        raise click.ClickException(f"vLLM could not be asked:\n{result.stderr[-2000:]}")
    return [tuple(one) for one in json.loads(answers.read_text(encoding="utf-8"))]


def _for_vllm(row: Row, checkpoints: Path) -> dict[str, object]:
    raw = row.raw(checkpoints)
    if row.vllm_config is not None:
        raw["speculative_config"] = json.loads(
            json.dumps(row.vllm_config).replace('"@', f'"{checkpoints}/')
        )
    return {**raw, "with_arctic": row.with_arctic}


def _differs(ours: Judgement, theirs: str, message: str) -> bool:
    if ours.verdict == "refused" or theirs == "refused":
        return (ours.verdict == "refused") != (theirs == "refused")
    return (ours.method or "") != message  # no drafts, no method


def _surprises(row: Row, ours: Judgement, theirs: str, message: str) -> list[str]:
    surprises = []
    if ours.verdict != row.verdict:
        surprises.append(f"{row.id}: specgw says {ours.verdict}, the table {row.verdict}")
    if theirs != row.vllm or _differs(ours, theirs, message) != row.differs:
        surprises.append(
            f"{row.id}: vLLM says {theirs}, the table {row.vllm}: {' '.join(message.split())[:240]}"
        )
    return surprises


@click.command()
@click.option("--vllm-python", type=click.Path(path_type=Path), required=True)
@click.option("--verbose", is_flag=True, help="Print vLLM's message for every row it refuses.")
def main(vllm_python: Path, verbose: bool) -> None:
    """Prints on how many configurations specgw and vLLM agree, and where they do not."""
    table = rows()
    with tempfile.TemporaryDirectory() as directory:
        checkpoints = Path(directory) / "checkpoints"
        checkpoints.mkdir()
        save_checkpoints(checkpoints)
        theirs = vllm_verdicts(vllm_python, table, checkpoints)
        ours = [judge(row.raw(checkpoints)) for row in table]
    surprises, differences = [], Counter[str]()
    for row, our_own, (their_verdict, message) in zip(table, ours, theirs, strict=True):
        surprises += _surprises(row, our_own, their_verdict, message)
        if verbose:
            print(f"{row.id}: vLLM: {their_verdict} {' '.join(message.split())[:200]}")
        if _differs(our_own, their_verdict, message):
            differences[row.difference or "undocumented"] += 1
            print(f"differs: {row.id}: {our_own.verdict} here, {their_verdict} by vLLM: ", end="")
            print(row.difference)
    num_different = sum(differences.values())
    for surprise in surprises:
        print(f"unexpected: {surprise}")
    print(", ".join(f"{name} {count}" for name, count in sorted(differences.items())))
    print(
        f"{len(table)} configurations: {len(table) - num_different} judged alike, {num_different} "
        f"differently, {differences['undocumented']} of them undocumented; "
        f"{len(surprises)} not as the table says"
    )
    sys.exit(bool(surprises or differences["undocumented"]))


if __name__ == "__main__":
    main()
