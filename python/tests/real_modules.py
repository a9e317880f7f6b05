"""Modules of other libraries that write to buffers and members, and programs that call them."""

from __future__ import annotations

import time
from typing import Any, Callable, NamedTuple

import torch
import torch.nn as nn

STEPS = 10
WIDTH = 16


class Around(nn.Module):
    """A layer before and after a library's module, and what programs note for their logs."""

    def __init__(
        self, inner: nn.Module, call: Callable[[nn.Module, torch.Tensor], Any], wide: int = WIDTH
    ) -> None:
        super().__init__()
        self.enter, self.inner, self.leave = nn.Linear(WIDTH, wide), inner, nn.Linear(wide, WIDTH)
        self._call = call
        self.calls, self.last_seconds, self.last_shape = 0, 0.0, (0,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        start = time.perf_counter()
        self.calls += 1
        x = torch.tanh(self.enter(x))
        y = self._call(self.inner, x).sin()
        if y.shape[-1:] == x.shape[-1:]:
            y = self.leave(y)
        self.last_shape = tuple(y.shape)
        self.last_seconds = time.perf_counter() - start
        return y.exp().tanh()


class Program(NamedTuple):
    """One module: its library, a function that makes it, and what is known of it."""

    library: str
    make: Callable[[], nn.Module]
    shape: Callable[[int], tuple[int, ...]] = lambda step: (4, 6, WIDTH)
    begin: Callable[[nn.Module], None] = (
        lambda module: None
    )  # before each forward, as libraries ask
    error: str = ""  # the kinds in which its regions end
    error_of: tuple[str, ...] = ()  # the forms that it concerns; none: all
    beyond: tuple[str, ...] = ()  # attributes that docs/limits.md says are not put back


# ---- the modules --------------------------------------------------------------------------------


def growing(step: int) -> tuple[int, ...]:
    return 2, (6, 9, 9, 14, 5, 20, 3, 8, 24, 7)[step % STEPS], WIDTH


def rotary() -> nn.Module:
    from rotary_embedding_torch import RotaryEmbedding

    def attend(rope: Any, x: torch.Tensor) -> torch.Tensor:
        q = rope.rotate_queries_or_keys(x[:, None])
        return nn.functional.scaled_dot_product_attention(q, q, x[:, None])[:, 0]

    return Around(RotaryEmbedding(8, cache_max_seq_len=32), attend)


def rotary_xpos() -> nn.Module:
    from rotary_embedding_torch import RotaryEmbedding

    def attend(rope: Any, x: torch.Tensor) -> torch.Tensor:
        q, k = rope.rotate_queries_and_keys(x[:, None], x[:, None].flip(-1))
        return nn.functional.scaled_dot_product_attention(q, k, x[:, None])[:, 0]

    return Around(RotaryEmbedding(8, use_xpos=True, cache_max_seq_len=32), attend)


def rope_settings(**more: Any) -> dict[str, Any]:
    return dict(
        vocab_size=8,
        hidden_size=WIDTH,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=8,
        attn_implementation="eager",
        attention_dropout=0.1,
        rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0},
        **more,
    )


