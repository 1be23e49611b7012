"""benchmarks/gpu_tools.py: what ncu prints, what profiles count, and names of kernels."""

from functools import partial
from typing import Any

import pytest
from programs import python

NCU = """==PROF== Connected
"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","7","short(int)","gpu__time_duration.sum","ns","1,500"
"1","7","long(float)","gpu__time_duration.sum","ns","2,000,000"
"1","7","long(float)","dram__bytes.sum","byte","2,097,152"
"1","7","long(float)","sm__throughput.avg.pct_of_peak_sustained_elapsed","%","25"
"""


def test_what_ncu_prints_is_read(module: Any) -> None:
    tools = module("gpu_tools")
    long = {"kernel": "long", "us": 2000.0, "mib": 2.0, "of_compute": 0.25}
    assert tools.read_ncu(NCU) == [long, {"kernel": "short", "us": 1.5}]
    with pytest.raises(RuntimeError, match="no table"):
        tools.read_ncu("==ERROR== no permission")


def test_profiles_count_bytes_and_operations(module: Any) -> None:
    """Inputs, outputs and their gradients once; two operations for each of seven products, over visible pairs."""
    work = partial(module("gpu_tools").work_of, bench=module("gpu_measure").Bench(True))
    one = {"dim": 8, "dtype": "bfloat16"}
    config = {"batch": 2, "heads": 3, "length": 5, **one}
    assert work("biweight", config=config) == {"bytes": 8 * 2 * 2 * 3 * 5 * 8, "operations": 14 * 2 * 3 * 15 * 8}
    config = {"batch": 2, "heads": 4, "kv_heads": 2, "length": 5, **one}
    both = {"bytes": 2 * 2 * 2 * 2 * 5 * 8, "operations": 2 * 2 * 2 * 4 * 40}
    assert work("decoding, biweight", config=config) == both
    assert work("decoding, local-linear", config=config) == {"bytes": 640}
    assert work("memory", config={"tokens": 3, "top_k": 2, "width": 4}) == {"bytes": 3 * 3 * 2 * 4 * 4}
    assert work("memory, backward", config={}) == work("training step, GDN", config={}) == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["biweight", "decoding, local-linear", "memory"])
def test_calls_of_the_tools_run(module: Any, name: str) -> None:
    pytest.importorskip("triton")
    assert python(module("gpu_tools").__file__, name, "--small", TRITON_INTERPRET="1") == ""


def test_names_of_kernels_of_torch_are_short(module: Any) -> None:
    short, elementwise = module("gpu_table").short, "void at::native::vectorized_elementwise_kernel<4, at::native::"
    assert short("compact_dq_kernel") == "compact_dq_kernel"
    assert short("Memcpy DtoD (Device -> Device)") == "Memcpy DtoD (Device -> Device)"
    assert short(f"{elementwise}(anonymous namespace)::where_kernel_impl(at::TensorIterator&)>(int)") == "torch: where"
    assert short(f"{elementwise}FillFunctor<int>>(int)") == "torch: Fill"
