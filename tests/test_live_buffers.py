"""What is live at the peak, read from the dumps of three compilers and from one written by hand."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from test_targets import WIDE, WIDE_BYTES, dense_step

from benchmarks.live_buffers import live_buffer_rows, read_live_buffers
from remat_opt.targets import Worker, measure_flat, resolve_target


@pytest.mark.parametrize("target", ["cpu", "h200", "v5e"])
def test_the_live_buffers_at_the_peak(target: str, tmp_path: Path) -> None:
    with Worker(resolve_target(target), dump_to=tmp_path) as worker:
        figures = measure_flat(dense_step, WIDE, donated=(1, 2, 3), target=target, worker=worker)
    peak = read_live_buffers(tmp_path)
    assert peak.allocated_bytes == pytest.approx(figures.temp_bytes, rel=0.01)
    assert 0 < peak.live_bytes <= peak.allocated_bytes
    assert sum(buffer.bytes for buffer in peak.buffers) == peak.live_bytes
    assert {buffer.role for buffer in peak.buffers} == {"temporary"}
    sizes = [buffer.bytes for buffer in peak.buffers]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes.count(WIDE_BYTES) >= 2
    assert peak.instruction
    assert any("dot_general" in buffer.op_name for buffer in peak.buffers)
    assert not any(buffer.op_name.startswith("jit(program)") for buffer in peak.buffers)
    header, *rows = live_buffer_rows(peak, limit=2)
    assert header == ("MB", "instruction", "shape", "operation")
    assert len(rows) == min(2, len(sizes))
    assert rows[0][0] == f"{sizes[0] / 1e6:.2f}"
    everything = read_live_buffers(tmp_path, temporaries_only=False)
    assert "argument" in {buffer.role for buffer in everything.buffers}


def test_what_a_loop_carries_is_live(tmp_path: Path) -> None:
    def step(x: jax.Array) -> list[jax.Array]:
        _, stack = jax.lax.scan(lambda h, _: (jnp.sin(h), h), x, length=8)
        return [jnp.sum(stack @ stack[::-1])]

    square = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    with Worker(resolve_target("cpu"), dump_to=tmp_path) as worker:
        figures = measure_flat(step, (square,), target="cpu", worker=worker)
    peak = read_live_buffers(tmp_path)
    assert any(buffer.bytes == 8 * 4 * square.size for buffer in peak.buffers)
    assert peak.live_bytes == pytest.approx(figures.temp_bytes, rel=0.01)


def test_a_folder_without_a_dump_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="write Worker"):
        read_live_buffers(tmp_path)


ASSIGNMENT = """BufferAssignment:
allocation 0: size 4096, parameter 0, shape |f32[1024]| at ShapeIndex {}:
 value: <1 p @0> (size=4096,offset=0): f32[1024]{0}
allocation 1: size 12288, preallocated-temp:
 value: <2 a @0> (size=4096,offset=0): f32[1024]{0}
 value: <3 b{0} @0> (size=4096,offset=4096): f32[1024]{0}
 value: <4 c @0> (size=4096,offset=4096): f32[1024]{0}
 value: <5 d @0> (size=2048,offset=8192): f32[512]{0}
allocation 2: size 999999, color 1, preallocated-temp:
 value: <6 fast @1> (size=999999,offset=0): u8[999999]{0}
allocation 3: size 4, thread-local:
 value: <7 scalar @0> (size=4,offset=0): f32[]

Total bytes used: 17412
"""
LIVE_RANGE = """HloLiveRange (max 5):
  InstructionSequence:
    0:p
    1:a
    2:b
    3:c
    4:d
  BufferLiveRange:
    p{}:0-5
    a{}:1-3
    b{0}:2-3
    c{}:3-4
    d{}:4-5
    fast{}:0-5
  Live ranges at 3 (peak):
    a{}: 4096 bytes (cumulative: 4096 bytes)
"""
VALUES = """Used values:
<2 a @0>
 from instruction: %a = f32[1024]{0} add(%p, %p), metadata={op_name="jit(program)/call_exported/jit(program)/first/add"}
<4 c @0>
 from instruction: %c = f32[1024]{0} copy(%a), sharding={replicated}
"""


def test_a_dump_that_can_be_checked_by_hand(tmp_path: Path) -> None:
    for kind, text in (
        ("buffer-assignment", ASSIGNMENT),
        ("live-range", LIVE_RANGE),
        ("buffer-assignment-values", VALUES),
    ):
        (tmp_path / f"module_0000.jit_program.x_after_optimizations-{kind}.txt").write_text(text)
    peak = read_live_buffers(tmp_path)
    # At 2 and 3 a and b live, at 3 c in the memory of b.
    assert (peak.live_bytes, peak.allocated_bytes, peak.instruction) == (8192, 12288, "b")
    assert [(buffer.bytes, buffer.instruction, buffer.op_name) for buffer in peak.buffers] == [
        (4096, "a{}", "first/add"),
        (4096, "b{0}", ""),
    ]
    (tmp_path / "module_0000.jit_program.x_after_optimizations-live-range.txt").unlink()
    without_ranges = read_live_buffers(tmp_path, temporaries_only=False)
    assert without_ranges.live_bytes == 4096 + 4096 + 2048
    assert sorted(buffer.role for buffer in without_ranges.buffers) == ["argument", *["temporary"] * 3]
    assert without_ranges.buffers[0].op_name == "first/add"
