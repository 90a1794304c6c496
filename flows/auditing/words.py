"""The words for what an audit found, for the command and for the flow."""

from collections.abc import Iterator

from tasks.foundation.contracts.audit_receipt import AuditedStretch, AuditedVariable, AuditReceipt
from tasks.foundation.messages import counted, shown
from tasks.foundation.telemetry.formatting import number_words

_CHARACTERS = 1000

# What each result of the second execution suggests. None of them is a proof.
_SUGGESTS = {
    "log": "a second execution agrees with the log: this machine computed the first one wrongly, or the training is "
    "rarely not deterministic; test this machine's memory and processor, and audit again on another one",
    "first": "a second execution agrees with the first: the logged commit was computed wrongly, or something outside "
    "the identity has changed since: code, files that it reads, data, libraries, devices; audit on another machine, "
    "and compare the code with that of the training",
    "neither": "a second execution agrees with neither: the training is not deterministic; `baton prove` names usual "
    "causes. A machine that often computes wrongly looks the same",
}


def receipt_lines(receipt: AuditReceipt) -> Iterator[str]:
    """What an audit found, one line each."""
    for part in receipt_parts(receipt):
        if isinstance(part, str):
            yield part
        else:
            width = max(len(label) for label, _ in part)
            yield from (f"{label:<{width}}  {shown(text, _CHARACTERS)}" for label, text in part)


def receipt_parts(receipt: AuditReceipt) -> Iterator[str | list[tuple[str, str]]]:
    """What an audit found: lines, and facts of a label and a text for each stretch.

    The environment comes first, because it explains most differences.
    """
    for line in dict.fromkeys(line for stretch in receipt.stretches for line in stretch.environment):
        yield f"warning: another environment: {line}"
    how = (
        f"{len(receipt.stretches)} of {counted(receipt.auditable, 'stretch', 'stretches')} between retained checkpoints"
    )
    drawn = "" if receipt.seed is None else f", drawn with --seed {receipt.seed}"
    verdict = "the same bits" if receipt.verdict == "same" else "NOT the same bits"
    yield f"audited: {receipt.run}: {how}{drawn}: {verdict}"
    yield from map(_facts, receipt.stretches)
    for text in receipt.left_out:
        yield f"cannot be executed again: {text}"


def _facts(stretch: AuditedStretch) -> list[tuple[str, str]]:
    what = f"{stretch.start} to {stretch.end}, {stretch.compared} of {counted(stretch.commits, 'commit')} compared"
    facts = [("steps", f"{what}: {stretch.verdict}")]
    if stretch.second_agrees_with is None:
        return facts
    facts.append(("differs", f"first at the commit of step {stretch.first_differing_step}"))
    found = stretch.first_difference
    if found is not None:
        facts.append(("variables", f"{stretch.differing} of {stretch.variables} differ at step {stretch.end}"))
        facts.append(("first", _variable(found)))
        if found.path.startswith("metrics/"):
            facts.append(("", "only sums of metrics differ: was train.log_every_steps changed since?"))
    facts.append(("suggests", _SUGGESTS[stretch.second_agrees_with]))
    return facts


def _variable(found: AuditedVariable) -> str:
    what = f"{found.path}  {found.dtype}{list(found.shape)}"
    if found.only_in:
        return f"{what}: only in the {found.only_in}"
    bits = "" if found.bits is None else f" in {found.bits} bits"
    largest = "" if found.largest is None else f", by up to {number_words(found.largest)}"
    return f"{what}: {found.values} of its values differ{bits}{largest}"
