"""Train language models of 50 million parameters on a GPU, side by side: `python benchmarks/gpu_train.py --write`.

Every model of `MODELS` learns the Python sources of the standard library, byte by byte, for the same time, in a process
of its own: tokens a second, the loss along the way, and the loss on held-out files. What is compiled in the first steps
does not count as training time. The JSON is written after every model; `--resume` leaves out what it holds.

`--dry` trains toy models for a few steps on the CPU, in Triton's interpreter: it shows that the script runs, no more.
"""

import argparse
import importlib.util
import json
import math
import os
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if importlib.util.find_spec("regard") is None:  # a machine with torch and these sources alone
    sys.path.insert(0, str(ROOT / "src"))
sys.path.insert(0, str(Path(__file__).parent))

STORED = ROOT / "benchmarks" / "results" / "gpu-train.json"
SIZE: dict[str, Any] = {"hidden_size": 576, "num_hidden_layers": 12, "num_attention_heads": 9}
TOY: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
MODELS: dict[str, dict[str, Any]] = {
    "softmax": {"mixers": "softmax"},
    "biweight": {"mixers": "biweight"},
    "relumax": {"mixers": "relumax"},
    "local-linear": {"mixers": "local-linear"},
    "softmax, window of 256": {"mixers": "softmax", "window": 256},
    "softmax, window of 256, FwPKM": {"mixers": "softmax", "window": 256, "memories": "FwPKM@2,6,10"},
    "softmax, every fourth layer local-linear": {"mixers": 3 * ["softmax", "softmax", "softmax", "local-linear"]},
    "sparsemax": {"mixers": "sparsemax"},
    "triweight": {"mixers": "triweight"},
    "normrelu": {"mixers": "normrelu"},
    "relu": {"mixers": "relu"},
    "elu": {"mixers": "elu"},
    **{
        name: {"mixers": name}
        for name in (
            *("topk-softmax", "topk-uniform", "exponential", "linear", "cosine", "shift-cosine", "geometric"),
            *("clipped-geometric", "rbf", "relu2"),
        )
    },
}
"""Fields of `HybridConfig`, the most important first."""
BATCH, TOKENS, RATE, WARM = 16, 2048, 6e-4, 5
"""Windows of a step and their bytes; the learning rate; steps before the time is taken."""
LOOKS, WINDOWS = 10, 32
"""How often the loss is noted, and held-out windows."""


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9, help="minutes for all models together (default 9)")
    parser.add_argument("--model", nargs="*", choices=list(MODELS), default=list(MODELS), help="models to train")
    parser.add_argument("--dry", action="store_true", help="toy models on the CPU, in Triton's interpreter")
    parser.add_argument("--resume", action="store_true", help="keep what --out holds and train what is not in it")
    parser.add_argument("--out", type=Path, default=STORED, help=f"the JSON (default {STORED})")
    parser.add_argument("--write", action="store_true", help="write the table beside --out, as Markdown")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=30, help=argparse.SUPPRESS)
    return parser.parse_args()


