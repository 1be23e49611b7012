"""The tests of transformers that do not apply to regard's models: one table, with the reasons."""

from collections.abc import Iterator
from fnmatch import fnmatch

GPU, OWN, KIND = "needs a GPU or another package", "regard has its own tests of this", "not this kind of model"
EXCEPTIONS: dict[tuple[str, ...], str] = {
    ("test_flash_att*", "test_flex_attention*", "test_eager_matches_fa?_generate", "test_sdpa_can_compile_dynamic",
     "test_sdpa_can_dispatch_on_flash", "test_kernels_can_load_without_crashing", "test_*_offload*", "test_*deepspeed*",
     "test_model_parallel*", "test_can_load_with_device_context_manager", "test_can_load_with_global_device_set",
     "test_torch_compile_for_training", "test_generate_with_quant_cache"): GPU,
    ("test_*composite*", "test_internal_model_config_and_subconfig_are_same",
     "test_encoder_decoder_loss_no_double_shift", "test_*router_logits*", "test_vision_axial_rope",
     "test_get_*_features_*", "test_generate_with_mtp", "test_resize_position_vector_embeddings",
     "test_feed_forward_chunking", "test_problem_types"): KIND,
    ("test_eager_matches_sdpa_*", "test_eager_matches_batched_and_grouped_inference*",
     "test_can_set_attention_dynamically", "test_sdpa_can_dispatch_non_composite_models",
     "test_sdpa_padding_matches_padding_free_with_position_ids"):
        "specs and `impl` choose the attention; `attn_implementation` is not used",
    ("test_eager_padding_matches_padding_free_with_position_ids",): f"{OWN}: tests/models/test_packing.py",
    ("test_bc_cache_name_forward",): f"{OWN}: both names of a cache hold, without a warning",
    ("test_custom_4d_attention_mask",): "masks are of tokens, [B, N]; packed documents are given by segment_ids",
    ("test_sliding_window_mask",): f"{OWN}: windows are a field of the configuration",
    ("test_model_rope_*",): "rotary positions have only `rope_theta` or `rotary_share`",
    ("test_recurrent_layers_mask_padding_on_continued_forward",): f"{OWN}: tests/models/test_model_contracts.py",
    ("test_torch_export_*", "test_onnx_export_*", "test_executorch_*"): f"{OWN}: tests/models/test_export.py",
    ("test_tp_plan_matches_params", "test_tied_head_has_a_tp_plan_entry"): "there is no plan for tensor parallelism",
    ("test_keep_in_fp32_modules*",): "no module is kept in float32; the functions accumulate in float32",
    ("test_capture_outputs_decorator", "test_can_capture_specific_layers_hidden_states"):
        "outputs are returned by the decoders, and by hook points; transformers' recorders are not used",
    ("test_reverse_loading_mapping", "test_can_load_from_already_mapped_keys"): "names of tensors never changed",
    ("test_inherits_generation_mixin",): "GenerationMixin is a base of the common base class RegardForCausalLM",
}  # fmt: skip
"""Tests that apply to no model here."""
OF_MODELS: dict[tuple[str, str], str] = {
    **{(models, name): reason
       for models, reason in [
           ("iclm|memory-mosaic", "caches grow; a cache of fixed length is an error"),
           ("hybrid", "states are not in a StaticCache: tests/models/test_hybrid_cache.py"),
       ]
       for name in ["test_*static_cache*", "test_generate_compilation_all_outputs",
                    "test_generate_compile_model_forward_fullgraph"]},
    ("hybrid|memory-mosaic", "test_assisted_decoding_*"): "a state cannot be cropped, so assisted decoding is an error",
    ("hybrid", "test_attention_outputs"): "layers without weights are left out, as in transformers' hybrid models",
    ("hybrid", "test_can_init_all_missing_weights"):
        "Gated DeltaNet draws its decays when it is made: tests/models/test_language_models.py",
    ("iclm|memory-mosaic", "test_retain_grad_hidden_states_attentions"):
        "what is computed lacks the first row or has one more; states and weights that are shown are slices of it",
}  # fmt: skip
"""Tests that do not apply to some models."""
NEEDS_CHECKOUT = "its mixin is not in the source archive: TRANSFORMERS_SOURCE=PATH names a checkout that has it"


def reasons(test: str, model: str, archive: bool) -> Iterator[str]:
    """Yield why a test does not apply to a model; `archive` if there is no checkout."""
    if archive and test == "test_generation_tester_mixin_inheritance":
        yield NEEDS_CHECKOUT
    for patterns, reason in EXCEPTIONS.items():
        if any(fnmatch(test, pattern) for pattern in patterns):
            yield reason
    for (models, pattern), reason in OF_MODELS.items():
        if model in models.split("|") and fnmatch(test, pattern):
            yield reason
