"""Imports the modules of all recipes, which register themselves. The registry loads this on first use."""

from . import boundary_bias as boundary_bias
from . import fast_weight_recall as fast_weight_recall
from . import fwpkm_ablation as fwpkm_ablation
from . import fwpkm_case_studies as fwpkm_case_studies
from . import fwpkm_cost as fwpkm_cost
from . import iclm_mechanisms as iclm_mechanisms
from . import iclm_parity as iclm_parity
from . import kernel_selection as kernel_selection
from . import kernel_zoo as kernel_zoo
from . import lla_numerics as lla_numerics
from . import lla_variants as lla_variants
from . import mosaic_kernels as mosaic_kernels
from . import needle as needle
from . import recall_capacity as recall_capacity
from . import shared_query_key as shared_query_key
from . import streaming_perplexity as streaming_perplexity
from . import test_time_regression as test_time_regression
