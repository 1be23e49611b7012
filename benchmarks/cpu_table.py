"""The tables of `cpu.py` in docs/results.md, made from the stored JSON alone; torch is not needed."""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

BEGIN, END = "<!-- benchmarks/cpu.py: begin -->", "<!-- benchmarks/cpu.py: end -->"
PASSES = {"forward": "forward", "both": "forward + backward"}
PAIRS = (
    ("regard alpha=2", "entmax sparsemax"),
    ("regard alpha=1.5", "entmax entmax15"),
    ("regard alpha=1.5", "entmax entmax_bisect 1.5"),
    ("regard alpha=4/3", "entmax entmax_bisect 4/3"),
)
"""The same function in regard and in the package."""
DENSE = "dense entmax15"
DENSE_LOCAL = "dense local-linear"
BARS = {
    "forward": "",
    "both": " Targets: alpha 2 and 1.5, relumax and normrelu 1.5, alpha 4/3 2.5; at standard deviation 0.05, all 4.",
}
Entry = dict[str, Any]


def dump(stored: Entry) -> str:
    """The JSON, with every innermost list on one line."""
    text = json.dumps(stored, indent=1)
    return re.sub(r"\[\s+([^\[\]{}]*?)\s+\]", lambda m: f"[{re.sub(chr(10) + ' *', ' ', m[1])}]", text) + "\n"


def placed(page: str, tables: str) -> str:
    """The page with what stands between its markers replaced.

    Raises:
        ValueError: the markers are not there, each once and in order.
    """
    if page.count(BEGIN) != 1 or page.count(END) != 1 or page.index(BEGIN) > page.index(END):
        raise ValueError(f"the page must hold {BEGIN} and, after it, {END}, each once.")
    head, rest = page.split(BEGIN)
    return f"{head}{BEGIN}\n{tables}{END}{rest.split(END)[1]}"


def between(page: str) -> str:
    """What stands between the markers of a page."""
    return page.split(BEGIN + "\n")[1].split(END)[0]


def tables(stored: Entry) -> str:
    """All tables, as Markdown."""
    makers: dict[str, Callable[[Entry], Iterable[str]]] = {
        "normalisers": normalisers,
        "attention": attention,
        "linear": linear,
        "local_linear": local_linear,
        "models": models,
        "fast_weights": fast_weights,
        "token": token,
    }
    blocks: list[str] = []
    for name, make in makers.items():
        if name in stored:
            blocks += make(stored[name])
    return "".join(f"\n{block}\n" for block in blocks) + "\n"


# Words -------------------------------------------------------------------------------------------------------


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def number(x: float) -> str:
    """Three digits, or whole from a hundred on."""
    return f"{x:.0f}" if abs(x) >= 100 else f"{x:.3g}"


def machine(part: Entry) -> str:
    """Where and with what a part was measured, and how sure its ratios are."""
    p = part["provenance"]
    versions = ", ".join(f"{name} {version}" for name, version in p["versions"].items())
    changed = f" with {p['changed_files']} changed files" if p["changed_files"] else ""
    text = (
        f"`{p['command']}`, {p['date'][:10]}, {p['seconds']:.0f} s: {p['cpu']}, {p['cores']} cores, {p['threads']} "
        f"thread{'s' * (p['threads'] != 1)}, load at the start {p['load'][0]}; {versions}; commit "
        f"{p['commit'][:7]}{changed}. "
    )
    if p["quick"]:
        text = f"**Tiny sizes (`--quick`): shows that the script runs, and says nothing of speed.** {text}"
    return text + certainty(part["times"])


def certainty(times: list[Entry]) -> str:
    """What the medians hide, in a sentence."""
    cells = [c for t in times for c in t["contestants"].values()]
    spreads = sorted(c["spread"] for c in cells)
    apart = sorted(abs(c["ratio_min"] / c["ratio"] - 1) for c in cells)
    middle, high = len(cells) // 2, int(0.95 * (len(cells) - 1))
    return (
        f"Interquartile range over median: {spreads[middle]:.0%} typically, at most {spreads[high]:.0%} for 95%; "
        f"ratios of the fastest samples differ from those of the medians by {apart[middle]:.0%} and {apart[high]:.0%}."
    )


