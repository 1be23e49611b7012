import torch

import regard

torch.manual_seed(0)
query, key, value = (torch.randn(1, 4, 256, 64) for _ in range(3))  # [batch, heads, length, channels]
query, key = (torch.nn.functional.normalize(x, dim=-1) for x in (query, key))
print(f"{'spec':31} {'nonzero':>7} {'effective':>9}")
for spec in ("softmax", "biweight", "triweight*anchored(margin=0.5)", "local-linear[relumax]"):
    out, rows = regard.attention(query, key, value, spec, is_causal=True, scale=8.0, return_diagnostics=True)
    print(f"{spec:31} {rows.support.mean():7.1f} {rows.effective_sample_size.mean():9.1f}")
