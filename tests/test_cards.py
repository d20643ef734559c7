"""The figures in README and cards are those of the result files."""

import json
import math
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
CARD = ROOT / "model_cards" / "falcon-3a.3-tiny"
TRANSFORMER = "bytes of the Transformer's"
RULES = ("falcon_1", "falcon_2", "falcon_2a", "falcon_3")
FIRST, WIDEST = ("32x1024x12x64", "8x4096x16x128"), ("4x2048x4x256",)


def results(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


@pytest.mark.parametrize("model", ["falcon-3a.3-tiny", "transformer-tiny"])
def test_card_has_the_measured_figures(model):
    card, measured = (CARD / "README.md").read_text(), results(f"pretrain_{model}")
    splits = [measured["evaluation"][split] for split in ("val", "ood_postgres", "ood_persuasion")]
    bits = " | ".join(f"{split['bits_per_byte']:.3f}" for split in splits)
    perplexities = " | ".join(f"{split['perplexity']:.2f}" for split in splits)
    assert f"| {measured['parameters']:,} | {bits} | {int(measured['tokens_per_second_median']):,} |" in card
    assert f"| {perplexities} |" in card
    assert measured["finished"]


def test_card_has_the_run():
    card, run = (CARD / "README.md").read_text(), results("pretrain_falcon-3a.3-tiny")
    for figure in (run["steps"], run["training_data"]["tokens"], run["training_data"]["bytes"]):
        assert f"{figure:,}" in card
    assert f"{run['seconds']:.0f} seconds" in card
    other = results("pretrain_transformer-tiny")
    gap = run["evaluation"]["val"]["bits_per_byte"] - other["evaluation"]["val"]["bits_per_byte"]
    assert f"ahead by {gap:.3f} bits per byte" in card


def test_decoding_figures():
    card, rows = (CARD / "README.md").read_text(), results("decoding")["rows"]
    assert rows[0]["state, bytes"] == rows[1]["state, bytes"]
    assert f"{rows[0]['state, bytes']:,} bytes of state" in card
    short, long = (f"{row['ms per token']:.1f} ms" for row in rows)
    assert f"{short} a token after 128 tokens of context and {long} after 65,536" in card


def test_overlap_with_the_training_text():
    card, rows = (CARD / "README.md").read_text(), results("overlap")["rows"]
    val, manual, novel = (row["in the training text, %"] for row in rows)
    assert f"{val:.2f} % of the 13-word runs" in card
    assert f"{manual:.2f} % and none" in card
    assert novel == 0


def test_readme_names_the_checkpoint_s_figures():
    readme = (ROOT / "README.md").read_text()
    for model in ("falcon-3a.3-tiny", "transformer-tiny"):
        assert f"{results(f'pretrain_{model}')['evaluation']['val']['bits_per_byte']:.3f}" in readme


def test_readme_table_of_the_chunked_form():
    readme = (ROOT / "README.md").read_text()
    for row in results("torch_form")["rows"]:
        line = f"| {row['torch form, ms']:.0f} | {row['ratio']:.1f} | {row['loop over torch form']:.0f} |"
        assert line in readme, line


def test_readme_size_of_a_memory():
    short, long = results("decoding")["rows"]
    assert short["state, bytes"] == long["state, bytes"]
    readme = (ROOT / "README.md").read_text()
    assert f"{short['state, bytes']:,} bytes, after {short['context']} tokens as after {long['context']:,}" in readme


def test_kernels_readme_has_the_measured_times(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from rules import table

    readme = (ROOT / "kernels" / "README.md").read_text()
    for part in table(results("scalar_rules")).split("\n\n"):
        assert part in readme
    shares = [f"{r['rule']} {r['share of copy']:.2f}" for r in results("step")["rows"] if r["B, H, K = V"][:2] == "64"]
    assert len(shares) == 6
    assert ", ".join(shares) in " ".join(readme.split())
    for part in table(results("channel_and_window")).split("\n\n"):
        assert part in readme
    said, kernels = " ".join(readme.split()), results("scalar_rules")["kernels"]

    def came(kernel, shapes, digits):
        return " and ".join(f"{kernels[f'falcon_1@{shape}']['both'][kernel]:.{digits}f}" for shape in shapes)

    invert, pass_, back = (came(name, FIRST, 2) for name in ("_invert", "_pass", "_reverse_pass"))
    assert f"`_invert` 0.07 and 0.145, came {invert}, `_pass` 0.11 and 0.30, came {pass_}," in said
    assert f"`_reverse_pass` 0.09 and 0.27, came {back}." in said
    carry, reverse, read, gradients = (came(n, WIDEST, 3) for n in ("_carry", "_reverse", "_read", "_gradients"))
    assert f"`_gradients` 0.12, came {carry}, {reverse}, {read} and {gradients}:" in said


def test_kernels_readme_has_what_falcon_2_and_3_take_beside_falcon_1_and_peers():
    readme = " ".join((ROOT / "kernels" / "README.md").read_text().split())
    rows = {(row["work"], row["shape"]): row for row in results("channel_and_window")["rows"]}
    shapes = (*FIRST, "1x32768x16x128")

    def listed(figures):
        first, *others = (f"{figure:.2f}" for figure in figures)
        return f"{first}, " + " and ".join(others)

    times = {work: [rows[work, s]["both, GPU ms"] for s in shapes] for work in RULES}
    two, three = (
        listed(t / one for t, one in zip(times[w], times["falcon_1"], strict=True)) for w in ("falcon_2", "falcon_3")
    )
    assert f"falcon_2 takes {two} times falcon_1's time" in readme
    assert f"falcon_3 takes {three} times falcon_1's." in readme
    came = [listed(times[work]) for work in ("falcon_2", "falcon_2a")]
    came.append(" and ".join(f"{t:.2f}" for t in times["falcon_3"][:2]))
    assert f"came {', '.join(came)}, and the memory" in readme
    extra = " and ".join(f"{rows['falcon_3', s]['both, MiB']:.0f}" for s in shapes[1:])
    assert f"{rows['falcon_3', shapes[0]]['both, MiB']:.0f}, {extra} extra MiB" in readme
    before = {(row["work"], row["shape"]): row for row in results("channel_and_window_before")["rows"]}
    gla, product = (before[peer, shapes[0]] for peer in ("chunk_gla", "chunk_gated_delta_product"))
    assert not {(peer["work"], shapes[0]) for peer in (gla, product)} & set(rows)
    said = [f"{gla[of]:.2f} and {product[of]:.2f}" for of in ("both, GPU ms", "both, ms")]
    assert f"they took {said[0]} ms on the GPU and {said[1]} as called" in readme
    gla_over, product_over = (
        " and ".join(f"{peer[of] / rows[ours, shapes[0]][of]:.2f}" for of in ("both, GPU ms", "both, ms"))
        for peer, ours in ((gla, "falcon_2a"), (product, "falcon_3"))
    )
    assert f"falcon_2a is {gla_over} times as fast, falcon_3 {product_over}." in readme


def test_kernels_readme_says_where_the_time_of_falcon_3_goes(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from rules import MOVED, SHAPES, floor_ms

    solving, shares, over = ("_local", "_solutions", "_gradients"), [], []
    for shape in FIRST:
        came = results("channel_and_window")["kernels"][f"falcon_3@{shape}"]["both"]
        shares.append(f"{sum(came[kernel] for kernel in solving) / sum(came.values()):.2f}")
        over += [came[kernel] / floor_ms(SHAPES[shape], MOVED["falcon_3"][kernel]) for kernel in solving]
    readme = " ".join((ROOT / "kernels" / "README.md").read_text().split())
    assert f"are {' and '.join(shares)} of it at the first two shapes, and take" in readme
    assert f"and take {min(over):.1f} to {max(over):.1f} times the time of their bytes" in readme


def test_kernels_readme_has_the_best_tile_of_one_token():
    readme = " ".join((ROOT / "kernels" / "README.md").read_text().split())
    rows = [
        row for row in results("step_sweep")["rows"] if (row["rule"], row["B, H, K = V"]) == ("falcon_1", "64, 16, 128")
    ]
    best = max(rows, key=lambda row: row["share of copy"])
    assert best["tile"] == 4096
    assert f"were expected of falcon_1 and {best['share of copy']:.2f} came" in readme


def test_memory_of_kernels_was_checked():
    rows = results("memcheck")["rows"]
    assert len(rows) == 78
    assert not any(row["errors"] for row in rows)
    steps = results("memcheck_step")["rows"]
    assert len(steps) == 12
    assert not any(row["errors"] for row in steps)
    errors = {row["work"]: row["errors"] for row in results("memcheck_falcon_3")["rows"]}
    assert {work for work, found in errors.items() if found == 0} == {
        f"falcon_3 {card} {width}" for card in ("large fp32", "large bf16", "safe bf16") for width in (128, 256)
    }
    assert set(errors.values()) == {0, -1}  # -1: not come to its end in time


def test_all_cases_of_the_errors_on_a_gpu_hold():
    cases = [case for group in results("triton_errors")["groups"].values() for case in group["rows"]]
    assert len(cases) == 939
    assert all(case["errors"] and not case["wrong"] for case in cases)


def test_kernels_readme_has_what_falcon_2_takes_to_solve():
    readme = " ".join((ROOT / "kernels" / "README.md").read_text().split())
    kernels = results("channel_and_window")["kernels"]
    shapes = ("32x1024x12x64", "8x4096x16x128", "1x32768x16x128")
    came = [[kernels[f"falcon_2@{shape}"]["both"][name] for name in ("_solve", "_unsolve")] for shape in shapes]
    first, second, third = (f"{solve:.2f} and {unsolve:.2f}" for solve, unsolve in came)
    assert f"came {first}, {second}, {third}." in readme
    assert f"{1000 * came[2][0] / 512:.1f} µs each forward and {1000 * came[2][1] / 512:.1f} back" in readme


def test_kernels_readme_has_the_times_of_sums():
    readme = " ".join((ROOT / "kernels" / "README.md").read_text().split())
    rows = {
        row["form"]: row
        for row in results("add_norm")["rows"]
        if row["rows x width"] == "32768x768" and row[""] == "sum and norm"
    }
    ours, plain = ([rows[form][f"{way} GPU, ms"] for way in ("forward", "backward")] for form in ("triton", "torch"))
    floors = " and ".join(f"{rows['triton'][f'{way} floor, ms']:.3f}" for way in ("forward", "backward"))
    assert f"it takes {ours[0]:.3f} ms forward and {ours[1]:.3f} back, where the bytes pass in {floors} and" in readme
    assert f"PyTorch's operations take {plain[0]:.3f} and {plain[1]:.3f}." in readme


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("first_call", "took {} s, longest for {}, and in a second process, which finds them compiled, {} s."),
        ("first_call_before", "it was {} s, longest for {}, and {} s."),
    ],
)
def test_kernels_readme_has_the_times_of_first_calls(name, said):
    readme = " ".join((ROOT / "kernels" / "README.md").read_text().split())
    calls: dict[str, dict[str, float]] = {}
    for row in results(name)["rows"]:
        calls.setdefault(row["case"], {})[row["rule"]] = row["call, s"]
    first, second = (calls[case] for case in ("nothing compiled", "second process"))
    ranges = [f"{min(times.values()):.1f} to {max(times.values()):.1f}" for times in (first, second)]
    assert said.format(ranges[0], max(first, key=first.__getitem__), ranges[1]) in readme


def test_readme_says_what_taking_tokens_back_costs():
    readme, rows = (ROOT / "README.md").read_text(), results("taking_back")["rows"]
    recorded, taken = (f"{(row['times plain'] - 1) * 100:.0f} %" for row in rows[1:])
    assert f"takes {recorded} longer when it is recorded, and {taken} when three of the six" in readme


def test_readme_says_what_a_token_takes_on_a_cpu():
    readme = " ".join((ROOT / "README.md").read_text().split())
    ratios = {row["model"]: f"{row['ratio']:.2f}" for row in results("cpu_decoding")["rows"]}
    assert f"takes {ratios['falcon-1a.3-130m']} times the time of its linear layers alone" in readme
    assert f"after 128 tokens, {ratios['llama-130m']} times" in readme


def test_readme_has_the_speed_of_decoding_on_a_gpu():
    readme = (ROOT / "README.md").read_text()
    rows: dict[tuple[str, str], dict[int, float]] = {}
    for row in results("device_decoding")["rows"]:
        rows.setdefault((row["model"], row["way"]), {})[row["rows"]] = row["tokens/s"]
    shown = [speeds for (_, way), speeds in rows.items() if way != "generate, without graphs"]
    assert len(shown) == 6
    for speeds in shown:
        assert f" | {speeds[1]:,.0f} | {speeds[64]:,.0f} |" in readme
    rows = {row["context"]: row for row in results("device_decoding_contexts")["rows"] if row["way"] == "generate"}
    short, long = rows[128], rows[131_072]
    said = (
        f"takes {short['ms per token']:.2f} ms after 128 tokens and {long['ms per token']:.2f} ms after 131,072, where "
    )
    said += f"{long['bytes'] / 1e6:.1f} MB are kept; that Llama's keys and values are "
    said += f"{long[TRANSFORMER] / 1e9:.1f} GB there"
    assert said in " ".join(readme.split())


def test_recipes_readme_has_the_speed_of_training():
    readme = " ".join((ROOT / "examples" / "README.md").read_text().split())
    found = sorted((ROOT / "benchmarks" / "results").glob("training*.json"))
    files = [results("training"), *(results(path.stem) for path in found if path.stem != "training")]
    rows = [row for measured in files for row in measured["rows"] if not row["failure"]]
    assert len(rows) == 35
    for row in rows:
        compiled = ", compiled" if row["compiled"] else ""
        figures = f"{compiled} | {row['loss']} | {row['tokens/s']:,} | {row['peak GiB']:.1f} |"
        assert re.search(rf"\| {row['shape']} \| [^|]*{re.escape(figures)}", readme)
    speeds = {
        (row["model"], row["shape"]): f"{round(row['tokens/s'], -3):,}"
        for row in files[0]["rows"]
        if not row["failure"]
    }
    main = " ".join((ROOT / "README.md").read_text().split())
    for model, sentence in (
        ("falcon_3a", "trains on {} tokens a second in rows of 1,024 and on {}"),
        ("llama", "on {} and {}"),
    ):
        assert sentence.format(*(speeds[model, shape] for shape in ("32x1024", "4x8192"))) in main
    profile = files[0]["profiles"]["falcon_3a 32x1024 fused"]
    longest = sum(kernel["ms"] for kernel in profile["kernels"])
    assert f"of the {profile['ms']:.0f} ms that the GPU works" in readme
    assert f"twenty kinds of kernels take {longest:.0f}" in readme
    parts = {
        ("nvjet",): "{} are matrix products",
        ("liger", "gpu_kernel_impl_nocast"): "{} the loss beside them",
        ("copy", "CUDAFunctor_add<c10::BFloat16>, std", "CUDAFunctor_add<float>"): "{} casts, sums and copies",
        ("add_forward", "add_backward"): "{} the norms of the layers",
        ("_chunk_backward",): "{} the gradients of the update rule",
        ("_forward", "_backward"): "{} the short convolutions",
    }
    for names, sentence in parts.items():
        spent = sum(
            kernel["ms"]
            for kernel in profile["kernels"]
            if any(kernel["kernel"] == name if name[0] == "_" else name in kernel["kernel"] for name in names)
        )
        assert sentence.format(f"{spent:.0f}") in readme


def test_readmes_have_the_speed_of_compiled_training():
    rows = results("training_compiled")["rows"] + results("training_plain_llama")["rows"]
    ours, llama = (round(row["tokens/s"], -3) for row in rows if row["compiled"] and not row["failure"])
    assert f"`torch.compile` they are {ours:,} and, with the plain loss, {llama:,} in" in " ".join(
        (ROOT / "README.md").read_text().split()
    )


def test_recipes_readme_has_the_speed_of_two_devices():
    readme = " ".join((ROOT / "examples" / "README.md").read_text().split())
    rows = {row["on all"]: row for row in results("scaling")["rows"]}
    times = {name: f"{row['times as fast']:.2f}" for name, row in rows.items()}
    assert f"DDP is {times['DDP']} times as fast as one device, FSDP2 {times['FSDP2']} times" in readme
    handed = rows["sequence, handed over"]
    said = f"handed over, they are {times['sequence, handed over']} times as fast, with {handed['GiB, each']:.0f}"
    assert f"{said} GiB each in place of {handed['GiB, one']:.0f}; scanned {times['sequence, scanned']} times" in readme
    assert rows["DDP"]["losses differ by"] == 0
    assert max(row["losses differ by"] for row in rows.values()) < 3e-3


def test_recipes_readme_has_the_perplexities_of_distillation():
    readme, measured = (ROOT / "examples" / "README.md").read_text(), results("distillation")
    for name, run in measured["runs"].items():
        last = {stage: math.exp(list(points.values())[-1]) for stage, points in run["curve"].items()}
        early = " | ".join(f"{last[stage]:,.0f}" for stage in ("converted", "align"))
        late = " | ".join(f"{last[stage]:.1f}" for stage in ("match", "tune"))
        assert f"| {name} | {early} | {late} |" in readme
        assert f"The teacher's is {last['teacher']:.1f}." in readme
        if "scratch" in last:
            assert f"is at {last['scratch']:.1f} after {list(run['curve']['scratch'])[-1]} steps" in readme
    assert measured["tokens a step"] == 64 * 512


def test_recipes_readme_has_the_perplexities_of_language_models():
    readme, runs = (ROOT / "examples" / "README.md").read_text(), sorted((RESULTS / "language").glob("*/result.json"))
    assert len(runs) == 3
    for path in runs:
        run = json.loads(path.read_text())
        figures = [run["evaluation"][name] for name in ("val", "ood_postgres", "ood_persuasion")]
        shown = " | ".join(f"{found['perplexity']:.2f} / {found['bits_per_byte']:.4f}" for found in figures)
        assert re.search(rf"\| {re.escape(run['model'])}, 1 × 29.9M \| [^|]+\| {re.escape(shown)} \|", readme)


def test_recipes_readme_has_what_small_output_norms_do():
    readme = " ".join((ROOT / "examples" / "README.md").read_text().split())

    def perplexity(folder, model):
        run = json.loads((RESULTS / folder / f"{model}-seed0-lr0.002" / "result.json").read_text())
        return f"{run['evaluation']['val']['perplexity']:.1f}"

    before, now = (perplexity(folder, "falcon-3a.3") for folder in ("language_small_before", "language_small"))
    other = perplexity("language_small", "falcon-1.3")
    assert f"was {before} before and is {now} now, Falcon-1.3 {other}." in readme
    assert f"A Transformer is at {perplexity('language_small_before', 'transformer')}." in readme


def test_recipes_readme_has_the_scores_of_a_known_model():
    readme = " ".join((ROOT / "examples" / "README.md").read_text().split())
    tasks = results("evaluate_smollm2")["tasks"]
    names = {"piqa": "PIQA", "arc_challenge": "ARC-Challenge", "openbookqa": "OpenBookQA"}
    said = ", ".join(f"{name} {100 * tasks[task]['acc_norm']:.1f} % (acc_norm)" for task, name in names.items())
    errors = [f"{100 * tasks[task]['acc_norm_stderr']:.1f}" for task in names]
    assert f"{said}, with standard errors of {errors[0]}, {errors[1]} and {errors[2]}" in readme


def test_recipes_readme_has_what_models_keep(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    from recall import table
    from side_by_side import read_results

    readme = (ROOT / "examples" / "README.md").read_text()
    runs = read_results(RESULTS / "recall_tiny")
    assert len(runs) == 12
    assert table(runs) in readme
    falcon = [run["evaluation"]["by_count"]["8"] for run in runs if run["model"] == "falcon-1.3"]
    assert min(min(found["kept"], found["rebound"]) for found in falcon) > 0.985
    for run in read_results(RESULTS / "recall_tiny_longer"):
        assert run["seed"] == 0
        for count in ("16", "64"):
            found = run["evaluation"]["by_count"][count]
            assert " / ".join(f"{100 * found[kind]:.1f}" for kind in ("kept", "rebound", "stale")) in readme
