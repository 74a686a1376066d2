"""Sampling written in numpy, one row at a time, from its definition and without any cleverness."""

import numpy as np

from specjax.sampling.params import SamplingParams


def kept_by_sorting(logits, top_k, top_p=1.0, min_p=0.0):
    """Top-k with ties, then the smallest set that reaches top-p with ties, then min-p.

    Returns:
        The kept tokens, and how far the closest share lies from the limit it is compared with:
        rounding may decide where that is nothing.
    """
    logits = np.asarray(logits, np.float64)
    kept = logits >= np.sort(logits)[::-1][min(top_k, len(logits)) - 1]
    weights = np.where(kept, np.exp(logits - logits.max()), 0.0)
    gaps = [np.inf]
    if top_p < 1:
        mass = {v: weights[logits >= v].sum() / weights.sum() for v in set(logits[kept])}
        kept &= logits >= max((v for v, share in mass.items() if share >= top_p), default=-np.inf)
        gaps += [abs(share - top_p) for share in mass.values()]
    if min_p > 0:
        gaps += list(np.abs(weights - min_p))
    kept &= weights >= min_p
    return set(np.flatnonzero(kept & (logits > -np.inf)).tolist()), min(gaps)


def adjusted_logits(logits, prompt, produced, params: SamplingParams, end_token_ids=()):
    """Logits f64 ``[V]`` behind a text, with penalties, bias and the minimum length."""
    logits = np.array(logits, np.float64)
    for token in range(len(logits)):
        times = produced.count(token)
        logits[token] -= params.frequency_penalty * times
        logits[token] -= params.presence_penalty * (times > 0)
        if times or token in prompt:
            if logits[token] > 0:
                logits[token] /= params.repetition_penalty
            else:
                logits[token] *= params.repetition_penalty
    for token, value in (params.logit_bias or {}).items():
        logits[int(token)] += value
    if len(produced) < params.min_new_tokens:
        logits[list(end_token_ids)] = -np.inf
    return logits
