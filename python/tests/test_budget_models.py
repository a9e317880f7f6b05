"""Models of other people's libraries, trained within a byte budget.

Two steps with an optimizer at half and a quarter of the plain peak leave the outputs, gradients,
parameters, buffers and random state of plain torch, bit by bit.

    pip install -r python/tests/budget_models.txt
    cd python/tests
    REMAT_TEST_BUDGET_MODELS=1 PYTHONPATH=../../build/python python -m unittest test_budget_models

A part of a name instead of 1 chooses models. None of these libraries is needed otherwise. A model
whose library is missing is skipped. Weights are random: nothing is downloaded.
"""

# mypy: disable-error-code=no-any-return
from __future__ import annotations

import importlib
import os
import sys
import unittest
import warnings
from typing import Any, Callable, NamedTuple, Optional

import torch
import torch.nn as nn

import remat
from common import Case

Loss = Callable[[], torch.Tensor]
SHARES = (None, 0.5, 0.25)  # of the plain peak; None: no limit


class Program(NamedTuple):
    library: str
    make: Callable[[], tuple[nn.Module, Loss]]


def ids(*sizes: int, below: int = 100) -> torch.Tensor:
    return torch.randint(0, below, sizes)


# ---- transformers -------------------------------------------------------------------------------

SMALL = dict(
    vocab_size=100,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    max_position_embeddings=64,
)


def of_transformers(
    kind: str, call: Callable[[Any], torch.Tensor], attention: str = "sdpa", **settings: Any
) -> Callable[[], tuple[nn.Module, Loss]]:
    def make() -> tuple[nn.Module, Loss]:
        import transformers

        model_class = getattr(transformers, kind)
        config = model_class.config_class(**settings)
        config._attn_implementation = attention
        model = model_class(config).train()
        return model, lambda: call(model)

    return make


def language(model: Any) -> torch.Tensor:
    batch = ids(4, 24)
    return model(input_ids=batch, labels=batch).loss


def translation(model: Any) -> torch.Tensor:
    return model(input_ids=ids(4, 20), labels=ids(4, 16)).loss


def masked(model: Any) -> torch.Tensor:
    batch, mask = ids(4, 24), torch.ones(4, 24, dtype=torch.long)
    mask[1, 10:] = 0
    return model(input_ids=batch, attention_mask=mask, labels=batch).loss


def picture(model: Any) -> torch.Tensor:
    return model(pixel_values=torch.randn(4, 3, 32, 32), labels=ids(4, below=2)).loss


def sound(model: Any) -> torch.Tensor:
    return model(input_values=torch.randn(2, 2000)).last_hidden_state.square().mean()


def spectrum(model: Any) -> torch.Tensor:
    return model(input_features=torch.randn(2, 8, 64), labels=ids(2, 10)).loss


def pairs(model: Any) -> torch.Tensor:
    return model(
        input_ids=ids(4, 12), pixel_values=torch.randn(4, 3, 32, 32), return_loss=True
    ).loss


def clip() -> tuple[nn.Module, Loss]:
    import transformers

    text = {**SMALL, "eos_token_id": 99}
    view = dict(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=32,
        patch_size=8,
    )
    config = transformers.CLIPConfig(text_config=text, vision_config=view, projection_dim=16)
    model = transformers.CLIPModel(config).train()
    return model, lambda: pairs(model)


# ---- timm, diffusers, MONAI, torch_geometric ----------------------------------------------------


def of_timm(name: str, side: int = 32, **settings: Any) -> Callable[[], tuple[nn.Module, Loss]]:
    def make() -> tuple[nn.Module, Loss]:
        import timm

        model = timm.create_model(name, num_classes=10, **settings).train()

        def loss() -> torch.Tensor:
            out = model(torch.randn(4, 3, side, side))
            return nn.functional.cross_entropy(out, ids(4, below=10))

        return model, loss

    return make


def denoiser() -> tuple[nn.Module, Loss]:
    import diffusers

    model = diffusers.UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(16, 32),
        layers_per_block=1,
        cross_attention_dim=16,
        attention_head_dim=8,
        norm_num_groups=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    ).train()
    schedule = diffusers.DDPMScheduler()

    def loss() -> torch.Tensor:
        x, noise, steps = torch.randn(2, 4, 16, 16), torch.randn(2, 4, 16, 16), ids(2, below=1000)
        found = model(schedule.add_noise(x, noise, steps), steps, torch.randn(2, 5, 16)).sample
        return nn.functional.mse_loss(found, noise)

    return model, loss


def autoencoder() -> tuple[nn.Module, Loss]:
    import diffusers

    model = diffusers.AutoencoderKL(
        block_out_channels=(16, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=8,
        latent_channels=4,
    ).train()

    def loss() -> torch.Tensor:
        x = torch.randn(2, 3, 32, 32)
        latent = model.encode(x).latent_dist
        return (model.decode(latent.sample()).sample - x).square().mean() + latent.kl().mean()

    return model, loss


def diffusion_transformer() -> tuple[nn.Module, Loss]:
    import diffusers

    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=8,
        in_channels=4,
        out_channels=4,
        num_layers=3,
        sample_size=16,
        patch_size=2,
        num_embeds_ada_norm=20,
        norm_num_groups=8,
    ).train()

    def loss() -> torch.Tensor:
        out = model(torch.randn(2, 4, 16, 16), ids(2, below=20), ids(2, below=10)).sample
        return out.square().mean()

    return model, loss