def select(times: list[Entry], which: str, **config: Any) -> Entry:
    """The contestants of one configuration."""
    return next(
        t["contestants"]
        for t in times
        if t.get("pass", which) == which and all(t["config"][name] == value for name, value in config.items())
    )


# Normalisers -------------------------------------------------------------------------------------------------


def normalisers(part: Entry) -> Iterable[str]:
    configs = [t["config"] for t in part["times"] if t["pass"] == "both"]
    elements = configs[0]["elements"]
    yield "### Normalisers\n\n" + machine(part)
    for which, words in PASSES.items():
        yield (
            f"{words.capitalize()} of {elements:,} float32 scores: time as a ratio to torch.softmax, by row length and "
            f"standard deviation of the scores.{BARS[which]}"
        )
        yield ratios(part, which, configs)
    yield (
        "The same function in regard and in the package entmax, forward + backward: how many times faster regard is. "
        "Targets: 25 against entmax15, 60 against entmax_bisect."
    )
    cells = [select(part["times"], "both", **c) for c in configs]
    rows = []
    for mine, theirs in PAIRS:
        faster = (number(c[theirs]["median_ms"] / c[mine]["median_ms"]) for c in cells)
        rows.append([f"{mine} against {theirs}", *faster])
    yield markdown(["", *map(column, configs)], rows)
    yield from exactness(part)


def column(config: Entry) -> str:
    return f"{config['length']}, {config['spread']:g}"


def ratios(part: Entry, which: str, configs: list[Entry]) -> str:
    cells = [select(part["times"], which, **c) for c in configs]
    base = part["baseline"]
    rows = [[f"torch.{base}, ms", *(number(c[base]["median_ms"]) for c in cells)]]
    rows += [[name, *(number(c[name]["ratio"]) for c in cells)] for name in cells[0] if name != base]
    return markdown(["", *map(column, configs)], rows)


def exactness(part: Entry) -> Iterable[str]:
    """Errors and memory of every normaliser."""
    length = part["accuracy"][0]["length"]
    mib = {m["name"]: m["tensors"] for m in part["memory"]}
    yield (
        f"Largest errors over the three standard deviations at row length {length}, of a row's sum from 1 and of a "
        f"weight from float64 (for alpha-entmax 100 bisections); targets of the sums: 2e-6 and 4e-3. Peak memory "
        f"in addition to scores and cotangent, in score tensors; output and gradient count; target: 2.6 (a fresh "
        f"process each, {settings(part)})."
    )
    head = ["", "sum, float32", "sum, bfloat16", "weight, float32", "weight, bfloat16", *PASSES.values()]
    rows = []
    for found in part["accuracy"]:
        errors = [f"{found[dtype][what]:.1e}" for what in ("sum", "weight") for dtype in ("float32", "bfloat16")]
        own = mib.get(found["name"])
        rows.append([found["name"], *errors, *(number(own[which]) if own else "–" for which in PASSES)])
    yield markdown(head, rows)


def settings(part: Entry) -> str:
    environment = part["provenance"]["memory_environment"]
    return ", ".join(f"{name}={value}" for name, value in environment.items())


# Attention ---------------------------------------------------------------------------------------------------


def attention(part: Entry) -> Iterable[str]:
    sizes = list(dict.fromkeys((t["config"]["length"], t["config"]["heads"]) for t in part["times"]))
    longest = max(sizes)
    sizes = [s for s in sizes if s[1] > 1 or s == longest]
    yield "### Attention\n\n" + machine(part)
    for causal in (False, True):
        yield (
            f"{'Causal' if causal else 'Full'} attention, 64 features, float32: time as a ratio to "
            f"scaled_dot_product_attention (sdpa), and in brackets how many times faster than dense entmax15 attention."
            + ("" if causal else " Targets for biweight at T 2048, H 8, forward + backward: 1.8 (10x).")
        )
        yield against_sdpa(part, sizes, causal)
    yield "Exponent of T in the time (one head, fitted over all lengths). Peak memory of full attention in MiB, in " + (
        f"addition to q, k, v and the cotangent; output and gradients count (a fresh process each, {settings(part)})."
    )
    yield growth_and_memory(part)
    yield from clusters(part)


