"""Arithmetic in 16 bit as a what-if: which ops, by how much, and that it comes back."""

from __future__ import annotations

import pytest

from dpro.graph.graph import Graph, OpKind
from dpro.passes import registry
from dpro.passes.mixed_precision import MixedPrecision, Precision, _kind, parse
from dpro.replay.engine import replay
from tests.report.hand_graph import MAKESPAN_MS, MS, two_ranks
from tests.search.graphs import ddp_graph

COMPUTE = (
    "aten::mm", "aten::addmm", "aten::bmm", "aten::linear", "aten::mkldnn_convolution", "aten::convolution_backward",
    "autograd::engine::evaluate_function: AddmmBackward0", "ConvolutionBackward0", "volta_sgemm_64x64_tn",
    "cudnn_infer_volta_scudnn_128x64_relu_medium_nn_v1", "void cudnn::detail::dgrad_engine<float, 512, 6>",
    "aten::scaled_dot_product_attention", "model/dense/MatMul", "gradient_tape/m/conv1/Conv2D/Conv2DBackpropFilter",
    "hybridsequential0_dense0_fwd", "_backward_FullyConnected", "resnetv10_conv0_fwd",
)  # fmt: skip
MEMORY = (
    "aten::relu", "aten::add_", "aten::mul", "aten::cat", "aten::native_dropout", "aten::cudnn_batch_norm",
    "void at::native::vectorized_elementwise_kernel<4, at::native::BinaryFunctor>", "ReluBackward0", "AddBackward0",
    "void cudnn::bn_bw_1C11_kernel_new<float, float>", "m/conv1_bn/FusedBatchNormV3", "m/conv2_block1_add/AddV2",
    "aten::max_pool2d_with_indices", "resnetv10_stage1_batchnorm0_fwd",
)  # fmt: skip
STAYS = (
    "aten::_softmax", "aten::native_layer_norm", "aten::nll_loss_forward", "aten::empty",
    "torch::distributed::reducer::mul_out", "aten::convert_element", "aten::upsample_bilinear2d", "aten::address",
    "volta_h884gemm_64x64", "void split_embedding_codegen_forward_kernel<c10::Half>", "Memcpy HtoD", "aten::command",
)  # fmt: skip


@pytest.mark.parametrize(("names", "kind"), [(COMPUTE, 1), (MEMORY, 2), (STAYS, 0)])
def test_kinds_by_name(names: tuple[str, ...], kind: int) -> None:
    assert {name: _kind(name) for name in names} == dict.fromkeys(names, kind)


def test_products_take_a_third_and_the_optimizer_stays() -> None:
    graph = two_ranks()
    edit = MixedPrecision()
    mark = edit.apply(graph, Precision("bfloat16"))
    # rank 1: gap 1, (14 + 20) / 3, transfer 8, Adam 2
    assert replay(graph).makespan_ns / MS == pytest.approx(1 + 34 / 3 + 8 + 2, abs=1e-5)
    graph.undo(mark)
    assert replay(graph).makespan_ns == MAKESPAN_MS * MS
    mark = edit.apply(graph, Precision("bfloat16", compute=0.5))
    assert replay(graph).makespan_ns / MS == 1 + 17 + 8 + 2
    graph.undo(mark)
    # half of 10 + 20 and of 14 + 20
    assert edit.cost(graph, Precision("float16", compute=0.5)) == -32 * MS


def test_gradients_in_16_bit_halve_the_transfer() -> None:
    graph = ddp_graph([4 * MS], MS, [2 * MS])  # 4 MB at 1 ns a byte and 0.1 ms
    host = graph.info["main_resource"][0]
    graph.add_op("aten::mm", OpKind.FORWARD, resource=host, duration=MS, rank=0)  # rank 0's thread has 4 ms to run
    edit = MixedPrecision()
    assert [*edit.candidates(graph)] == [
        Precision("bfloat16"), Precision("float16"), Precision("bfloat16", gradients=True),
        Precision("float16", gradients=True),
    ]  # fmt: skip
    assert replay(graph).makespan_ns == 4 * MS + 4_100_000
    mark = edit.apply(graph, Precision("bfloat16", compute=0.5, gradients=True))
    assert replay(graph).makespan_ns == 3_500_000 + 2_100_000
    graph.undo(mark)
    assert replay(graph).makespan_ns == 4 * MS + 4_100_000
    assert not edit.legal(two_ranks(), Precision("bfloat16", gradients=True))  # no gradient is known there
    assert not edit.legal(Graph(), Precision("bfloat16"))
    assert not edit.legal(two_ranks(), Precision("float32"))


def test_only_streams_are_faster_where_there_are_any() -> None:
    graph = Graph()
    graph.ranks = 1
    host, stream = graph.resource("rank0/cpu/1"), graph.resource("rank0/stream/7")
    launch = graph.add_op("aten::addmm", OpKind.FORWARD, resource=host, duration=300, rank=0)
    kernel = graph.add_op("volta_sgemm", OpKind.FORWARD, resource=stream, duration=900, rank=0, after=[launch])
    kept = graph.add_op("softmax_warp_forward", OpKind.FORWARD, resource=stream, duration=90, after=[kernel])
    MixedPrecision().apply(graph, Precision("float16"))
    assert graph.column("duration")[[launch, kernel, kept]].tolist() == [300, 300, 90]


def test_no_plan_carries_it() -> None:
    assert registry.find("mixed_precision").knobs == frozenset()
    assert isinstance(MixedPrecision(), registry.Pass)


def test_words() -> None:
    assert parse("bf16") == Precision("bfloat16")
    assert parse("float16=0.4") == Precision("float16", compute=0.4)
    assert parse(" FP16+gradients=2 ") == Precision("float16", compute=2, gradients=True)
    for wrong in ("", "bf16=", "bf16=x", "fp8", "bf16=-1", "bf16=1e9", "bf16=1e", "bf16+weights", "float32"):
        with pytest.raises(ValueError, match="is not bf16 or fp16"):
            parse(wrong)
    said = MixedPrecision().assumed(two_ranks(), parse("bf16=0.4"))
    assert "bfloat16: 4 matrix products and convolutions take 0.4× their time, 0 ops" in said and "\n" not in said
