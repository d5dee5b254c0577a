"""The generator behind dropout: known answers, and a mask that depends on the position alone."""

from __future__ import annotations

import pytest
import torch

from tilewise import reference
from tilewise.kernels.philox import in_threads, keep_mask, philox, write_keep_mask

WORD = 0xFFFFFFFF


def tensors(*words: int) -> list[torch.Tensor]:
    return [torch.tensor([word]) for word in words]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((WORD,) * 4, -1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0A4093822,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_known_answers_of_philox4x32_10(counter: tuple[int, ...], key: int, expected: tuple[int, ...]) -> None:
    """The vectors published with the generator's reference implementation."""
    words = philox(torch.tensor(key), *tensors(*counter))
    assert tuple(int(word) for word in words) == expected


def test_broadcast_counters_equal_full_ones() -> None:
    c0, c1, c2, c3 = (torch.randint(0, 1 << 32, shape) for shape in ((5,), (4, 1), (3, 1, 1), (2, 1, 1, 1)))
    seed = torch.tensor(-3)
    broadcast = philox(seed, c0, c1, c2, c3)
    full = philox(seed, *(c.contiguous() for c in torch.broadcast_tensors(c0, c1, c2, c3)))
    for a, b in zip(broadcast, full, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("seed", [0, 1, -1, 1 << 62, -(1 << 63)])
@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 0.999])
def test_mask_equals_the_reference(seed: int, dropout_p: float) -> None:
    index = [torch.arange(n).view(shape) for n, shape in zip((2, 3, 5, 23), ((-1, 1, 1, 1), (-1, 1, 1), (-1, 1), (-1,)), strict=True)]
    expected = reference.philox_keep(seed, dropout_p, *index)
    assert torch.equal(keep_mask(torch.tensor(seed), dropout_p, *index[:3], 0, 23), expected)


@pytest.mark.parametrize(("start", "stop"), [(0, 1), (1, 2), (3, 9), (4, 8), (5, 23), (22, 23)])
def test_any_piece_of_the_mask_is_that_piece_of_the_whole(start: int, stop: int) -> None:
    seed, b, h, i = torch.tensor(11), torch.tensor(0), torch.tensor(2), torch.arange(7)[:, None]
    whole = keep_mask(seed, 0.4, b, h, i, 0, 23)
    assert torch.equal(keep_mask(seed, 0.4, b, h, i, start, stop), whole[:, start:stop])
    assert torch.equal(keep_mask(seed, 0.4, b, h, i[3:5], start, stop), whole[3:5, start:stop])


def test_positions_above_32_bits_of_pairs() -> None:
    """The counter has a word for each index, so that no product of lengths wraps: late rows and late keys differ from early ones."""
    seed, zero = torch.tensor(5), torch.tensor(0)
    early = keep_mask(seed, 0.5, zero, zero, torch.tensor([[0]]), 0, 256)
    late = keep_mask(seed, 0.5, zero, zero, torch.tensor([[1 << 31]]), 0, 256)
    far = keep_mask(seed, 0.5, zero, zero, torch.tensor([[0]]), 1 << 33, (1 << 33) + 256)
    assert not torch.equal(early, late)
    assert not torch.equal(early, far)


def test_the_share_that_is_kept() -> None:
    keep = keep_mask(torch.tensor(9), 0.3, torch.tensor(0), torch.arange(4).view(-1, 1, 1), torch.arange(256).view(-1, 1), 0, 256)
    deviation = (0.3 * 0.7 / keep.numel()) ** 0.5
    assert abs(keep.double().mean().item() - 0.7) < 4 * deviation


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_draw_the_same_mask(threads: int) -> None:
    """Several heads and many rows, so that every thread has its share; an error in one of them reaches the caller."""
    index = [torch.arange(n).view(shape) for n, shape in ((1, (1, 1, 1, 1)), (5, (1, -1, 1, 1)), (70, (1, 1, -1, 1)))]
    whole = keep_mask(torch.tensor(7), 0.3, *index, 2, 90)
    out = torch.full((1, 5, 70, 88), 9, dtype=torch.int32)

    def draw(rows: slice) -> None:
        write_keep_mask(out[:, :, rows], torch.tensor(7), 0.3, *index[:2], index[2][:, :, rows], 2, 90)

    def fail(rows: slice) -> None:
        raise ArithmeticError

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        parts = [slice(start, min(start + 16, 70)) for start in range(0, 70, 16)]
        in_threads(draw, parts)
        with pytest.raises(ArithmeticError):
            in_threads(fail, parts)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(out, whole.int())