def against_sdpa(part: Entry, sizes: list[tuple[int, int]], causal: bool) -> str:
    base = part["baseline"]
    head, cells = [""], []
    for length, heads in sizes:
        for which, words in PASSES.items():
            head.append(f"T {length}, H {heads}: {words}")
            cells.append(select(part["times"], which, length=length, heads=heads, causal=causal))
    rows = [[f"{base}, ms", *(number(c[base]["median_ms"]) for c in cells)]]
    for name in cells[0]:
        if name != base:
            times = [c[DENSE]["median_ms"] / c[name]["median_ms"] for c in cells]
            faster = ["" if name == DENSE else f" ({number(x)}x)" for x in times]
            rows.append([name, *(number(c[name]["ratio"]) + more for c, more in zip(cells, faster, strict=True))])
    return markdown(head, rows)


def growth_and_memory(part: Entry) -> str:
    columns = list(dict.fromkeys((m["config"]["length"], m["config"]["heads"]) for m in part["memory"]))
    mib = {(m["name"], m["config"]["length"], m["config"]["heads"]): m["mib"] for m in part["memory"]}
    head = [""]
    head += [f"{'causal' if g['causal'] else 'full'}, {PASSES[g['pass']]}" for g in part["growth"]]
    head += [f"MiB, T {length}, H {heads}: {words}" for length, heads in columns for words in PASSES.values()]
    rows = []
    for name in part["growth"][0]["contestants"]:
        row = [name, *(f"{g['contestants'][name]['fitted']:.2f}" for g in part["growth"])]
        for size in columns:
            own = mib.get((name, *size))
            row += [number(own[which]) if own else "–" for which in PASSES]
        rows.append(row)
    rows += unfit(part, len(head))
    return markdown(head, rows)


def unfit(part: Entry, width: int) -> list[list[str]]:
    """A row for the size at which dense attention was not run, its memory by proportion from one head."""
    one = [m for m in part["memory"] if m["name"] == DENSE and m["config"]["heads"] == 1]
    if not one:
        return []
    length, gib = one[0]["config"]["length"], 8 * one[0]["mib"]["both"] / 1024
    return [[f"{DENSE}, T {length}, H 8", f"does not fit: about {gib:.0f} GiB, not run", *[""] * (width - 2)]]


def clusters(part: Entry) -> Iterable[str]:
    config, base = part["clustered"][0]["config"], part["baseline"]
    yield (
        f"Keys in clusters of {config['cluster']} along time (T {config['length']}, H {config['heads']}, full): each "
        f"query has weight in its own cluster only. Most blocks of keys then have no weight and are skipped after the "
        f"scores. Shuffled in time, the same keys give the same outputs, and every block has some weight."
    )
    cells = [c["contestants"] for c in part["clustered"]]
    rows = [[f"{base}, ms", *(number(c[base]["median_ms"]) for c in cells)]]
    rows += [[name, *(number(c[name]["ratio"]) for c in cells)] for name in cells[0] if name != base]
    yield markdown(["", *(PASSES[c["pass"]] for c in part["clustered"])], rows)


# Linear ------------------------------------------------------------------------------------------------------


