"""Tentative rows of recurrent layers: whatever of them is accepted, all bits are those of running just those tokens."""

import ctypes
import mmap
import sys

import numpy as np
import pytest
from recorded_ops import ISAS, MAX_ROWS, DeltaSpec, KvSpec, Recorded, rows_of, weight

from tandem import native
from tandem.errors import PlanError, ShapeError
from tandem.ops.base import Delta
from tandem.ops.delta_cpu import record_delta_rule, record_short_conv
from tandem.ops.state_cpu import MAX_TENTATIVE, CpuState, KvPrefix, size_bytes

# k heads, v heads, head_dim, conv width
SHAPES = {
    "one head": (1, 1, 16, 2),
    "odd": (1, 3, 33, 3),
    "two blocks": (2, 4, 63, 4),
    "five heads": (5, 5, 64, 4),
    "qwen": (2, 4, 128, 4),
    "wide": (1, 2, 160, 4),
}


@pytest.fixture(params=ISAS)
def isa(request):
    return native.load(request.param)


class Layer:
    """A DeltaNet layer: its convolution and its rule, as one recorded program; row t of a sequence has fixed inputs."""

    def __init__(self, shape: tuple[int, int, int, int], seed: int):
        k_heads, v_heads, dim, width = shape
        rng = np.random.default_rng(seed)
        self.channels = (2 * k_heads + v_heads) * dim
        self.rule = Delta(k_heads, v_heads, dim, width, 1e-6)
        self.spec = DeltaSpec(v_heads, dim, dim, self.channels, width)
        self.widths = (self.channels, v_heads, v_heads)
        self.taps = weight(rows_of(rng, self.channels, width))
        self.a = weight(-np.exp(rows_of(rng, 1, v_heads)[0]))
        self.bias = weight(rows_of(rng, 1, v_heads)[0])

    def record(self, program, x, alpha, beta):
        mixed = record_short_conv(program, x, self.taps, 0)
        return mixed, record_delta_rule(program, mixed, alpha, beta, self.a, self.bias, 0, self.rule)

    def recorded(self, library, threads: int) -> Recorded:
        """The program on a pool whose scratch is full of NaN."""
        op = Recorded(library, threads, self.widths, self.record)
        nan = [np.full((MAX_TENTATIVE, width), np.nan, np.float32) for width in self.widths]
        for rows in (40, MAX_TENTATIVE):
            state = self.state(library)
            nan = [np.full((rows, width), np.nan, np.float32) for width in self.widths]
            op(*nan, segments=[state.segment(0, rows, 0, tentative=rows <= MAX_TENTATIVE)])
        return op

    def state(self, library, max_tentative: int = MAX_TENTATIVE) -> CpuState:
        state = CpuState([self.spec], 4000, "f16", MAX_ROWS, max_tentative, library)
        state.memory[state.recurrent_memory.nbytes + 64 :] = 0xFF  # logs full of NaN
        return state

    def inputs(self, rng, rows: int) -> list[np.ndarray]:
        return [rows_of(rng, rows, self.widths[0]), *(rows_of(rng, rows, width, 2) for width in self.widths[1:])]


