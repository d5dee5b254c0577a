"""Calls that come again: found by one look-up, checked, chosen and launched as they were the first time.

In training and serving the same call comes on every step with other numbers in its tensors. Validation, the choice of kernels and the
arguments of their launches follow from what a key holds; `kernels.replay` keeps what they led to. Keys are made for calls on CUDA devices
whose tensors are all arguments of their own, and only where nothing watches, transforms or traces: all others go the ordinary way.

Making a key takes longer than launching, so what came lately is told by less: the same objects as rules, which cannot have changed since
they were checked, and the tensors' layouts compared in one call (`layouts_of`). What is not found this way is looked up by its key.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from . import derivatives, onlookers
from .kernels.replay import Pass, Passes
from .ops import DIFFERENTIABLE, FORWARD_ARGS, float32_precision_allows_tf32, run_backward, run_forward

MOST = 512  # calls kept at a time
_PLAIN = (Tensor, torch.nn.Parameter)
_STRIDED, _FLOAT32 = torch.strided, torch.float32
_SIMPLE = frozenset((bool, int, float, str, type(None), torch.dtype))
# The operands that a call with a key may have, by their names in the operators.
OPERANDS = ("q", "k", "v", "bias", "mask", "alibi_slopes", "sink", "seqused_q", "seqused_k", "cu_seqlens_q", "cu_seqlens_k")
_OFFSETS = OPERANDS.index("cu_seqlens_q")
WITH_GRADIENT = OPERANDS[:4]  # of which a repeated call has gradients
_NO_MORE = (None,) * len(OPERANDS)
known: dict[tuple[Any, ...], Repeated] = {}
LATELY = 4  # told from each other by comparing: calls with one shape of q, backward passes of one call, steps over a cache
lately: dict[torch.Size, tuple[Lately, ...]] = {}
_lately_over_caches: tuple[LatelyOverACache, ...] = ()


def key_of(
    tensors: Sequence[Any], rules: Sequence[Any], window_size: Any, deterministic: Any, excluded: Sequence[Any], return_aux: Any
) -> tuple[Any, ...] | None:
    """All that a call with these tensors, rules and window follows from, torch's settings included, apart from what its tensors hold and
    where they lie. None where it must go the ordinary way, also where anything of `excluded` is not 0 or False. Values that are equal but
    of another type are not the same, for some of them are errors."""
    if torch.compiler.is_compiling() or type(window_size) is not tuple or len(window_size) != 2:
        return None
    values = (*rules, *window_size, deterministic, *excluded)
    kinds = tuple(map(type, values))
    if not _SIMPLE.issuperset(kinds) or any(excluded) or (return_aux != () and return_aux != "lse"):
        return None
    if onlookers.watched() or forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active():
        return None
    if len(tensors) > _OFFSETS and onlookers.hooks_see_what_is_saved():
        return None
    if torch.is_autocast_enabled("cuda"):
        return None
    if tensors[0] is None or tensors[1] is None or tensors[2] is None:
        return None
    layouts: list[Any] = []
    for x in tensors:
        if x is None:
            layouts.append(None)
        elif type(x) in _PLAIN and x.is_cuda and x.layout is _STRIDED and not x.is_nested and not (x.is_neg() or x._is_zerotensor()):
            layouts.append((x.dtype, x.shape, x.stride(), x.get_device()))
        else:
            return None
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    tf32 = tensors[0].dtype is _FLOAT32 and float32_precision_allows_tf32()
    return (*layouts, values, kinds, deterministic, return_aux, tf32)


def forget() -> None:
    """Every call is a first one again."""
    global _lately_over_caches
    _lately_over_caches = ()
    for kept in (known, lately, _over_caches.known):
        kept.clear()


# -------------------------------------------------------------------------------------------------------- what came lately


def layouts_of(tensors: Sequence[Tensor]) -> Callable[..., bool] | None:
    """``same(*tensors)``: whether others, all strided and not nested (it ends the process on others), are like these for all that a
    recorded pass follows from; None where this torch cannot say it.

    Class, dtype, device index, shape, strides and ``requires_grad`` of each, no two of them being one object; and the dispatch keys that
    an operator called on it would meet now. Those say device type, layout, lazy negation and what wraps a tensor, and of this thread what
    stands between an operator and its kernels: modes, transforms of torch.func, tracing, autocast, inference mode. Not among them are
    forward mode and profilers.
    """
    guards = _guards()
    return None if guards is None else guards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check


@functools.cache
def _guards() -> Callable[..., Any] | None:
    """The comparison that torch.compile makes before each call of compiled code, once it was seen to notice everything named above."""
    try:
        guards: Callable[..., Any] = importlib.import_module("torch._C._dynamo.guards").TensorGuards
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
            noticed = _notices(guards)
        return guards if noticed else None
    except (ImportError, AttributeError, TypeError, RuntimeError, SystemError):
        return None


def _notices(guards: Callable[..., Any]) -> bool:
    zeros = functools.partial(torch.zeros, device="cpu")
    x, y = zeros(4, 2), zeros(4, 2)
    same = guards(x, y, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    others = [
        zeros(4, 3), zeros(2, 4).t(), zeros(4, 2, 1), zeros(4, 2, dtype=torch.int32), torch._neg_view(y), y.to("meta"), x,
        zeros(4, 2, requires_grad=True), torch.nn.Parameter(y, requires_grad=False), torch._add_batch_dim(zeros(3, 4, 2), 0, 1),
    ]  # fmt: skip
    noticed = same(x, y) is same(y, x) is True and not any(same(x, other) for other in others)
    transform = torch._C._IncludeDispatchKeyGuard(torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode)
    for watching in (TorchDispatchMode(), transform, torch.autocast("cpu"), torch.inference_mode()):
        with watching:
            noticed = noticed and same(x, y) is False
    return noticed


def _strided(tensors: Sequence[Any]) -> bool:
    """Whether all are tensors of which `layouts_of` may be asked."""
    try:
        return not any(map(_is_nested, tensors)) and {*map(_layout, tensors)} == _ALL_STRIDED
    except (AttributeError, TypeError):
        return False


_is_nested, _layout, _ALL_STRIDED = attrgetter("is_nested"), attrgetter("layout"), {_STRIDED}


class Lately(NamedTuple):
    """A call of q, k and v alone: its rules, torch's deterministic flag, and what it led to."""

    causal: Any
    window_size: Any
    softmax_scale: Any
    softcap: Any
    dropout_p: Any
    deterministic: Any
    layout: Any
    backend: Any
    out_dtype: Any
    check_values: Any
    return_aux: Any
    flag: Any
    same: Callable[..., bool]
    call: Repeated
    differentiable: bool