def linear(part: Entry) -> Iterable[str]:
    lengths = list(dict.fromkeys(t["config"]["length"] for t in part["times"]))
    heads = part["times"][0]["config"]["heads"]
    yield "### Linear-time forms\n\n" + machine(part)
    yield (
        f"Causal, chunked, {heads} heads of 64 features, float32, forward + backward: milliseconds by length, exponent "
        f"of T (fitted over all lengths, and between the two longest), and peak memory in MiB, counted as above. "
        f"The presets linear and cosine do not normalise weights; they are also timed with weights that sum to one."
    )
    cells = [select(part["times"], "both", length=length) for length in lengths]
    fits = {g["pass"]: g["contestants"] for g in part["growth"]}["both"]
    kept = list(dict.fromkeys(m["config"]["length"] for m in part["memory"]))
    mib = {(m["name"], m["config"]["length"]): m["mib"]["both"] for m in part["memory"]}
    rows = []
    for name in cells[0]:
        row = [name, *(number(c[name]["median_ms"]) if name in c else "–" for c in cells)]
        row += [f"{fits[name][what]:.2f}" for what in ("fitted", "last")]
        rows.append(row + [number(mib[name, n]) if (name, n) in mib else "–" for n in kept])
    head = ["", *(f"T {n}" for n in lengths), "exponent", "last", *(f"MiB, T {n}" for n in kept)]
    yield markdown(head, rows)
    yield from decoding(part["decoding"])


def decoding(found: list[Entry]) -> Iterable[str]:
    lengths = [d["config"]["length"] for d in found]
    yield (
        f"One decoded token, {found[0]['config']['heads']} heads, microseconds after that many tokens: a state of "
        f"fixed size costs the same after any number, a cache of keys and values is read as a whole."
    )
    rows = []
    for name in found[0]["contestants"]:
        times = [d["contestants"][name]["median_ms"] for d in found]
        rows.append([name, *(number(1e3 * t) for t in times), f"{number(times[-1] / times[0])}x"])
    yield markdown(["", *(f"{n} tokens" for n in lengths), "longest / shortest"], rows)


# Local linear ------------------------------------------------------------------------------------------------


def local_linear(part: Entry) -> Iterable[str]:
    usual = part["times"][0]["config"]["dim"]
    configs = [t["config"] for t in part["times"] if t["pass"] == "both"]
    yield "### Local linear attention\n\n" + machine(part)
    yield (
        f"Causal, ridge {part['ridge']:g}, float32, {usual} features: time as a ratio to scaled_dot_product_attention "
        f"(sdpa), and in brackets how many times faster than the plain dense form, which runs where its tensors are "
        f"below 1 GiB. Without a tolerance systems are solved to a residual of 1e-6. Targets at T 2048, H 8: 12 "
        f"forward, 8 forward + backward."
    )
    yield against_dense(part, [c for c in configs if c["dim"] == usual])
    others = sorted((c for c in configs if c["dim"] != usual), key=lambda c: int(c["dim"]))
    length, heads = others[0]["length"], others[0]["heads"]
    yield f"The same by features, T {length}, H {heads}."
    same = [c for c in configs if (c["length"], c["heads"]) == (length, heads)]
    yield against_dense(part, sorted(same, key=lambda c: int(c["dim"])))
    yield "Mean (largest) steps of conjugate gradients a row, forward, and the largest relative residual of a row."
    yield steps(part, configs)
    yield from growth_and_bar(part)
    yield from against_softmax(part["decoding"])


def size(config: Entry) -> str:
    return f"T {config['length']}, H {config['heads']}, D {config['dim']}"


def against_dense(part: Entry, configs: list[Entry]) -> str:
    """A column for every configuration and pass; names that did not run there have a dash."""
    base, head, cells = part["baseline"], [""], []
    for config in configs:
        for which, words in PASSES.items():
            head.append(f"{size(config)}: {words}")
            cells.append(select(part["times"], which, **config))
    names = list(dict.fromkeys(name for c in cells for name in c if name != base))
    rows = [[f"{base}, ms", *(number(c[base]["median_ms"]) for c in cells)]]
    for name in names:
        row = [name]
        for c in cells:
            more = ""
            if name in c and name != DENSE_LOCAL and DENSE_LOCAL in c:
                more = f" ({number(c[DENSE_LOCAL]['median_ms'] / c[name]['median_ms'])}x)"
            row.append(number(c[name]["ratio"]) + more if name in c else "–")
        rows.append(row)
    return markdown(head, rows)


