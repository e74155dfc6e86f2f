"""rocket-decode: text from a prompt."""

from dataclasses import replace
from typing import Annotated, NoReturn

import typer

from rocket.boosters import (
    BOOSTERS_HELP,
    DENSE_HELP,
    SPLIT_HELP,
    WAIT_HELP,
    WAIT_SECONDS,
    Group,
    follow,
    joined,
    leave,
    only_rank0_prints,
    speaks,
)
from rocket.errors import run_command_line
from rocket.expert_options import (
    BANK_HELP,
    BANK_WORDS,
    GIB_HELP,
    MAP_HELP,
    SLAB_HELP,
    SLOTS_HELP,
    TRACE_HELP,
    ExpertCache,
    check_trace_name,
)
from rocket.options import (
    KV_HELP,
    MAX_CHUNK,
    MAX_SEED,
    PRECISIONS,
    PREFILL_HELP,
    check_choice,
    check_computing,
    check_integer,
    check_output_name,
    check_real,
    flag,
    integer,
    number,
    string,
)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


def _show_version(wanted: bool) -> None:
    if wanted:
        from rocket import _core

        cuda = "with" if _core.cuda_built else "without"
        print(f"rocket-decode {_core.__version__} ({_core.cpu_isa()}, {cuda} CUDA)")
        raise typer.Exit(0)


