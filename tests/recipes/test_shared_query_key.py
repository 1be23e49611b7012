"""`regard reproduce shared-query-key`, as small as it goes."""

from tiny_runs import checked, tiny

from regard.models import HybridForCausalLM
from regard_recipes.kernels.shared_query_key import memory_bytes


def test_what_is_counted() -> None:
    """Two layers of width 64, four heads of 16 channels, 8 windows of 64 characters, float32."""
    runs = tiny("shared-query-key")[1].select(kind="run")
    assert len(runs) == 8
    rows = runs[runs["seed"] == 0].set_index(["model", "q and k"])
    for spec, cache in (("softmax", 2 * 2 * 512 * 64 * 4), ("elu", 2 * (4 * (17 * 16 + 17) * 4 + 4))):
        apart, shared = rows.loc[(spec, "apart")], rows.loc[(spec, "shared")]
        assert apart["parameters"] - shared["parameters"] == 2 * 64 * 64
        assert apart["query_key_bytes"] == 2 * shared["query_key_bytes"] == 2 * 2 * 8 * 64 * 64 * 4
        assert apart["kept_bytes"] - shared["kept_bytes"] >= 2 * 8 * 64 * 64 * 4
        assert apart["cache_bytes"] == shared["cache_bytes"] == cache
        assert 4 < apart["bits_per_char"] < 9


def test_memory_that_is_freed_and_used_again_is_counted_again() -> None:
    cell = {"model": "softmax", "q and k": "apart"}
    model = HybridForCausalLM(checked("shared-query-key", width=32, layers=1).model_config(cell, 50))
    before = memory_bytes(model, 2, 16)["kept_bytes"]

    def save(module: object, inputs: object, output: object) -> None:
        for _ in range(4):  # each takes the memory of the one before
            (2 * output).square()  # saves 2 * output

    model.lm_head.register_forward_hook(save)
    assert memory_bytes(model, 2, 16)["kept_bytes"] == before + 4 * 2 * 16 * 50 * 4
