"""How two launches of the Hopper forward kernel agree on whether the second one has anything to do.

A bias or a mask may hide any key from every query, and what such a key and its value hold, NaN maybe, must reach no output. Looking for
that before costs a pass over V, and nearly never finds any. So the first launch reads K and V as they are and adds a bias as it is. What is
hidden takes part with a probability of 0, and 0 times a finite number is 0. Where it was not finite, O is not finite either: NaN and
infinity survive a factor of 0, and a NaN among the scores survives in the denominator. Each CTA says whether it met such an O. Behind it
come two launches that do nothing unless one did: the copy of V in which what nobody sees is finite (`hidden`), and the same kernel again,
which reads that copy and selects away what a bias hides.

A CTA has a word of its own, which it clears before its warps begin, in memory of the call. So nothing has to be cleared before or behind
the launches, and no other call can come between them, on whatever stream, from whatever thread, captured in a graph or not.
"""

from . import configs
from .gluon_api import constexpr_function, gl, jit

MOST_PROGRAMS = gl.constexpr(configs.MOST_PROGRAMS)


@jit
def tiles_to_do(found_ptr, repairs, tiles):
    """How many tiles a launch has: all of them, or none where it `repairs` and the launch before it found nothing."""
    if repairs == 0:
        gl.store(found_ptr + gl.program_id(0), 0)
    else:
        # Every warp reads all words: the maximum then takes no shared memory.
        layout: gl.constexpr = gl.BlockedLayout([MOST_PROGRAMS // 32], [32], [4], [0])
        words = gl.arange(0, MOST_PROGRAMS, layout=layout)
        found = gl.load(found_ptr + words, mask=words < gl.num_programs(0), other=0)
        if gl.max(found, 0) == 0:
            tiles = tiles * 0
    return tiles


@constexpr_function
def _mark_text(n):
    # 0 times what is finite is 0, and anything else NaN, which stays: a multiply-add a number, in four chains.
    text = "{ .reg .pred p; .reg .f32 t<4>; "
    text += "".join(f"mul.f32 t{i}, ${n + i}, 0f00000000; " for i in range(4))
    text += "".join(f"fma.rn.f32 t{i % 4}, ${n + i}, 0f00000000, t{i % 4}; " for i in range(4, n))
    text += "add.f32 t0, t0, t1; add.f32 t2, t2, t3; add.f32 t0, t0, t2; "
    text += f"setp.nan.f32 p, t0, t0; @p st.global.u32 [${2 * n}], 1; "
    return text + "".join(f"mov.b32 ${i}, 0; " for i in range(n)) + "}"


@constexpr_function
def _mark_operands(n):
    return ",".join(["=r"] * n + ["f"] * n + ["l"] * n)


@jit
def mark_unless_finite(out, found_ptr):
    """Set this CTA's word where a number of O [64, n], normalised and in wgmma's layout, is not finite. In a launch that repairs,
    other CTAs may still read the words: it has tiles only because one was 1, and this one may become 1 as well.
    """
    n: gl.constexpr = out.shape[0] * out.shape[1] // 128
    text: gl.constexpr = _mark_text(n)
    operands: gl.constexpr = _mark_operands(n)
    word_ptr = found_ptr + gl.program_id(0)
    gl.inline_asm_elementwise(text, operands, [out, word_ptr.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=n)
