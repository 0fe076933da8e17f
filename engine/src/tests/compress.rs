//! Compression of activations to eight bits, compared with its reference.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use gapless_compile::Output;
use gapless_graph::ops::{Compress, Expand};
use gapless_graph::reference::evaluate;
use gapless_graph::{Array, Graph, Numbers, Spec, Stream, Tensor, lock};
use gapless_runtime::RunOptions;

use crate::gradient_check::session;

/// The kernels are compared with a tolerance, because an element half way between two codes may be rounded either way.
/// The test also checks that the error of the compression itself, which is larger than this tolerance, is as expected.
#[test]
fn kernels_are_their_references() {
    for dims in [vec![3, 64, 96], vec![3, 50, 300], vec![2, 7, 5], vec![700], vec![4, 8, 32, 16]] {
        let graph = Arc::new(Mutex::new(Graph::default()));
        let spec = Spec::f32(dims.clone());
        let x = lock(&graph).add_input("x", spec.clone()).unwrap();
        let packed = Tensor::apply_op::<2>(Compress, &[&Tensor::of(&graph, x)]).unwrap();
        let [y] = Tensor::apply_op(Expand(spec.clone()), &[&packed[0], &packed[1]]).unwrap();
        let numbers = Numbers::from_seed(3);
        let data: Vec<f32> = (0..spec.elements()).map(|i| numbers.normal(i) as f32).collect();
        let exact = Array::new(&dims, data.iter().map(|&x| f64::from(x)).collect());
        let graph = lock(&graph);
        let given = HashMap::from([("x".to_owned(), exact)]);
        let expected = &evaluate(&graph, &given, Stream::new(0, 0, 0))[y.id().index()].data;
        let mut session = session(&graph, &[Output::local("y", y.id())]).unwrap();
        let program = session.executable().program("check").unwrap();
        session.write_input(program, "x", 0, &data).unwrap();
        session.run(program, RunOptions { poison: true, ..RunOptions::default() }).unwrap();
        let got: Vec<f32> = session.output(program, "y").unwrap().flatten_all().unwrap().to_vec1().unwrap();
        let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
        let size = norm(&mut expected.iter().copied());
        let apart = norm(&mut got.iter().zip(expected).map(|(&a, b)| f64::from(a) - b)) / size;
        let rounded = norm(&mut data.iter().zip(expected).map(|(&a, b)| f64::from(a) - b)) / size;
        assert!(apart < 5e-4 && (1e-3..1e-2).contains(&rounded), "{dims:?}: {apart:e}, rounded by {rounded:e}");
    }
}