def again(
    q: Any, k: Any, v: Any, causal: Any, window_size: Any, softmax_scale: Any, softcap: Any, dropout_p: Any, deterministic: Any,
    layout: Any, backend: Any, out_dtype: Any, check_values: Any, return_aux: Any,
) -> Sequence[Tensor] | None:  # fmt: skip
    """out, and lse where it was asked for, of a call of q, k and v alone that came lately; None where it has to be looked up.

    The rules were checked when they were kept, and are of kinds that do not change: the same objects say the same. Left out of what
    `key_of` reads are the precision of float32, since such calls are not kept, and what `layouts_of` says it sees.
    """
    if forward_ad._current_level >= 0 or torch.autograd._profiler_enabled():
        return None
    try:
        if k.is_nested or v.is_nested or not (q.layout is k.layout is v.layout is _STRIDED):
            return None
        for x in lately.get(q.shape, ()):
            if (
                x.causal is causal
                and x.window_size is window_size
                and x.softmax_scale is softmax_scale
                and x.return_aux is return_aux
                and x.softcap is softcap
                and x.dropout_p is dropout_p
                and x.deterministic is deterministic
                and x.layout is layout
                and x.backend is backend
                and x.out_dtype is out_dtype
                and x.check_values is check_values
                and x.flag is torch._C._get_deterministic_algorithms()
                and x.same(q, k, v)
            ):
                break
        else:
            return None
    except (AttributeError, TypeError, RuntimeError):  # no tensors, or a q that is nested or whose sizes are no numbers
        return None
    call = x.call
    if x.differentiable and torch.is_grad_enabled():
        result = _apply(call, q, k, v)
        return result if call.returns_lse else (result,)
    return call.play(q, k, v)