def call_decoder(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model(inputs_embeds=x, use_cache=False).last_hidden_state  # type: ignore[no-any-return]


def llama() -> nn.Module:
    import transformers

    return Around(
        transformers.LlamaModel(transformers.LlamaConfig(**rope_settings())), call_decoder
    )


def mixtral() -> nn.Module:
    import transformers

    settings = rope_settings(
        num_local_experts=4, num_experts_per_tok=2, experts_implementation="eager", head_dim=8
    )
    return Around(transformers.MixtralModel(transformers.MixtralConfig(**settings)), call_decoder)


def sum_of_codes(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    quantized, _, loss = module(x)[:3]
    return quantized + loss.sum()  # type: ignore[no-any-return]


def codebook() -> nn.Module:
    from vector_quantize_pytorch import VectorQuantize

    module = VectorQuantize(
        WIDTH,
        codebook_size=8,
        decay=0.8,
        kmeans_init=True,
        kmeans_iters=3,
        threshold_ema_dead_code=2,
    )
    return Around(module, sum_of_codes)


def residual_codebook() -> nn.Module:
    from vector_quantize_pytorch import ResidualVQ

    module = ResidualVQ(
        dim=WIDTH,
        codebook_size=8,
        num_quantizers=3,
        kmeans_init=True,
        threshold_ema_dead_code=1,
        quantize_dropout=True,
        stochastic_sample_codes=True,
    )
    return Around(module, sum_of_codes)


def spikes() -> nn.Module:
    from spikingjelly.activation_based import layer, neuron, surrogate

    module = nn.Sequential(
        neuron.LIFNode(surrogate_function=surrogate.ATan(), step_mode="m"),
        layer.Linear(WIDTH, WIDTH, step_mode="m"),
        neuron.ParametricLIFNode(
            surrogate_function=surrogate.ATan(), step_mode="m", store_v_seq=True
        ),
    )
    return Around(module, lambda m, x: m(x))


def reset_spikes(module: nn.Module) -> None:
    from spikingjelly.activation_based import functional

    functional.reset_net(module)


def leaky() -> nn.Module:
    import snntorch

    module = nn.Sequential(
        snntorch.Leaky(beta=0.9, init_hidden=True),
        nn.Linear(WIDTH, WIDTH),
        snntorch.Leaky(beta=0.8, init_hidden=True),
    )

    def run(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([m(each) for each in x.unbind(1)], 1)

    return Around(module, run)


def reset_leaky(module: nn.Module) -> None:
    for each in module.modules():
        if hasattr(each, "reset_mem"):
            each.mem = each.reset_mem()


def fake_quantized() -> nn.Module:
    from torch.ao.quantization import get_default_qat_qconfig, prepare_qat

    net = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH)).train()
    net.qconfig = get_default_qat_qconfig("x86")
    return Around(prepare_qat(net), lambda m, x: m(x))


def fake_quantized_convolution() -> nn.Module:
    from torch.ao.nn.intrinsic.qat import ConvBnReLU1d
    from torch.ao.quantization import FakeQuantize, MovingAveragePerChannelMinMaxObserver, QConfig

    observed = FakeQuantize.with_args(quant_min=0, quant_max=255, reduce_range=False)
    weights = FakeQuantize.with_args(
        observer=MovingAveragePerChannelMinMaxObserver,
        quant_min=-128,
        quant_max=127,
        dtype=torch.qint8,
        qscheme=torch.per_channel_symmetric,
    )
    module = ConvBnReLU1d(6, 6, 3, padding=1, qconfig=QConfig(activation=observed, weight=weights))
    return Around(
        module,
        lambda m, x: (
            m.activation_post_process(m(x)) if hasattr(m, "activation_post_process") else m(x)
        ),
    )


def quantized_by_torchao() -> nn.Module:
    from torchao.quantization.qat import FakeQuantizedLinear, IntxFakeQuantizeConfig

    module = FakeQuantizedLinear(
        WIDTH,
        WIDTH,
        activation_config=IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False),
        weight_config=IntxFakeQuantizeConfig(torch.int4, group_size=8),
    )
    return Around(module, lambda m, x: m(x))


def spectral() -> nn.Module:
    from torch.nn.utils.parametrizations import spectral_norm

    return Around(
        nn.Sequential(
            spectral_norm(nn.Linear(WIDTH, 32)), nn.GELU(), spectral_norm(nn.Linear(32, WIDTH))
        ),
        lambda m, x: m(x),
    )


def old_spectral() -> nn.Module:
    from torch.nn.utils import spectral_norm

    return Around(
        nn.Sequential(
            spectral_norm(nn.Linear(WIDTH, 32)), nn.GELU(), spectral_norm(nn.Linear(32, WIDTH))
        ),
        lambda m, x: m(x),
    )


def cross_batch() -> nn.Module:
    from pytorch_metric_learning.losses import ContrastiveLoss, CrossBatchMemory

    module = CrossBatchMemory(ContrastiveLoss(), WIDTH, memory_size=64)
    return Around(
        module, lambda m, x: m(x.flatten(0, 1), torch.arange(x.shape[0] * x.shape[1]) % 3)
    )


def memory_bank() -> nn.Module:
    from lightly.loss import NTXentLoss

    return Around(
        NTXentLoss(memory_bank_size=(32, WIDTH)),
        lambda m, x: m(x.flatten(0, 1), x.flatten(0, 1) * 0.9),
    )


def centered() -> nn.Module:
    from lightly.loss import DINOLoss

    module = DINOLoss(output_dim=WIDTH, warmup_teacher_temp_epochs=3)
    return Around(
        module,
        lambda m, x: m([each.detach() for each in x.unbind(1)[:2]], list(x.unbind(1)), epoch=1),
    )


def performer() -> nn.Module:
    from performer_pytorch import Performer

    module = Performer(
        dim=WIDTH, depth=2, heads=2, dim_head=8, feature_redraw_interval=3, auto_check_redraw=True
    )
    return Around(module, lambda m, x: m(x))


def routing() -> nn.Module:
    from routing_transformer.routing_transformer import KmeansAttention

    module = KmeansAttention(num_clusters=2, window_size=4, num_heads=2, head_dim=8, dropout=0.1)

    def attend(m: Any, x: torch.Tensor) -> torch.Tensor:
        q = x.unflatten(-1, (2, 8)).transpose(1, 2)
        out, loss = m(q, q, q)[:2]
        return out.transpose(1, 2).flatten(2) + loss

    return Around(module, attend)


