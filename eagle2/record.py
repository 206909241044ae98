"""From a decoding step to its record: the only place that copies tensors to the host for looking at.

Recording runs between the steps, outside of their clocks.
"""

from __future__ import annotations

import torch

from .generate import Step
from .trace import StepTrace
from .verify import SamplingParams, target_probs


def _short(values: torch.Tensor) -> tuple[float, ...]:
    """Six significant digits: more than a screen shows, and a third of the file size."""
    return tuple(float(f"{value:.6g}") for value in values.tolist())


def step_trace(step: Step, sampling: SamplingParams) -> StepTrace:
    """Copy what a viewer shows of ``step``."""
    proposal, verdict = step.proposal, step.verdict
    tree = proposal.expanded
    node_of = (0, *proposal.kept)  # verification row -> node of the expanded tree
    row_of = {node: row for row, node in enumerate(node_of)}
    logits = step.output.logits.float()
    probs = target_probs(logits, sampling)  # [K + 1, V]
    best = logits.argmax(-1, keepdim=True)  # the distribution's mode is the logits' argmax
    if proposal.kept:
        parent_rows = torch.tensor([row_of[tree.parents[node]] for node in proposal.kept], device=logits.device)
        tokens = tree.token_ids[list(proposal.kept)].to(logits.device)
        kept_probs = probs[parent_rows, tokens]
        ranks = (logits[parent_rows] > logits[parent_rows, tokens][:, None]).sum(-1).tolist()
    else:
        kept_probs, ranks = probs.new_zeros(0), []
    return StepTrace(
        token_ids=tuple(tree.token_ids.tolist()),
        parents=tree.parents,
        confidence=_short(tree.confidence),
        log_value=_short(tree.log_value),
        selected=proposal.selected,
        kept=proposal.kept,
        target_probs=_short(kept_probs.clamp(max=1)),
        target_ranks=tuple(ranks),
        choice_ids=tuple(best[:, 0].tolist()),
        choice_probs=_short(probs.gather(1, best)[:, 0].clamp(max=1)),
        accepted=tuple(node_of[row] for row in verdict.accepted),
        next_id=verdict.next_token,
        next_kind=verdict.kind,
        decisions=tuple(
            type(d)(node_of[d.node], float(f"{d.target_prob:.6g}"), d.draw, d.accepted) for d in verdict.decisions
        ),
        emitted=len(step.emitted),
        draft_seconds=step.draft_seconds,
        verify_seconds=step.verify_seconds,
        commit_seconds=step.commit_seconds,
        copied=proposal.copied,
    )