def keep_lately(call: Repeated, operands: Sequence[Any], *rules: Any) -> None:
    """Lets `again` find a call that was looked up, once a pass of it is recorded. `rules` are its arguments from `causal` on."""
    tensors = operands[:3]
    q = tensors[0]
    if q.dtype is _FLOAT32 or not call.plays():
        return
    flag, before = torch._C._get_deterministic_algorithms(), lately.get(q.shape, ())
    if any(x.call is call and x.flag is flag and all(map(is_, x, rules)) and x.same(*tensors) for x in before):
        return  # found, but could not be played
    same = layouts_of(tensors)
    if same is not None:
        kept = Lately._make((*rules, flag, same, call, any(x.requires_grad for x in tensors)))
        lately[q.shape] = (kept, *before[: LATELY - 1])


class LatelyBackward(NamedTuple):
    """A backward pass of a call of q, k and v alone to which all gradients arrived: which were wanted, and how its tensors lay."""

    needs: tuple[bool, ...]
    same: Callable[..., bool]
    play: Callable[..., tuple[Tensor, ...] | None]


class LatelyOverACache(NamedTuple):
    """A call over a cache: its rules, which tensors it had, and whether its values lie in its keys."""

    rules: tuple[Any, ...]
    absent: list[bool]
    together: bool
    same: Callable[..., bool]
    play: Callable[..., tuple[Tensor, ...] | None]


def again_over_a_cache(tensors: Sequence[Any], *rules: Any) -> Sequence[Tensor] | None:
    """What `over_a_cache` returns, as `again` finds it."""
    if not _lately_over_caches or forward_ad._current_level >= 0 or torch.autograd._profiler_enabled():
        return None
    absent = [x is None for x in tensors]
    given = [x for x in tensors if x is not None]
    _, k_cache, v_cache, new_k = tensors[:4]
    if not _strided(given):
        return None
    for kept in _lately_over_caches:
        if kept.absent != absent or not all(map(is_, kept.rules, rules)):
            continue
        if kept.same(*given) and (not kept.together or k_cache.data_ptr() == v_cache.data_ptr()):
            if kept.together:
                del given[2]
            results = kept.play(*given)
            if results is not None and new_k is not None:
                torch.autograd.graph.increment_version([k_cache, v_cache])
            return results
    return None


# ------------------------------------------------------------------------------------------------------ what has a key


def remember(key: tuple[Any, ...], arguments: dict[str, Any], returns_lse: bool, packed: bool = False) -> Repeated:
    """The call of a key from now on; `arguments` are those of the forward operator. `packed`: the user's tensors have no batch."""
    if len(known) >= MOST:
        known.clear()
        lately.clear()
    found = known[key] = Repeated(arguments, returns_lse, packed)
    return found


def over_a_cache(
    key: tuple[Any, ...], tensors: Sequence[Any], rules: tuple[Any, ...], compute: Callable[[], Sequence[Tensor]]
) -> Sequence[Tensor]:
    """What `compute` returns, of a call over a cache: `tensors` and `rules` are the arguments of `kvcache.attention_with_kvcache`.

    Values may lie in the memory of the keys, as the latent vectors of MLA do: then one address stands for both.
    """
    global _lately_over_caches
    k_cache, v_cache, new_k = tensors[1:4]
    given = [x for x in tensors if x is not None]
    differentiable = any(x.requires_grad for x in given)
    if differentiable and torch.is_grad_enabled():
        return compute()  # which refuses it in words
    together = k_cache.data_ptr() == v_cache.data_ptr()
    key = (together, *key)
    results = _over_caches.run(key, [x for x in given if not (together and x is v_cache)], compute)
    if new_k is not None:  # written in place, and not by an operator of torch
        torch.autograd.graph.increment_version([k_cache, v_cache])
    found = _over_caches.known.get(key)
    tellable = not differentiable and tensors[0].dtype is not _FLOAT32  # whose precision is a setting of torch
    if isinstance(found, Pass) and tellable and (same := layouts_of(given)):
        absent = [x is None for x in tensors]
        others = [x for x in _lately_over_caches if x.play is not found.play]
        _lately_over_caches = (LatelyOverACache(rules, absent, together, same, found.play), *others[: LATELY - 1])
    return results