@app.command()
def decode(
    context: typer.Context,
    fuel: Annotated[
        str | None,
        string("NAME|DIR", "The model, by name or directory. By default sparkler, the small one that ships."),
    ] = None,
    prompt: Annotated[str | None, string("TEXT", "The prompt. Without any: standard input.")] = None,
    prompt_file: Annotated[
        str | None, string("FILE", "The prompt as UTF-8 text, less one newline at its end.")
    ] = None,
    prompt_ids: Annotated[str | None, string("1,5,9", "The prompt as token ids.")] = None,
    chat: Annotated[bool, flag("--chat", "Put the prompt into the fuel's chat template.")] = False,
    tokens: Annotated[int, integer("Generate at most N tokens; 0 only feeds the prompt.")] = 128,
    ignore_eos: Annotated[bool, flag("--ignore-eos", "Go on after a token that ends the text.")] = False,
    sampling: Annotated[
        str, string("greedy|fuel", "Defaults of the next four: greedy, or generation_config.json's.")
    ] = "greedy",
    temperature: Annotated[float | None, number("0 takes the most likely token.")] = None,
    top_k: Annotated[int | None, integer("Draw from the N most likely tokens; 0 is off.")] = None,
    top_p: Annotated[
        float | None, number("Draw from the likeliest tokens that have this mass; 1 is off.")
    ] = None,
    min_p: Annotated[
        float | None, number("Drop tokens under X times the greatest probability; 0 is off.")
    ] = None,
    seed: Annotated[int, integer("The same seed draws the same tokens.")] = 0,
    backend: Annotated[str, string("auto|cpu|cuda", "What computes.")] = "auto",
    prefill_precision: Annotated[str, string(PRECISIONS, PREFILL_HELP)] = "auto",
    kv_dtype: Annotated[str, string(PRECISIONS, KV_HELP)] = "auto",
    threads: Annotated[int | None, integer("CPU threads; 0, the default, is all that may be used.")] = None,
    max_context: Annotated[int | None, integer("Room for N tokens. By default what the run needs.")] = None,
    prefill_chunk: Annotated[int | None, integer("Feed the prompt N tokens at a time.")] = None,
    expert_cache_gib: Annotated[float | None, number(GIB_HELP)] = None,
    expert_slots: Annotated[int | None, integer(SLOTS_HELP)] = None,
    slot_map: Annotated[str | None, string("FILE", MAP_HELP)] = None,
    expert_slab: Annotated[str | None, string("DIR", SLAB_HELP)] = None,
    expert_bank: Annotated[str, string(BANK_WORDS, BANK_HELP)] = "auto",
    boosters: Annotated[int | None, integer(BOOSTERS_HELP)] = None,
    split: Annotated[str | None, string("FILE", SPLIT_HELP)] = None,
    split_dense: Annotated[bool, flag("--split-dense", DENSE_HELP)] = False,
    booster_wait: Annotated[float, number(WAIT_HELP, "N")] = WAIT_SECONDS,
    stats: Annotated[
        float | None, number("Print what the cache of experts did every N seconds.", "N")
    ] = None,
    trace_out: Annotated[str | None, string("FILE", TRACE_HELP)] = None,
    json: Annotated[bool, flag("--json", "Print one JSON object instead of the text.")] = False,
    logits_out: Annotated[
        str | None,
        string("FILE", "Write the logits after each token fed: safetensors, float32 [rows, vocab]."),
    ] = None,
    profile: Annotated[bool, flag("--profile", "Print how long each stage takes.")] = False,
    diagnostics: Annotated[
        bool, flag("--diagnostics", "Print the residual stream's size and the router's entropy.")
    ] = False,
    quiet: Annotated[bool, flag("--quiet", "Nothing on standard error but errors.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> int:
    """Continue a prompt: text to standard output as it is generated, everything else to standard error."""
    check_choice("--sampling", sampling, ("greedy", "fuel"))
    check_computing(backend, prefill_precision, kv_dtype)
    check_integer("--tokens", tokens, 0)
    check_integer("--seed", seed, 0, MAX_SEED)
    if temperature is not None:
        check_real("--temperature", temperature, 0, 100)
    if top_k is not None:
        check_integer("--top-k", top_k, 0)
    if top_p is not None:
        check_real("--top-p", top_p, 0, 1, with_low=False)
    if min_p is not None:
        check_real("--min-p", min_p, 0, 1, with_high=False)
    if threads is not None:
        check_integer("--threads", threads, 0)
    if max_context is not None:
        check_integer("--max-context", max_context, 1)
    if prefill_chunk is not None:
        check_integer("--prefill-chunk", prefill_chunk, 1, MAX_CHUNK)
    if logits_out is not None:
        check_output_name("--logits-out", logits_out)
    experts = ExpertCache(expert_cache_gib, expert_slots, slot_map, expert_slab, expert_bank)
    experts.check()
    if stats is not None:
        check_real("--stats", stats, 0, 86400, with_low=False)
    check_trace_name(trace_out)
    group = Group.of(boosters, split, split_dense, booster_wait)

    from rocket.decode_run import DecodeOptions
    from rocket.decode_run import decode as run
    from rocket.fuel import DEFAULT_FUEL
    from rocket.prompt import read_prompt

    options = DecodeOptions(
        fuel=fuel,
        chat=chat,
        tokens=tokens,
        sampling=sampling,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        ignore_eos=ignore_eos,
        backend=backend,
        prefill_precision=prefill_precision,
        kv_dtype=kv_dtype,
        threads=threads or 0,
        max_context=max_context,
        prefill_chunk=prefill_chunk or 0,
        experts=experts,
        boosters=group,
        stats=stats,
        trace_out=trace_out,
        json=json,
        profile=profile,
        diagnostics=diagnostics,
        quiet=quiet,
    )
    reads_stdin = prompt is None and prompt_file is None and prompt_ids is None
    inputs = {
        "--prompt-file": prompt_file,
        "--slot-map": slot_map,
        "--split": split,
        "--expert-slab": experts.slab_file,
        "standard input": 0 if reads_stdin else None,
    }
    with joined(group.count, group.wait, context) as rank:
        if rank:
            return follow(fuel or DEFAULT_FUEL, options.engine_arguments())
        source = read_prompt(prompt, prompt_file, prompt_ids, chat)
        return run(replace(options, prompt=source), logits_out, inputs)


def main() -> NoReturn:
    only_rank0_prints()
    run_command_line(lambda: app, "rocket-decode", speaks, leave)