class Lane:
    """One sequence that is run by tentative passes, and beside it the same accepted rows run one by one."""

    def __init__(self, layer: Layer, library, seed: int):
        self.layer, self.rng = layer, np.random.default_rng(seed)
        self.state, self.plain_state = layer.state(library), layer.state(library, 0)
        self.plain = Recorded(library, 1, layer.widths, layer.record)
        self.position = 0

    def draw(self, plain_rows: tuple[int, ...]) -> tuple[bool, int]:
        """Whether the next part is tentative, and its number of rows."""
        if self.rng.random() < 0.3:
            return False, int(self.rng.choice(plain_rows))
        return True, int(self.rng.integers(1, MAX_TENTATIVE + 1))

    def check(self, tentative: bool, inputs: list[np.ndarray], outputs: list[np.ndarray]) -> None:
        """Accepts some of the rows; their outputs are those of the plain sequence."""
        rows = len(inputs[0])
        kept = int(self.rng.integers(0, rows + 1)) if tentative else rows
        if tentative:
            self.state.accept(kept)
        pieces = [(t, t + 1) for t in range(kept)] if tentative else [(0, rows)]
        for begin, end in pieces:
            segment = self.plain_state.segment(0, end - begin, self.position)
            expected = self.plain(*[x[begin:end] for x in inputs], segments=[segment])
            self.position += end - begin
            for got, wanted in zip(outputs, expected, strict=True):
                assert np.array_equal(got[begin:end], wanted)

    def check_state(self) -> None:
        assert np.array_equal(self.state.snapshot(), self.plain_state.snapshot())
        assert np.array_equal(self.state.recurrent_memory, self.plain_state.recurrent_memory)


def run_lanes(op: Recorded, lanes: list[Lane], plain_rows: tuple[int, ...]) -> None:
    """One step with a part of every lane."""
    drawn = [lane.draw(plain_rows) for lane in lanes]
    inputs = [lane.layer.inputs(lane.rng, rows) for lane, (_, rows) in zip(lanes, drawn, strict=True)]
    segments, at = [], 0
    for lane, (tentative, rows) in zip(lanes, drawn, strict=True):
        segments.append(lane.state.segment(at, rows, lane.position, tentative))
        at += rows
    outputs = op(*map(np.concatenate, zip(*inputs, strict=True)), segments=segments)
    at = 0
    for lane, (tentative, rows), own in zip(lanes, drawn, inputs, strict=True):
        lane.check(tentative, own, [out[at : at + rows] for out in outputs])
        at += rows


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_accepted_tentative_rows_have_the_bits_of_rows_run_one_by_one(isa, name, threads):
    layer = Layer(SHAPES[name], seed=threads)
    op, lane = layer.recorded(isa, threads), Lane(layer, isa, seed=threads)
    for round in range(30):
        run_lanes(op, [lane], plain_rows=(1, 2, 7, 15))
        if round % 7 == 6:  # in between, the pending rows are applied by the next pass
            lane.check_state()
    lane.check_state()


@pytest.mark.parametrize("name", ["odd", "qwen"])
def test_prefill_goes_on_from_accepted_rows(isa, name):
    layer = Layer(SHAPES[name], seed=5)
    op, lane = layer.recorded(isa, 2), Lane(layer, isa, seed=6)
    for _ in range(12):
        run_lanes(op, [lane], plain_rows=(16, 40, 67))
    lane.check_state()


def test_sequences_of_one_step_do_not_disturb_each_other(isa):
    layer = Layer(SHAPES["two blocks"], seed=8)
    op = layer.recorded(isa, 3)
    lanes = [Lane(layer, isa, seed) for seed in range(11)]  # more dynamic loops than stand between two barriers
    for round in range(6):
        run_lanes(op, lanes[: 11 if round % 2 else 3], plain_rows=(1, 3, 20))
    for lane in lanes:
        lane.check_state()


def test_a_snapshot_has_the_accepted_rows_and_going_back_forgets_them(isa):
    layer = Layer(SHAPES["odd"], seed=2)
    op, state, plain = layer.recorded(isa, 2), layer.state(isa), layer.state(isa, 0)
    rng = np.random.default_rng(3)
    first, second, third = (layer.inputs(rng, rows) for rows in (5, 6, 4))
    before = state.snapshot()

    op(*first, segments=[state.segment(0, 5, 0, tentative=True)])
    assert np.array_equal(state.recurrent_memory, before)
    state.accept(3)
    for t in range(3):
        op(*[x[t : t + 1] for x in first], segments=[plain.segment(0, 1, t)])
    after_three = state.snapshot()
    assert np.array_equal(after_three, plain.recurrent_memory) and not np.array_equal(after_three, before)

    op(*second, segments=[state.segment(0, 6, 3, tentative=True)])
    state.accept(6)
    state.restore(after_three)
    assert np.array_equal(state.snapshot(), after_three)
    got = op(*third, segments=[state.segment(0, 4, 3)])
    expected = op(*third, segments=[plain.segment(0, 4, 3)])
    assert all(map(np.array_equal, got, expected))
    assert np.array_equal(state.snapshot(), plain.snapshot())

    op(*second, segments=[state.segment(0, 6, 7, tentative=True)])
    state.reset()  # without a verdict
    assert not state.snapshot().any()
    state.segment(0, 1, 0)


