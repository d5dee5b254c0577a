"""The host side of calls with a bias or mask, and the copy that they may need, in Triton's interpreter: run by `test_hopper_guard`.

The Gluon kernel, which has no interpreter, is replaced by a few lines of PyTorch that do with NaN what it does.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch

from tilewise import reference
from tilewise.kernels.hopper import configs, forward_pass, launch
from tilewise.kernels.hopper.hidden import finite_copy
from tilewise.kernels.hopper.launch import Program
from tilewise.plan import Operands, Outputs, Rules

INFINITY = float("inf")
NAN = float("nan")


class StandIn:
    """Fills out and lse as the Gluon kernel would, and the words of its CTAs."""

    def __init__(self, variant, out, made):
        self.variant, self.out, self.made, self.computed = variant, out, made, []

    def __getitem__(self, grid):
        return self

    def __call__(self, *arguments):
        a, c, out = dict(zip(forward_pass.attention_forward.arg_names, arguments, strict=True)), self.variant, self.out
        found = next(x for x in self.made if x.data_ptr() == a["found_ptr"])
        if a["repairs"]:
            if found.max() == 0:
                return
        else:
            found.zero_()
        self.computed.append(a["repairs"])
        q, k, v = (a[f"{name}_desc"].base.float() for name in "qkv")
        key_heads = torch.arange(a["heads"]) // a["group"]
        own = a["repairs"] and c.values_a_head
        assert v.shape[1] == (a["heads"] if own else k.shape[1])
        k, v = k[:, key_heads], v if own else v[:, key_heads]
        s = q @ k.mT * a["scale"]
        if self.bias is not None:
            s = s + self.bias.float()
            if a["repairs"] or c.bias_dtype == "fp32":
                s = torch.where(self.bias == -INFINITY, -INFINITY, s)
        if self.mask is not None:
            s = torch.where(self.mask, s, -INFINITY)
        m = s.amax(3, keepdim=True)
        p = torch.exp(s - torch.where(m == -INFINITY, 0.0, m))
        l = p.sum(3, keepdim=True)
        result = torch.where(l == 0, 0.0, p @ v / l)
        out.out.copy_(result)
        out.lse.copy_((m + l.log())[..., 0])
        if not result.isfinite().all():
            found[-1] = 1


def attended(monkeypatch, t, r):
    """(out, lse), which of the two launches computed them, and the variant."""
    shape = (*t.q.shape[:3], t.v.shape[3])
    outputs = Outputs(torch.full(shape, NAN, dtype=t.q.dtype), torch.full(shape[:3], NAN))
    made, new_empty = [], torch.Tensor.new_empty
    kernel = StandIn(launch.variant_of(t, r, outputs), outputs, made)
    kernel.bias, kernel.mask = t.bias, t.mask

    def remember(x, *size, dtype=None, **options):
        made.append(new_empty(x, *size, dtype=dtype, **options).fill_(77))
        return made[-1]

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "new_empty", remember)
        patch.setattr(launch, "program_for", lambda *_: Program(kernel.variant, configs.Addresses(0, 0), kernel))
        patch.setattr(launch, "multiprocessors", lambda _: 4)
        patch.setattr(launch.replay, "asked", lambda make, device: torch.zeros(2, dtype=torch.int32))
        launch.launch(t, r, outputs)
    return outputs.out, outputs.lse, kernel.computed, kernel.variant


HIDING = {
    "a bias": lambda seen: {"bias": torch.randn(seen.shape).half().masked_fill(~seen, -INFINITY)},
    "a float32 bias": lambda seen: {"bias": torch.randn(seen.shape).masked_fill(~seen, -INFINITY)},
    "a mask": lambda seen: {"mask": seen},
}


@pytest.mark.parametrize("wild", ["nothing", "v", "k", "an infinity", "what is seen"])
@pytest.mark.parametrize("shared", [True, False], ids=["heads alike", "heads told apart"])
@pytest.mark.parametrize("name", HIDING)
def test_computed_again_only_where_it_must_be(monkeypatch, name, shared, wild):
    q, k, v = torch.randn(2, 4, 40, 16).half(), torch.randn(2, 2, 70, 16).half(), torch.randn(2, 2, 70, 16).half()
    seen = torch.rand(1, 1 if shared else 4, 40, 70) < 0.7
    seen[:, :, 5] = seen[..., 7::20] = False
    if not shared:
        seen[:, 1, :, 30] = False  # the other head that shares this value sees it
    options = HIDING[name](seen)
    if wild == "v":
        v[:, :, 7::20] = NAN
    elif wild == "k":
        k[:, :, 7::20] = NAN
    elif wild == "an infinity":
        v[0, 0, 27] = INFINITY
    elif wild == "what is seen":
        v[:, :, 30] = NAN
    out, lse, computed, variant = attended(monkeypatch, Operands(q, k, v, **options), Rules(0.25))
    selected = wild == "k" and name != "a bias"
    assert variant.guarded and computed == ([0] if wild == "nothing" or selected else [0, 1])
    given = [x.transpose(1, 2).double() for x in (q, k, v)]
    exact, exact_lse = (x.float() for x in reference.attention(*given, softmax_scale=0.25, **options))
    exact = exact.transpose(1, 2)
    torch.testing.assert_close(lse, exact_lse, rtol=1e-3, atol=1e-3)
    if wild != "what is seen":
        torch.testing.assert_close(out.float(), exact, rtol=2e-3, atol=2e-3)
    elif not shared:
        assert exact[:, :, 6:].isnan()[:, [0, 2, 3]].any() and out[:, 0].isnan().any()
        torch.testing.assert_close(out[:, 1].float(), exact[:, 1], rtol=2e-3, atol=2e-3)
    else:
        assert out.isnan()[exact.isnan()].all() and exact.isnan().any()


@pytest.mark.parametrize("word", [None, 0, 6])
def test_no_copy_where_nothing_was_found(word):
    """What is not copied is not touched, and words behind the launch's own do not count."""
    q, x = torch.randn(1, 2, 30, 8).half(), torch.randn(1, 2, 130, 8).half()
    x[:, :, 100] = NAN
    mask = torch.ones(1, 1, 30, 130, dtype=torch.bool)
    mask[..., 100] = False
    t, r = Operands(q, x, x, mask=mask), Rules(1.0)
    words = torch.ones(9, dtype=torch.int32)
    words[:7] = 0
    if word is not None:
        words[word] = 1
    whole = finite_copy(x, t, r, keys=True, heads=2)
    assert torch.equal(whole, x.masked_fill(x.isnan(), 0.0))
    copy = finite_copy(x, t, r, keys=True, heads=2, found=words[:7])
    assert torch.equal(copy, whole) if word is not None else copy.isnan().all()  # memory is poisoned in tests
