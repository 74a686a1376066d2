"""The complete path from prompts to texts without the engine. Read this file first.

    python examples/minimal.py "The sky is blue because" "Once upon a time"

The program plans a target with its draft head, compiles all functions, prefills the prompts and
runs rounds of draft, verify and accept. It prints accepted drafts in colour. `specjax.Engine` adds
what a service needs: continuous batching, page management, streams, stop strings and more.
"""

import argparse
from collections.abc import Sequence

from specjax import SamplingParams
from specjax.engine.args import EngineArgs
from specjax.engine.plan import EnginePlan, plan_engine
from specjax.engine.weights import load_weights
from specjax.kv.pages import PageAllocator
from specjax.runtime.runner import ModelRunner
from specjax.speculative.prefill import Chunk

Token = tuple[int, bool]  # token id, and whether the token is an accepted draft


def build(args: EngineArgs) -> tuple[EnginePlan, ModelRunner]:
    """Plan all sizes, compile all functions, and load the weights to the device."""
    plan = plan_engine(args)
    runner = ModelRunner(plan.networks, plan.config)
    runner.compile(show_progress=False)
    runner.load(*load_weights(plan))
    return plan, runner


def prefill(runner: ModelRunner, slot: int, prompt: Sequence[int], params: SamplingParams) -> int:
    """Compute the KV cache of a prompt in chunks, and return the first sampled token."""
    runner.set_slot(slot, params, seed=params.sampling_seed or 0, prompt_len=len(prompt))
    width = runner.config.prefill_buckets[-1]
    for start in range(0, len(prompt), width):
        end = min(start + width, len(prompt))
        chunk = Chunk.of(slot, prompt, start, end, budget=params.max_new_tokens)
        result = runner.prefill([chunk])  # does not wait for the device
    return int(result.read()[0])


def decode(runner: ModelRunner, texts: dict[int, list[Token]], max_new_tokens: int) -> None:
    """Run rounds for all slots, and append tokens to ``texts`` until each slot has enough."""
    slots = list(texts)
    while any(len(texts[slot]) < max_new_tokens for slot in slots):
        # one compiled call: the head drafts, and the target verifies all drafts in one pass. Drafts
        # that equal the target's own choice are accepted. The target adds a bonus token
        rounds = runner.round(slots).read()
        for packed in rounds:  # one i32 [B, A + 3] per round
            for slot, row in zip(slots, packed.tolist(), strict=False):  # further rows are padding
                *tokens, _num_proposed, num_accepted_drafts, num_accepted_tokens = row
                new = enumerate(tokens[:num_accepted_tokens])
                texts[slot] += [(token, i < num_accepted_drafts) for i, token in new]
    for slot in slots:
        del texts[slot][max_new_tokens:]


def generate(
    args: EngineArgs, prompts: Sequence[str], params: SamplingParams
) -> tuple[EnginePlan, list[list[Token]]]:
    """Generate tokens for all prompts in one batch."""
    plan, runner = build(args)
    tokenizer, config = plan.target.load_tokenizer(), plan.config
    pages = PageAllocator(config.num_pages, config.page_size)
    texts: dict[int, list[Token]] = {}
    for slot, prompt in enumerate(prompts, 1):  # slot 0 is for padding
        own = pages.allocate(config.pages_per_request)  # enough for the longest text
        if own is None:
            raise ValueError(f"{len(prompts)} prompts are too many for {config.num_pages} pages")
        runner.set_pages(slot, own)
        texts[slot] = [(prefill(runner, slot, tokenizer.encode(prompt), params), False)]
    decode(runner, texts, params.max_new_tokens)
    return plan, list(texts.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", nargs="*", default=["The sky is blue because"])
    parser.add_argument("--max-new-tokens", type=int, default=48, help="per prompt (default: 48)")
    args = parser.parse_args()
    params = SamplingParams(temperature=0.0, max_new_tokens=args.max_new_tokens, ignore_eos=True)
    sizes = {"context_length": 256, "max_running_requests": len(args.prompts)}
    options = EngineArgs(speculative_algorithm="EAGLE3", speculative_num_steps=3, **sizes)
    plan, texts = generate(options, args.prompts, params)
    tokenizer = plan.target.load_tokenizer()
    for prompt, tokens in zip(args.prompts, texts, strict=True):
        green = {True: "\033[32m{}\033[0m", False: "{}"}
        pieces = [green[is_draft].format(tokenizer.decode([token])) for token, is_draft in tokens]
        print(f"{prompt}{''.join(pieces)}")
        num_drafts = sum(is_draft for _, is_draft in tokens)
        print(f"-- {len(tokens)} tokens, {num_drafts} of them accepted drafts\n")


if __name__ == "__main__":
    main()
