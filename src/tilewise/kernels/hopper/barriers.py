"""Synchronisation of the Hopper kernels in raw PTX: shared-memory barriers, named barriers, and what they need around them.

Gluon's own barrier operations put a barrier of the whole warp group before every arrival. These do not: one elected thread arrives,
which is enough after a wgmma wait because that wait covers the warp group (CUTLASS relies on the same). Addresses are
`global_smem + offset`; the launcher reads the offset from the PTX of the compiled kernel.

Phases: a barrier that is waited for with the parity of the phase *before* its first one returns at once. So "empty" barriers are
waited for with the flipped parity and need no arrival before the first use.
"""

from .gluon_api import constexpr_function, gl, jit


@jit
def uniform(x):
    """x (int32), marked equal across the warp: captured values reach worker warps through shared memory, where ptxas lost that."""
    return gl.inline_asm_elementwise("shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;", "=r,r", [x], dtype=gl.int32, is_pure=True, pack=1)


@jit
def pinned(x):
    """x (int32), which no compiler pass may recompute or hoist: comparisons with it are not kept in registers across a loop."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@jit
def settled(x):
    """x (float32), in registers that no wgmma has written: reading one that a wgmma wrote makes ptxas wait for all that run."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1)


@jit
def shared_address(offset: gl.constexpr, anchor):
    """Address of the byte `offset` of the CTA's shared memory. `anchor` is any int32 scalar."""
    start = gl.inline_asm_elementwise("mov.u32 $0, global_smem;", "=r,r", [anchor], dtype=gl.int32, is_pure=True, pack=1)
    return start + offset


