"""EAGLE draft heads against the PyTorch reference: prefill, then two rounds of steps and extend.

Positions follow the serving engines: the prompt's features are at ``0 .. n-1`` next to ids shifted
by one, and recurrent steps start at ``n``. The extend over verified tokens starts at ``n`` again
and overwrites the entries of the recurrent steps.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from specjax.checkpoints import open_draft, open_target  # noqa: E402
from specjax.models.decoder import CausalLM  # noqa: E402

from .eagle_files import (  # noqa: E402
    TARGET_HIDDEN,
    TARGET_LAYERS,
    VOCAB,
    HeadCase,
    publish,
    random_tensors,
    reference_head,
)
from .eagle_reference import Draft  # noqa: E402
from .jax_side import (  # noqa: E402
    build_draft,
    build_target,
    dense_attend,
    empty_cache,
    relative_error,
)
from .torch_side import make_model, rope, save  # noqa: E402

pytestmark = pytest.mark.parity

TOLERANCE = 1e-4
STEPS = 4  # draft tokens per round: one from the (draft-)extend row, three recurrent
ROUNDS = 2
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

CASES = {
    "eagle3": HeadCase(),
    "eagle3_layers0": HeadCase(style="layers.0", theta=1e6),
    "eagle3_model_prefix": HeadCase(
        prefix="model.", config={"architectures": ["LlamaForCausalLM"]}
    ),
    "eagle3_model_prefix_layers0": HeadCase(prefix="model.", style="layers.0"),
    "eagle3_pytorch_bin": HeadCase(file="pytorch_model.bin"),
    "eagle3_bfloat16": HeadCase(dtype=torch.bfloat16),
    "eagle3_fc_bias": HeadCase(fc_bias=True, config={"bias": True}),
    "eagle3_qkv_bias": HeadCase(qkv_bias=True),
    "eagle3_layer_ids": HeadCase(
        config={
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": [0, 4, 6],
                "use_aux_hidden_state": True,
            }
        }
    ),
    "eagle3_llama3_rope": HeadCase(theta=5e5, head_dim=16, rope_scaling=LLAMA3_SCALING),
    "eagle3_full_vocabulary": HeadCase(draft_vocab=VOCAB),
    "eagle3_target_lm_head": HeadCase(
        draft_vocab=VOCAB, lm_head="target", config={"draft_vocab_size": None}
    ),
    "eagle3_own_embedding": HeadCase(embedding="own"),
    "eagle3_other_width": HeadCase(hidden=40, head_dim=10, heads=4, embedding="own"),
    "eagle3_tied": HeadCase(draft_vocab=VOCAB, lm_head="tied", embedding="own"),
    "eagle3_tied_to_target": HeadCase(draft_vocab=VOCAB, lm_head="tied"),
    "eagle3_mislabelled_as_tied": HeadCase(lm_head="mislabelled"),
    "eagle31": HeadCase(is_3_1=True),
    "speculators": HeadCase(
        is_speculators=True,
        style="layers.0",
        embedding="own",
        norm_before_residual=True,
        config={"norm_before_residual": True},
    ),
    "speculators_default_residual": HeadCase(
        is_speculators=True, style="layers.0", norm_before_residual=True
    ),
    "speculators_plain_residual": HeadCase(
        is_speculators=True, style="layers.0", config={"norm_before_residual": False}
    ),
    "speculators_norm_before_fc": HeadCase(
        is_speculators=True,
        style="layers.0",
        norm_before_residual=True,
        norm_before_fc=True,
        config={"norm_before_fc": True},
    ),
    "eagle3_norm_before_fc": HeadCase(
        hidden=40,
        head_dim=10,
        heads=4,
        embedding="own",
        norm_before_fc=True,
        config={
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": [0, 4, 6],
                "use_aux_hidden_state": True,
                "norm_before_fc": True,
            }
        },
    ),
    "peagle": HeadCase(
        is_speculators=True,
        style="layers.0",
        mask_key="mask_token_id",
        layers=3,
        embedding="own",
        config={"architectures": ["PEagleSpeculator"]},
    ),
    "peagle_norms": HeadCase(
        is_speculators=True,
        style="layers.0",
        mask_key="mask_token_id",
        norm_before_residual=True,
        norm_before_fc=True,
        qk_norm=True,
        layers=2,
        embedding="own",
        config={"norm_before_residual": True, "norm_before_fc": True},
    ),
    "peagle_draft_model": HeadCase(
        mask_key="ptd_token_id",
        layers=2,
        is_3_1=True,
        config={
            "architectures": ["PEagleDraftModel"],
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 4, 6]},
        },
    ),
    "peagle_one_layer": HeadCase(mask_key="pard_token", prefix="model.", embedding="own"),
    "eagle1": HeadCase(
        algorithm="EAGLE", draft_vocab=VOCAB, lm_head="target", fc_bias=True, embedding="copy"
    ),
    "eagle1_no_bias": HeadCase(
        algorithm="EAGLE",
        draft_vocab=VOCAB,
        lm_head="target",
        embedding="none",
        theta=5e5,
        config={"bias": False, "architectures": ["LlamaForCausalLM"]},
    ),
    "eagle1_bin_qkv_bias": HeadCase(
        algorithm="EAGLE",
        draft_vocab=VOCAB,
        lm_head="target",
        fc_bias=True,
        qkv_bias=True,
        embedding="copy",
        kv_heads=6,
        file="pytorch_model.bin",
    ),
    "eagle1_two_layers": HeadCase(
        algorithm="EAGLE", draft_vocab=VOCAB, lm_head="target", fc_bias=True, layers=2
    ),
}


@dataclass(frozen=True)
class Plan:
    """Target outputs for two requests of different lengths, the same for both sides."""

    prompts: list[list[int]]
    prompt_features: list[np.ndarray]
    verified: list[list[list[int]]]  # [round][request]: target tokens of all verify rows
    accepted: list[list[int]]  # [round][request]: number of accepted rows
    verified_features: list[list[np.ndarray]]

    @classmethod
    def random(cls, feature_size: int) -> "Plan":
        rng = np.random.default_rng(5)

        def ids(count: int) -> list[int]:
            return [int(x) for x in rng.integers(0, VOCAB, count)]

        def features(count: int) -> np.ndarray:
            return rng.normal(0, 2, (count, feature_size)).astype(np.float32)

        lengths, rows = (9, 4), STEPS + 1
        return cls(
            prompts=[ids(n + 1) for n in lengths],  # the last id is the first sampled token
            prompt_features=[features(n) for n in lengths],
            verified=[[ids(rows) for _ in lengths] for _ in range(ROUNDS)],
            accepted=[[3, 1], [rows, 2]],
            verified_features=[[features(rows) for _ in lengths] for _ in range(ROUNDS)],
        )


Record = tuple[str, Any, Any]  # label, logits [rows, V'], recurrent states [rows, D]


def run_reference(drafts: list[Draft], plan: Plan) -> tuple[list[list[Record]], list[list[int]]]:
    """Return the records and drafted ids of each request."""
    all_records, all_drafted = [], []
    for request, draft in enumerate(drafts):
        records: list[Record] = []
        drafted: list[int] = []

        def rows(
            label: str, tokens: list[int], hidden: list, start: int, draft=draft, records=records
        ) -> tuple[Any, Any]:
            logits, states = zip(
                *(
                    draft.forward(token, state, start + i)
                    for i, (token, state) in enumerate(zip(tokens, hidden, strict=True))
                ),
                strict=True,
            )
            records.append((label, torch.stack(logits).numpy(), torch.stack(states).numpy()))
            return logits[-1], states[-1]

        n = len(plan.prompts[request]) - 1
        fused = draft.fuse(torch.from_numpy(plan.prompt_features[request]))
        logits, state = rows("prefill", plan.prompts[request][1:], list(fused), 0)
        for r in range(ROUNDS + 1):
            drafted.append(draft.target_token(logits))
            for k in range(STEPS - 1):
                token, hidden = draft.next_row(drafted[-1], state)
                logits, state = rows(f"round {r} step {k}", [token], [hidden], n + k)
                drafted.append(draft.target_token(logits))
            if r == ROUNDS:
                break
            draft.forget_from(n)
            count = plan.accepted[r][request]
            fused = draft.fuse(torch.from_numpy(plan.verified_features[r][request][:count]))
            tokens = plan.verified[r][request][:count]
            logits, state = rows(f"round {r} extend", tokens, list(fused), n)
            n += count
        all_records.append(records)
        all_drafted.append(drafted)
    return all_records, all_drafted


def run_specjax(head: Any, target: CausalLM, plan: Plan) -> tuple[list[list[Record]], list]:
    """Like run_reference, in one batch; later rows overwrite padded and rejected rows."""
    batch = len(plan.prompts)
    lengths = np.array([len(prompt) - 1 for prompt in plan.prompts])
    cache = empty_cache(head.config, batch, 40)
    records: list[list[Record]] = [[] for _ in plan.prompts]
    drafted: list[list[int]] = [[] for _ in plan.prompts]

    def forward(
        label: str, tokens: np.ndarray, hidden: Any, start: np.ndarray, counts: np.ndarray
    ) -> tuple[Any, Any]:
        nonlocal cache
        positions = start[:, None] + np.arange(tokens.shape[1])
        embeds = head.embed(jnp.asarray(tokens), target)
        states, cache = head(embeds, hidden, jnp.asarray(positions), cache, dense_attend(positions))
        logits = head.logits(states, target)
        for b, count in enumerate(counts):
            records[b].append((label, logits[b, :count], states[b, :count]))
        last = np.arange(batch), counts - 1
        return logits[last], states[last]

    def propose(logits: Any) -> np.ndarray:
        tokens = np.asarray(head.target_ids(jnp.argmax(logits, axis=-1)))
        for b in range(batch):
            drafted[b].append(int(tokens[b]))
        return tokens[:, None]

    width = lengths.max()
    tokens = np.zeros((batch, width), np.int32)
    features = np.zeros((batch, width, plan.prompt_features[0].shape[1]), np.float32)
    for b, n in enumerate(lengths):
        tokens[b, :n] = plan.prompts[b][1:]
        features[b, :n] = plan.prompt_features[b]
    fused = head.fuse(jnp.asarray(features))
    logits, state = forward("prefill", tokens, fused, np.zeros(batch, int), lengths)
    one = np.ones(batch, int)
    for r in range(ROUNDS + 1):
        tokens = propose(logits)
        for k in range(STEPS - 1):
            hidden = state[:, None]
            if head.config.mask_token_id is not None:
                tokens = np.full_like(tokens, head.config.mask_token_id)
                hidden = jnp.broadcast_to(head.fuse(head.mask_hidden[...]), hidden.shape)
            logits, state = forward(f"round {r} step {k}", tokens, hidden, lengths + k, one)
            tokens = propose(logits)
        if r == ROUNDS:
            break
        fused = head.fuse(jnp.asarray(np.stack(plan.verified_features[r])))
        counts = np.array(plan.accepted[r])
        verified = np.array(plan.verified[r])
        logits, state = forward(f"round {r} extend", verified, fused, lengths, counts)
        lengths = lengths + counts
    return records, drafted


@pytest.fixture(scope="module")
def target_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    changes = {
        "num_hidden_layers": TARGET_LAYERS,
        "hidden_size": TARGET_HIDDEN,
        "vocab_size": VOCAB,
        "tie_word_embeddings": request.param == "tied",
        **rope(1e4),
    }
    return save(make_model("LlamaConfig", changes), tmp_path_factory.mktemp("target"))


def reference_drafts(case: HeadCase, tensors: dict, target: CausalLM) -> list[Draft]:
    table = torch.from_numpy(np.array(target.embedding.table[...]))
    kernel = target.lm_head
    target_head = table if kernel is None else torch.from_numpy(np.array(kernel.kernel[...])).T
    embedding = tensors.get("embed_tokens.weight", table)
    lm_head = tensors.get("lm_head.weight", embedding if case.lm_head == "tied" else target_head)
    return [Draft(reference_head(case, tensors), embedding, lm_head) for _ in range(2)]


# among them all ways to read the output matrix of the target, which a tied one does not have
READ_TARGET = (
    "eagle3 eagle3_target_lm_head eagle3_tied eagle3_tied_to_target eagle3_mislabelled_as_tied "
    "eagle1 eagle1_no_bias"
).split()


@pytest.mark.parametrize(
    ("target_dir", "name"),
    [*(("untied", name) for name in CASES), *(("tied", name) for name in READ_TARGET)],
    indirect=["target_dir"],
)
def test_draft_forwards(name: str, target_dir: Path, tmp_path: Path) -> None:
    case = CASES[name]
    checkpoint = open_target(str(target_dir), dtype="float32")
    target = build_target(checkpoint)
    table = torch.from_numpy(np.array(target.embedding.table[...]))
    tensors = random_tensors(case, table, seed=len(name))
    path = publish(case, tensors, tmp_path / "draft")

    draft = open_draft(str(path), checkpoint)
    assert draft.config.fuses_features == (case.algorithm == "EAGLE3")
    assert draft.config.rope_theta == case.head_theta
    assert draft.config.draft_vocab_size == case.draft_vocab
    assert draft.config.has_own_embedding == (case.embedding == "own") or case.embedding == "copy"
    if case.algorithm == "EAGLE3":
        ids = case.config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
        assert draft.config.feature_layers == tuple(ids or (1, 3, 4))

    head = build_draft(draft)
    plan = Plan.random(draft.config.feature_size)
    theirs, their_ids = run_reference(reference_drafts(case, tensors, target), plan)
    ours, our_ids = run_specjax(head, target, plan)
    assert our_ids == their_ids
    for our_records, their_records in zip(ours, theirs, strict=True):
        for mine, other in zip(our_records, their_records, strict=True):
            assert mine[0] == other[0]
            # float32 errors grow along a chain that reads its own output
            bound = 5 * TOLERANCE if "step" in mine[0] else TOLERANCE
            assert relative_error(mine[1], other[1]) <= bound, f"logits of {mine[0]}"
            assert relative_error(mine[2], other[2]) <= bound, f"states of {mine[0]}"


@pytest.mark.parametrize("target_dir", ["untied"], indirect=True)
def test_rope_theta_override(target_dir: Path, tmp_path: Path) -> None:
    """An explicit theta overrides the file's and changes the forward passes accordingly."""
    filed, used = HeadCase(theta=1e6), HeadCase(theta=1e4)
    checkpoint = open_target(str(target_dir), dtype="float32")
    target = build_target(checkpoint)
    tensors = random_tensors(filed, torch.zeros(1), seed=3)
    path = publish(filed, tensors, tmp_path / "draft")
    plan = Plan.random(3 * TARGET_HIDDEN)
    head = build_draft(open_draft(str(path), checkpoint, rope_theta=1e4))
    ours, _ = run_specjax(head, target, plan)
    theirs, _ = run_reference(reference_drafts(used, tensors, target), plan)
    wrong, _ = run_reference(reference_drafts(filed, tensors, target), plan)
    assert relative_error(ours[0][0][1], theirs[0][0][1]) <= TOLERANCE
    assert relative_error(ours[0][0][1], wrong[0][0][1]) > 100 * TOLERANCE