_over_caches = Passes(MOST)


def _not_yet(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Stands for a pass that is not recorded."""


class Repeated:
    """One call of `attention` or `attention_varlen`: the arguments of its operator but `OPERANDS`, and the passes that it has led to.
    Operands are in that order, None where there is none, also at the end. Those of packed sequences, and their results, are as the user has
    them, without a batch; where the offsets of keys are those of queries, they are given once."""

    def __init__(self, arguments: dict[str, Any], returns_lse: bool, packed: bool) -> None:
        self.arguments = {name: x for name, x in arguments.items() if name not in OPERANDS}
        self.packed = packed
        self.same_offsets = arguments["cu_seqlens_q"] is not None and arguments["cu_seqlens_q"] is arguments["cu_seqlens_k"]
        self.returns_lse = returns_lse
        self.allow_tf32 = float32_precision_allows_tf32()
        self.passes = Passes()
        # Forward passes of q, k and v alone, without derivatives and with them.
        self.play: Callable[..., Sequence[Tensor] | None] = _not_yet
        self.play_with_lse: Callable[..., Sequence[Tensor] | None] = _not_yet
        self.lately: tuple[LatelyBackward, ...] = ()

    def __call__(self, *operands: Tensor | None) -> Sequence[Tensor]:
        """out, and lse where it was asked for; perhaps more that nobody asked for."""
        if torch.is_grad_enabled():
            for x in operands[len(WITH_GRADIENT) :]:
                if x is not None and x.requires_grad:
                    return self._without_batch(derivatives.attention_forward(**self._named(operands)))
            if any(x is not None and x.requires_grad for x in operands[: len(WITH_GRADIENT)]):
                result = _Differentiable.apply(self, *operands)
                return result if self.returns_lse else (result,)
        return self.forward(operands, self.returns_lse)

    def plays(self) -> bool:
        """Whether there is a forward pass to play, for a call of q, k and v alone."""
        with_lse, alone = self.passes.known.get(True), self.passes.known.get(self.returns_lse)
        if isinstance(with_lse, Pass):
            self.play_with_lse = with_lse.play
        if isinstance(alone, Pass):
            self.play = alone.play
        return isinstance(with_lse, Pass) or isinstance(alone, Pass)

    def forward(self, operands: Sequence[Tensor | None], with_lse: bool) -> Sequence[Tensor]:
        """out, and lse with `with_lse`: without, its memory is of the workspace."""
        given = [x for x in operands if x is not None]
        compute: Callable[[], Any] = lambda: self._without_batch(run_forward(self._named(operands))[: 1 + with_lse])  # noqa: E731
        results = self.passes.run(with_lse, given, compute)
        self.plays()
        return results

    def backward(
        self, saved: Sequence[Tensor | None], arrived: Sequence[Tensor | None], needs: tuple[bool, ...]
    ) -> Sequence[Tensor | None]:
        """The gradients of q, k, v and, where `needs` has a fourth, the bias; None where they are not needed. `saved` are out, lse and the
        operands, or what hooks made of them; `arrived` the gradients of out and, where it was returned, lse."""
        tensors = (*saved, *arrived)
        told = not (torch.is_grad_enabled() or forward_ad._current_level >= 0 or torch.autograd._profiler_enabled())
        if told and not torch.compiler.is_compiling() and _strided(tensors):
            for kept in self.lately:
                if kept.needs == needs and kept.same(*tensors):
                    played = kept.play(*tensors)
                    if played is not None:
                        return _spread(played, needs)
                    break
        dout, dlse = arrived if self.returns_lse else (*arrived, None)
        if dout is None and dlse is None:
            return [None] * len(needs)
        given = [x for x in tensors if x is not None]
        layouts = [(x.dtype, x.shape, x.stride(), x.get_device()) for x in given if x.is_cuda and onlookers.lies_as_it_is(x)]
        if len(layouts) < len(given) or not onlookers.ordinary():
            return self._differentiable_backward(saved, (dout, dlse), needs)
        key = (needs, dout is None, dlse is None, *layouts)
        results = self.passes.run(key, given, lambda: self._backward(saved, (dout, dlse), needs))
        found = self.passes.known.get(key)
        if isinstance(found, Pass) and len(given) == len(tensors) == 5 + len(arrived) and (same := layouts_of(given)):
            others = [x for x in self.lately if x.play is not found.play]
            self.lately = (LatelyBackward(needs, same, found.play), *others[: LATELY - 1])
        return _spread(results, needs)

    def _with_batch(self, x: Tensor | None) -> Tensor | None:
        return x.unsqueeze(0) if self.packed and x is not None else x

    def _without_batch(self, results: Sequence[Tensor | None]) -> Sequence[Any]:
        return [x if x is None else x.squeeze(0) for x in results] if self.packed else results

    def _named(self, operands: Sequence[Tensor | None]) -> dict[str, Any]:
        named = {**dict.fromkeys(OPERANDS), **dict(zip(OPERANDS, operands, strict=False))}
        if self.packed:
            named |= {name: self._with_batch(named[name]) for name in ("q", "k", "v")}
        if self.same_offsets:
            named["cu_seqlens_k"] = named["cu_seqlens_q"]
        return {**self.arguments, **named}

    def _kept(self, saved: Sequence[Tensor | None]) -> dict[str, Any]:
        """The arguments of the forward operator and its results."""
        out, lse, *operands = saved
        results = {"out": self._with_batch(out), "lse": self._with_batch(lse), "entropy": None}
        return {**self._named(operands), **results, "allow_tf32": self.allow_tf32}

    def _backward(self, saved: Sequence[Tensor | None], arrived: Sequence[Tensor | None], needs: Sequence[bool]) -> Sequence[Tensor]:
        dout, dlse = map(self._with_batch, arrived)
        cotangents = {"dout": dout, "dlse": dlse, "dkey_mass": None, "dentropy": None}
        all_needs = [*needs, *[False] * (len(DIFFERENTIABLE) - len(needs))]
        given = {**cotangents, **derivatives.common_arguments(self._kept(saved)), "needs": all_needs}
        return self._without_batch(run_backward(given))

    def _differentiable_backward(
        self, saved: Sequence[Tensor | None], arrived: Sequence[Tensor | None], needs: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        names = WITH_GRADIENT[: len(needs)]
        needed = {**dict.fromkeys(FORWARD_ARGS, False), **dict(zip(names, needs, strict=True)), "captured": [], "blocks": []}
        grads = derivatives.FORWARD.vjp(self._kept(saved), (*map(self._with_batch, arrived), None, None, None), needed)
        return self._without_batch([grads.get(name) for name in names])


def _spread(results: Sequence[Tensor], needs: Sequence[bool]) -> Sequence[Tensor | None]:
    """A gradient for each operand from those that were needed."""
    if len(results) == len(needs):
        return results
    computed = iter(results)
    return [next(computed) if needed else None for needed in needs]


class _Differentiable(torch.autograd.Function):
    """A repeated call under autograd, with gradients of q, k, v and a bias."""

    @staticmethod
    def forward(ctx: Any, call: Repeated, *operands: Tensor | None) -> Any:
        out, lse = (call.play_with_lse(*operands) if len(operands) == 3 else None) or call.forward(operands, True)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(out, lse, *operands)
        ctx.call = call
        return (out, lse) if call.returns_lse else out

    @staticmethod
    def backward(ctx: Any, *arrived: Tensor | None) -> Any:
        needs = ctx.needs_input_grad
        wanted = needs[1:5] if len(needs) > 4 and needs[4] else needs[1:4]  # with a bias or without, however it was called
        return None, *ctx.call.backward(ctx.saved_tensors, arrived, wanted), *_NO_MORE[: len(needs) - 1 - len(wanted)]


# The method of the class in C. What `torch.autograd.Function.apply` does before it is for functions with a `setup_context`, and for what is
# left of tensors of torch.func after its transforms, whose dispatch keys are those of no tensor that came lately.
_apply = super(torch.autograd.Function, _Differentiable).apply
