//! Tests products of warpgroups (warpgroup.cuh) with operands laid out as PTX ISA describes. On the simulated device,
//! the tests check its model of these products. On a GPU that has the products, they check the layouts assumed here.

use candle_core::DType;
use gapless_graph::Numbers;

use super::memory::Region;
use super::{gpu, host};
use crate::cuda::{Family, Generated, Kernel, Launch};

/// A kernel that adds one product to ones. Its operands are in an image of shared memory; the left operand may be in
/// registers instead.
const SOURCE: &str = r#"#include "warpgroup.cuh"

struct Arguments {
    const u8* image;
    u64 bytes;
    u64 a;
    u64 b;
    const u32* left;
    f32* out;
    u32 are_columns;
    u32 are_rows;
    u32 adds;
};

template <bool ARE_COLUMNS, bool ARE_ROWS, u32 N>
__device__ void start(const Arguments& to, f32 (&d)[N / 8][4], const u32 (&left)[4], u64 at) {
    fence_registers();
    if (to.left) {
        start_product<ARE_COLUMNS>(d, left, to.b + at, to.adds != 0);
    } else {
        start_product<ARE_COLUMNS, ARE_ROWS>(d, to.a + at, to.b + at, to.adds != 0);
    }
    close_products();
}

template <u32 N>
__device__ void product(const Arguments& to) {
    u8* const memory = swizzled_memory();
    for (u64 i = threadIdx.x; i < to.bytes; i += blockDim.x) memory[i] = to.image[i];
    f32 d[N / 8][4];
    u32 left[4] = {};
#pragma unroll
    for (u32 i = 0; i < N / 2; ++i) d[i / 4][i % 4] = 1.0f;
    for (u32 i = 0; i < 4 && to.left; ++i) left[i] = to.left[threadIdx.x * 4 + i];
    fence_shared_memory();
    __syncthreads();
    const u64 at = shared_address(memory) / 16;
    if (to.are_columns) {
        to.are_rows ? start<true, true, N>(to, d, left, at) : start<true, false, N>(to, d, left, at);
    } else {
        to.are_rows ? start<false, true, N>(to, d, left, at) : start<false, false, N>(to, d, left, at);
    }
    wait_for_products<0>(d);
#pragma unroll
    for (u32 i = 0; i < N / 2; ++i) to.out[threadIdx.x * (N / 2) + i] = d[i / 4][i % 4];
}

KERNEL(product_64, Arguments) { product<64>(arguments); }
KERNEL(product_128, Arguments) { product<128>(arguments); }
KERNEL(product_256, Arguments) { product<256>(arguments); }
"#;

#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct Arguments {
    image: u64,
    bytes: u64,
    a: u64,
    b: u64,
    left: u64,
    out: u64,
    are_columns: u32,
    are_rows: u32,
    adds: u32,
}

/// A swizzling mode: its number in a descriptor, and the number of 16-byte cells per row of its atom. An atom has
/// eight rows.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Mode {
    number: u64,
    cells: usize,
}

const MODES: [Mode; 4] = [
    Mode { number: 0, cells: 1 },
    Mode { number: 1, cells: 8 },
    Mode { number: 2, cells: 4 },
    Mode { number: 3, cells: 2 },
];

impl Mode {
    /// Returns the place to which a cell of an atom's row is moved, as in the figures of "Shared memory matrix
    /// layout".
    fn cell(self, row: usize, cell: usize) -> usize {
        match self.cells {
            8 => cell ^ row,
            4 => cell ^ (row / 2),
            2 => cell ^ (row / 4),
            _ => cell,
        }
    }

    fn atom_bytes(self) -> usize {
        8 * 16 * self.cells
    }
}

/// A matrix with dimensions (mn, k) in an image of shared memory. Its atoms follow each other along the dimension in
/// which elements are contiguous, and then along the other dimension.
struct Factor {
    mode: Mode,
    is_mn_major: bool,
    mn: usize,
    k: usize,
    image: Vec<u8>,
}

impl Factor {
    /// Returns the distances, in bytes, from an atom to the next one: in the dimension in which elements are
    /// contiguous, and in the other dimension. The latter includes a gap.
    fn distances(&self) -> (usize, usize) {
        let along = if self.is_mn_major { self.mn } else { self.k };
        let atom = self.mode.atom_bytes();
        (atom, along.div_ceil(8 * self.mode.cells) * atom + 1024)
    }