def volume(make: Callable[[Any], Any]) -> Callable[[], tuple[nn.Module, Loss]]:
    def made() -> tuple[nn.Module, Loss]:
        import monai.losses
        import monai.networks.nets as nets

        model = make(nets).train()
        criterion = monai.losses.DiceCELoss(to_onehot_y=True, softmax=True)

        def loss() -> torch.Tensor:
            out = model(torch.randn(1, 1, 32, 32, 32))
            if isinstance(out, (list, tuple)):
                out = out[0]
            if out.shape[2:] != (32, 32, 32):
                out = nn.functional.interpolate(out, (32, 32, 32))
            return criterion(out, ids(1, 1, 32, 32, 32, below=2))

        return model, loss

    return made


class Nodes(nn.Module):
    """A net of layers on a graph of 200 nodes."""

    def __init__(self, layers: list[Any], calls: str) -> None:
        super().__init__()
        self.layers, self.calls = nn.ModuleList(layers), calls
        self.norm = nn.BatchNorm1d(32)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            y = layer(x) if self.calls == "x" else layer(x, edges)
            x = nn.functional.dropout(self.norm(y).relu(), 0.2)
        return x


def on_graph(make: Callable[[Any], Any], depth: int = 4) -> Callable[[], tuple[nn.Module, Loss]]:
    def made() -> tuple[nn.Module, Loss]:
        import torch_geometric.nn as layers

        model = Nodes([make(layers) for _ in range(depth)], "edges").train()

        def loss() -> torch.Tensor:
            out = model(torch.randn(200, 32), ids(2, 800, below=200))
            batch = torch.arange(200) // 25
            pooled = layers.global_mean_pool(out, batch) + layers.global_max_pool(out, batch)
            return nn.functional.cross_entropy(pooled, ids(8, below=32))

        return model, loss

    return made


PROGRAMS: dict[str, Program] = {
    "GPT-2": Program(
        "transformers",
        of_transformers(
            "GPT2LMHeadModel", language, vocab_size=100, n_embd=32, n_layer=3, n_head=4,
            n_positions=64,
        ),
    ),
    "Llama": Program(
        "transformers",
        of_transformers("LlamaForCausalLM", language, num_key_value_heads=2, **SMALL),
    ),
    "Llama, eager attention": Program(
        "transformers",
        of_transformers(
            "LlamaForCausalLM", language, "eager", num_key_value_heads=2, attention_dropout=0.1,
            **SMALL,
        ),
    ),
    "Mixtral": Program(
        "transformers",
        of_transformers(
            "MixtralForCausalLM", language, num_key_value_heads=2, num_local_experts=4,
            num_experts_per_tok=2, output_router_logits=True, **SMALL,
        ),
    ),
    "Qwen3": Program(
        "transformers",
        of_transformers("Qwen3ForCausalLM", language, num_key_value_heads=2, head_dim=8, **SMALL),
    ),
    "BERT": Program("transformers", of_transformers("BertForMaskedLM", masked, **SMALL)),
    "T5": Program(
        "transformers",
        of_transformers(
            "T5ForConditionalGeneration", translation, "eager", vocab_size=100, d_model=32, d_kv=8,
            d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0,
        ),
    ),
    "Mamba": Program(
        "transformers",
        of_transformers(
            "MambaForCausalLM", language, "eager", vocab_size=100, hidden_size=32, state_size=8,
            num_hidden_layers=2,
        ),
    ),
    "ViT": Program(
        "transformers",
        of_transformers(
            "ViTForImageClassification", picture, image_size=32, patch_size=8, hidden_size=32,
            intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
            hidden_dropout_prob=0.1,
        ),
    ),
    "Whisper": Program(
        "transformers",
        of_transformers(
            "WhisperForConditionalGeneration", spectrum, vocab_size=100, num_mel_bins=8, d_model=32,
            encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64,
            max_source_positions=32, max_target_positions=32, dropout=0.1, pad_token_id=0,
            bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, suppress_tokens=None,
            begin_suppress_tokens=None,
        ),
    ),
    "Wav2Vec2": Program(
        "transformers",
        of_transformers(
            "Wav2Vec2Model", sound, vocab_size=32, hidden_size=32, intermediate_size=64,
            num_hidden_layers=2, num_attention_heads=4, conv_dim=(16, 16), conv_stride=(5, 4),
            conv_kernel=(10, 4), num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4,
            apply_spec_augment=False, layerdrop=0.1,
        ),
    ),
    "CLIP": Program("transformers", clip),
    "ResNet": Program("timm", of_timm("resnet10t", 96, drop_path_rate=0.1)),
    "EfficientNet": Program("timm", of_timm("efficientnet_b0", 96, drop_rate=0.2)),
    "ConvNeXt": Program("timm", of_timm("convnext_atto", 96, drop_path_rate=0.1)),
    "Swin": Program(
        "timm",
        of_timm(
            "swin_tiny_patch4_window7_224", 56, img_size=56, embed_dim=24, depths=(2, 2),
            num_heads=(2, 4),
        ),
    ),
    "U-Net of diffusers": Program("diffusers", denoiser),
    "autoencoder of diffusers": Program("diffusers", autoencoder),
    "DiT": Program("diffusers", diffusion_transformer),
    "U-Net of MONAI": Program(
        "monai",
        volume(
            lambda nets: nets.UNet(
                3, 1, 2, channels=(4, 8, 16), strides=(2, 2), num_res_units=2, dropout=0.1
            )
        ),
    ),
    "SegResNet": Program(
        "monai",
        volume(lambda nets: nets.SegResNet(init_filters=8, out_channels=2, dropout_prob=0.1)),
    ),
    "UNETR": Program(
        "monai",
        volume(
            lambda nets: nets.UNETR(
                1, 2, (32, 32, 32), feature_size=4, hidden_size=48, mlp_dim=96, num_heads=4
            )
        ),
    ),
    "GCN": Program("torch_geometric", on_graph(lambda layers: layers.GCNConv(32, 32))),
    "GAT": Program(
        "torch_geometric", on_graph(lambda layers: layers.GATv2Conv(32, 8, heads=4, dropout=0.1))
    ),
    "graph isomorphism": Program(
        "torch_geometric",
        on_graph(lambda layers: layers.GINConv(layers.MLP([32, 32, 32], dropout=0.1))),
    ),
    "graph transformer": Program(
        "torch_geometric", on_graph(lambda layers: layers.TransformerConv(32, 8, heads=4))
    ),
}  # fmt: skip