def test_tentative_rows_need_a_verdict():
    layer = Layer(SHAPES["one head"], seed=0)
    state = layer.state(native.native())
    with pytest.raises(AssertionError):
        state.accept(0)
    with pytest.raises(AssertionError):
        state.segment(0, MAX_TENTATIVE + 1, 0, tentative=True)
    state.segment(0, 4, 0, tentative=True)
    for wrong in (lambda: state.segment(0, 1, 4), state.snapshot, lambda: state.accept(5), lambda: state.accept(-1)):
        with pytest.raises(AssertionError):
            wrong()
    state.accept(4)
    assert state.segment(0, 1, 4).commit_rows == 4
    assert state.segment(0, 1, 5).commit_rows == 0


def test_logs_are_counted_and_not_part_of_a_snapshot():
    specs = [KvSpec(2, 64, 32), DeltaSpec(3, 16, 16, 100, 4)]
    without, with_logs = (CpuState(specs, 1000, "f16", 128, most) for most in (0, 8))
    log = 8 * 100 * 4 + 2 * 8 * 3 * 48 * 4
    assert log <= with_logs.size_bytes - without.size_bytes < log + 2 * 64
    assert with_logs.memory.nbytes == with_logs.size_bytes == size_bytes(specs, 1000, "f16", 128, 8)
    assert with_logs.snapshot().nbytes == without.snapshot().nbytes


def test_rejected_rows_have_replaced_the_oldest_positions_of_a_ring():
    state = CpuState([KvSpec(1, 32, 32, window=100)], 4000, "f16", 64)
    capacity = 100 + 64 + 256
    state.segment(0, 8, 992, tentative=True)
    state.accept(0)  # the sequence has 992 positions, the ring has lost those of 1000
    assert state.can_cut(992, 1000 - capacity + 99)
    assert not state.can_cut(992, 1000 - capacity + 98)


MIXED = [KvSpec(2, 64, 32), DeltaSpec(3, 16, 16, 100, 4), KvSpec(1, 32, 64, window=50)]


def write_positions(state: CpuState, begin: int, end: int, seed: int) -> None:
    """Fills the caches of positions [begin, end) with bytes that tell layer, head and position apart."""
    for at in range(begin, end):
        state.segment(0, 1, at)
        for spec, view in state._attention_layers():
            for cache in state._caches(spec, view):
                slot = cache[:, at % view.capacity]
                slot[:] = np.random.default_rng((seed, at, cache.shape[2])).integers(0, 256, slot.shape)


def held(state: CpuState, at: int) -> list[bytes]:
    return [c[:, at % v.capacity].tobytes() for s, v in state._attention_layers() for c in state._caches(s, v)]


@pytest.mark.parametrize("kv", ["f16", "q8_0", "f32"])
@pytest.mark.parametrize("filled, length", [(90, 90), (90, 40), (700, 700), (700, 610), (370, 366)])
def test_a_copied_prefix_holds_what_the_next_token_reads(kv, filled, length):
    source, copy = (CpuState(MIXED, 1000, kv, 64) for _ in range(2))
    write_positions(source, 0, filled, seed=1)
    write_positions(copy, 0, 800, seed=2)  # what was there before
    copy.copy_prefix(source, length)
    for at in range(length):
        full, ring = held(source, at), held(copy, at)
        assert full[:2] == ring[:2]
        if at >= length - 50:
            assert full[2:] == ring[2:]
    assert copy.can_cut(length, length)
    for to in range(0, length, 7):  # and it never claims more than its source
        assert source.can_cut(filled, to) or not copy.can_cut(length, to)
        if copy.can_cut(length, to):
            assert all(held(source, at) == held(copy, at) for at in range(max(0, to - 50), length))


