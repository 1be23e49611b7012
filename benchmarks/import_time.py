"""Measure what `import regard`, and the first use of one of its names, cost beyond `import torch`.

    python benchmarks/import_time.py            # prints a table
    python benchmarks/import_time.py --write    # and stores it under benchmarks/results

Each statement runs in fresh processes, in turns; the table gives the median and the least of their times
(`python -X importtime`, cumulative, in seconds), and how many modules of regard were loaded.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys

from cpu_measure import ROOT, provenance

STORED = ROOT / "benchmarks" / "results" / "import-time.json"
STATEMENTS = {
    "import regard": "import torch; import regard",
    "regard.attention": "import torch; import regard; regard.attention",
    "import regard.nn": "import torch; import regard.nn",
    "import regard.models": "import torch; import transformers; import regard.models",
}
LINE = re.compile(r"import time:\s*(\d+) \|\s*(\d+) \|( *)(\S+)")


def measured(statement: str) -> tuple[float, int]:
    """Seconds spent in modules of regard and in what they alone import, and how many modules of regard were loaded."""
    command = [sys.executable, "-X", "importtime", "-c", statement]
    output = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stderr
    lines = [match.groups() for match in map(LINE.match, output.splitlines()) if match]
    ours = {name for *_, name in lines if name.split(".")[0] == "regard"}
    outermost = 0
    depth_of_ours: list[int] = []
    for _, total, blanks, name in reversed(lines):  # a module is printed after those it imports
        depth = len(blanks)
        while depth_of_ours and depth_of_ours[-1] >= depth:
            depth_of_ours.pop()
        if name.split(".")[0] == "regard" and not depth_of_ours:
            outermost += int(total)
            depth_of_ours.append(depth)
    return outermost / 1e6, len(ours)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="processes per statement (default 9)")
    parser.add_argument("--write", action="store_true", help=f"store the result in {STORED}")
    options = parser.parse_args()
    seconds: dict[str, list[float]] = {name: [] for name in STATEMENTS}
    modules: dict[str, int] = {}
    for _ in range(options.rounds):
        for name, statement in STATEMENTS.items():
            spent, modules[name] = measured(statement)
            seconds[name].append(spent)
    rows = [
        {
            "statement": name,
            "median_s": round(statistics.median(times), 4),
            "least_s": round(min(times), 4),
            "regard_modules": modules[name],
        }
        for name, times in seconds.items()
    ]
    for row in rows:
        print(
            f"{row['statement']:<22}{row['median_s']:>8.3f} s{row['least_s']:>8.3f} s{row['regard_modules']:>5} modules"
        )
    if options.write:
        STORED.write_text(json.dumps({"provenance": provenance(quick=False), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
