"""Engines as rows of a table: how they draft and how they serve."""

from typing import Any

from .draws import MODULES, Drafts, Options, split

BATCHES = 2
Row = tuple[Any, ...]
SEEN = (
    "retractions",
    "aborts",
    "cached tokens",
    "accepted drafts",
    "greedy tokens",
    "seeded tokens",
)
OF_MIXTURES: list[Row] = [
    ("EAGLE3", "tree", "ahead", 4, "here", "fixed", 1),
    ("NGRAM", "tree", "in turn", 16, "split", "adaptive", 3),
    ("DSPARK", "chain", "ahead", 1, "here", "adaptive", 1),
    ("STANDALONE", "tree", "ahead", 4, "split", "fixed", 3),
    ("DFLASH", "chain", "in turn", 4, "here", "fixed", 1),
    ("EAGLE", "cut chain", "ahead", 1, "split", "adaptive", 3),
]


def drafting(row: Row, drafts: Drafts) -> Options:
    """Options that control how an engine drafts."""
    algorithm, shape, _, _, _, adapts, _ = row
    files = {
        "EAGLE3": drafts.eagle3,
        "EAGLE": drafts.eagle,
        "P-EAGLE": drafts.peagle,
        "STANDALONE": drafts.model,
        "MULTI_LAYER_EAGLE": drafts.modules,
        "DFLASH": drafts.dflash,
        "DSPARK": drafts.dspark,
    }
    steps = 4 if algorithm == "NGRAM" else 2
    named = "EAGLE3" if algorithm == "P-EAGLE" else algorithm
    options: Options = {"speculative_algorithm": named}
    if shape == "cut chain":  # four rows are verified
        steps = MODULES if algorithm == "MULTI_LAYER_EAGLE" else 7
        options["speculative_num_draft_tokens"] = 4
    options["speculative_num_steps"] = steps
    if algorithm in files:
        options["draft"] = files[algorithm]
    if algorithm == "NGRAM":
        options["speculative_ngram_max_bfs_breadth"] = 4 if shape == "tree" else 1
    elif shape == "tree":
        options["speculative_eagle_topk"] = 3
    if adapts == "adaptive":  # may switch after every round
        config = {"policy": "ema", "ema_alpha": 1.0, "warmup_batches": 0, "update_interval": 1}
        options |= {
            "speculative_adaptive": True,
            "speculative_adaptive_config": config | {"candidate_steps": [0, steps]},
        }
        if shape != "cut chain":  # its number of rows needs the steps
            options["speculative_num_steps"] = 0
    return options


def serving(row: Row) -> Options:
    """The other options of an engine."""
    _, _, rounds, page_size, prompts, _, num_rounds = row
    options: Options = {
        "page_size": page_size,
        "overlap": rounds == "ahead",
        "rounds_per_dispatch": num_rounds,
        "max_running_requests": 6,
        "batch_buckets": (6,),
        "max_total_tokens": 112,
        "chunked_prefill_size": 12,
    }
    if prompts == "here":
        return options
    # the prefill side has different pages and chunks
    other = {1: 16, 4: 1, 16: 4}[page_size]
    sizes = {"page_size": other, "chunked_prefill_size": 16, "max_total_tokens": 400}
    return options | split(sizes)
