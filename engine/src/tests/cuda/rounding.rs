//! How far a function in few digits may be from itself in f64: as far as its roundings take it, by its own condition.
//!
//! A kernel rounds what it stores, by up to a unit roundoff of the number: the nearest bf16 is within 2⁻⁸ of it. Which numbers
//! are stored between two operations is the compiler's to choose, so that a reader may see a rounded number where another one sees
//! the number itself. How much of that reaches a result depends on the function alone. It is measured, by evaluating the
//! function in f64 where every reader of every intermediate result sees it changed at random by as much as a rounding.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use candle_core::DType;
use gapless_graph::{Numbers, Stream};
use gapless_testing::prelude::*;

use super::fused::{Function, any_function, random_function};
use super::memory::to_bf16;
use crate::graph::{Graph, Source, ValueId, lock};

use crate::reference::{Array, evaluate, evaluate_with};

/// How often the function is evaluated with changes.
const DRAWS: u64 = 32;

/// A result may be this many times further from the truth than the furthest of the draws.
///
/// Roundings are no random numbers, but an error that many of them make is as good as normal, and so are the draws, whose changes
/// are the larger ones: that all of 32 are less than a quarter of one more has a probability of 10⁻⁹. The error of a single
/// rounding is bounded, and that all of 32 draws stay below a quarter of its bound has one of 10⁻¹⁹.
const FACTOR: f64 = 4.0;

/// What a kernel's arithmetic in f32 is off by: some of its unit roundoffs of 2⁻²⁴, of a number; and of 1, for derivatives like
/// 1 − tanh² are differences of numbers near 1.
const F32: f64 = 1.0 / (1 << 21) as f64;

/// What a stored number is off by, in parts of itself.
fn unit(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 1.0 / 256.0 + F32,
        DType::F32 => F32,
        _ => 0.0,
    }
}

/// A function in f64, and how far its roundings may take each result.
pub struct Judged {
    /// By value.
    pub exact: Vec<Array>,
    /// For each of the results asked for, the distance ‖x − exact‖ that is allowed; infinite where a number on the way is
    /// none of f32.
    pub allowed: Vec<f64>,
}

/// Evaluates a graph in f64, with and without changes.
pub fn judged(graph: &Graph, given: &HashMap<String, Array>, stream: Stream, results: &[ValueId]) -> Judged {
    let exact = evaluate(graph, given, stream);
    let overflows =
        exact.iter().flat_map(|array| &array.data).any(|x| x.is_nan() || x.abs() > f64::from(f32::MAX) / 2.0);
    if overflows {
        return Judged { exact, allowed: vec![f64::INFINITY; results.len()] };
    }
    let mut furthest = vec![0.0f64; results.len()];
    for draw in 0..DRAWS {
        let changed = evaluate_with(graph, given, stream, |reader, id, x| {
            let value = graph.value(id);
            match graph.value(value.root).source {
                Source::Node { .. } => {
                    // Equal numbers are rounded alike, so that a reader of many finds all of them changed by as much.
                    let size = unit(value.spec.dtype) * x.abs() + F32;
                    x + size * uniform((draw, reader, id.index(), x.to_bits()))
                }
                // Parameters are what they are.
                _ => x,
            }
        });
        for (furthest, id) in furthest.iter_mut().zip(results) {
            *furthest = furthest.max(distance(&changed[id.index()].data, &exact[id.index()].data));
        }
    }
    Judged { exact, allowed: furthest.into_iter().map(|furthest| FACTOR * furthest).collect() }
}

/// ‖a − b‖.
pub fn distance(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| (a - b) * (a - b)).sum::<f64>().sqrt()
}

/// A number from -1 to 1 that is another one for whatever differs in anything.
fn uniform(of: impl Hash) -> f64 {
    let mut hasher = DefaultHasher::new();
    of.hash(&mut hasher);
    (hasher.finish() >> 11) as f64 / (1u64 << 52) as f64 - 1.0
}

generated! {
    #![cases(64)]

    /// Against functions that are evaluated with roundings in some places or others, and bf16's own.
    #[test]
    fn roundings_take_nothing_further_than_allowed(chosen in any_function(), salt: u64) {
        let function = Function::new(DType::BF16, |parameter| random_function(&chosen, parameter)).unwrap();
        let graph = lock(&function.graph);
        let number = |place: usize| rounded(Numbers::from_seed(salt).normal(place));
        let parameter = |(id, name): (ValueId, &str)| {
            let dims = graph.value(id).spec.dims();
            let data = (0..dims.iter().product()).map(|i| number(1000 * id.index() + i)).collect();
            (name.to_owned(), Array::new(dims, data))
        };
        let parameters: HashMap<String, Array> = graph.persistent().map(parameter).collect();
        let stream = Stream::new(3, 0, 0);
        let results: Vec<ValueId> = function.outputs.iter().map(|output| output.value).collect();
        let judged = judged(&graph, &parameters, stream, &results);
        let stored = evaluate_with(&graph, &parameters, stream, |reader, id, x| {
            let is_stored = reader.is_none() || uniform((salt, reader, id.index())) < 0.5;
            if is_stored && graph.value(id).spec.dtype == DType::BF16 { rounded(x) } else { x }
        });
        for (id, allowed) in results.iter().zip(judged.allowed) {
            let (exact, stored) = (&judged.exact[id.index()].data, &stored[id.index()].data);
            let error = distance(stored, exact);
            prop_assert!(allowed.is_infinite() || error <= allowed, "{error}, allowed {allowed}");
        }
    }
}

/// The nearest bf16.
fn rounded(x: f64) -> f64 {
    f64::from(f32::from_bits(u32::from(to_bf16(x as f32)) << 16))
}