def test_a_prefix_moves_between_rings_of_other_sizes():
    for rows in ((64, 16), (16, 64)):
        source, other = (CpuState(MIXED, ctx, "f16", n) for ctx, n in zip((1000, 900), rows, strict=True))
        write_positions(source, 0, 700, seed=1)
        prefix = source.prefix(690)
        other.load_prefix(KvPrefix(690, prefix.first, tuple(a.copy() for a in prefix.arrays)))
        assert other.can_cut(690, 690)
        for to in range(690):
            if other.can_cut(690, to):
                assert all(held(source, at) == held(other, at) for at in range(max(0, to - 49), 690))


def test_a_prefix_of_another_model_is_refused_and_nothing_is_written():
    source = CpuState(MIXED, 1000, "f16", 64)
    write_positions(source, 0, 100, seed=1)
    prefix = source.prefix(100)
    fewer = KvPrefix(100, prefix.first[:1], prefix.arrays[:2])
    longer = KvPrefix(101, prefix.first, prefix.arrays)
    for state, wrong in (
        (CpuState(MIXED, 1000, "q8_0", 64), prefix),
        (CpuState(MIXED, 90, "f16", 64), prefix),
        (CpuState([KvSpec(1, 64, 32), *MIXED[1:]], 1000, "f16", 64), prefix),
        (CpuState(MIXED, 1000, "f16", 64), fewer),
        (CpuState(MIXED, 1000, "f16", 64), longer),
    ):
        with pytest.raises(ShapeError, match="positions"):
            state.load_prefix(wrong)
        assert not state.memory.any()


def resident(state: CpuState) -> int:
    """Bytes of the state's memory that are in RAM, asked of the system."""
    begin = state.memory.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    pages = -(-(state.memory.ctypes.data + state.memory.nbytes - begin) // mmap.PAGESIZE)
    vector = (ctypes.c_ubyte * pages)()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(begin), ctypes.c_size_t(pages * mmap.PAGESIZE), vector) == 0
    return sum(page & 1 for page in vector) * mmap.PAGESIZE


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux what is resident")
def test_memory_is_resident_where_positions_are_and_given_back():
    specs = [KvSpec(2, 128, 128), DeltaSpec(8, 64, 64, 1000, 4), KvSpec(4, 64, 64), KvSpec(2, 64, 64, window=50)]
    state = CpuState(specs, 100_000, "f16", 64)
    slack = (2 * 2 + 4 * 2 + 2 * 2 + 3) * mmap.PAGESIZE  # a head's part begins anywhere in a page
    assert resident(state) <= mmap.PAGESIZE and state.held_bytes == state.resident_bytes(0) == 0
    for length in (300, 2000):
        state.restore(np.ones_like(state.recurrent_memory))
        write_positions(state, state._written, length, seed=1)
        assert state.resident_bytes(length) == state.held_bytes
        assert abs(resident(state) - state.resident_bytes(length)) <= slack
    state.reset()
    assert state.held_bytes == state.resident_bytes(2000) and resident(state) > 2_000_000
    state.release()
    assert state.held_bytes == 0 and resident(state) <= mmap.PAGESIZE
    assert not state.snapshot().any() and state.can_cut(0, 0)


def test_a_context_beyond_the_address_space_is_an_error():
    with pytest.raises(PlanError, match="smaller ctx"):
        CpuState(MIXED, 1 << 42, "f16", 64)