def norms() -> nn.Module:
    import timm

    module = timm.create_model(
        "resnet18", num_classes=WIDTH, drop_path_rate=0.1, in_chans=4, drop_rate=0.1
    )
    return Around(module, lambda m, x: m(x.reshape(2, 4, 16, 16)), 512)


def activation_norm() -> nn.Module:
    from normflows.flows import ActNorm

    return Around(ActNorm(WIDTH), lambda m, x: m(x.flatten(0, 1))[0].view_as(x))


def metric() -> nn.Module:
    import torchmetrics

    class Logged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.metric = nn.Linear(WIDTH, WIDTH), torchmetrics.MeanSquaredError()
            self.mean = torchmetrics.MeanMetric()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x).sin()
            self.metric.update(y.detach(), x.detach())
            self.mean(y.detach())
            return y.exp()

    return Around(Logged(), lambda m, x: m(x))


def biased() -> nn.Module:
    from x_transformers import Encoder

    module = Encoder(
        dim=WIDTH,
        depth=1,
        heads=2,
        attn_dim_head=8,
        alibi_pos_bias=True,
        rotary_pos_emb=False,
        attn_dropout=0.1,
    )
    return Around(module, lambda m, x: m(x))


def cached() -> nn.Module:
    import transformers

    model = transformers.LlamaModel(transformers.LlamaConfig(**rope_settings()))

    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        result = m(inputs_embeds=x, past_key_values=m.cache, use_cache=True)
        return result.last_hidden_state  # type: ignore[no-any-return]

    return Around(model, run)


def new_cache(module: nn.Module) -> None:
    import transformers

    inner: Any = module.inner
    if hasattr(inner, "cache"):
        inner.cache.layers.clear()  # a region has the cache as an argument, and the cache its graph
    inner.cache = transformers.DynamicCache()


PROGRAMS: dict[str, Program] = {
    "rotary embedding": Program("rotary_embedding_torch", rotary, growing),
    "rotary embedding, xpos": Program("rotary_embedding_torch", rotary_xpos, growing),
    "Llama, dynamic rope": Program("transformers", llama, growing),
    "Mixtral, dynamic rope": Program("transformers", mixtral, growing),
    # A list outside, which each call extends: docs/from-python.md says to train without.
    "Llama, cache": Program(
        "transformers", cached, growing, begin=new_cache, error="CAPTURE_CHANGED SELECTIVE_MISMATCH"
    ),
    "EMA codebook": Program("vector_quantize_pytorch", codebook),
    "residual EMA codebook": Program("vector_quantize_pytorch", residual_codebook),
    # Its potential has a history: docs/errors.md.
    "spiking neurons": Program("spikingjelly", spikes, begin=reset_spikes, error="CAPTURE_CHANGED"),
    "leaky neurons": Program("snntorch", leaky, begin=reset_leaky),
    "fake quantization": Program("torch", fake_quantized),
    "fake quantized convolution": Program("torch", fake_quantized_convolution),
    "torchao fake quantization": Program("torchao", quantized_by_torchao),
    "spectral norm": Program("torch", spectral),
    # A hook around the region assigns its weight: docs/from-python.md.
    "old spectral norm": Program(
        "torch", old_spectral, error="CAPTURE_CHANGED", error_of=("apply to all",)
    ),
    # The loss inside writes to the queue that the region inside has as an argument: docs/errors.md.
    "cross-batch memory": Program(
        "pytorch_metric_learning", cross_batch, error="VALUE_MISMATCH", error_of=("apply to all",)
    ),
    "memory bank": Program("lightly", memory_bank),
    "centered teacher": Program("lightly", centered),
    "Performer": Program("performer_pytorch", performer),
    "routing attention": Program("routing_transformer", routing, lambda step: (2, 8, WIDTH)),
    # Its activations in place are regions of their own: docs/errors.md.
    "running norms": Program(
        "timm",
        norms,
        lambda step: (4, 1, WIDTH),
        error="VALUE_MISMATCH",
        error_of=("apply to all",),
    ),
    # Its first forward sets parameters: docs/errors.md.
    "activation norm": Program(
        "normflows",
        activation_norm,
        error="CAPTURE_CHANGED",
        error_of=("apply to all", "nested", "Checkpointed inside"),
    ),
    # It adds to tensors that are no buffers.
    "metrics": Program(
        "torchmetrics",
        metric,
        beyond=(
            "inner.metric.sum_squared_error",
            "inner.metric.total",
            "inner.mean.mean_value",
            "inner.mean.weight",
        ),
    ),
    "attention with biases": Program("x_transformers", biased, growing),
}
