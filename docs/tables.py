#!/usr/bin/env python3
"""Fills the tables of README.md and docs/ with what `make eval`, `make bench` and `make growth`
measured, and draws docs/growth.svg.

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->`. Its numbers come from
target/eval.json, target/bench.json, target/bench-avx2.json (`cargo bench -- --level avx2`) and
target/growth.json and from nowhere else; where a file is missing, its tables stay as they are.
"""

import json
import math
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = ["README.md", "docs/evaluation.md", "docs/performance.md"]
MIB = 1024 * 1024
# llama.cpp's block formats: bytes of 32 values, as a share of their 64 bytes in f16.
Q8_0 = 34 / 64
Q4_0 = 18 / 64

# What the README shows, and how it calls it.
SHOWN = {
    "ladder": "libsekv, default",
    "ladder-keys": "without value sketches",
    "int8": "all tokens in int8",
    "paper": "routing `paper`, untrained",
}


def table(header, rows):
    """Markdown; the first column to the left, the others to the right."""
    lines = [header, ["---"] + ["--:"] * (len(header) - 1)] + rows
    return "\n".join("| " + " | ".join(line).lstrip() + " |" for line in lines)


def f16_bytes(row):
    return row["fast_bytes"] / row["fast_fraction_f16"]


def methods_of(rows):
    return list(dict.fromkeys(row["method"] for row in rows))


def pooled(rows):
    """One method's documents as one, every token counting once."""
    n_tokens = sum(row["n_tokens"] for row in rows)
    return {
        name: sum(row[name] * row["n_tokens"] for row in rows) / n_tokens
        for name in ["kl_mean", "top1", "dnll", "fetched_mean"]
    } | {"kl_worst": max(row["kl_mean"] for row in rows)}


def fast_percent(rows, n_ctx):
    """The share of f16 at one length, mean over its documents."""
    shares = [row["fast_fraction_f16"] for row in rows if row["n_ctx"] == n_ctx]
    return f"{100 * sum(shares) / len(shares):.1f} %" if shares else "-"


def needle_score(needles, method):
    """Of the prompts that the full cache solves for sure."""
    asked = [needle for needle in needles if needle["method"] == method and needle["full_solved"]]
    if not asked:
        return "-"
    return f"{sum(needle['solved'] for needle in asked)} of {len(asked)}"


def fidelity_table(evaluation, methods):
    rows = evaluation["rows"]
    lengths = sorted({row["n_ctx"] for row in rows})
    header = ["", "KL mean", "KL, worst document", "same next token", "needles", "tokens fetched"]
    header += [f"fast tier at {n_ctx:,}, of f16" for n_ctx in lengths]
    lines = []
    for method, name in methods.items():
        own = [row for row in rows if row["method"] == method]
        if not own:
            continue
        sums = pooled(own)
        lines.append(
            [
                name,
                f"{sums['kl_mean']:.5f}",
                f"{sums['kl_worst']:.5f}",
                f"{100 * sums['top1']:.1f} %",
                needle_score(evaluation["needles"], method),
                f"{sums['fetched_mean']:.0f}",
            ]
            + [fast_percent(own, n_ctx) for n_ctx in lengths]
        )
    return table(header, lines)


def fidelity(evaluation):
    return fidelity_table(evaluation, SHOWN)


def all_methods(evaluation):
    methods = methods_of(evaluation["rows"])
    return fidelity_table(evaluation, {method: f"`{method}`" for method in methods})


def memory(evaluation):
    """Bytes of the longest documents' caches, default method."""
    rows = [row for row in evaluation["rows"] if row["method"] == "ladder"]
    n_ctx = max(row["n_ctx"] for row in rows)
    rows = [row for row in rows if row["n_ctx"] == n_ctx]
    f16 = sum(map(f16_bytes, rows)) / len(rows)
    fast = sum(row["fast_bytes"] for row in rows) / len(rows)
    slow = sum(row["slow_bytes"] for row in rows) / len(rows)
    sizes = [
        ("llama.cpp, f16", f16),
        ("llama.cpp, q8_0", Q8_0 * f16),
        ("llama.cpp, q4_0", Q4_0 * f16),
        ("libsekv, fast tier", fast),
        ("libsekv, slow tier", slow),
        ("libsekv, both", fast + slow),
    ]
    header = [f"{n_ctx:,} tokens", "MiB", "of f16"]
    return table(header, [[name, f"{size / MIB:.1f}", f"{100 * size / f16:.1f} %"] for name, size in sizes])