    /// Creates a matrix whose element (mn, k) is `numbers(mn, k)`.
    fn new(mode: Mode, is_mn_major: bool, (mn, k): (usize, usize), numbers: &dyn Fn(usize, usize) -> f32) -> Self {
        let mut factor = Self { mode, is_mn_major, mn, k, image: Vec::new() };
        let (next, across) = factor.distances();
        let rows = if is_mn_major { k } else { mn };
        factor.image = vec![0xff; rows.div_ceil(8) * across];
        for mn in 0..factor.mn {
            for k in 0..factor.k {
                let (along, row) = if is_mn_major { (mn, k) } else { (k, mn) };
                let (atom, in_atom) = (along / (8 * mode.cells), along % (8 * mode.cells));
                let cell = mode.cell(row % 8, in_atom / 8);
                let byte = row / 8 * across + atom * next + row % 8 * 16 * mode.cells + cell * 16 + in_atom % 8 * 2;
                factor.image[byte..byte + 2].copy_from_slice(&bf16(numbers(mn, k)));
            }
        }
        factor
    }

    /// Returns the descriptor of the matrix that starts at element (`first_mn`, `first_k`). The image starts `before`
    /// bytes after the start of shared memory. The distances follow "Strides" and "Canonical layouts".
    fn descriptor(&self, before: usize, first_mn: usize, first_k: usize) -> u64 {
        let (next, across) = self.distances();
        let (along, row) = if self.is_mn_major { (first_mn, first_k) } else { (first_k, first_mn) };
        let in_atom = 8 * self.mode.cells;
        let start = before + row / 8 * across + along / in_atom * next + along % in_atom * 2;
        // The leading distance is that between atoms along mn or, without a swizzle, along k. The stride is the other
        // distance.
        let (leading, stride) = match (self.mode.number, self.is_mn_major) {
            (0, true) => (across, next),
            _ => (next, across),
        };
        (start / 16) as u64 | ((leading / 16) as u64) << 16 | ((stride / 16) as u64) << 32 | self.mode.number << 62
    }
}

/// Returns a small integer, which bf16 represents exactly. Sums of products of such integers are exact as well.
fn small(numbers: &Numbers, index: usize) -> f32 {
    (numbers.normal(index) * 4.0).round() as f32
}

fn bf16(x: f32) -> [u8; 2] {
    ((x.to_bits() >> 16) as u16).to_ne_bytes()
}

fn family(source: &str) -> Family {
    Family::Generated(Generated::of("warpgroup_product.cu".into(), source.into()))
}

/// Returns the 64 × `columns` sums that a kernel computes, or the error that the simulated device reports.
fn run(
    source: &str,
    columns: usize,
    a: u64,
    b: u64,
    image: &[u8],
    left: Option<&[u8]>,
    [are_columns, are_rows, adds]: [bool; 3],
) -> Result<Vec<f32>, String> {
    let mut image = image.to_vec();
    image.resize(image.len().next_multiple_of(8), 0);
    let (of_image, out) = (Region::from_bytes(image.clone(), DType::U8), Region::poisoned(64 * columns, DType::F32));
    let of_left = left.map(|left| Region::from_bytes(left.to_vec(), DType::U32));
    let arguments = Arguments {
        image: of_image.address(),
        bytes: image.len() as u64,
        a,
        b,
        left: of_left.as_ref().map_or(0, Region::address),
        out: out.address(),
        are_columns: u32::from(are_columns),
        are_rows: u32::from(are_rows),
        adds: u32::from(adds),
    };
    let kernel = Kernel {
        family: family(source),
        name: format!("product_{columns}"),
        grid: [1; 3],
        block: 128,
        shared_bytes: 1024 + image.len() as u32,
        tickets: 0,
        arguments: Box::new(arguments),
    };
    // SAFETY: the regions are as large as the arguments say. No other reference to the regions is used.
    unsafe { host::run(&Launch::Kernel(kernel), false) }?;
    assert!(out.is_intact());
    let by_thread = out.numbers();
    let mut sums = vec![0.0; 64 * columns];
    // Sum i of a thread, according to "Register fragments" of D.
    for (at, sum) in by_thread.into_iter().enumerate() {
        let (thread, i) = (at / (columns / 2), at % (columns / 2));
        let row = thread / 32 * 16 + thread % 32 / 4 + i % 4 / 2 * 8;
        let column = i / 4 * 8 + thread % 4 * 2 + i % 2;
        sums[row * columns + column] = sum as f32;
    }
    Ok(sums)
}

/// Returns the registers of a left operand, thread by thread, according to "Register fragments" of A.
fn registers(a: &dyn Fn(usize, usize) -> f32) -> Vec<u8> {
    let mut bytes = Vec::new();
    for thread in 0..128 {
        for i in 0..4 {
            let row = thread / 32 * 16 + thread % 32 / 4 + i % 2 * 8;
            let k = thread % 4 * 2 + i / 2 * 8;
            bytes.extend([bf16(a(row, k)), bf16(a(row, k + 1))].concat());
        }
    }
    bytes
}