def steps(part: Entry, configs: list[Entry]) -> str:
    found = [next(s["contestants"] for s in part["solver"] if s["config"] == c) for c in configs]
    rows = [
        [name, *(f"{number(s[name]['mean'])} ({s[name]['max']}); {s[name]['residual']:.1e}" for s in found)]
        for name in found[0]
    ]
    return markdown(["", *map(size, configs)], rows)


def growth_and_bar(part: Entry) -> Iterable[str]:
    """Exponents of T, and peak memory beside its target."""
    memory = part["memory"]
    config, queries, bar = (memory[0][name] for name in ("config", "queries_mib", "bar_mib"))
    yield (
        f"Exponent of T in the time of a head, fitted over all lengths, and peak memory at {size(config)} in MiB, "
        f"counted as above. Target of the latter: 12 times the queries ({number(queries)} MiB) and 64 MB, so "
        f"{number(bar)} MiB."
    )
    mib = {m["name"]: m["mib"] for m in memory}
    rows = []
    for name in part["growth"][0]["contestants"]:
        own = mib.get(name)
        row = [name, *(f"{g['contestants'][name]['fitted']:.2f}" for g in part["growth"])]
        rows.append(row + [number(own[which]) if own else "–" for which in PASSES])
    yield markdown(["", *PASSES.values(), *(f"MiB, {words}" for words in PASSES.values())], rows)


def against_softmax(found: list[Entry]) -> Iterable[str]:
    base, config = found[0]["baseline"], found[0]["config"]
    yield (
        f"One decoded token against a cache, {config['heads']} heads of {config['dim']} features: microseconds, and as "
        f"a ratio to {base}. Target at 8192 keys: 2.5."
    )
    rows = []
    for name in found[0]["contestants"]:
        cells = [d["contestants"][name] for d in found]
        rows.append([name, *(f"{number(1e3 * c['median_ms'])} ({number(c['ratio'])}x)" for c in cells)])
    yield markdown(["", *(f"{d['config']['length']} keys" for d in found)], rows)


# Models ------------------------------------------------------------------------------------------------------


def models(part: Entry) -> Iterable[str]:
    bars = part["bars"]
    biweight = "memory-mosaic biweight"
    yield "### Language models\n\n" + machine(part)
    yield (
        f"A training step (forward, backward, clipping, AdamW), float32: milliseconds, and in brackets as a ratio to "
        f"the first row of its kind; ICLM has the inner width that gives it as many parameters as the Transformer "
        f"(GPT-2's blocks with rotary positions). Peak memory in MiB of forward + backward, in addition to the "
        f"parameters, at the first size; gradients count. Target of {biweight} against softmax: "
        f"{number(bars[biweight])}."
    )
    sizes = list(dict.fromkeys(shape_of(t["config"]) for t in part["times"]))
    cells = {(shape_of(t["config"]), name): c for t in part["times"] for name, c in t["contestants"].items()}
    learned = {name: n for p in part["parameters"] for name, n in p["parameters"].items()}
    mib = {m["name"]: m["mib"]["both"] for m in part["memory"]}
    rows = []
    for name, parameters in learned.items():
        own = [cells[size, name] for size in sizes]
        row = [name, *(f"{number(c['median_ms'])} ({number(c['ratio'])}x)" for c in own)]
        rows.append([*row, f"{parameters:,}", number(mib[name]) if name in mib else "–"])
    yield markdown(["", *sizes, "parameters", "MiB"], rows)
    yield from cached(part["decoding"], bars["decoding"])


def shape_of(config: Entry) -> str:
    return f"T {config['length']}, B {config['batch']}, C {config['width']}, L {config['layers']}"


