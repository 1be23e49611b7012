"""Fetch the packages that `gpu.py` compares with as wheels, for a GPU machine without a network.

    python benchmarks/fetch_peers.py                    # here, into benchmarks/wheels, which is not committed
    pip install --no-index --no-deps --target /tmp/peers benchmarks/wheels/*.whl   # there
    PYTHONPATH=/tmp/peers python benchmarks/gpu.py --minutes 10

Only wheels without needs of their own beside torch, triton and transformers are fetched, so that nothing there is
replaced.
"""

import argparse
import subprocess
import sys
from pathlib import Path

PEERS = ("adasplash", "flash-linear-attention", "fla-core", "einops")
FOLDER = Path(__file__).parent / "wheels"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="3.12", help="version of Python there (default 3.12)")
    parser.add_argument("--out", type=Path, default=FOLDER, help=f"folder to write (default {FOLDER})")
    args = parser.parse_args()
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", args.python, "--dest", str(args.out)]
    code = 0
    for peer in PEERS:  # one by one: what is missing must not keep the others
        code |= subprocess.run([*command, peer], check=False).returncode
    for path in sorted(args.out.glob("*.whl")):
        print(f"{path.name}: {path.stat().st_size / 2**20:.2f} MiB")
    return code


if __name__ == "__main__":
    sys.exit(main())