@jit
def thread_in_warpgroup(anchor):
    """0..127"""
    return gl.inline_asm_elementwise(
        "{ .reg .u32 t; mov.u32 t, %tid.x; and.b32 $0, t, 127; }",
        "=r,r",
        [anchor],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@jit
def thread_in_warpgroups(anchor):
    """0..255, of two that work together."""
    return gl.inline_asm_elementwise(
        "{ .reg .u32 t; mov.u32 t, %tid.x; and.b32 $0, t, 255; }", "=r,r", [anchor], dtype=gl.int32, is_pure=True, pack=1
    )


@jit
def launch_dependents(anchor):
    """The kernel launched behind this one may be set up once every CTA has come here; it waits until all have ended. `anchor` is any int32
    scalar."""
    gl.inline_asm_elementwise("griddepcontrol.launch_dependents; mov.b32 $0, 0;", "=r,r", [anchor], dtype=gl.int32, is_pure=False, pack=1)


@constexpr_function
def _power_of_two(n):
    return n & (n - 1) == 0


@constexpr_function
def _log2(n):
    return n.bit_length() - 1


@jit
def stage_of(count, stages: gl.constexpr):
    """Which of `stages` buffers the count-th use takes. Masks, not `%`: a division costs uniform registers."""
    if _power_of_two(stages):  # noqa: SIM108
        stage = count & (stages - 1)
    else:
        stage = count % stages
    return stage


@jit
def phase_of(count, stages: gl.constexpr):
    """The parity of the count-th use of a ring of `stages` barriers."""
    if _power_of_two(stages):  # noqa: SIM108
        phase = (count >> _log2(stages)) & 1
    else:
        phase = (count // stages) & 1
    return phase


@jit
def wait(barrier, phase):
    """Block until `phase` of the barrier at this address is complete. It ends a basic block: ptxas moves nothing across it."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [$1], $2; @!p bra.uni AGAIN; mov.b32 $0, 0; }",
        "=r,r,r",
        [barrier, phase],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@jit
def wait_behind(barrier, phase, sums):
    """`wait`, which no pass may move above the computation of `sums` (float32, two a thread, not negative).

    The exit condition asks whether a sum is negative. None is, but ptxas does not know: what the sums are made of stays above the wait.
    The vote tells it that the answer is the same in the whole warp; else it gives up uniform registers for the rest of the loop.
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred p, q; setp.lt.f32 q, $2, 0f00000000; setp.lt.or.f32 q, $3, 0f00000000, q; "
        "vote.sync.any.pred q, q, 0xffffffff; "
        "AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [$4], $6; or.pred p, p, q; @!p bra.uni AGAIN; "
        "mov.b32 $0, 0; mov.b32 $1, 0; }",
        "=r,=r,f,f,r,r,r,r",
        [sums, barrier, phase],
        dtype=gl.int32,
        is_pure=False,
        pack=2,
    )


@jit
def arrive(barrier, thread):
    """One arrival for the whole warp group; only right behind a wgmma wait (or another barrier) of all its warps."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.eq.s32 p, $2, 0; @p mbarrier.arrive.shared::cta.b64 _, [$1]; mov.b32 $0, 0; }",
        "=r,r,r",
        [barrier, thread],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@jit
def arrive_if(barrier, thread, condition):
    """`arrive` where the int32 `condition` is not 0."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.eq.s32 p, $2, 0; setp.ne.and.s32 p, $3, 0, p; @p mbarrier.arrive.shared::cta.b64 _, [$1]; mov.b32 $0, 0; }",
        "=r,r,r,r",
        [barrier, thread, condition],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@jit
def arrive_each_warp(barrier):
    """One arrival a warp, behind plain stores to shared memory that TMA is about to read (or behind its having read them)."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; fence.proxy.async.shared::cta; bar.warp.sync 0xffffffff; elect.sync _|p, 0xffffffff; "
        "@p mbarrier.arrive.shared::cta.b64 _, [$1]; mov.b32 $0, 0; }",
        "=r,r",
        [barrier],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@jit
def arrive_behind_reads(barrier):
    """One arrival a warp, behind plain reads of shared memory. Who waits has to put `fence_reads` before TMA writes there again."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; bar.warp.sync 0xffffffff; elect.sync _|p, 0xffffffff; "
        "@p mbarrier.arrive.shared::cta.b64 _, [$1]; mov.b32 $0, 0; }",
        "=r,r",
        [barrier],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@jit
def fence_reads(anchor):
    """Behind the wait for `arrive_behind_reads`: the next copy by TMA comes after the reads that it told of. A fence between the proxies
    orders what happened before it, by whomever, as long as barriers lead from there to here; so one of the producer's is as good as one
    of each reader's, and holds up nobody who computes.
    """
    gl.inline_asm_elementwise("fence.proxy.async.shared::cta; mov.b32 $0, $1;", "=r,r", [anchor], dtype=gl.int32, is_pure=False, pack=1)


@jit
def await_turn(turn_ptr, turn):
    """One warp: until the int32 in global memory says `turn`. What was added before it said so is seen, also by TMA."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .u32 v; AGAIN: ld.acquire.gpu.global.u32 v, [$1]; setp.eq.u32 p, v, $2; @!p bra.uni AGAIN; "
        "bar.warp.sync 0xffffffff; fence.proxy.async; mov.b32 $0, 0; }",
        "=r,l,r",
        [turn_ptr, turn],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@jit
def give_turn(turn_ptr, anchor):
    """One warp: wait until its TMA additions are done in global memory, then let the next one in."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .u32 l; cp.async.bulk.wait_group 0; fence.proxy.async; bar.warp.sync 0xffffffff; mov.u32 l, %laneid; "
        "setp.eq.u32 p, l, 0; @p red.release.gpu.global.add.u32 [$1], 1; mov.b32 $0, $2; }",
        "=r,l,r",
        [turn_ptr, anchor],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@constexpr_function
def _named_barrier(kind, number, threads):
    return f"bar.{kind} {number}, {threads}; mov.b32 $0, $1;"


@jit
def take_turn(number: gl.constexpr, threads: gl.constexpr, anchor):
    """Wait at a named barrier until the warp group before this one has passed the turn on."""
    text: gl.constexpr = _named_barrier("sync", number, threads)
    gl.inline_asm_elementwise(text, "=r,r", [anchor], dtype=gl.int32, is_pure=False, pack=1)


@jit
def pass_turn(number: gl.constexpr, threads: gl.constexpr, anchor):
    """Let the warp group that waits at this named barrier go on; do not wait."""
    text: gl.constexpr = _named_barrier("arrive", number, threads)
    gl.inline_asm_elementwise(text, "=r,r", [anchor], dtype=gl.int32, is_pure=False, pack=1)


@jit
def end_warps(anchor):
    """End the calling warp group, which has nothing more to do: barriers of all threads do not count warps that have ended.

    Triton's worker warps otherwise return to a loop in which they wait for further work, and their consumers' loops are loops inside that
    one, entered by a branch that differs from warp to warp. ptxas then gives up uniform registers in most of them.

    Registers go back to the CTA first: those of ended warps do not, and the others, which ask for more at the kernel's end, would wait.
    """
    text: gl.constexpr = "setmaxnreg.dec.sync.aligned.u32 24; exit; mov.b32 $0, $1;"
    gl.inline_asm_elementwise(text, "=r,r", [anchor], dtype=gl.int32, is_pure=False, pack=1)


@jit
def draw_tile(counter_ptr, anchor):
    """Take the next number of a global counter; every lane of the (single) calling warp gets it."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .u32 l, v; mov.u32 l, %laneid; setp.eq.u32 p, l, 0; mov.u32 v, 0; "
        "@p atom.global.add.u32 v, [$1], 1; shfl.sync.idx.b32 $0, v, 0, 31, 0xffffffff; }",
        "=r,l,r",
        [counter_ptr, anchor],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@jit
def retire(counter_ptr, anchor, last):
    """Count this CTA out; the one that finds `last` others gone puts both counters back to 0 for the next launch."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p, q; .reg .u32 l, v; mov.u32 l, %laneid; setp.eq.u32 p, l, 0; mov.u32 v, 0; "
        "@p atom.global.add.u32 v, [$1+4], 1; setp.eq.and.u32 q, v, $3, p; "
        "@q st.global.u32 [$1], 0; @q st.global.u32 [$1+4], 0; mov.b32 $0, 0; }",
        "=r,l,r,r",
        [counter_ptr, anchor, last],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@jit
def publish(slot, barrier, value):
    """One warp writes a number into shared memory and arrives: the producer tells the consumers their next tile."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .u32 l; mov.u32 l, %laneid; setp.eq.u32 p, l, 0; @p st.shared.b32 [$1], $3; "
        "@p mbarrier.arrive.shared::cta.b64 _, [$2]; mov.b32 $0, 0; }",
        "=r,r,r,r",
        [slot, barrier, value],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@jit
def collect(slot, barrier):
    """Every warp reads the published number; lane 0 of each arrives, so that the slot can be written again."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .u32 l, v; mov.u32 l, %laneid; setp.eq.u32 p, l, 0; ld.volatile.shared.b32 v, [$1]; "
        "shfl.sync.idx.b32 $0, v, 0, 31, 0xffffffff; @p mbarrier.arrive.shared::cta.b64 _, [$2]; }",
        "=r,r,r",
        [slot, barrier],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@jit
def leave_number(slot, value):
    """One warp writes a number into shared memory, for whoever waits for a barrier at which it arrives next.

    Nobody says that it was read: there are twice as many slots as buffers of that barrier, so that a slot is written again only when the
    consumers have given back the buffer of a later use.
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .u32 l; mov.u32 l, %laneid; setp.eq.u32 p, l, 0; @p st.shared.b32 [$1], $2; bar.warp.sync 0xffffffff; "
        "mov.b32 $0, 0; }",
        "=r,r,r",
        [slot, value],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@jit
def left_number(slot):
    """Every warp reads what `leave_number` wrote."""
    return gl.inline_asm_elementwise(
        "{ .reg .u32 v; ld.volatile.shared.b32 v, [$1]; shfl.sync.idx.b32 $0, v, 0, 31, 0xffffffff; }",
        "=r,r",
        [slot],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@constexpr_function
def _rescale_text(n):
    # Operands: n results, n tied inputs, n factors. A thread has two rows, which alternate every two values.
    text = "{ .reg .pred p<2>; "
    for row in (0, 1):
        text += f"setp.neu.f32 p{row}, ${2 * n + 2 * row}, 0f3F800000; vote.sync.any.pred p{row}, p{row}, 0xffffffff; "
    for row in (0, 1):
        text += f"@!p{row} bra.uni SKIP{row}; "
        for i in range(n):
            if (i >> 1) & 1 == row:
                text += f"mul.f32 ${i}, ${i}, ${2 * n + 2 * row}; "
        text += f"SKIP{row}: "
    return text + "}"


@constexpr_function
def _rescale_operands(n):
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + ["f"] * n)


@jit
def rescale(acc, alpha):
    """acc * alpha[:, None] for a wgmma accumulator [64, n]. Each half of a warp's rows whose factors are all exactly 1 is branched past."""
    factor = gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None]
    n: gl.constexpr = acc.shape[0] * acc.shape[1] // 128
    text: gl.constexpr = _rescale_text(n)
    operands: gl.constexpr = _rescale_operands(n)
    return gl.inline_asm_elementwise(text, operands, [acc, factor], dtype=gl.float32, is_pure=False, pack=n)


