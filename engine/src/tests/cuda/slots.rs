//! Kernels that read the addresses of their operands from slots.

use candle_core::{DType, Layout};
use gapless_graph::{Numbers, launches};

use super::host;
use super::memory::Region;
use crate::cuda::launch::{
    GatedUnit, SLOT, grouped_linear, grouped_linear_grad_input, grouped_linear_grad_weight, routed_gated,
    routed_gated_grad,
};
use crate::cuda::{Features, Launch, Operand, Operands, Random};
use crate::ops::{Binary, BinaryKind, Powf};

/// Row offsets for two sources, two experts and one sequence. The tensors have room for [`MOST`] rows.
const STARTS: [u32; 5] = [0, 3, 70, 70, 151];
const USED: usize = 151;
const MOST: usize = 170;
const WIDTH: usize = 12;
const OUT: usize = 40;

/// The shape of a tensor. If the first dimension is [`MOST`], the tensor's rows are dynamic.
type Dims<'d> = &'d [usize];

/// A tensor in memory. A tensor with dynamic rows may have a slot.
struct Tensor {
    region: Region,
    slot: Option<Region>,
    layout: Layout,
    dtype: DType,
}

impl Tensor {
    fn new(dims: Dims<'_>, dtype: DType, has_slot: bool, region: impl Fn(&[usize]) -> Region) -> Self {
        let mut own = dims.to_vec();
        let is_placed = has_slot && dims[0] == MOST;
        if is_placed {
            own[0] = USED;
        }
        let region = region(&own);
        let words = [region.address(), region.bytes().len() as u64];
        let bytes = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        let slot = is_placed.then(|| Region::from_bytes(bytes, DType::I64));
        Self { region, slot, layout: Layout::contiguous(dims), dtype }
    }

    fn operand(&self) -> Operand {
        let address = self.slot.as_ref().map_or(self.region.address(), |slot| SLOT | slot.address());
        Operand { address, layout: self.layout.clone(), dtype: self.dtype }
    }
}

/// Checks that the used rows have the same bits with slots as without, and that nothing is written after the used
/// rows.
fn check(
    name: &str,
    inputs: &[Dims<'_>],
    outputs: &[Dims<'_>],
    starts: Option<usize>,
    launches: impl Fn(&Operands<'_>) -> Option<Vec<Launch>>,
) {
    for dtype in [DType::F32, DType::BF16] {
        let [plain, placed] = [false, true].map(|has_slot| {
            let input = |(index, dims): (usize, &Dims<'_>)| {
                let numbers = Numbers::from_seed(index as u64);
                let normal = |own: &[usize]| (0..own.iter().product()).map(|i| numbers.normal(i)).collect::<Vec<f64>>();
                Tensor::new(dims, dtype, has_slot, |own| Region::of(&normal(own), dtype))
            };
            let mut inputs: Vec<Tensor> = inputs.iter().enumerate().map(input).collect();
            if let Some(index) = starts {
                let numbers = STARTS.map(f64::from);
                inputs.insert(index, Tensor::new(&[5], DType::U32, false, |_| Region::of(&numbers, DType::U32)));
            }
            let output = |dims: &Dims<'_>| {
                Tensor::new(dims, dtype, has_slot, |own| Region::poisoned(own.iter().product(), dtype))
            };
            let outputs: Vec<Tensor> = outputs.iter().map(output).collect();
            let operands = |tensors: &[Tensor]| tensors.iter().map(Tensor::operand).collect::<Vec<_>>();
            let operands = Operands {
                inputs: &operands(&inputs),
                outputs: &operands(&outputs),
                workspace: &[],
                accumulate: 0,
                tickets: 0,
                random: Random { key: 0, micro_batch: 0 },
                features: Features::default(),
            };
            for launch in launches(&operands).unwrap() {
                let reads_slots = matches!(&launch, Launch::Kernel(kernel) if kernel.family.reads_slots());
                assert!(reads_slots || !has_slot, "{launch:?}");
                // SAFETY: the regions are as large as the operands or their slots say. No other reference to the
                // regions is used.
                unsafe { host::run(&launch, false) }.unwrap();
            }
            assert!(inputs.iter().chain(&outputs).all(|tensor| tensor.region.is_intact()), "{name} in {dtype:?}");
            outputs
        });
        for (plain, placed) in plain.iter().zip(&placed) {
            let bytes = placed.region.bytes();
            assert!(plain.region.bytes()[..bytes.len()] == *bytes, "{name} in {dtype:?}");
        }
    }
}

#[test]
fn kernels_find_what_is_placed() {
    if !host::is_there() {
        return;
    }
    let (rows, wide, weight, weights): (Dims, Dims, Dims, Dims) =
        (&[MOST, WIDTH], &[MOST, OUT], &[2, OUT, WIDTH], &[MOST, 1]);
    check("grouped_linear", &[rows, weight], &[wide], Some(2), |all| grouped_linear(2, all));
    check("grouped_linear_grad_input", &[wide, weight], &[rows], Some(2), |all| grouped_linear_grad_input(2, all));
    check("grouped_linear_grad_weight", &[rows, wide], &[weight], Some(2), |all| grouped_linear_grad_weight(2, all));
    let unit = GatedUnit { alpha: 1.7, limit: 0.6, shift: 1.0 };
    check("routed_swiglu", &[rows, rows, weights], &[rows], Some(3), |operands| routed_gated(unit, operands));
    let of_grad = |operands: &Operands<'_>| routed_gated_grad(unit, operands);
    check("routed_swiglu_grad", &[rows, rows, weights, rows], &[rows, rows, weights], Some(3), of_grad);
    // Elementwise operations stop after the last row, with and without packs.
    for dims in [rows, weights] {
        let add = Binary { kind: BinaryKind::Add };
        check("add", &[dims, dims], &[dims], None, |all| launches::launches(&add, all));
        check("powf", &[dims], &[dims], None, |all| launches::launches(&Powf { exponent: 2.0 }, all));
    }
}

/// If no operand has a slot, the kernel's source contains no code for slots.
#[test]
fn kernels_of_planned_operands_know_no_slots() {
    let name = |address: u64| {
        let operand = || Operand { address, layout: Layout::contiguous(8), dtype: DType::F32 };
        let operands = Operands {
            inputs: &[operand()],
            outputs: &[operand()],
            workspace: &[],
            accumulate: 0,
            tickets: 0,
            random: Random { key: 0, micro_batch: 0 },
            features: Features::default(),
        };
        match launches::launches(&Powf { exponent: 2.0 }, &operands).unwrap().remove(0) {
            Launch::Kernel(kernel) => kernel.family.source().contains("placed("),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!([name(64), name(SLOT | 64)], [false, true]);
}
