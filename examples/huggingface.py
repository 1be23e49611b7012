import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from regard.integrations.transformers import convert

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, initializer_range=0.3,
)  # fmt: skip
model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()  # or from_pretrained
text = torch.randint(3, 256, (1, 128))
with torch.no_grad():
    before = model(text).logits
    for spec in ("softmax", "biweight", "biweight*anchored(margin=2)", "local-linear[relumax]"):
        convert(model, spec)
        out = model(text, output_attentions=True)
        keys = torch.stack(out.attentions).ne(0).sum(-1).float().mean()
        moved = (out.logits - before).norm() / before.norm()
        print(f"{spec:28} nonzero keys: {keys:4.1f}  logits moved: {moved:.0%}")
    print("tokens after generate:", model.generate(text, attention_mask=text.ne(0), max_new_tokens=8).shape[1])
