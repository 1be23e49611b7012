"""Imports the modules of all recipes, which register themselves. The registry loads this on first use."""

from .fwpkm import fast_weight_recall as fast_weight_recall
from .fwpkm import fwpkm_ablation as fwpkm_ablation
from .fwpkm import fwpkm_case_studies as fwpkm_case_studies
from .fwpkm import fwpkm_cost as fwpkm_cost
from .iclm import iclm_mechanisms as iclm_mechanisms
from .iclm import iclm_parity as iclm_parity
from .kernels import kernel_selection as kernel_selection
from .kernels import kernel_zoo as kernel_zoo
from .kernels import recall_capacity as recall_capacity
from .kernels import shared_query_key as shared_query_key
from .local_linear import boundary_bias as boundary_bias
from .local_linear import lla_numerics as lla_numerics
from .local_linear import lla_variants as lla_variants
from .long_text import needle as needle
from .long_text import streaming_perplexity as streaming_perplexity
from .mosaic import mosaic_kernels as mosaic_kernels
