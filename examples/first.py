import torch

import regard

torch.manual_seed(0)
query, key, value = (torch.randn(1, 4, 256, 64) for _ in range(3))  # [batch, heads, length, dim]
query, key = (torch.nn.functional.normalize(x, dim=-1) for x in (query, key))
for spec in ("softmax", "biweight", "triweight*anchored(margin=0.5)", "local-linear[relumax]"):
    out, rows = regard.attention(query, key, value, spec, is_causal=True, scale=8.0, return_diagnostics=True)
    print(f"{spec:31} keys that count: {rows.support.mean():5.1f}  bandwidth: {rows.bandwidth.mean():.2f}")
print(regard.entmax(torch.tensor([1.0, 0.6, -1.0]), alpha=1.5), regard.Spec.parse("polynomial(r=2)*adaptive"))
