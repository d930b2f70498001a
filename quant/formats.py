"""Import other tools' quantized tensors as `PackedWeight`, with the exact values and scales.

These functions take tensors only; `loading.imported` reads the files.

Shapes: N output rows, K input columns, g group size, G = K / g groups in a row. Words are int32,
their fields counted from the lowest bits; as bytes (little-endian) they hold column 2i in the low
nibble of byte i, which is the order of `PackedWeight`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fasteagle.errors import FasteagleError
from fasteagle.quant.packed import PackedWeight, int4, pack_nibbles, unpack_nibbles

Shape = tuple[int, ...]

WAY_OUT = "use the unquantized checkpoint, or a GPTQ, AWQ, compressed-tensors or GGUF one"
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # column, within eight, that each nibble of a word holds


class Geometry(NamedTuple):
    """Bits, shape and group size of a weight, from the shapes of its stored parts."""

    bits: int
    n_rows: int
    n_columns: int
    group_size: int


class Imported(NamedTuple):
    """Weight with its column order: `y = weight.dequantize() @ x[columns]`; None: unchanged."""

    weight: PackedWeight
    columns: Tensor | None

    def dequantize(self) -> Tensor:
        """Return the weight in fp32 [N, K], with columns in the order of the model."""
        values = self.weight.dequantize()
        if self.columns is None:
            return values
        original = torch.empty_like(values)
        original[:, self.columns] = values
        return original


def refused(what: str) -> FasteagleError:
    """Return the error for a format that has no exact import."""
    return FasteagleError(f"{what} are not supported: {WAY_OUT}")


def gptq_geometry(qweight: Shape, qzeros: Shape, scales: Shape) -> Geometry:
    """Return the geometry of a GPTQ weight; raise `FasteagleError` for inconsistent shapes."""
    misfit = _misfit(qweight=qweight, qzeros=qzeros, scales=scales)
    G, N = scales
    bits, rest = divmod(32 * qzeros[1], N)
    if rest or qweight[1] != N or qzeros[0] != G or bits not in range(2, 9):
        raise misfit
    if bits not in (4, 8):
        raise refused(f"{bits}-bit GPTQ weights")
    return _grouped(bits, N, qweight[0] * 32 // bits, G, misfit)


def gptq_zero_offset(qzeros: Tensor, *, bits: int, v2: bool, sym: bool) -> int:
    """Return the offset of stored zeros: 1 for `gptq`, which stores zero - 1, 0 for `gptq_v2`.

    Symmetric weights have the zero 2^(bits - 1), so the stored values show the format: some files
    labelled `gptq` hold v2 zeros (vllm-project/vllm#38966). For other weights the label decides.
    """
    midpoint = 1 << (bits - 1)
    stored = _fields(qzeros, bits)
    if sym and bool((stored == midpoint).all()):
        return 0
    if sym and bool((stored == midpoint - 1).all()):
        return 1
    return 0 if v2 else 1


def from_gptq(
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    g_idx: Tensor | None = None,
    *,
    zero_offset: int,
) -> Imported:
    """Import GPTQ as AutoGPTQ and GPTQModel write it; `w[n, k] = (q - zero) * scale`.

    qweight [K * bits / 32, N] int32, packed along K; qzeros [G, N * bits / 32] int32, packed along
    N; scales [G, N]; g_idx [K], the group of each column. A stored 15 with `zero_offset` 1 is the
    zero 16: the reference kernels add after unpacking. Raises `FasteagleError` for shapes that do
    not fit, and for 8 bits with other zeros than 128, which `PackedWeight` cannot hold.
    """
    _check_dtypes(scales, qweight=qweight, qzeros=qzeros)
    geometry = gptq_geometry(qweight.shape, qzeros.shape, scales.shape)
    zeros = _fields(qzeros, geometry.bits) + zero_offset
    q = _as_bytes(qweight.T)
    weight = _with_zeros(geometry, q, scales.T.contiguous(), zeros.T.contiguous(), "GPTQ")
    return _ordered(weight, g_idx)


def awq_geometry(qweight: Shape, qzeros: Shape, scales: Shape) -> Geometry:
    """Return the geometry of an AWQ weight; raise `FasteagleError` for inconsistent shapes."""
    misfit = _misfit(qweight=qweight, qzeros=qzeros, scales=scales)
    G, N = scales
    if qweight[1] * 8 != N or qzeros != (G, qweight[1]):
        raise misfit
    return _grouped(4, N, qweight[0], G, misfit)


def from_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> PackedWeight:
    """Import AWQ in AutoAWQ's `gemm` layout; `w[n, k] = (q - zero) * scale`.

    qweight [K, N / 8] int32 and qzeros [G, N / 8] int32, both packed along N in `AWQ_ORDER`;
    scales [G, N]. Raises `FasteagleError` for shapes that do not fit.
    """
    _check_dtypes(scales, qweight=qweight, qzeros=qzeros)
    awq_geometry(qweight.shape, qzeros.shape, scales.shape)
    values, zeros = _awq_fields(qweight), _awq_fields(qzeros)
    return int4(values.T.contiguous(), scales.T.contiguous(), zeros=zeros.T.contiguous())


def _awq_fields(words: Tensor) -> Tensor:
    """Unpack [R, N / 8] int32 into [R, N] uint8, in the order of columns."""
    nibble_of_column = torch.tensor(AWQ_ORDER).argsort()
    return _fields(words, 4).unflatten(1, (-1, 8))[..., nibble_of_column].flatten(1)


def compressed_tensors_geometry(
    weight_packed: Shape, weight_scale: Shape, shape: Shape
) -> Geometry:
    """Return the geometry of a compressed-tensors weight of `shape` (N, K).

    Raises `FasteagleError` for inconsistent shapes.
    """
    misfit = _misfit(weight_packed=weight_packed, weight_scale=weight_scale, weight_shape=shape)
    N, K = shape
    fitting = [bits for bits in (4, 8) if weight_packed == (N, -(-K * bits // 32))]
    if not fitting or weight_scale[0] != N or K % 2:
        raise misfit
    return _grouped(fitting[0], N, K, weight_scale[1], misfit)


def from_compressed_tensors(
    weight_packed: Tensor,
    weight_scale: Tensor,
    shape: Shape,
    weight_zero_point: Tensor | None = None,
    weight_g_idx: Tensor | None = None,
) -> Imported:
    """Import compressed-tensors `pack-quantized`; `w[n, k] = (q - zero) * scale`, 4 or 8 bits.

    weight_packed [N, K * bits / 32] int32, packed along K after adding 2^(bits - 1); weight_scale
    [N, G]; weight_zero_point packed likewise along N, [N * bits / 32, G] int32, or plain int8
    [N, G]; none where symmetric; weight_g_idx [K], all -1 where unused; `shape` is (N, K). Raises
    `FasteagleError` for shapes that do not fit and for 8 bits with zero points.
    """
    _check_dtypes(weight_scale, weight_packed=weight_packed)
    geometry = compressed_tensors_geometry(weight_packed.shape, weight_scale.shape, shape)
    zeros = _zero_points(weight_zero_point, geometry.bits, *weight_scale.shape)
    n_bytes = geometry.n_columns * geometry.bits // 8  # of a row, without padding
    q = _as_bytes(weight_packed)[:, :n_bytes].contiguous()
    weight = _with_zeros(geometry, q, weight_scale.contiguous(), zeros, "compressed-tensors")
    return _ordered(weight, weight_g_idx)


def _zero_points(point: Tensor | None, bits: int, n_rows: int, n_groups: int) -> Tensor:
    """Return unsigned zeros [N, G] from compressed-tensors' signed zero points, packed or plain."""
    midpoint = 1 << (bits - 1)
    if point is None:
        return torch.full((n_rows, n_groups), midpoint, dtype=torch.int16)
    if point.dtype == torch.int8 and point.shape == (n_rows, n_groups):
        point = point.to(torch.int16)  # in which the limits of 8 bits are exact, too
        if not bool(((point >= -midpoint) & (point <= midpoint)).all()):
            raise FasteagleError(f"weight_zero_point is beyond {bits} bits: fetch the file again")
        return point + midpoint
    if point.dtype == torch.int32 and point.shape == (-(-n_rows * bits // 32), n_groups):
        return _fields(point.T, bits)[:, :n_rows].T.contiguous()
    raise FasteagleError(
        f"weight_zero_point is {point.dtype} {tuple(point.shape)}, which does not fit {n_rows} "
        f"rows of {n_groups} groups; fetch the file again"
    )


def act_order(g_idx: Tensor, n_columns: int, group_size: int) -> Tensor | None:
    """Return the column order [K] that makes the groups of `g_idx` [K] contiguous.

    Returns None if they already are, or if all are -1, which means unused. Columns keep their order
    within a group. Raises `FasteagleError` unless every group has exactly `group_size` columns.
    """
    plain = torch.arange(n_columns) // group_size
    g_idx = g_idx.long()
    if g_idx.shape == plain.shape and (torch.equal(g_idx, plain) or bool((g_idx == -1).all())):
        return None
    columns = torch.argsort(g_idx, stable=True)
    if g_idx.shape != plain.shape or not torch.equal(g_idx[columns], plain):
        raise FasteagleError(
            f"g_idx {tuple(g_idx.shape)} does not put {n_columns} columns into groups of "
            f"{group_size}; fetch the file again"
        )
    return columns


def _ordered(weight: PackedWeight, g_idx: Tensor | None) -> Imported:
    """Return `weight` with its columns moved from the model's order into that of its groups."""
    if g_idx is None:
        return Imported(weight, None)
    columns = act_order(g_idx, weight.shape[1], weight.group_size)
    if columns is None:
        return Imported(weight, None)
    values = weight.values()[:, columns]
    q = pack_nibbles(values) if weight.bits == 4 else values
    parts = weight.tensors() | {"q": q}
    return Imported(PackedWeight(weight.bits, weight.group_size, **parts), columns)


def _with_zeros(
    geometry: Geometry, q: Tensor, scales: Tensor, zeros: Tensor, method: str
) -> PackedWeight:
    """Make a weight of unsigned q, packed as bytes [N, K * bits / 8], and zeros [N, G]."""
    bits, group_size = geometry.bits, geometry.group_size
    if bits == 4:
        return PackedWeight(4, group_size, q, scales, zeros=zeros.to(torch.uint8))
    if bool((zeros != 128).any()):
        raise refused(f"asymmetric 8-bit {method} weights")
    return PackedWeight(8, group_size, (q ^ 128).view(torch.int8), scales)  # q - 128, as a bit flip


def _fields(words: Tensor, bits: int) -> Tensor:
    """Unpack int32 [R, W] into uint8 [R, W * 32 / bits], lowest bits first."""
    return unpack_nibbles(_as_bytes(words)) if bits == 4 else _as_bytes(words)


def _as_bytes(words: Tensor) -> Tensor:
    """View int32 [R, W] as uint8 [R, 4 W]."""
    # Flattened first: a transposed [R, 1] counts as contiguous but has the wrong stride.
    return words.contiguous().flatten().view(torch.uint8).view(len(words), -1)


def _grouped(bits: int, n_rows: int, n_columns: int, n_groups: int, misfit: Exception) -> Geometry:
    if n_columns % n_groups:
        raise misfit
    return Geometry(bits, n_rows, n_columns, n_columns // n_groups)


def _misfit(**shapes: Shape) -> FasteagleError:
    """Return the error for shapes that do not fit; raise it where one is no matrix, or empty."""
    listed = ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items())
    misfit = FasteagleError(f"shapes do not fit each other: {listed}; fetch the file again")
    if any(len(shape) != 2 or 0 in shape for shape in shapes.values()):
        raise misfit
    return misfit


def _check_dtypes(scales: Tensor, **words: Tensor) -> None:
    for name, tensor in words.items():
        if tensor.dtype != torch.int32:
            raise refused(f"{name} words of {tensor.dtype}")
    if scales.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise refused(f"scales of {scales.dtype}")