@constexpr_function
def _first_rows_text(n, warps):
    text = (
        "{ .reg .pred p, q; .reg .u32 t, r; mov.u32 t, %tid.x; "
        f"shr.u32 r, t, 5; and.b32 r, r, {warps - 1}; shl.b32 r, r, 4; shr.u32 t, t, 2; and.b32 t, t, 7; add.u32 r, r, t; "
        f"setp.lt.s32 p, r, ${2 * n}; add.u32 r, r, 8; setp.lt.s32 q, r, ${2 * n}; "
    )
    for i in range(n):
        text += f"selp.f32 ${i}, ${i}, 0f00000000, {'q' if (i >> 1) & 1 else 'p'}; "
    return text + "}"


@constexpr_function
def _first_rows_operands(n):
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + ["r"] * n)


@jit
def first_rows(x, end, warps: gl.constexpr):
    """A wgmma accumulator, 0 from row `end` on; `warps` share its rows. Row numbers that the compiler knew would be kept through the loop
    before, and mixed with those that must be uniform there.
    """
    n: gl.constexpr = x.shape[0] * x.shape[1] // 256
    text: gl.constexpr = _first_rows_text(n, warps)
    operands: gl.constexpr = _first_rows_operands(n)
    return gl.inline_asm_elementwise(text, operands, [x, end], dtype=gl.float32, is_pure=False, pack=n)


