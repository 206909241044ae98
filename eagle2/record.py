"""From a decoding step to its record: the only place that copies tensors to the host for looking at.

Recording runs between the steps, outside of their clocks.
"""

from __future__ import annotations

import torch

from .generate import Step
from .native import above, top
from .trace import StepTrace
from .verify import SamplingParams, target_probs


def _short(values: torch.Tensor) -> tuple[float, ...]:
    """Six significant digits: more than a screen shows, and a third of the file size."""
    return tuple(float(f"{value:.6g}") for value in values.tolist())


def step_trace(step: Step, sampling: SamplingParams) -> StepTrace:
    """Copy what a viewer shows of ``step``."""
    proposal, verdict = step.proposal, step.verdict
    tree = proposal.expanded
    token_ids = tree.token_ids.tolist()
    node_of = (0, *proposal.kept)  # verification row -> node of the expanded tree
    row_of = {node: row for row, node in enumerate(node_of)}
    logits = step.output.logits.float()
    best_log, best_id = top(logits, 1, softmax=True)
    best = torch.tensor(best_id, device=logits.device)  # [K + 1, 1]; the distribution's mode is the logits' argmax
    if sampling.greedy:  # a plain softmax, of which a few elements are wanted
        total = logits.gather(1, best) - torch.tensor(best_log, device=logits.device)  # log of the sum of exponentials
        probs = None
    else:
        probs = target_probs(logits, sampling)  # [K + 1, V]
    if proposal.kept:
        parent_rows = [row_of[tree.parents[node]] for node in proposal.kept]
        tokens = [token_ids[node] for node in proposal.kept]
        ranks = above(logits, parent_rows, tokens)
        at = torch.tensor(parent_rows, device=logits.device), torch.tensor(tokens, device=logits.device)
        kept_probs = (logits[at] - total[at[0], 0]).exp() if probs is None else probs[at]
    else:
        kept_probs, ranks = logits.new_zeros(0), []
    choice_probs = torch.tensor(best_log).exp()[:, 0] if probs is None else probs.gather(1, best)[:, 0]
    return StepTrace(
        token_ids=tuple(token_ids),
        parents=tree.parents,
        confidence=_short(tree.confidence),
        log_value=_short(tree.log_value),
        selected=proposal.selected,
        kept=proposal.kept,
        target_probs=_short(kept_probs.clamp(max=1)),
        target_ranks=tuple(ranks),
        choice_ids=tuple(best[:, 0].tolist()),
        choice_probs=_short(choice_probs.clamp(max=1)),
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