def text(dry: bool) -> tuple[bytes, bytes]:
    """The bytes to learn and those held out: every eighth file."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    files = [path for path in files if "site-packages" not in path.parts][: 40 if dry else None]
    contents = [path.read_bytes() for path in files]
    learn, held = (b"".join(x for i, x in enumerate(contents) if (i % 8 == 0) == out) for out in (False, True))
    return learn, held


def make(name: str, dry: bool, tokens: int) -> Any:
    """Return a model with the first weights of seed 0."""
    import torch

    from regard.models import HybridConfig, HybridForCausalLM

    fields = {**(TOY if dry else SIZE), **MODELS[name]}
    if dry and isinstance(fields["mixers"], list):
        fields["mixers"] = fields["mixers"][:4]
    if "memories" in fields:
        sizes = {"sub_keys": 8, "key_dim": 8, "value_dim": 8, "chunk_size": 16} if dry else {"chunk_size": 512}
        fields |= {"memories": "FwPKM@1" if dry else fields["memories"], "memory_options": {"fwpkm": sizes}}
    torch.manual_seed(0)
    return HybridForCausalLM(HybridConfig(vocab_size=256, max_position_embeddings=tokens, **fields))


class Training:
    """A model with its text, optimizer and losses."""

    def __init__(self, name: str, dry: bool) -> None:
        import torch
        from gpu_measure import Bench

        from regard.nn import optimizer_groups

        self.bench, self.dry = Bench(dry), dry
        self.batch, self.tokens = (2, 32) if dry else (BATCH, TOKENS)
        self.model = make(name, dry, self.tokens).to(self.bench.device).train()
        self.optimizer = torch.optim.AdamW(optimizer_groups(self.model).dense, lr=RATE, betas=(0.9, 0.95))
        self.learn, self.held = (torch.frombuffer(bytearray(x), dtype=torch.uint8) for x in text(dry))
        self.generator = torch.Generator().manual_seed(0)
        self.losses: list[Any] = []

    def windows(self, source: Any, count: int) -> Any:
        import torch

        first = torch.randint(len(source) - self.tokens, (count,), generator=self.generator)
        found = torch.stack([source[i : i + self.tokens] for i in first.tolist()])
        return found.long().to(self.bench.device)

    def loss(self, batch: Any) -> Any:
        import torch
        from gpu_measure import small_tiles

        with torch.autocast(self.bench.device.type, torch.bfloat16, enabled=not self.dry), small_tiles(self.bench):
            return self.model(input_ids=batch, labels=batch, use_cache=False).loss

    def step(self, done: float) -> None:
        """Train on one batch; `done` is the share of the time that is over, by which the learning rate falls."""
        import torch

        for group in self.optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (len(self.losses) + 1) / 100) * (1 - 0.9 * min(done, 1.0))
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(self.windows(self.learn, self.batch))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.losses.append(loss.detach())

    def held_out(self) -> float:
        """Return the mean loss on held-out windows."""
        import torch

        self.model.eval()
        with torch.no_grad():
            found = [float(self.loss(self.windows(self.held, 1))) for _ in range(2 if self.dry else WINDOWS)]
        return sum(found) / len(found)

    def clock(self) -> float:
        """Return the time once the device has done all."""
        import torch

        if self.bench.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def trained(name: str, seconds: float, dry: bool) -> dict[str, Any]:
    """Train one model for some seconds, and return what was seen."""
    import torch
    from gpu_measure import provenance

    own, most, used = Training(name, dry), WARM + 2 if dry else math.inf, 0.0
    curve: list[tuple[int, float, float]] = []
    begun = own.clock()
    while used < seconds and len(own.losses) < most:
        own.step(used / seconds)
        count = len(own.losses)
        if count == WARM:
            begun = own.clock()
        elif count > WARM and (count % 5 == 0 or count == most):
            used = own.clock() - begun
            if used >= seconds * (len(curve) + 1) / LOOKS or count == most:
                curve.append((count, round(used, 2), float(torch.stack(own.losses[-50:]).mean())))
    speed = (len(own.losses) - WARM) * own.batch * own.tokens / used
    peak = torch.cuda.max_memory_allocated() / 2**20 if own.bench.device.type == "cuda" else None
    return {
        "model": name, "parameters": own.model.num_parameters(), "steps": len(own.losses), "seconds": round(used, 2),
        "tokens_per_second": speed, "curve": curve, "held_out": own.held_out(), "mib": peak,
        "run": provenance(own.bench),
    }  # fmt: skip


def table(stored: dict[str, Any]) -> str:
    """A row for every model, as Markdown."""
    names = ["model", "parameters", "steps", "tokens/s", "loss, last", "loss, held out", "MiB"]
    lines = ["| " + " | ".join(names) + " |", "|---|" + 6 * "---:|"]
    for name, row in stored.items():
        if "error" in row:
            lines.append(f"| {name} | {row['error'].splitlines()[-1][:120] if row['error'] else 'killed'} | | | | | |")
            continue
        speed = f"{row['tokens_per_second']:,.0f}"
        peak = "" if row["mib"] is None else f"{row['mib']:,.0f}"
        last = f"{row['curve'][-1][2]:.3f}" if row["curve"] else ""
        cells = (f"{row['parameters']:,}", row["steps"], speed, last, f"{row['held_out']:.3f}", peak)
        lines.append(f"| {name} | {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    args = options()
    if args.dry:
        os.environ["TRITON_INTERPRET"] = "1"  # which triton reads when it is imported
    if args.one:
        print("RESULT " + json.dumps(trained(args.one, args.seconds, args.dry)), flush=True)
        return 0
    import torch

    if not args.dry and not torch.cuda.is_available():
        print("no GPU here; --dry shows that the script runs.", file=sys.stderr)
        return 1
    stored = json.loads(args.out.read_text(encoding="utf-8")) if args.resume and args.out.exists() else {}
    begun, names = time.perf_counter(), [name for name in args.model if "error" in stored.get(name, {"error": ""})]
    for place, name in enumerate(names):
        left = 60 * args.minutes - (time.perf_counter() - begun)
        seconds = max(5.0, left / (len(names) - place) - 15)  # the start of a process, and what is compiled
        command = [sys.executable, __file__, "--one", name, "--seconds", f"{seconds:.1f}", *["--dry"] * args.dry]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=3 * seconds + 120, check=False)
            found = [line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT ")]
            stored[name] = json.loads(found[0]) if found else {"model": name, "error": done.stderr[-2000:]}
        except subprocess.TimeoutExpired:
            stored[name] = {"model": name, "error": f"took more than {3 * seconds + 120:.0f} s"}
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(stored, indent=1), encoding="utf-8")
        print(table({name: stored[name]}).splitlines()[-1], flush=True)
    if args.write:
        args.out.with_suffix(".md").write_text(f"# Training on a GPU\n\n{table(stored)}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