def documents(evaluation):
    header = ["document", "tokens", "KL mean", "KL max", "same next token", "dNLL", "fast tier, of f16", "fetched", "99th percentile"]
    rows = [row for row in evaluation["rows"] if row["method"] == "ladder"]
    return table(
        header,
        [
            [
                row["doc"],
                f"{row['n_ctx']:,} + {row['n_tokens']}",
                f"{row['kl_mean']:.5f}",
                f"{row['kl_max']:.3f}",
                f"{100 * row['top1']:.1f} %",
                f"{row['dnll']:+.4f}",
                f"{100 * row['fast_fraction_f16']:.1f} %",
                f"{row['fetched_mean']:.0f}",
                f"{row['fetched_p99']:.0f}",
            ]
            for row in rows
        ],
    )


def speed(benches):
    """What is ours; a rival's or a yardstick's row has a colon in its name."""
    return all_speeds({"rows": [row for row in benches["rows"] if ":" not in row["name"]]})


def all_speeds(benches):
    def number(row, name, pattern):
        return pattern.format(row[name]) if row.get(name) is not None else "-"

    header = ["", "tokens", "median", "spread", "times llama.cpp's speed", "times a dense f16 attention's", "of the floor"]
    return table(
        header,
        [
            [
                row["name"],
                f"{row['n_ctx']:,}",
                number({"ms": 1e3 * row["median_s"]}, "ms", "{:.3f} ms"),
                number({"spread": 100 * row["spread"]}, "spread", "{:.0f} %"),
                number(row, "ratio_vs_ggml", "{:.2f}"),
                number(row, "ratio_vs_dense", "{:.2f}"),
                number(row, "fraction_of_floor", "{:.2f}"),
            ]
            for row in benches["rows"]
        ],
    )


def growth(measured):
    header = ["tokens", "attend, a layer", "times half as many tokens", "fetched", "in the middle", "fast tier", "slow tier, in files", "anonymous memory of the process"]
    lines, before = [], None
    for row in measured["rows"]:
        seconds = row["median_s"] / measured["layers"]
        lines.append(
            [
                f"{row['n_ctx']:,}",
                f"{1e3 * seconds:.2f} ms",
                f"{seconds / before:.2f}" if before else "-",
                f"{row['fetched']:.0f}",
                f"{row['middle']:.0f}",
                f"{row['fast_bytes'] / MIB:.0f} MiB",
                f"{row['slow_file_bytes'] / MIB:.0f} MiB",
                f"{row['anonymous_bytes'] / MIB:.0f} MiB",
            ]
        )
        before = seconds
    return table(header, lines)


def million(measured):
    memory, state, errors = measured["memory"], measured["state"], measured["errors"]
    n = max(row["n_ctx"] for row in measured["rows"])
    rows = [
        ["anonymous memory of the process", f"{memory['anonymous_bytes'] / MIB:.0f} MiB"],
        ["its bound", f"{memory['bound_bytes'] / MIB:.0f} MiB"],
        ["a full f16 cache", f"{memory['full_f16_bytes'] / MIB:.0f} MiB"],
        ["the saved state", f"{state['state_bytes'] / MIB:.0f} MiB"],
        ["saved, fsync included", f"{state['save_s']:.1f} s"],
        ["`cp` of the file", f"{state['cp_s']:.1f} s"],
        ["loaded and verified", f"{state['load_s']:.1f} s"],
        ["load over `cp`, median of the turns", f"{state['load_over_cp']:.2f}"],
        ["difference to dense attention in f64, of the largest value: default, mean and worst", f"{errors['mean']:.4f}, {errors['worst']:.4f}"],
        ["the same with every token read, from the loaded state", f"{errors['all_mean']:.4f}, {errors['all_worst']:.4f}"],
    ]
    return table([f"{n:,} tokens, {measured['layers']} layers", ""], rows)