def cached(found: list[Entry], bar: float) -> Iterable[str]:
    config = found[0]["config"]
    yield (
        f"{config['new_tokens']} greedy tokens after a prompt, batch 1, C {config['width']}, L "
        f"{config['layers']}, softmax: seconds. Target: a cache makes decoding {number(bar)} times as fast."
    )
    rows = []
    for entry in found:
        with_cache, without = entry["contestants"].values()
        name = entry["baseline"].removesuffix(", a cache")
        seconds = (number(c["median_ms"] / 1e3) for c in (with_cache, without))
        rows.append([f"{name}, after {entry['config']['prompt']}", *seconds, f"{number(without['ratio'])}x"])
    yield markdown(["", "with a cache", "without", "faster"], rows)


# Fast weights ------------------------------------------------------------------------------------------------


def fast_weights(part: Entry) -> Iterable[str]:
    bars, base, ours = part["bars"], part["baseline"], "regard"
    one, two = part["times"]
    config = one["config"]
    yield "### Memories of fast weights\n\n" + machine(part)
    package = (
        f"The time of the package ({part['package']}) is that of its whole layer, with projections, for a token more."
        if part["package"] != "not installed"
        else "The package fast-weight-product-key-memory 0.2.2 was not installed."
    )
    yield (
        f"Reading and writing {config['sub_keys']}^2 slots of {config['width']} numbers, top {config['top_k']}, chunks "
        f"of {config['chunk']} tokens, search included, float32, one thread: milliseconds, and how many times as fast "
        f"as the dense form, which gives the same results (the released program's rule). {package} Peak memory in MiB, "
        f"as above, of two chunks. Targets: {number(bars['ms'])} ms forward, {number(bars['dense'])} times."
    )
    mib = {m["name"]: m["mib"] for m in part["memory"] if m["config"]["chunks"] == two["config"]["chunks"]}
    rows = []
    for name in one["contestants"]:
        times = [
            f"{number(t[name]['median_ms'])} ({number(1 / t[name]['ratio'])}x)"
            for t in (one["contestants"], two["contestants"])
        ]
        rows.append([name, *times, *(number(mib[name][which]) for which in PASSES)])
    yield markdown(
        ["", "a chunk, forward", "two chunks, forward + backward", *(f"MiB, {w}" for w in PASSES.values())], rows
    )
    most = next(m for m in part["memory"] if m["name"] == ours and m["config"] != two["config"])
    yield (
        f"{most['config']['chunks']} chunks, forward + backward: {number(most['mib']['both'])} MiB, of which "
        f"{number(most['written_mib'])} are the rows that were written; the table is "
        f"{number(4 * config['sub_keys'] ** 2 * config['width'] / 2**20)} MiB, of which {base} makes several a chunk."
    )
    yield from memory_steps(part["steps"], bars["step"])


def memory_steps(found: list[Entry], bar: float) -> Iterable[str]:
    for entry in found:
        yield (
            f"A training step (forward, backward, clipping, AdamW) at the paper's size, {entry['config']['tokens']} "
            f"tokens, batch {entry['config']['batch']}: seconds. Target of three memories: {number(bar)} times."
        )
        rows = [
            [name, f"{number(c['median_ms'] / 1e3)} ({number(c['ratio'])}x)", f"{entry['parameters'][name]:,}"]
            for name, c in entry["contestants"].items()
        ]
        yield markdown(["", "step", "parameters"], rows)


# A decoded token ---------------------------------------------------------------------------------------------


def token(part: Entry) -> Iterable[str]:
    yield "### One decoded token against few keys\n\n" + machine(part)
    yield (
        "One query on one thread, 8 heads of 64 features, float32, no gradients. Processor time is the smallest of all "
        "samples. Targets at 64 keys: softmax 4 x sdpa, biweight "
        "600 us, local-linear[biweight] 2000 us."
    )
    head = ("call", "keys", "median us", "x sdpa", "processor us", "x sdpa")
    columns = (("median_ms", 1e3), ("ratio", 1), ("cpu_us", 1), ("cpu_ratio", 1))
    rows = [
        (name, str(t["config"]["keys"]), *(number(unit * c[column]) for column, unit in columns))
        for t in part["times"]
        for name, c in t["contestants"].items()
    ]
    yield markdown(head, rows)