/// Tests every layout of each operand. The operands start at the beginning of an image, or inside of it.
#[test]
fn are_of_what_descriptors_say() {
    if !host::is_there() || !host::has_warpgroups() {
        return;
    }
    let (of_a, of_b) = (Numbers::from_seed(1), Numbers::from_seed(2));
    let a = |row: usize, k: usize| small(&of_a, row * 1000 + k);
    let b = |column: usize, k: usize| small(&of_b, column * 1000 + k);
    for columns in [64, 128, 256] {
        for (index, mode) in MODES.into_iter().enumerate() {
            for (are_columns, are_rows) in [(false, false), (true, false), (false, true), (true, true)] {
                // The images have additional elements along k before the operands. If elements are contiguous along k, all
                // of them are in one row of the swizzling pattern, and the image of the left operand has additional rows
                // before the operand's rows.
                let first_k =
                    |mode: Mode, is_mn_major| if is_mn_major { 16 } else { (8 * mode.cells).saturating_sub(16) };
                let of_a = MODES[(index + 1) % 4];
                let (a_first_k, b_first_k) = (first_k(of_a, are_rows), first_k(mode, are_columns));
                let first_row = if are_rows { 0 } else { 8 };
                let left = Factor::new(of_a, are_rows, (first_row + 64, a_first_k + 16), &|row, k| {
                    if row < first_row || k < a_first_k { f32::NAN } else { a(row - first_row, k - a_first_k) }
                });
                let right = Factor::new(mode, are_columns, (columns, b_first_k + 16), &|column, k| {
                    if k < b_first_k { f32::NAN } else { b(column, k - b_first_k) }
                });
                let before = left.image.len().next_multiple_of(1024);
                let mut image = left.image.clone();
                image.resize(before, 0xff);
                image.extend(&right.image);
                let [of_a, of_b] = [left.descriptor(0, first_row, a_first_k), right.descriptor(before, 0, b_first_k)];
                for (in_registers, adds) in [(false, true), (true, true), (true, false)] {
                    let left = in_registers.then(|| registers(&a));
                    let ways = [are_columns, are_rows, adds];
                    let got = run(SOURCE, columns, of_a, of_b, &image, left.as_deref(), ways).unwrap();
                    let expected = |at: usize| {
                        let (row, column) = (at / columns, at % columns);
                        let onto = if adds { 1.0 } else { 0.0 };
                        (0..16).map(|k| a(row, k) * b(column, k)).sum::<f32>() + onto
                    };
                    let wrong = (0..64 * columns).find(|&at| got[at] != expected(at));
                    assert_eq!(
                        wrong.map(|at| (at / columns, at % columns, got[at], expected(at))),
                        None,
                        "{columns} columns, {mode:?}, {are_columns}, {are_rows}, {in_registers}, {adds}"
                    );
                }
            }
        }
    }
}

/// The simulated device reports incorrect uses of products.
#[test]
fn misuse_is_told() {
    if gpu::is_asked_for() || !host::is_there() {
        return;
    }
    let factor = Factor::new(MODES[1], false, (64, 16), &|_, _| 1.0);
    let descriptor = factor.descriptor(0, 0, 0);
    let left = registers(&|_, _| 1.0);
    let sums = |from: &str, to: &str| {
        assert!(SOURCE.contains(from), "{from}");
        run(&SOURCE.replacen(from, to, 1), 64, descriptor, descriptor, &factor.image, Some(&left), [false, false, true])
    };
    assert_eq!(sums("close_products();", "close_products();").unwrap(), vec![17.0; 64 * 64]);
    // Sums are not available before the kernel has waited for the product.
    let early = sums("wait_for_products<0>(d);\n", "").unwrap_err();
    assert!(early.contains("a product that nobody waits for"), "{early}");
    let late = "    wait_for_products<0>(d);\n}\n\nKERNEL(product_64,";
    let early = SOURCE.replacen("    wait_for_products<0>(d);\n", "", 1).replacen("}\n\nKERNEL(product_64,", late, 1);
    let early = run(&early, 64, descriptor, descriptor, &factor.image, Some(&left), [false, false, true]).unwrap();
    assert!(early.iter().all(|sum| sum.is_nan()));
    for (from, to, expected) in [
        ("    fence_shared_memory();\n", "", "not fenced, or changed"),
        ("    __syncthreads();\n    const", "    const", "not fenced, or changed"),
        ("    wait_for", "    memory[threadIdx.x * 16] = 0;\n    wait_for", "not fenced, or changed"),
        ("    fence_registers();\n", "", "without a fence of registers"),
        ("    wait_for", "    left[1] = 0;\n    wait_for", "registers changed"),
        ("    close_products();\n", "", "a product that nobody waits for"),
        ("to.b + at, to.adds", "to.b + at + threadIdx.x / 32, to.adds", "not all of a warpgroup"),
        ("to.b + at, to.adds", "(to.b + at) | 1ull << 50, to.adds", "not modelled"),
        ("to.b + at, to.adds", "to.b + at + 1024, to.adds", "beside the block's shared memory"),
    ] {
        let told = sums(from, to).unwrap_err();
        assert!(told.contains(expected), "{to}: {told}");
    }
}