def plot(measured):
    """Time a layer against tokens, both logarithmic; a line of proportional growth beside it."""
    points = [(row["n_ctx"], 1e3 * row["median_s"] / measured["layers"]) for row in measured["rows"]]
    left, right, top, bottom = 60, 620, 20, 300
    low_x, high_x = math.log2(points[0][0]), math.log2(points[-1][0])
    low_y, high_y = math.log10(points[0][1]) - 0.1, math.log10(points[0][1]) + (high_x - low_x) * math.log10(2) + 0.1

    def at(n, milliseconds):
        x = left + (math.log2(n) - low_x) / (high_x - low_x) * (right - left)
        y = bottom - (math.log10(milliseconds) - low_y) / (high_y - low_y) * (bottom - top)
        return f"{x:.1f},{y:.1f}"

    proportional = [points[0], (points[-1][0], points[0][1] * points[-1][0] / points[0][0])]
    marks = []
    for n, milliseconds in points:
        x, y = at(n, milliseconds).split(",")
        name = f"{n >> 10}K" if n < 1 << 20 else f"{n >> 20}M"
        marks.append(f'<circle cx="{x}" cy="{y}" r="3"/><text x="{x}" y="{float(y) - 8}">{milliseconds:.3g}</text><text x="{x}" y="{bottom + 18}">{name}</text>')
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 660 340" font-family="sans-serif" font-size="11" text-anchor="middle">',
        '<rect width="660" height="340" fill="white"/>',
        f'<path d="M{left},{top}V{bottom}H{right}" fill="none" stroke="#888"/>',
        f'<polyline points="{" ".join(at(*p) for p in proportional)}" fill="none" stroke="#bbb" stroke-dasharray="4 3"/>',
        f'<polyline points="{" ".join(at(*p) for p in points)}" fill="none" stroke="#2060a0" stroke-width="2"/>',
        *marks,
        f'<text x="{(left + right) / 2}" y="335">tokens; dashed: in proportion to them</text>',
        f'<text x="20" y="160" transform="rotate(-90 20 160)">ms a layer</text>',
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


# Which file each table needs.
TABLES = {
    "fidelity": ("target/eval.json", fidelity),
    "memory": ("target/eval.json", memory),
    "documents": ("target/eval.json", documents),
    "all methods": ("target/eval.json", all_methods),
    "speed": ("target/bench.json", speed),
    "all speeds": ("target/bench.json", all_speeds),
    "speed with avx2": ("target/bench-avx2.json", speed),
    "growth": ("target/growth.json", growth),
    "million": ("target/growth.json", million),
}


def main():
    texts = {}
    for name, (source, make) in TABLES.items():
        if not (ROOT / source).exists():
            print(f"{source} is missing: the table '{name}' stays as it is", file=sys.stderr)
            continue
        texts[name] = make(json.loads((ROOT / source).read_text()))
        print(f"{name}, from {source}\n\n{texts[name]}\n")
    measured = ROOT / "target/growth.json"
    if measured.exists():
        (ROOT / "docs/growth.svg").write_text(plot(json.loads(measured.read_text())))
    for page in PAGES:
        path = ROOT / page
        old = path.read_text()

        def fill(match):
            if match[2] not in TABLES:
                sys.exit(f"{page}: there is no table '{match[2]}'; known: {', '.join(TABLES)}")
            text = texts.get(match[2])
            return match[0] if text is None else f"{match[1]}\n{text}\n{match[3]}"

        new = re.sub(r"(<!-- table: ([\w ]+) -->)\n.*?(<!-- end of table -->)", fill, old, flags=re.S)
        if new != old:
            path.write_text(new)
            print(f"{page}: written", file=sys.stderr)


main()
