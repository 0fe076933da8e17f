//! An operation whose methods return arbitrary results. Its kernel checks that its operands do not overlap.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::{DType, Layout};
use gapless_graph::{Args, Array, Element, Op, Reference, RowUse, Spec};
use half::bf16;

/// The operation's descriptions of itself.
#[derive(Debug, Clone)]
pub struct Answers {
    pub outputs: Vec<Spec>,
    pub view: Option<Layout>,
    pub workspace: Vec<u64>,
    pub inplace: Vec<(usize, usize)>,
    pub mutates: Vec<(usize, usize)>,
    pub rows: RowUse,
    pub accumulates: bool,
    pub strides: bool,
    pub bf16: bool,
    pub cost: u64,
    /// The value that the kernel writes to u32 outputs. If another operation reads them as row offsets, this is its
    /// row count.
    pub number: u32,
    /// The element count that the first input should have, if it is known.
    pub elements: Option<usize>,
    /// Number of scratch pieces that the kernel uses beyond those the operation has declared.
    pub greed: usize,
}

impl Answers {
    pub fn of(outputs: Vec<Spec>) -> Self {
        Self {
            outputs,
            view: None,
            workspace: vec![],
            inplace: vec![],
            mutates: vec![],
            rows: RowUse::Unaware,
            accumulates: false,
            strides: false,
            bf16: false,
            cost: 1,
            number: 3,
            elements: None,
            greed: 0,
        }
    }
}

/// Number of elements that are checked at either end of a slice, so that large slices are not traversed.
const ENDS: usize = 8;

/// Writes a value to both ends of a slice.
fn mark<T: Copy>(slice: &mut [T], x: T) {
    let len = slice.len();
    slice[..len.min(ENDS)].fill(x);
    slice[len.saturating_sub(ENDS)..].fill(x);
}

fn ends<T: Copy>(slice: &[T]) -> Vec<T> {
    [&slice[..slice.len().min(ENDS)], &slice[slice.len().saturating_sub(ENDS)..]].concat()
}

/// A slice of one of the element types.
enum Given<'a> {
    F32(&'a mut [f32]),
    Bf16(&'a mut [bf16]),
    U32(&'a mut [u32]),
    U8(&'a mut [u8]),
}

impl Given<'_> {
    /// Writes a value, or asserts that it is still there.
    fn each(&mut self, number: u32, writes: bool) {
        fn one<T: Element + PartialEq>(slice: &mut [T], x: T, writes: bool) {
            match writes {
                true => mark(slice, x),
                false => assert!(ends(slice).into_iter().all(|y| y == x), "another has written here"),
            }
        }
        match self {
            Self::F32(slice) => one(slice, number as f32, writes),
            Self::Bf16(slice) => one(slice, bf16::from_f32(number as f32), writes),
            Self::U32(slice) => one(slice, number, writes),
            Self::U8(slice) => one(slice, number as u8, writes),
        }
    }
}

/// The bytes at the ends of an input.
fn seen(args: &Args<'_>, index: usize) -> Vec<u8> {
    match args.input_dtype(index) {
        _ if args.is_overwritten(index) => vec![],
        DType::F32 => f32::bytes(&ends(args.strided::<f32>(index).0)).to_vec(),
        DType::BF16 => bf16::bytes(&ends(args.strided::<bf16>(index).0)).to_vec(),
        DType::U32 => u32::bytes(&ends(args.strided::<u32>(index).0)).to_vec(),
        _ => u8::bytes(&ends(args.strided::<u8>(index).0)).to_vec(),
    }
}

/// An operation whose methods may return other results once it is recorded in a graph.
#[derive(Debug)]
pub struct Hostile {
    pub answers: [Answers; 2],
    pub is_recorded: Arc<AtomicBool>,
}

impl Hostile {
    fn now(&self) -> &Answers {
        &self.answers[usize::from(self.is_recorded.load(Ordering::Relaxed))]
    }
}

impl Op for Hostile {
    fn name(&self) -> &'static str {
        "hostile"
    }

    fn infer(&self, _: &[Spec]) -> Result<Vec<Spec>, String> {
        Ok(self.now().outputs.clone())
    }

    fn rows(&self) -> RowUse {
        self.now().rows
    }

    fn view(&self, _: &Layout) -> Option<Layout> {
        self.now().view.clone()
    }

    fn reads_strides(&self, _: usize, _: &Layout) -> bool {
        self.now().strides
    }

    fn writes_strides(&self, _: usize) -> bool {
        self.now().strides
    }

    fn flops(&self, _: &[Spec], _: &[Spec]) -> u64 {
        self.now().cost
    }

    fn bytes_moved(&self, _: &[Spec], _: &[Spec]) -> u64 {
        self.now().cost
    }

    fn inplace(&self) -> &[(usize, usize)] {
        &self.now().inplace
    }

    fn mutates(&self) -> &[(usize, usize)] {
        &self.now().mutates
    }

    fn accumulates(&self, _: usize) -> bool {
        self.now().accumulates
    }

    fn workspace(&self, _: &[Spec], _: &[Spec], _: usize) -> Vec<u64> {
        self.now().workspace.clone()
    }

    fn runs_in_bf16(&self) -> bool {
        self.now().bf16
    }

    fn run(&self, args: &mut Args<'_>) {
        let before: Vec<_> = (0..args.inputs()).map(|index| seen(args, index)).collect();
        if let Some(elements) = self.now().elements {
            assert_eq!(args.strided::<f32>(0).0.len(), elements, "another number of elements");
        }
        let mut given: Vec<Given<'_>> = Vec::new();
        for index in 0..self.answers[0].outputs.len() {
            let (output, stored) = match args.output_dtype(index) {
                DType::F32 => {
                    let (wide, stored) = args.output_rounded(index);
                    (Given::F32(wide), stored.map(Given::Bf16))
                }
                DType::BF16 => (Given::Bf16(args.output(index)), None),
                DType::U32 => (Given::U32(args.output(index)), None),
                _ => (Given::U8(args.output(index)), None),
            };
            given.extend([output].into_iter().chain(stored));
        }
        let mut scratch = args.workspace();
        (0..self.now().workspace.len() + self.now().greed).for_each(|_| given.push(Given::U8(scratch.take())));
        for writes in [true, false] {
            (100..).zip(&mut given).for_each(|(number, given)| given.each(number, writes));
        }
        let after: Vec<_> = (0..args.inputs()).map(|index| seen(args, index)).collect();
        assert_eq!(before, after, "an input is written through another tensor");
        for given in &mut given {
            if let Given::U32(counts) = given {
                mark(counts, self.now().number);
            }
        }
    }

    fn reference(&self, _: &Reference<'_>) -> Vec<Array> {
        vec![]
    }
}
