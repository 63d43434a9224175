from types import SimpleNamespace

import pytest

from concord.conformance.compare.kernel_names import MARK, kernels, meanings, within
from concord.conformance.compare.module_reference import ModuleReference
from tests.toys.kinds import drawn, linear


@pytest.mark.parametrize(
    ("name", "meaning"),
    [
        ("sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize128x128x16", "TF32"),
        ("cutlass_80_tensorop_s1688gemm_128x128_16x4_nn_align4", "TF32"),
        ("void cudnn::winograd_nonfused::winogradWgradDelta9x9_5x5<float, float>", "Winograd"),
        ("void fft2d_r2c_32x32<float, false, 1u, false>", "an FFT"),
        ("void RNN_blockPersist_fp_LSTM<float, float, float, 128>", "recurrent"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64", "half precision"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64>>", "fused attention"),
    ],
)
def test_the_name_of_a_kernel_says_what_it_computes(name, meaning):
    assert any(meaning in text for text in meanings([name]))


def test_the_name_of_a_plain_kernel_says_nothing():
    assert not meanings(
        ["void at::native::elementwise_kernel<128, 2>", "sm80_xmma_gemm_f32f32_f32f32_f32_tn"]
    )


def event(name, *children, ran=()):
    return SimpleNamespace(name=name, cpu_children=children, kernels=[SimpleNamespace(name=x) for x in ran])


def test_kernels_of_activations_before_are_none_of_a_stretch():
    inner = event(f"{MARK}layer.inner", event("aten::mm", ran=["before"]))
    other = event(f"{MARK}layer.other", event("aten::mm", ran=["product"]))
    layer = event(f"{MARK}layer", inner, other, event("aten::add", ran=["sum"]))
    assert [*within(layer, {f"{MARK}layer.inner"})] == ["product", "sum"]


def test_on_a_processor_there_are_none():
    assert not kernels(ModuleReference(linear(7, 5)(), args=(drawn(3, 7),)), "output", ())