def train(
    program: Program, budget: Optional[Callable[[], remat.Budget]] = None
) -> tuple[dict[str, Any], Optional[remat.BudgetReport]]:
    """Runs two steps from the same seed, and returns their results by name."""
    torch.manual_seed(1)
    model, loss_of = program.make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    torch.manual_seed(2)
    found: dict[str, Any] = {}

    def steps() -> None:
        for step in range(2):
            optimizer.zero_grad()
            loss = loss_of()
            loss.backward()
            found[f"loss {step}"] = loss.detach()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            found[f"random state {step}"] = torch.get_rng_state()

    report = None
    if budget is None:
        steps()
    else:
        with budget() as opened:
            steps()
        report = opened.report()
    found.update({f"gradient {name}": each.grad for name, each in model.named_parameters()})
    found.update({name: each.detach().clone() for name, each in model.state_dict().items()})
    return found, report


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


class Models(Case):
    def check_program(self, name: str, program: Program) -> None:
        expected, _ = train(program)
        again, _ = train(program)  # a model that differs by itself shows nothing
        self.check_found(again, expected, f"{name}, plain again")
        span = 0
        for share in SHARES:
            bytes = sys.maxsize if share is None else int(span * share)
            found, report = train(program, lambda: remat.budget(bytes, min_bytes=0))  # noqa: B023
            assert report is not None
            span = span or report.peak_bytes
            said = f"{name} at {share} of {span / 1e6:.2f} MB"
            if os.environ.get("REMAT_TEST_BUDGET_SAYS"):
                print(
                    f"{said}: peak {report.peak_bytes / 1e6:.2f} MB, {report.evictions} evictions,"
                    f" {report.reruns} of {report.operators} run again, over {report.over_count}",
                    flush=True,
                )
            self.check_found(found, expected, said)
            if share == 0.25:
                self.assertGreater(report.reruns, 0, said)
            if share is not None and report.over_count == 0:
                self.assertLessEqual(report.peak_bytes, bytes, said)
            elif share is not None:
                self.assertGreater(report.floor_bytes, bytes, said)

    def check_found(self, found: dict[str, Any], expected: dict[str, Any], message: str) -> None:
        self.assertEqual(found.keys(), expected.keys(), message)
        for name, each in expected.items():
            if each is None:
                self.assertIsNone(found[name], f"{message}: {name}")
            else:
                self.assertTrue(torch.equal(bits(found[name]), bits(each)), f"{message}: {name}")

    def test_models_of_others_are_as_plain(self) -> None:
        chosen = os.environ.get("REMAT_TEST_BUDGET_MODELS")  # 1, or a part of the names
        if not chosen:
            self.skipTest("it takes minutes, and libraries: set REMAT_TEST_BUDGET_MODELS")
        ran, missing = 0, set()
        for name, program in PROGRAMS.items():
            if chosen != "1" and chosen not in name:
                continue
            try:
                importlib.import_module(program.library)
            except (ImportError, OSError, RuntimeError):
                missing.add(program.library)
                continue
            with self.subTest(name), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.check_program(name, program)
                ran += 1
        if missing:
            self.skipTest(f"{ran} models compared; not installed: {', '.join(sorted(missing))}")


if __name__ == "__main__":
    unittest.main()
