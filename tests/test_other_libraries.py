"""Accelerate, Lightning, diffusers and timm need no integration: models that call tilewise, or torch's SDPA, run in them as they are."""

from __future__ import annotations

import enum
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tilewise
from tilewise.integrations import torch_sdpa


class Copier(nn.Module):
    """One layer that learns to say the token before, with the attention it is given."""

    def __init__(self, attention) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention, self.embed, self.head = attention, nn.Embedding(16, 32), nn.Linear(32, 16)
        self.project, self.places = nn.Linear(32, 96), nn.Parameter(torch.randn(12, 32))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The loss of predicting from (B, 12) tokens what stood one place earlier."""
        x = self.embed(tokens) + self.places
        q, k, v = self.project(x).unflatten(-1, (3, 4, 8)).unbind(-3)
        x = x + self.attention(q, k, v).flatten(-2)
        return F.cross_entropy(self.head(x)[:, 1:].flatten(0, 1), tokens[:, :-1].flatten())


def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return tilewise.attention(q, k, v, causal=True)


def torchs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    mask = torch.ones(12, 12, dtype=torch.bool).tril()
    return (q @ k.mT / 8**0.5).masked_fill(~mask, -torch.inf).softmax(-1).matmul(v).transpose(1, 2)


def batches() -> torch.utils.data.DataLoader:
    return torch.utils.data.DataLoader(torch.randint(16, (48, 12), generator=torch.Generator().manual_seed(1)), batch_size=8)


def agree(run) -> None:
    """Six steps with each attention: the losses fall, and are the same."""
    losses, expected = run(Copier(ours)), run(Copier(torchs))
    assert len(losses) == 6 and losses[-1] < losses[0]
    assert losses == pytest.approx(expected, rel=1e-4)


def test_accelerate() -> None:
    accelerate = pytest.importorskip("accelerate")

    def run(model: nn.Module) -> list[float]:
        accelerator = accelerate.Accelerator(cpu=True)
        model, optimizer, loader = accelerator.prepare(model, torch.optim.Adam(model.parameters(), 1e-2), batches())
        losses = []
        for tokens in loader:
            loss = model(tokens)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    agree(run)


def test_lightning(tmp_path) -> None:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model, self.losses = model, []

        def training_step(self, tokens: torch.Tensor, index: int) -> torch.Tensor:
            loss = self.model(tokens)
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), 1e-2)

    def run(model: nn.Module) -> list[float]:
        module = Module(model)
        trainer = lightning.Trainer(
            accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(module, batches())
        return module.losses

    agree(run)


@pytest.fixture
def through_tilewise(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[], list]], tuple[list, list[dict]]]]:
    """Runs a function while tilewise is torch's implementation; gives its results and the calls that reached tilewise."""
    calls: list[dict] = []
    forward = torch_sdpa.scaled_dot_product_attention
    monkeypatch.setattr(torch_sdpa, "scaled_dot_product_attention", lambda *a, **kw: calls.append(kw) or forward(*a, **kw))

    def run(function: Callable[[], list]) -> tuple[list, list[dict]]:
        torch_sdpa.register()
        torch.nn.attention.activate_flash_attention_impl("tilewise")
        try:
            return function(), calls
        finally:
            torch.nn.attention.restore_flash_attention_impl()

    yield run


def output_and_gradients(model: nn.Module, call: Callable[[], torch.Tensor]) -> list[torch.Tensor | None]:
    out = call()
    parameters = [p for p in model.parameters() if p.requires_grad]
    return [out.detach(), *torch.autograd.grad(out.square().sum(), parameters, allow_unused=True)]


def assert_same(results: list[torch.Tensor | None], expected: list[torch.Tensor | None]) -> None:
    for mine, theirs in zip(results, expected, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            torch.testing.assert_close(mine, theirs, atol=1e-5 * max(theirs.abs().max().item(), 1), rtol=1e-4)


def test_a_diffusion_transformer_through_torch_s_sdpa(through_tilewise) -> None:
    """The names of diffusers' attention backends are a closed list; its native one calls SDPA, which torch can give to tilewise."""
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    model = diffusers.FluxTransformer2DModel(
        in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=8, num_attention_heads=2, joint_attention_dim=8,
        pooled_projection_dim=8, axes_dims_rope=(2, 2, 4),
    )  # fmt: skip
    inputs = dict(
        hidden_states=torch.randn(2, 9, 4), encoder_hidden_states=torch.randn(2, 5, 8), pooled_projections=torch.randn(2, 8),
        timestep=torch.tensor([0.3, 0.7]), img_ids=torch.rand(9, 3), txt_ids=torch.rand(5, 3),
    )  # fmt: skip
    run = lambda: output_and_gradients(model, lambda: model(**inputs).sample)  # noqa: E731
    expected = run()
    results, calls = through_tilewise(run)
    assert len(calls) == 2
    assert_same(results, expected)


class Unused(types.ModuleType):
    """Stands for a part of torchvision: every name in it is an empty enumeration, which nothing that the tests run touches."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        members = ["NEAREST", "BILINEAR", "BICUBIC", "BOX", "HAMMING", "LANCZOS"] if name == "InterpolationMode" else []
        return enum.Enum(name, members)


@pytest.fixture
def timm(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """timm, which imports torchvision for its data sets and image transforms. torchvision's packages are each made for one build of
    torch, so beside another its names stand empty: models need none of them."""
    if importlib.util.find_spec("timm") is None:
        pytest.skip("timm is not installed: pip install --no-deps timm")
    before = set(sys.modules)
    for name in ("ops.misc", "models.feature_extraction", "transforms.functional", "datasets", "utils"):
        parts = ["torchvision", *name.split(".")]
        for depth in range(1, len(parts) + 1):
            full = ".".join(parts[:depth])
            if full not in sys.modules or not isinstance(sys.modules[full], Unused):
                monkeypatch.setitem(sys.modules, full, Unused(full))
            if depth > 1:
                setattr(sys.modules[".".join(parts[: depth - 1])], parts[depth - 1], sys.modules[full])
    yield importlib.import_module("timm")
    for name in set(sys.modules) - before:
        if name.partition(".")[0] == "timm":
            del sys.modules[name]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("vit_tiny_patch16_224", {}),
        ("vit_tiny_patch16_224", dict(qk_norm=True, class_token=False, global_pool="map")),  # pooled by a query of its own
        ("vit_tiny_patch16_224", dict(dynamic_img_size=True, reg_tokens=2, init_values=1e-2)),
    ],
    ids=["plain", "attention pooling", "registers"],
)
def test_a_vision_transformer_of_timm_through_torch_s_sdpa(name: str, changes: dict, timm, through_tilewise) -> None:
    torch.manual_seed(0)
    model = timm.create_model(name, img_size=32, patch_size=8, depth=2, embed_dim=32, num_heads=4, num_classes=5, **changes).eval()
    images = torch.randn(2, 3, 32, 32)
    run = lambda: output_and_gradients(model, lambda: model(images))  # noqa: E731
    expected = run()
    results, calls = through_tilewise(run)
    assert len(calls) == (3 if "global_pool" in changes else 2)
    assert_same(results, expected)
