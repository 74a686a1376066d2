"""Opening a language model that drafts for another one."""

import os

from specjax.checkpoints.target import TargetCheckpoint, open_target


def open_draft_model(
    draft: str | os.PathLike[str],
    target: TargetCheckpoint,
    *,
    context_length: int | None = None,
    with_tokenizer: bool = True,
) -> TargetCheckpoint:
    """Find a model as :func:`open_target` does, and check that it can draft for ``target``.

    Args:
        draft: a directory, a GGUF file or a repository id; it is opened in the target's dtype.
        target: whose vocabulary it must share.
        context_length: tokens that it must be able to read; by default the target's own limit.
        with_tokenizer: compare the tokenizers, where both models have one.

    Raises:
        ValueError: if there is no such model, or it does not fit.
    """
    opened = open_target(draft, dtype=target.config.dtype, knob="draft")
    sizes = opened.config.vocab_size, target.config.vocab_size
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"draft={opened.name!r} has vocab_size={sizes[0]}, but model={target.name!r} has "
            f"{sizes[1]}; a draft model needs the target's vocabulary"
        )
    limit, context = opened.config.context_limit, context_length or target.config.context_limit
    if limit < context:
        raise ValueError(
            f"draft={opened.name!r} reads at most {limit} tokens, but the context has {context}; "
            f"set context_length={limit}"
        )
    if with_tokenizer:
        _check_same_tokens(opened, target)
    return opened


def _check_same_tokens(draft: TargetCheckpoint, target: TargetCheckpoint) -> None:
    """Compare what the ids mean that both tokenizers know."""
    ours, theirs = _tokens(draft), _tokens(target)
    differing = sorted(i for i in ours.keys() & theirs.keys() if ours[i] != theirs[i])
    if differing:
        one = differing[0]
        raise ValueError(
            f"draft={draft.name!r} has another tokenizer than model={target.name!r}: "
            f"{len(differing)} ids differ, of which {one} is {ours[one]!r} and not "
            f"{theirs[one]!r}; a draft model needs the target's vocabulary"
        )


def _tokens(model: TargetCheckpoint) -> dict[int, str]:
    """Tokens by id; none for a model without a tokenizer, which the target's own user is told."""
    try:
        backend = model.load_tokenizer().backend
    except ValueError:
        return {}
    return {i: token for token, i in backend.get_vocab(with_added_tokens=True).items()}