@constexpr_function
def _add_text(n):
    text = (
        "{ .reg .pred p; .reg .u32 t, w; .reg .u64 a; mov.u32 t, %tid.x; shl.b32 w, t, "
        f"{_log2(4 * n)}; and.b32 w, w, {7 * 128 * n}; and.b32 t, t, 31; shl.b32 t, t, 4; or.b32 t, t, w; cvt.u64.u32 a, t; "
        f"add.u64 a, a, ${2 * n}; setp.ne.s32 p, ${3 * n}, 0; "
    )
    for i in range(0, n, 4):
        values = f"[a+{128 * i}], {{${n + i}, ${n + i + 1}, ${n + i + 2}, ${n + i + 3}}}; "
        text += f"@p st.global.v4.f32 {values}@!p red.relaxed.gpu.global.add.v4.f32 {values}"
    return text + "".join(f"mov.b32 ${i}, 0; " for i in range(n)) + "}"


@constexpr_function
def _add_operands(n):
    return ",".join(["=r"] * n + ["f"] * n + ["l"] * n + ["r"] * n)


@jit
def add_in_memory(x, ptr, store):
    """Add a wgmma accumulator of 8 warps, one below the other, to float32 numbers in global memory that lie there as the threads hold them:
    [warp, 8 columns, lane, 4 values of a thread]. Each instruction of a warp then adds 512 adjacent bytes, and nobody waits for it. Where
    the int32 `store` is not 0 there is nothing yet to add to.
    """
    n: gl.constexpr = x.shape[0] * x.shape[1] // 256
    text: gl.constexpr = _add_text(n)
    operands: gl.constexpr = _add_operands(n)
    gl.inline_asm_elementwise(text, operands, [x, ptr.to(gl.int64), store], dtype=gl.int32, is_pure=False, pack=n)


@constexpr_function
def _clear_text(units, rows, row_bytes, number):
    shift = row_bytes.bit_length() - 1
    return (
        "{ .reg .pred p; .reg .u32 u, a, r, z; mov.u32 z, 0; mov.u32 u, $2; "
        f"NEXT: shl.b32 a, u, 4; shr.u32 r, a, {shift}; and.b32 r, r, {rows - 1}; add.u32 a, a, $1; "
        "setp.ge.s32 p, r, $3; @p st.shared.v4.b32 [a], {z, z, z, z}; "
        f"add.u32 u, u, 128; setp.lt.u32 p, u, {units}; @p bra NEXT; "
        f"fence.proxy.async.shared::cta; bar.sync {number}, 128; mov.b32 $0, 0; }}"
    )


@jit
def clear_rows(tile, end, thread, size: gl.constexpr, rows: gl.constexpr, row_bytes: gl.constexpr, number: gl.constexpr):
    """Zero the rows from `end` on of a tile of `size` bytes in shared memory, and let wgmma see it.

    The swizzle moves 16-byte units only inside a row of `row_bytes`, so whole rows can be cleared without knowing it. Every warp
    group that reads the tile clears all of it: all write the same zeros, and none has to wait for another.
    """
    text: gl.constexpr = _clear_text(size // 16, rows, row_bytes, number)
    gl.inline_asm_elementwise(text, "=r,r,r,r", [tile, thread, end], dtype=gl.int32, is_pure=False, pack=1)
